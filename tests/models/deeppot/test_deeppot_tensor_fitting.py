"""Fittings beside the energy: how their outputs turn and add up, against plain formulas, and against DeePMD-kit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_networks import fitting_from_tree, fitting_tree
from forgefield.models.deeppot.se_e2 import SeE2A
from forgefield.models.deeppot.tensor_fitting import (
    DipoleFitting,
    DosFitting,
    Output,
    PolarFitting,
    PropertyFitting,
    TensorFitting,
)
from forgefield.models.edges import EdgeContext
from tests.support.structures import SPECIES, make_batch, make_frame

CUTOFF = 3.0
CLASSES = {"dipole": DipoleFitting, "polar": PolarFitting, "dos": DosFitting, "property": PropertyFitting}
CASES: dict[str, dict[str, Any]] = {
    "dipole": {"type": "dipole"},
    "polar": {"type": "polar", "scale": [1.5, 0.4], "out_bias": [0.3, -0.8]},
    "full polar": {"type": "polar", "fit_diag": False, "scale": 2.0, "out_bias": [0.3, -0.8], "shift_diag": False},
    "dos": {"type": "dos", "numb_dos": 5, "out_bias": np.arange(10.0).reshape(2, 5).tolist()},
    "extensive": {"type": "property", "property_name": "charge", "task_dim": 2, "out_bias": [[1.0, 2.0], [3.0, 4.0]]},
    "intensive": {"type": "property", "property_name": "gap", "intensive": True, "out_std": [[2.0], [0.5]]},
}
DIM, ROWS = 24, 8
"""Numbers of the descriptor and rows of its rotation."""


def make_fitting(name: str, *, mixed_types: bool = False, **options: Any) -> TensorFitting:
    given = CASES[name] | options
    kind = CLASSES[given["type"]]
    resolved = kind.complete(kind.Options(**{"neuron": [6, 6], **given}), species=SPECIES, statistics={})
    return kind(
        resolved,
        species=SPECIES,
        dim_descriptor=DIM,
        dim_rotation=ROWS,
        mixed_types=mixed_types,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )


def make_descriptor() -> SeE2A:
    given = {"davg": [[0.0] * 4] * 2, "dstd": [[0.4, 0.2, 0.2, 0.2]] * 2, "neuron": [4, 8], "axis_neuron": 3}
    options = SeE2A.complete(
        SeE2A.Options(**given), species=SPECIES, cutoff=CUTOFF, statistics={"mean_neighbours": 9.0}
    )
    made = SeE2A(
        options, species=SPECIES, cutoff=CUTOFF, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    assert (made.dim_out, made.dim_rotation) == (DIM, ROWS)
    return made


def predict(fitting: TensorFitting, *frames: Frame) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of every atom and of every frame."""
    batch = make_batch(*frames, cutoff=CUTOFF)
    described, rotation = make_descriptor()(batch, EdgeContext.of(batch))
    (output,) = fitting.outputs
    values = fitting(described, rotation, batch)[output.name].detach()
    assert values.shape == (batch["species"].shape[0], *output.shape)
    assert values.dtype == torch.float64
    return values, output.of_frames(values, batch)


