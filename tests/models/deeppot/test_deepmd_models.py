"""Models of DeePMD-kit with other descriptors: its energies, forces, virials and parameter gradients; files there and back."""

from __future__ import annotations

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_descriptors import descriptor_from_tree
from forgefield.models.deeppot.deepmd_files import read_tree
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.models.edges import EdgeContext, edge_vectors
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from tests.support.deepmd_models import assert_equal_predictions, batch_for, gradients, loaded, predictions, unpacked
from tests.support.engine_cases import difference, labelled, step_function

NAMES = [
    "hybrid",
    "hybrid_mixed",
    "se_e3",
    "hybrid_se_e3",
    "se_e3_tebd",
    "se_e3_tebd_strip",
    "case",
    "sum",
    "dpa2",
    "dpa2_inside",
    "dpa2_rough",
    "dpa3",
    "dpa3_dynamic",
    "dpa3_plain",
    "dpa3_edges",
    "spin",
    "spin_atten",
    "networks",
]


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_those_of_deepmd(name, tmp_path):
    potential = loaded(unpacked(tmp_path, f"{name}.dp"))
    assert_equal_predictions(potential, predictions(name))


@pytest.mark.parametrize("name", ["spin", "sum", "networks"])
def test_checkpoints_are_the_same_models(name, tmp_path):
    assert_equal_predictions(loaded(unpacked(tmp_path, f"{name}.pt")), predictions(name))


@pytest.mark.parametrize("form", ["double", "tangent"])
@pytest.mark.parametrize("name", NAMES)
def test_parameter_gradients_are_those_of_deepmd(name, form, tmp_path):
    potential = loaded(unpacked(tmp_path, f"{name}.dp"))
    expected = loaded(unpacked(tmp_path, f"{name}.gradients.dp")).state_dict()
    found = gradients(potential, predictions(name), form)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-2
    for key, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[key], rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read_back_exactly(name, tmp_path):
    potential = loaded(unpacked(tmp_path, f"{name}.dp"))
    again = loaded(write_deepmd(potential, tmp_path / "again.yaml"))
    for key, value in potential.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)
    assert_equal_predictions(again, predictions(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hybrid_se_e3", "tangent"),
        ("se_e3_tebd_strip", "tangent"),
        ("dpa2", "double"),
        ("dpa3_dynamic", "tangent"),
    ],
)
def test_one_trace_serves_every_size(name, form, tmp_path):
    potential = loaded(unpacked(tmp_path, f"{name}.dp"))
    engine, eager = ScriptEngine(step_function(potential, derivative=form)), Engine(step_function(potential))
    for number, atoms in enumerate([(1,), (4, 3), (5, 1, 2, 6)]):
        assert difference(engine, eager, labelled(*atoms, seed=number, box=8.0)) < 1e-9, atoms


def test_a_part_that_sees_beyond_its_cutoff_in_deepmd_is_refused(tmp_path):
    descriptor = read_tree(unpacked(tmp_path, "hybrid_mixed.dp"))["model"]["descriptor"]
    attention = descriptor["list"][1]
    attention["smooth_type_embedding"] = False
    with pytest.raises(ForgefieldError, match="an attention that is not smooth"):
        descriptor_from_tree(descriptor, 2)
    attention["@variables"]["davg"][:, :, 0] = 0.1
    with pytest.raises(ForgefieldError, match=r"descriptor.list\[1\].*means"):
        descriptor_from_tree(descriptor, 2)


class Owners:
    """Ghost atoms of which this process is the owner. owner: (n_atoms,) number of the atom that each is an image of."""

    def __init__(self, owner: torch.Tensor) -> None:
        self.owner, self.exchanges = owner, 0

    def fill(self, rows: torch.Tensor) -> torch.Tensor:
        self.exchanges += 1
        return rows.index_select(0, self.owner)


def test_layers_of_dpa2_exchange_what_ghost_atoms_need(tmp_path):
    potential = loaded(unpacked(tmp_path, "dpa2.dp"))
    batch = batch_for(potential, predictions("dpa2"))
    n, (source, centre) = len(batch["species"]), batch["edge_index"]
    images, number = torch.unique(torch.cat([source[:, None], batch["edge_shift"]], 1), dim=0, return_inverse=True)
    owner = torch.cat([torch.arange(n), images[:, 0].long()])
    vectors = edge_vectors(batch).requires_grad_()
    ghosts = {key: batch[key].index_select(0, owner) for key in ("species", "frame", "positions")}
    ghosts |= {"edge_index": torch.stack([n + number, centre]), "edge_shift": torch.zeros_like(batch["edge_shift"])}
    of_images = {key: value for key, value in batch.items() if key != "edge_reverse"} | ghosts
    owners = Owners(owner)
    with_ghosts = potential.model(of_images, EdgeContext(vectors, of_images, ghosts=owners))[:n]
    periodic = potential.model(batch, EdgeContext(vectors, batch))
    torch.testing.assert_close(with_ghosts, periodic, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(energies.sum(), vectors)[0] for energies in (with_ghosts, periodic)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)
    assert potential.model.ghost_atoms == "exchange"
    assert owners.exchanges == 2
