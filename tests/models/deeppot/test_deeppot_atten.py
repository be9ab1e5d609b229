"""The attention descriptors: against loops over padded slots, the symmetries and derivatives they must have, and DeePMD-kit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.models import Potential
from forgefield.models.deeppot.deepmd_attention import attention_from_tree, attention_tree
from forgefield.models.deeppot.descriptor import electronic_configuration, occupations
from forgefield.models.deeppot.fitting import EnergyFitting
from forgefield.models.deeppot.se_atten import SeAtten, SeAttenV2
from forgefield.models.edges import EdgeContext
from forgefield.models.interface import AtomisticModel
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from tests.support.engine_cases import difference, labelled, step_function
from tests.support.structures import SPECIES, make_batch, make_frame

CUTOFF = 3.0
TINY = {"neuron": [4, 8], "axis_neuron": 3, "attn": 5, "tebd_dim": 3, "rcut_smth": 0.6}
MEANS = [[0.21, 0.0, 0.0, 0.0], [-0.13, 0.0, 0.0, 0.0]]
DEVIATIONS = [[0.5, 0.3, 0.3, 0.3], [0.8, 0.4, 0.4, 0.4]]
SLOTS = 60
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "smooth": {"smooth_type_embedding": True},
    "with slots": {"sel": SLOTS, "set_davg_zero": False},
    "smooth with slots": {"sel": [40, 20], "set_davg_zero": False, "smooth_type_embedding": True},
    "stripped": {"tebd_input_mode": "strip", "sel": SLOTS, "set_davg_zero": False},
    "stripped, one side": {"tebd_input_mode": "strip", "type_one_side": True, "sel": SLOTS, "resnet_dt": True},
    "v2": {"type": "se_atten_v2"},
    "v2 with slots": {"type": "se_atten_v2", "sel": SLOTS, "set_davg_zero": False},
    "without directions": {"attn_dotr": False, "smooth_type_embedding": True, "sel": SLOTS},
    "not normalised, others only": {"normalize": False, "attn_mask": True, "temperature": 0.6},
    "without attention": {"attn_layer": 0, "type_one_side": True},
    "with exclusions": {"exclude_types": [[0, 0]], "sel": SLOTS, "smooth_type_embedding": True, "set_davg_zero": False},
    "from configurations": {"use_econf_tebd": True, "use_tebd_bias": True, "env_protection": 0.1},
}


def make_descriptor(species: tuple[str, ...] = SPECIES, dtype: torch.dtype = torch.float64, **options: Any) -> SeAtten:
    kind = SeAttenV2 if options.get("type") == "se_atten_v2" else SeAtten
    given = {"davg": MEANS, "dstd": DEVIATIONS, "max_neighbours": 60, **TINY, **options}
    statistics = {"mean_neighbours": 9.0}
    resolved = kind.complete(kind.Options(**given), species=species, cutoff=CUTOFF, statistics=statistics)
    assert kind.Options(**dataclasses.asdict(resolved)) == resolved
    made = kind(resolved, species=species, cutoff=CUTOFF, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # so that scales and shifts of layer normalisations are not ones and zeros
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
            )
    return made


class Energies(AtomisticModel):
    """Atomic energies from a descriptor."""

    only_edge_vectors = True
    species, cutoff = SPECIES, CUTOFF

    def __init__(self, descriptor: SeAtten) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.fitting = EnergyFitting(
            EnergyFitting.Options(neuron=[6, 6]),
            species=SPECIES,
            dim_descriptor=descriptor.dim_out,
            mixed_types=descriptor.mixed_types,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(3),
        )

    def forward(self, batch, edges):
        described, _ = self.descriptor(batch, edges)
        return self.fitting(described, batch).squeeze(1)


def make_energies(**options: Any) -> Potential:
    return Potential(Energies(make_descriptor(**options)))


def describe(descriptor: SeAtten, *frames: Frame) -> tuple[torch.Tensor, torch.Tensor]:
    batch = make_batch(*frames, cutoff=CUTOFF)
    described, rotation = descriptor(batch, EdgeContext.of(batch))
    assert rotation is not None
    return described.detach(), rotation.detach()


# The oracle: DeePMD-kit's definition, one atom at a time, with every slot written out.


def affine(x: np.ndarray, state: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ state[f"{name}.w"][0] + state[f"{name}.b"][0]


def network(x: np.ndarray, state: dict[str, np.ndarray], name: str) -> np.ndarray:
    number = 0
    while f"{name}.layers.{number}.w" in state:
        layer = f"{name}.layers.{number}"
        y = np.tanh(affine(x, state, layer))
        if f"{layer}.idt" in state:
            y = y * state[f"{layer}.idt"][0]
        repeats = y.shape[1] / x.shape[1]
        x = y + np.tile(x, int(repeats)) if repeats in (1, 2) else y
        number += 1
    return x


def attention(
    g: np.ndarray, real: np.ndarray, unit: np.ndarray, s: np.ndarray, state: dict, name: str, o: Any
) -> np.ndarray:
    q, k, v = np.split(affine(g, state, f"{name}.project_in"), 3, axis=1)
    if o.normalize:
        q, k, v = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k, v))
    logits = q @ k.T * (o.temperature or (o.attn * o.scaling_factor) ** -0.5)
    both = np.outer(s, s)
    logits = (logits + 20) * both - 20 if o.smooth_type_embedding else np.where(real[None, :], logits, -1e30)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights = weights / weights.sum(1, keepdims=True) * real[:, None]
    if o.smooth_type_embedding:
        weights = weights * both
    if o.attn_dotr:
        weights = weights * (unit @ unit.T)
    if o.attn_mask:
        weights = weights * (1 - np.eye(len(weights)))
    x = g + affine(weights @ v, state, f"{name}.project_out")
    centred = x - x.mean(1, keepdims=True)
    x = centred / np.sqrt((centred**2).mean(1, keepdims=True) + o.ln_eps)
    return x * state[f"{name}.norm_scale"] + state[f"{name}.norm_shift"]


def padded(descriptor: SeAtten, frame: Frame, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Descriptor and rotation of every atom of a frame, from lists filled up to so many slots."""
    o = descriptor.options
    state = {name: tensor.numpy() for name, tensor in descriptor.state_dict().items()}
    table = descriptor.type_embedding().detach().numpy()
    kinds = np.array([{1: 0, 8: 1}[z] for z in frame.numbers])
    davg, dstd = np.array(o.davg), np.array(o.dstd)
    images = (
        np.array(np.meshgrid(*[[-1, 0, 1]] * 3)).reshape(3, -1).T @ frame.cell if frame.pbc[0] else np.zeros((1, 3))
    )
    results = []
    for i, centre in enumerate(kinds):
        vectors, neighbours = [], []
        for j, kind in enumerate(kinds):
            for image in images:
                vector = frame.positions[j] + image - frame.positions[i]
                if 1e-6 < np.linalg.norm(vector) < CUTOFF:
                    vectors.append(vector)
                    neighbours.append(kind)
        assert len(vectors) <= slots
        rows, s, types = np.zeros((slots, 4)), np.zeros(slots), np.full(slots, kinds[0])
        real, kept = np.arange(slots) < len(vectors), np.ones(slots)
        for slot, (vector, kind) in enumerate(zip(vectors, neighbours)):
            r = np.linalg.norm(vector)
            u = np.clip((r - o.rcut_smth) / (CUTOFF - o.rcut_smth), 0, 1)
            s[slot] = 1 + u**3 * (-6 * u**2 + 15 * u - 10)
            p = r + o.env_protection
            rows[slot], types[slot] = s[slot] * np.array([1 / p, *(vector / p**2)]), kind
            if [centre, kind] in o.exclude_types or [kind, centre] in o.exclude_types:
                real[slot], kept[slot], s[slot] = False, 0.0, 0.0
        rows = (rows - davg[centre]) / dstd[centre] * kept[:, None]
        unit = rows[:, 1:] / np.maximum(np.linalg.norm(rows[:, 1:], axis=1, keepdims=True), 1e-12)
        species = [table[types]] if o.type_one_side else [table[types], np.tile(table[centre], (slots, 1))]
        if o.tebd_input_mode == "concat":
            g = network(np.hstack([rows[:, :1], *species]), state, "embedding")
        else:
            factor = network(np.hstack(species), state, "type_network")
            g = network(rows[:, :1], state, "embedding")
            g = g + g * factor * (s[:, None] if o.smooth_type_embedding else 1)
        for number in range(o.attn_layer):
            g = attention(g, real, unit, s, state, f"attention.{number}", o)
        moments = g.T @ rows / slots
        parts = [(moments @ moments[: o.axis_neuron].T).ravel(), *([table[centre]] if o.concat_output_tebd else [])]
        results.append((np.concatenate(parts), moments[:, 1:]))
    described, rotation = zip(*results)
    return np.array(described), np.array(rotation)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_loops_over_padded_slots(name):
    """Without `sel` as many slots as the sums are divided by; they then enter a smooth attention alone."""
    descriptor = make_descriptor(**{"set_davg_zero": True, **VARIANTS[name]}, **_without_room(VARIANTS[name]))
    frames = make_frame(6, seed=3), make_frame(4, seed=5, periodic=False), make_frame(1, periodic=False)
    found, rotation = describe(descriptor, *frames)
    expected = [padded(descriptor, frame, SLOTS) for frame in frames]
    np.testing.assert_allclose(found.numpy(), np.concatenate([d for d, _ in expected]), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(rotation.numpy(), np.concatenate([r for _, r in expected]), rtol=1e-10, atol=1e-13)


def _without_room(options: dict[str, Any]) -> dict[str, Any]:
    return {} if "sel" in options else {"neighbour_norm": float(SLOTS)}


def test_empty_slots_matter():
    """Else the comparison above would show nothing of them."""
    frame = make_frame(6, seed=3)
    for name in ("smooth with slots", "with slots"):
        more = make_descriptor(**VARIANTS[name] | {"sel": 70, "neighbour_norm": float(SLOTS)})
        fewer = make_descriptor(**VARIANTS[name])
        assert (describe(more, frame)[0] - describe(fewer, frame)[0]).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["smooth", "stripped", "v2", "without directions", "with exclusions"])