def random_inputs(**parameters: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Descriptors, rotations and what else a fitting reads, of two frames of 3 and 4 atoms."""
    rng = np.random.default_rng(0)
    batch = {
        "species": torch.tensor([0, 1, 1, 0, 0, 1, 0]),
        "frame": torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        "n_atoms": torch.tensor([3, 4]),
    }
    for name, rows in (("fparam", 2), ("aparam", 7)):
        if name in parameters:
            batch[name] = torch.from_numpy(rng.normal(size=(rows, parameters[name])))
    return torch.from_numpy(rng.normal(size=(7, DIM))), torch.from_numpy(rng.normal(size=(7, ROWS, 3))), batch


def raw(fitting: TensorFitting, descriptor: torch.Tensor, species: torch.Tensor) -> np.ndarray:
    """What the networks say, one atom at a time."""
    rows = []
    for x, kind in zip(descriptor.numpy(), species.tolist()):
        for number, layer in enumerate(fitting.network.networks.layers):
            w, b = layer.w[kind].detach().numpy(), layer.b[kind].detach().numpy()
            y = x @ w + b
            if number < 2:
                y = np.tanh(y) if layer.idt is None else np.tanh(y) * layer.idt[kind].detach().numpy() + x
            x = y
        rows.append(x)
    return np.array(rows)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_plain_formulas(name):
    fitting, (descriptor, rotation, batch) = make_fitting(name), random_inputs()
    (found,) = fitting(descriptor, rotation, batch).values()
    numbers, kinds = raw(fitting, descriptor, batch["species"]), batch["species"].numpy()
    for i, (values, t, kind) in enumerate(zip(numbers, rotation.numpy(), kinds)):
        if name == "dipole":
            expected = values @ t
        elif name == "polar":
            expected = [1.5, 0.4][kind] * (t.T @ np.diag(values) @ t + [0.3, -0.8][kind] * np.eye(3))
        elif name == "full polar":
            matrix = values.reshape(ROWS, ROWS)
            expected = 2.0 * t.T @ (matrix + matrix.T) @ t / 2
        elif name == "dos":
            expected = values + np.arange(10.0).reshape(2, 5)[kind]
        elif name == "extensive":
            expected = values + [[1.0, 2.0], [3.0, 4.0]][kind]
        else:
            expected = values * [2.0, 0.5][kind]
        np.testing.assert_allclose(found[i].detach().numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_equivariant(name):
    fitting, frame = make_fitting(name), make_frame(6, seed=4)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    turned = dataclasses.replace(frame, positions=frame.positions @ turn.T, cell=frame.cell @ turn.T)
    before, after = predict(fitting, frame)[0], predict(fitting, turned)[0]
    q = torch.from_numpy(turn)
    rank = {"dipole": 1, "polar": 2, "full polar": 2}.get(name, 0)
    expected = before if rank == 0 else before @ q.T if rank == 1 else q @ before @ q.T
    torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-12)
    assert rank == 0 or float((after - before).abs().max()) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_a_doubled_cell_has_twice_what_is_extensive_and_the_same_of_what_is_not(name):
    fitting, frame = make_fitting(name), make_frame(5, seed=2)
    doubled = dataclasses.replace(
        frame,
        positions=np.concatenate([frame.positions, frame.positions + frame.cell[0]]),
        numbers=np.tile(frame.numbers, 2),
        cell=frame.cell * [[2], [1], [1]],
    )
    _, (once, twice) = predict(fitting, frame, doubled)
    torch.testing.assert_close(twice, once if name == "intensive" else 2 * once, rtol=1e-10, atol=1e-12)


def test_frames_add_up_their_atoms():
    batch = {"frame": torch.tensor([0, 0, 1]), "n_atoms": torch.tensor([2, 1])}
    values = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]], dtype=torch.float64)
    assert Output("a", (2,)).of_frames(values, batch).tolist() == [[4.0, 7.0], [7.0, 11.0]]
    assert Output("a", (2,), "mean").of_frames(values, batch).tolist() == [[2.0, 3.5], [7.0, 11.0]]
    with pytest.raises(ValueError, match="no reduction 'max'"):
        Output("a", (), "max")


def test_parameters_of_frames_and_atoms_are_read():
    given = {"numb_fparam": 2, "numb_aparam": 1, "fparam_avg": [1.0, 2.0], "fparam_std": [1.0, 0.5]}
    fitting = make_fitting("dipole", **given, aparam_avg=[0.0], aparam_std=[1.0])
    descriptor, rotation, batch = random_inputs(fparam=2, aparam=1)
    before = fitting(descriptor, rotation, batch)["dipole"]
    moved = batch | {"fparam": batch["fparam"] + torch.tensor([[0.0, 0.0], [0.1, 0.0]])}
    changed = (fitting(descriptor, rotation, moved)["dipole"] - before).abs().amax(1) > 1e-6
    assert changed.tolist() == [False] * 3 + [True] * 4
    with pytest.raises(ForgefieldError, match="the data has no field aparam"):
        fitting(descriptor, rotation, {key: value for key, value in batch.items() if key != "aparam"})


def test_one_network_serves_all_species_of_a_descriptor_that_distinguishes_them():
    fitting, (descriptor, rotation, batch) = make_fitting("dos", mixed_types=True, out_bias=None), random_inputs()
    other = batch | {"species": 1 - batch["species"]}
    assert fitting.network.networks.count == 1
    assert torch.equal(fitting(descriptor, rotation, batch)["dos"], fitting(descriptor, rotation, other)["dos"])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("polar", {"scale": [1.0]}, "scale needs a number for each of 2 species"),
        ("dos", {"numb_dos": 0}, "numb_dos must be at least 1, not 0"),
        ("dos", {"out_bias": [[1.0], [2.0]]}, "out_bias needs 5 numbers for each of 2 species"),
        ("extensive", {"task_dim": 0}, "task_dim must be at least 1, not 0"),
        ("dipole", {"activation_function": "thin"}, "activation_function is 'thin'"),
        ("dipole", {"trainable": [True]}, "trainable has 1 flags"),
    ],
)
def test_options_without_meaning_are_refused(name, options, words):
    with pytest.raises(ForgefieldError, match=words):
        make_fitting(name, **options)


def test_a_descriptor_without_directions_is_refused():
    descriptor, _, batch = random_inputs()
    with pytest.raises(ForgefieldError, match="dipole, which needs directions"):
        make_fitting("dipole")(descriptor, None, batch)


def rebuild(tree: dict[str, Any], bias: np.ndarray, std: np.ndarray) -> TensorFitting:
    options, state = fitting_from_tree(tree, bias, std)
    kind = CLASSES[options["type"]]
    resolved = kind.complete(kind.Options(**options), species=SPECIES, statistics={})
    made = kind(
        resolved,
        species=SPECIES,
        dim_descriptor=DIM,
        dim_rotation=ROWS,
        mixed_types=tree["mixed_types"],
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(9),
    )
    made.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})
    return made


@pytest.mark.parametrize("mixed_types", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_form_of_deepmd_and_back_is_the_same_fitting(name, mixed_types):
    parameters = {"numb_fparam": 1, "fparam_avg": [0.3], "fparam_std": [2.0]}
    fitting = make_fitting(name, mixed_types=mixed_types, **parameters)
    descriptor, rotation, batch = random_inputs(fparam=1)
    again = rebuild(*fitting_tree(fitting))
    (before,), (after,) = (made(descriptor, rotation, batch).values() for made in (fitting, again))
    torch.testing.assert_close(before, after, rtol=1e-13, atol=1e-14)
    assert again.outputs == fitting.outputs


def test_constants_of_species_that_share_a_network_are_refused():
    tree, bias, std = fitting_tree(make_fitting("dipole", mixed_types=True))
    tree["@variables"]["bias_atom_e"][0] = 1.0
    with pytest.raises(ForgefieldError, match="bias_atom_e differs between species"):
        fitting_from_tree(tree, bias, std)


DEEPMD = """
import pickle, sys
import numpy as np
import deepmd.dpmodel.fitting
from deepmd.dpmodel.fitting.base_fitting import BaseFitting
cases = pickle.load(open(sys.argv[1], "rb"))
for case in cases:
    fitting = BaseFitting.deserialize(case["tree"])
    rng = np.random.default_rng(3)
    for network in fitting.nets._networks:
        for layer in network.layers:
            layer.w = layer.w + 0.1 * rng.normal(size=layer.w.shape)
    fitting.bias_atom_e = rng.normal(size=fitting.bias_atom_e.shape)
    given = {"gr": case["rotation"], "fparam": case["fparam"], "aparam": case["aparam"]}
    out = fitting.call(case["descriptor"], case["species"], **given)
    case["found"] = next(value for value in out.values() if value is not None)
    case["tree"] = fitting.serialize()
pickle.dump(cases, open(sys.argv[1], "wb"))
"""


def deepmd_python() -> str | None:
    """An interpreter that has DeePMD-kit."""
    if importlib.util.find_spec("deepmd") is not None:
        return sys.executable
    return os.environ.get("FORGEFIELD_DEEPMD_PYTHON")


@pytest.mark.skipif(
    deepmd_python() is None, reason="no DeePMD-kit; FORGEFIELD_DEEPMD_PYTHON names an interpreter with it"
)
def test_equals_deepmd(tmp_path):
    """A fitting is sent there, given other weights, and read again."""
    parameters = {"numb_fparam": 1, "fparam_avg": [0.3], "fparam_std": [2.0]}
    parameters |= {"numb_aparam": 2, "aparam_avg": [0.3, 0.1], "aparam_std": [2.0, 0.7]}
    descriptor, rotation, batch = random_inputs(fparam=1, aparam=2)
    batch = {key: value[3:] if len(value) == 7 else value[1:] for key, value in batch.items()}  # frames there are alike
    batch["frame"] = torch.zeros_like(batch["frame"])
    arrays = {
        "descriptor": descriptor[3:],
        "rotation": rotation[3:],
        "species": batch["species"],
        "aparam": batch["aparam"],
    }
    given = {name: tensor.numpy()[None] for name, tensor in arrays.items()} | {"fparam": batch["fparam"].numpy()}
    cases = [{"tree": fitting_tree(make_fitting(name, **parameters))[0], **given} for name in CASES]
    file = tmp_path / "cases.pickle"
    file.write_bytes(pickle.dumps(cases))
    done = subprocess.run([str(deepmd_python()), "-c", DEEPMD, str(file)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    for case in pickle.loads(file.read_bytes()):
        tree = case["tree"]
        size = tree.get("dim_out", 9 if tree["type"] == "polar" else 3)
        fitting = rebuild(tree, np.zeros((2, size)), np.ones((2, size)))
        (found,) = fitting(descriptor[3:], rotation[3:], batch).values()
        np.testing.assert_allclose(found.detach().numpy(), case["found"][0], rtol=0, atol=1e-12)
