"""What NequIP promises beyond the laws of every potential: limits, smoothness, sizes, initial weights."""

import pytest
import torch

from forgefield.data.frame import Frame
from forgefield.models import build_model, resolve_model
from forgefield.ops.graph import edge_graph
from tests.support.structures import STATISTICS, make_batch, make_frame, make_potential


@pytest.mark.parametrize(
    "options", [{}, {"l_max": 2, "num_layers": 3}, {"nonlinearity": "norm", "parity": False}, {"zbl": True}]
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_an_atom_alone_has_exactly_its_shift(options, precision):
    shifts = {"H": -13.605693122994, "O": -75.0123456789}
    potential = make_potential(precision=precision, energy_shifts=shifts, **options)
    lone = [make_frame(1, seed=seed, periodic=False, numbers=(z,)) for seed, z in enumerate((1, 8))]
    outputs = potential(make_batch(*lone))
    assert outputs["energy"].tolist() == [shifts["H"], shifts["O"]]
    assert torch.equal(outputs["forces"], torch.zeros(2, 3, dtype=torch.float64))


def dimer(distance: float) -> Frame:
    frame = make_frame(2, periodic=False, numbers=(8,))
    positions = frame.positions * 0
    positions[1, 2] = distance
    return Frame(positions, frame.numbers, frame.cell, frame.pbc, None, None, None)


@pytest.mark.parametrize("options", [{}, {"zbl": True}, {"per_edge_type_cutoff": {"O": 2.0}}])
def test_energy_and_forces_vanish_smoothly_at_the_cutoff(options):
    end = 2.0 if "per_edge_type_cutoff" in options else 3.0
    potential = make_potential(energy_shifts=0.0, **options)
    forces = []
    for gap in (1e-2, 1e-3, 1e-4):
        outputs = potential(make_batch(dimer(end - gap)))
        forces.append(outputs["forces"].abs().max().item())
        assert outputs["energy"].abs().item() < 1e3 * gap**3
    assert forces[1] < forces[0] / 50
    assert forces[2] < forces[1] / 50
    beyond = potential(make_batch(dimer(end + 1e-9), cutoff=3.5))
    assert beyond["energy"].item() == 0.0
    assert beyond["forces"].abs().max().item() == 0.0


def test_pair_cutoffs_are_by_centre_then_neighbour():
    potential = make_potential(per_edge_type_cutoff={"H": {"O": 1.5}}, energy_shifts=0.0, num_layers=1)
    frame = dimer(2.0)
    mixed = Frame(frame.positions, torch.tensor([1, 8]).numpy(), frame.cell, frame.pbc, None, None, None)
    atomic = potential(make_batch(mixed))["atomic_energy"]
    assert atomic[0].item() == 0.0
    assert atomic[1].item() != 0.0


def test_no_edges_at_all_still_trains():
    potential = make_potential(energy_shifts_trainable=True).train()
    batch = make_batch(make_frame(1, periodic=False), make_frame(1, seed=1, periodic=False))
    assert batch["edge_index"].shape == (2, 0)
    outputs = potential(batch, stress=True)
    (outputs["energy"].sum() + outputs["forces"].sum()).backward()
    assert torch.equal(potential.model.energy_shifts.grad.sum(), torch.tensor(2.0, dtype=torch.float64))
    assert torch.equal(outputs["forces"], torch.zeros(2, 3, dtype=torch.float64))


def test_one_species():
    potential = make_potential(species=("O",)).train()
    outputs = potential(make_batch(make_frame(4, numbers=(8,)), species=("O",)))
    outputs["forces"].square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in potential.parameters())


def test_more_species_than_embedding_features_gives_the_same_model():
    """Two ways to apply the self-connection: per species, and through the embedding."""
    potential = make_potential(type_embed_num_features=3, num_layers=3)
    batch = make_batch(make_frame(6, seed=1))
    by_species = potential(batch)["energy"]
    assert potential.model.one_hot_self_connection
    potential.model.one_hot_self_connection = False
    torch.testing.assert_close(potential(batch)["energy"], by_species, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"per_edge_type_cutoff": {"H": 2.0, "O": {"H": 2.5}}}, {"zbl": True}])
def test_radial_weights_by_pair_change_nothing(options, monkeypatch):
    potential = make_potential(**options).train()
    batch = make_batch(make_frame(6, seed=1), make_frame(2, seed=2, box=2.4), make_frame(5, seed=3, periodic=False))
    assert edge_graph(batch).pair is not None
    results = []
    for by_pair in (True, False):
        if not by_pair:
            monkeypatch.setattr("forgefield.ops.graph._find_reverse", lambda *_: None)
            del batch["edge_reverse"]
            assert edge_graph(batch).pair is None
        outputs = potential(batch, stress=True)
        loss = outputs["forces"].square().sum() + outputs["energy"].sum()
        results.append([*outputs.values(), *torch.autograd.grad(loss, list(potential.parameters()))])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_list_with_one_direction_only_is_taken_as_it_is():
    """Half an edge list is another model, but a well defined one: each atom sees only some neighbours."""
    batch = make_batch(make_frame(5, periodic=False))
    del batch["edge_reverse"]
    kept = batch["edge_index"][0] < batch["edge_index"][1]
    half = batch | {"edge_index": batch["edge_index"][:, kept], "edge_shift": batch["edge_shift"][kept]}
    assert edge_graph(half).pair is None
    first = half["edge_index"][1] == half["edge_index"][1].min()
    outputs = make_potential(num_layers=1)(half)
    assert first.any()
    assert torch.equal(
        outputs["atomic_energy"][0], make_potential(num_layers=1).model.energy_shifts[batch["species"][0]]
    )


@pytest.mark.parametrize(("preset", "millions"), [("S", 0.61), ("M", 3.19), ("L", 6.83)])
def test_presets_have_the_sizes_of_nequip(preset, millions):
    species = ("H", "C", "O")
    statistics = STATISTICS | {"reference_energies": dict.fromkeys(species, 0.0)}
    resolved = resolve_model({"name": "nequip", "preset": preset}, species=species, cutoff=5.0, statistics=statistics)
    potential = build_model(resolved, precision="float32", seed=0)
    assert sum(p.numel() for p in potential.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    a, state = make_potential(seed=5), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    b, c = make_potential(seed=5), make_potential(seed=6)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.model.type_embedding, c.model.type_embedding)


def test_both_precisions_start_from_the_same_weights():
    double, single = make_potential("float64", seed=2), make_potential("float32", seed=2)
    for p, q in zip(double.parameters(), single.parameters()):
        torch.testing.assert_close(p.float(), q, rtol=0, atol=0)


def test_initial_weights_have_unit_variance_as_in_nequip():
    potential = make_potential("float64", num_features=32, radial_mlp_width=64, num_layers=3)
    for name, parameter in potential.named_parameters():
        if parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(1.0, abs=0.08), name
            bound = 3**0.5 if "radial" in name else None
            assert bound is None or parameter.abs().max() <= bound