def test_is_equivariant(name):
    descriptor, frame = make_descriptor(**VARIANTS[name]), make_frame(6, seed=4)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    turned = dataclasses.replace(frame, positions=frame.positions @ turn.T + 0.7, cell=frame.cell @ turn.T)
    (before, rows), (after, turned_rows) = describe(descriptor, frame), describe(descriptor, turned)
    torch.testing.assert_close(after, before, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(turned_rows, rows @ torch.from_numpy(turn.T), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["as it is", "smooth", "v2", "v2 with slots", "not normalised, others only"])
def test_order_of_atoms_and_batch_mates_have_no_influence(name):
    descriptor, frame = make_descriptor(**VARIANTS[name]), make_frame(6, seed=4)
    order = np.random.default_rng(1).permutation(6)
    shuffled = dataclasses.replace(frame, positions=frame.positions[order], numbers=frame.numbers[order])
    alone, _ = describe(descriptor, frame)
    together, _ = describe(descriptor, make_frame(9, seed=8), shuffled, make_frame(2, seed=9, periodic=False))
    torch.testing.assert_close(together[9:15], alone[order], rtol=1e-11, atol=1e-13)


def forces_across_the_cutoff(potential: Potential, step: float) -> tuple[float, float]:
    """Largest change of energy and of forces when an atom goes from inside to outside of another's reach."""
    positions = np.array([[0, 0, 0], [1.1, 0.2, 0], [-0.3, 1.2, 0.4], [CUTOFF, 0, 0]], dtype=float)
    frames = []
    for r in (CUTOFF - step, CUTOFF + step):
        positions[3, 0] = r
        frames.append(
            dataclasses.replace(
                make_frame(4, periodic=False), positions=positions.copy(), numbers=np.array([8, 1, 1, 1])
            )
        )
    inside, outside = (potential.eval()(make_batch(frame, cutoff=CUTOFF)) for frame in frames)
    return tuple(float((inside[key] - outside[key]).abs().max()) for key in ("energy", "forces"))


@pytest.mark.parametrize("name", ["smooth", "v2", "v2 with slots", "without directions", "without attention"])
def test_forces_are_smooth_where_neighbours_leave(name):
    potential = make_energies(**VARIANTS[name])
    (_, coarse), (energy, fine) = (forces_across_the_cutoff(potential, step) for step in (1e-2, 1e-4))
    assert energy < 1e-4
    assert fine < 1e-4
    assert fine < 0.02 * coarse


def test_attention_that_is_not_smooth_jumps():
    """As in DeePMD-kit, where it is the default; the option's description says so."""
    jump, _ = forces_across_the_cutoff(make_energies(), 1e-5)
    smooth, _ = forces_across_the_cutoff(make_energies(smooth_type_embedding=True), 1e-5)
    assert jump > 1e-4 > 1e3 * smooth


@pytest.mark.parametrize("name", VARIANTS)
def test_forces_and_stress_are_derivatives_of_the_energy(name):
    potential, frame = make_energies(**VARIANTS[name]).eval(), make_frame(5, seed=7)
    outputs = potential(make_batch(frame, cutoff=CUTOFF), stress=True)
    rng = np.random.default_rng(2)
    shift, strain = rng.normal(size=(5, 3)), rng.normal(size=(3, 3))
    strain = strain + strain.T
    step, energies = 1e-5, []
    for sign in (1, -1):
        grown = np.eye(3) + sign * step * strain
        moved = (frame.positions + sign * step * shift) @ grown
        changed = dataclasses.replace(frame, positions=moved, cell=frame.cell @ grown)
        energies.append(float(potential(make_batch(changed, cutoff=CUTOFF))["energy"]))
    slope = (energies[0] - energies[1]) / (2 * step)
    volume = abs(np.linalg.det(frame.cell))
    expected = volume * (outputs["stress"][0].numpy() * strain).sum() - (outputs["forces"].numpy() * shift).sum()
    assert slope == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", VARIANTS)
def test_both_derivative_forms_give_one_gradient(name):
    potential = make_energies(**VARIANTS[name])
    double, tangent = (Engine(step_function(potential, derivative=form)) for form in ("double", "tangent"))
    assert difference(tangent, double, labelled(5, 3, 4)) < 1e-10


def test_gradients_of_the_weights_are_those_of_finite_differences():
    potential, batch = make_energies(**VARIANTS["smooth with slots"]), labelled(4, 3)
    function = step_function(potential)
    gradients = dict(zip(function.trained, Engine(function).differentiate(batch).gradients))
    for part in ("attention.0.project_in.w", "attention.1.norm_scale", "type_embedding.w", "embedding.layers.1.w"):
        name = f"model.descriptor.{part}"
        weight = dict(potential.named_parameters())[name]
        direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        losses = []
        with torch.no_grad():
            for step in (1e-5, -2e-5):
                weight += step * direction
                losses.append(float(Engine(function).differentiate(batch).loss))
            weight += 1e-5 * direction
        slope = (losses[0] - losses[1]) / 2e-5
        assert float((gradients[name] * direction).sum()) == pytest.approx(slope, rel=1e-5), name


@pytest.mark.parametrize("form", ["double", "tangent"])
def test_atoms_may_be_taken_a_few_at_a_time(form, monkeypatch):
    potential, batch = make_energies(**VARIANTS["smooth with slots"]), labelled(7, 5, 1, 6)
    whole = Engine(step_function(potential, derivative=form)).differentiate(batch)
    monkeypatch.setattr("forgefield.models.deeppot.se_atten.CHUNK", 300)
    parts = Engine(step_function(potential, derivative=form)).differentiate(batch)
    for one, other in zip(whole.gradients, parts.gradients):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("smooth with slots", "tangent"), ("stripped", "double")])
def test_one_trace_serves_every_size(name, form):
    potential = make_energies(**VARIANTS[name], attn_layer=1)  # the second layer is the first once more
    engine, eager = ScriptEngine(step_function(potential, derivative=form)), Engine(step_function(potential))
    for number, atoms in enumerate([(1,), (4, 3), (5, 1, 2, 6)]):
        assert difference(engine, eager, labelled(*atoms, seed=number)) < 1e-9, atoms


@pytest.mark.slow
def test_a_trace_without_enough_places_gives_no_number():
    batch = labelled(6)
    enough, short = (make_energies(sel=SLOTS, max_neighbours=places, attn_layer=1) for places in (SLOTS, 2))
    assert Engine(step_function(short)).evaluate(batch).sums.isfinite().all()  # eager makes as many as are needed
    assert ScriptEngine(step_function(enough)).evaluate(batch).sums.isfinite().all()
    assert ScriptEngine(step_function(short)).evaluate(batch).sums.isnan().any()


def test_too_few_slots_are_refused_with_the_number_that_is_needed():
    batch = make_batch(make_frame(6, seed=3), cutoff=CUTOFF)
    needed = int(torch.bincount(batch["edge_index"][1]).max())
    make_energies(sel=needed)(batch)
    with pytest.raises(ForgefieldError, match=f"sel has room for {needed - 1} neighbours.* {needed} within"):
        make_energies(sel=needed - 1)(batch)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tebd_input_mode": "add"}, "tebd_input_mode is 'add'; choose one of concat, strip"),
        ({"sel": 0}, "sel is 0"),
        ({"sel": "many"}, "sel is 'many'"),
        ({"attn_layer": -1}, "attn_layer must be at least 0, not -1"),
        ({"ln_eps": 0.0}, "ln_eps must be a positive number, not 0.0"),
        ({"axis_neuron": 9}, "axis_neuron is 9"),
        ({"use_econf_tebd": True, "species": ("H", "X")}, "'X' is not an element"),
        ({"max_neighbours": None}, "max_neighbours is not set and there is no training data"),
    ],
)
def test_options_without_meaning_are_refused(options, words):
    with pytest.raises(ForgefieldError, match=words):
        make_descriptor(**options)


def test_room_of_traced_steps_comes_from_the_training_data():
    options = SeAtten.Options(**TINY)
    environment = {"davg": MEANS, "dstd": DEVIATIONS, "max_neighbours": [20, 10], "mean_neighbours": 17.0}
    given = {"species": SPECIES, "cutoff": CUTOFF, "statistics": {"environment": environment}}
    resolved = SeAtten.complete(options, **given)
    assert (resolved.max_neighbours, resolved.neighbour_norm, resolved.sel) == (33, 17.0, None)
    with_room = SeAtten.complete(dataclasses.replace(options, sel=[20, 12]), **given)
    assert (with_room.max_neighbours, with_room.neighbour_norm) == (32, 32.0)


def test_configurations_hold_all_electrons():
    for symbol, number in (("H", 1), ("Cr", 24), ("Pd", 46), ("Gd", 64), ("U", 92)):
        vector = np.array(electronic_configuration(symbol))
        assert sum(occupations(symbol).values()) == number == (vector > 0).sum()
        assert np.linalg.norm(vector) == pytest.approx(1)
    chromium, oxygen = occupations("Cr"), electronic_configuration("O")
    assert (chromium["4s"], chromium["3d"]) == (1, 5)
    paired = [oxygen[2 * orbital] > 0 for orbital in range(5)]
    assert paired == [True, True, True, False, False]  # 1s, 2s and one of 2p


@pytest.mark.parametrize("name", [name for name, options in VARIANTS.items() if "sel" in options])
def test_form_of_deepmd_and_back_is_the_same_descriptor(name):
    descriptor = make_descriptor(**VARIANTS[name])
    options, state = attention_from_tree(attention_tree(descriptor))
    again = make_descriptor(**options)
    again.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})
    frame = make_frame(6, seed=3)
    assert torch.equal(describe(again, frame)[0], describe(descriptor, frame)[0])
    assert again.options.precision == "float64"


def test_models_that_deepmd_cannot_represent_are_refused():
    with pytest.raises(ForgefieldError, match="trained without model.descriptor.sel"):
        attention_tree(make_descriptor())
    with pytest.raises(ForgefieldError, match="attn_mask"):
        attention_tree(make_descriptor(sel=SLOTS, attn_mask=True))
    tree = attention_tree(make_descriptor(sel=SLOTS))
    with pytest.raises(ForgefieldError, match="descriptor.lmax is 2"):
        attention_from_tree(tree | {"lmax": 2})


DEEPMD = """
import pickle, sys
import numpy as np, torch
from deepmd.pt.model.model import get_model
from deepmd.pt.model.model.model import BaseModel
cases = pickle.load(open(sys.argv[1], "rb"))
for case in cases:
    if "descriptor" in case:
        parts = case["model"] | {"descriptor": case["descriptor"]}
        model = BaseModel.deserialize(parts).double()
    else:
        options = dict(type_map=["H", "O"], descriptor=case["options"], fitting_net=dict(neuron=[6, 6], seed=2))
        model = get_model(options).double()
        shape = (2, case["slots"], 4)
        stats = [torch.tensor(case[key]).reshape(2, 1, 4).expand(shape).clone() for key in ("davg", "dstd")]
        model.atomic_model.descriptor.set_stat_mean_and_stddev(*stats)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        case["model"] = model.serialize()
    given = [torch.tensor(case[key]).unsqueeze(0) for key in ("positions", "kinds")]
    out = model(*given, box=torch.tensor(case["cell"]).reshape(1, 9))
    case["energy"], case["forces"] = (out[key].detach().numpy()[0] for key in ("energy", "force"))
pickle.dump(cases, open(sys.argv[1], "wb"))
"""


def deepmd_python() -> str | None:
    """An interpreter that has DeePMD-kit."""
    if importlib.util.find_spec("deepmd") is not None:
        return sys.executable
    return os.environ.get("FORGEFIELD_DEEPMD_PYTHON")


def run_deepmd(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    file = folder / "cases.pickle"
    file.write_bytes(pickle.dumps(cases))
    done = subprocess.run([str(deepmd_python()), "-c", DEEPMD, str(file)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return pickle.loads(file.read_bytes())


@pytest.mark.slow
@pytest.mark.skipif(
    deepmd_python() is None, reason="no DeePMD-kit; FORGEFIELD_DEEPMD_PYTHON names an interpreter with it"
)
def test_equals_deepmd_and_deepmd_equals_what_is_sent_back(tmp_path):
    frame, cases = make_frame(6, seed=3), []
    kinds = (frame.numbers == 8).astype(np.int64)
    for name in ("smooth with slots", "stripped", "v2 with slots", "with exclusions"):
        given = {"type": "se_atten", "rcut": CUTOFF, "seed": 1, "precision": "float64", **TINY, **VARIANTS[name]}
        zero = given.get("set_davg_zero", False)
        means = np.zeros((2, 4)) if zero else np.array(MEANS)
        case = {"options": given, "slots": SLOTS, "davg": means, "dstd": np.array(DEVIATIONS)}
        cases.append(case | {"positions": frame.positions, "cell": frame.cell, "kinds": kinds})
    cases = run_deepmd(cases, tmp_path)
    for case in cases:
        options, state = attention_from_tree(case["model"]["descriptor"])
        potential = Potential(Energies(make_descriptor(**options)))
        potential.model.descriptor.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})
        copy_fitting(potential.model.fitting, case["model"]["fitting"])
        outputs = potential.eval()(make_batch(frame, cutoff=CUTOFF))
        np.testing.assert_allclose(outputs["energy"].numpy(), case["energy"], rtol=0, atol=1e-10)
        np.testing.assert_allclose(outputs["forces"].numpy(), case["forces"], rtol=0, atol=1e-10)
        case["descriptor"] = attention_tree(potential.model.descriptor)
    for before, after in zip(cases, run_deepmd(cases, tmp_path)):
        np.testing.assert_allclose(after["forces"], before["forces"], rtol=0, atol=1e-12)


def copy_fitting(fitting: EnergyFitting, section: dict[str, Any]) -> None:
    with torch.no_grad():
        for layer, given in zip(fitting.networks.layers, section["nets"]["networks"][0]["layers"]):
            for key in ("w", "b", "idt"):
                if getattr(layer, key) is not None:
                    getattr(layer, key)[0] = torch.from_numpy(given["@variables"][key])
