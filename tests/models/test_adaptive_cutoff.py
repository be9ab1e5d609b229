"""The adaptive cutoff: edges and model agree on every radius, and nothing jumps while atoms become isolated or not."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from forgefield.config.trust import CONFIG
from forgefield.data.frame import Frame
from forgefield.data.neighbours import graph as numpy_graph
from forgefield.data.neighbours.graph import GraphOptions, build_edges
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models import Potential, build_model, resolve_model, terms
from forgefield.models.terms import adaptive_bessel_basis, pair_radii
from forgefield.ops.functions import bessel_basis, polynomial_cutoff
from forgefield.ops.graph import EdgeGraph
from tests.support.structures import SPECIES, STATISTICS, TINY, make_frame

CUTOFF, LIMIT = 2.0, 3.4
OPTIONS = GraphOptions(CUTOFF, adaptive_cutoff=LIMIT)
SHIFTS = {"H": -13.6, "O": -75.0}


def adaptive_potential(seed: int = 0, **options) -> Potential:
    given = {**TINY, "energy_shifts": SHIFTS, **options}
    resolved = resolve_model(given, species=SPECIES, cutoff=CUTOFF, adaptive_cutoff=LIMIT, statistics=STATISTICS)
    return build_model(json.loads(json.dumps(resolved)), precision="float64", seed=seed).eval()


def batch_of(frame: Frame, options: GraphOptions = OPTIONS) -> dict[str, torch.Tensor]:
    edges = build_edges(frame.positions, frame.cell, frame.pbc, options)
    n = len(frame)
    batch = {
        "positions": torch.tensor(frame.positions),
        "species": torch.from_numpy(SpeciesTable(SPECIES).index(frame.numbers, "").copy()),
        "frame": torch.zeros(n, dtype=torch.int64),
        "n_atoms": torch.tensor([n]),
        "cell": torch.tensor(frame.cell).reshape(1, 3, 3),
        "edge_index": torch.from_numpy(np.stack([edges.source, edges.destination])),
        "edge_shift": torch.from_numpy(edges.shifts.astype(np.float64)),
    }
    return batch if edges.reverse is None else batch | {"edge_reverse": torch.from_numpy(edges.reverse)}


def molecule(positions, numbers) -> Frame:
    positions = np.asarray(positions, dtype=np.float64)
    return Frame(positions, np.array(numbers), np.zeros((3, 3)), np.full(3, False))


def with_positions(frame: Frame, positions) -> Frame:
    return dataclasses.replace(frame, positions=np.asarray(positions, dtype=np.float64))


def water_and_visitor(x: float) -> Frame:
    """A molecule at the origin, an atom at `x` A that is inside, half isolated, isolated or gone, and a pair beyond."""
    return molecule(
        [[0, 0, 0], [0.76, 0.59, 0], [-0.76, 0.59, 0.1], [x, 0.2, 0.3], [6.8, 0.1, 0], [7.6, 0.4, 0.2]],
        [8, 1, 1, 1, 8, 1],
    )


def lengths_and_graph(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, EdgeGraph]:
    source, destination = batch["edge_index"]
    image = batch["edge_shift"] @ batch["cell"][0]
    lengths = torch.linalg.vector_norm(batch["positions"][source] - batch["positions"][destination] + image, dim=1)
    return lengths, EdgeGraph(source, destination, len(batch["species"]))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 8), box=st.sampled_from([3.0, 5.0, 8.0]), periodic=st.booleans())
def test_the_edge_list_is_exactly_that_of_the_radii_of_the_model(seed, n, box, periodic):
    frame = make_frame(n, seed=seed, box=box, periodic=periodic)
    lengths, graph = lengths_and_graph(batch_of(frame))
    radii = pair_radii(lengths, graph, CUTOFF, LIMIT)
    assert (lengths < radii + 1e-9).all()
    kept = {(int(i), int(j)): r for i, j, r in zip(graph.destination, graph.source, radii)} if not periodic else {}
    # Every edge the list left out is beyond the radius that the full list up to the limit gives it.
    every, all_edges = lengths_and_graph(batch_of(frame, GraphOptions(LIMIT)))
    all_radii = pair_radii(every, all_edges, CUTOFF, LIMIT)
    assert abs(int((every < all_radii).sum()) - len(lengths)) <= int((abs(every - all_radii) < 1e-9).sum())
    for i, j, r in zip(all_edges.destination, all_edges.source, all_radii):
        if (int(i), int(j)) in kept:
            torch.testing.assert_close(r, kept[int(i), int(j)], rtol=1e-12, atol=0)


@pytest.mark.parametrize("distance", [2.05, 2.6, 3.3, 5.0])
def test_the_radius_of_an_isolated_atom_is_no_larger_than_its_nearest_neighbour_requires(distance):
    """A pair far from a molecule, with a limit far beyond it; the atoms of the molecule keep their cutoff."""
    limit, start = 20.0, terms.SWITCH_START
    atoms = [[0, 0, 0], [0.9, 0, 0], [0.2, 0.9, 0], [0, 0, 9.0], [0, distance, 9.0]]
    batch = batch_of(molecule(atoms, [8, 1, 1, 1, 1]), GraphOptions(CUTOFF, adaptive_cutoff=limit))
    lengths, graph = lengths_and_graph(batch)
    radii = pair_radii(lengths, graph, CUTOFF, limit, to_nearest=True)
    by_pair = {(int(i), int(j)): float(r) for i, j, r in zip(graph.destination, graph.source, radii)}
    assert distance < by_pair[3, 4] <= 2 * (distance / start - CUTOFF) + CUTOFF
    assert by_pair[3, 0] == pytest.approx(distance / start, rel=0.02)
    assert [by_pair[pair] for pair in ((0, 1), (1, 2), (2, 0))] == [CUTOFF] * 3
    assert (radii <= pair_radii(lengths, graph, CUTOFF, limit)).all()


def test_runs_recorded_without_the_option_keep_the_radius_that_grows_to_the_limit():
    batch = batch_of(water_and_visitor(2.55))
    new, limit = adaptive_potential(), adaptive_potential(adaptive_radius="limit")
    given = {**TINY, "energy_shifts": SHIFTS, "adaptive_radius": "limit"}
    resolved = resolve_model(given, species=SPECIES, cutoff=CUTOFF, adaptive_cutoff=LIMIT, statistics=STATISTICS)
    old = build_model({k: v for k, v in resolved.items() if k != "adaptive_radius"}, precision="float64", seed=0).eval()
    energies = [float(potential(batch, forces=False)["energy"]) for potential in (old, limit, new)]
    assert energies[0] == energies[1] != energies[2]
    with pytest.raises(ForgefieldError, match=r"model\.adaptive_radius needs data\.adaptive_cutoff"):
        resolve_model(given, species=SPECIES, cutoff=CUTOFF, statistics=STATISTICS)


def test_both_sides_use_the_same_functions():
    assert terms.SWITCH_START == numpy_graph.SWITCH_START
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.uniform(0.1, 3.0, 200))
    weights = numpy_graph.coordination_weights(lengths, CUTOFF)
    assert (weights[lengths <= 0.7 * CUTOFF] == 1).all()
    assert (weights[lengths >= CUTOFF] == 0).all()
    for r, weight in zip(lengths[::9], weights[::9]):  # a dimer: its radius is a function of the one weight
        graph = EdgeGraph(torch.tensor([1, 0]), torch.tensor([0, 1]), 2)
        radius = pair_radii(torch.full((2,), r, dtype=torch.float64), graph, CUTOFF, LIMIT)
        x = numpy_graph.isolations(np.array([weight]))
        expected = numpy_graph.pair_radii(x, x, CUTOFF, LIMIT)
        np.testing.assert_allclose(radius.numpy(), np.repeat(expected, 2), rtol=1e-14)


def test_without_isolated_atoms_the_envelope_is_that_of_the_plain_cutoff():
    frame = make_frame(12, seed=1, box=4.0)
    batch = batch_of(frame)
    assert torch.equal(batch["edge_index"], batch_of(frame, GraphOptions(CUTOFF))["edge_index"])
    lengths, graph = lengths_and_graph(batch)
    radii = pair_radii(lengths, graph, CUTOFF, LIMIT)
    assert torch.equal(radii, torch.full_like(radii, CUTOFF))
    frequencies = torch.arange(1.0, 5.0, dtype=torch.float64)
    basis = adaptive_bessel_basis(lengths, radii, LIMIT, frequencies, 6.0)
    bare = torch.sin(torch.outer(lengths, frequencies) * torch.pi / LIMIT) / (torch.pi * lengths[:, None] / LIMIT)
    torch.testing.assert_close(basis, bare * polynomial_cutoff(lengths / CUTOFF, 6.0)[:, None], rtol=1e-12, atol=1e-14)
    # Where the radius is the limit as well, the basis is the plain one of the limit.
    plain = bessel_basis(lengths / LIMIT, frequencies, 6.0)
    at_limit = adaptive_bessel_basis(lengths, torch.full_like(lengths, LIMIT), LIMIT, frequencies, 6.0)
    torch.testing.assert_close(at_limit, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"zbl": True}, {"bessel_trainable": True, "l_max": 2}])
@pytest.mark.parametrize("x", [1.75, 2.1, 2.55, 2.75, 3.2, 4.2])
def test_forces_are_minus_the_energy_derivative_while_an_atom_becomes_isolated(x, options):
    potential, frame, step = adaptive_potential(**options), water_and_visitor(x), 1e-4
    forces = potential(batch_of(frame))["forces"]
    for atom in range(len(frame)):
        for axis in range(3):
            ends = []
            for sign in (1, -1):
                positions = frame.positions.copy()
                positions[atom, axis] += sign * step
                ends.append(potential(batch_of(with_positions(frame, positions)), forces=False)["energy"].item())
            assert forces[atom, axis].item() == pytest.approx(-(ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_stress_is_the_strain_derivative():
    potential, step = adaptive_potential(), 1e-5
    frame = make_frame(5, seed=4, box=6.0)
    assert (pair_radii(*lengths_and_graph(batch_of(frame)), CUTOFF, LIMIT) > CUTOFF).any()
    stress = potential(batch_of(frame), stress=True)["stress"][0]
    for a, b in ((0, 0), (0, 1), (2, 1)):
        ends = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += sign * step / 2
            strain[b, a] += sign * step / 2
            strained = dataclasses.replace(frame, positions=frame.positions @ strain, cell=frame.cell @ strain)
            ends.append(potential(batch_of(strained), forces=False)["energy"].item())
        assert stress[a, b].item() == pytest.approx((ends[0] - ends[1]) / (2 * step) / frame.volume, rel=1e-5, abs=1e-7)


def steps_of_a_scan(potential: Potential, options: GraphOptions, start: float, stop: float, n: int):
    """Largest change of the energy and of any force between two points of a scan, and the number of edge lists met."""
    places = np.linspace(start, stop, n)
    outputs = [potential(batch_of(water_and_visitor(x), options)) for x in places]
    energies = np.array([out["energy"].item() for out in outputs])
    forces = np.stack([out["forces"].numpy() for out in outputs])
    lists = {batch_of(water_and_visitor(x), options)["edge_index"].numpy().tobytes() for x in places}
    return abs(np.diff(energies)).max(), abs(np.diff(forces, axis=0)).max(), len(lists)


@pytest.mark.parametrize(("seed", "radius"), [(0, "nearest"), (1, "nearest"), (1, "limit")])
def test_energy_and_forces_do_not_jump_while_an_atom_leaves(seed, radius):
    """The largest step of a scan shrinks with its spacing (a function without jumps and with bounded slope)."""
    potential = adaptive_potential(seed=seed, adaptive_radius=radius)
    start, stop = 1.3, 4.9
    coarse = steps_of_a_scan(potential, OPTIONS, start, stop, 80)
    fine = steps_of_a_scan(potential, OPTIONS, start, stop, 320)
    assert fine[2] >= 5  # edges come and go on the way
    for a, b in zip(coarse[:2], fine[:2]):
        assert b < 0.3 * a  # a jump would stay as it is; a smooth step becomes a quarter


def test_the_scan_would_see_a_jump():
    """The same scan with the list cut off in the midst of the interaction: the test above can fail."""
    potential = adaptive_potential(adaptive_radius="limit")
    short = GraphOptions(CUTOFF * 0.8)
    coarse = steps_of_a_scan(potential, short, 1.3, 4.9, 80)
    fine = steps_of_a_scan(potential, short, 1.3, 4.9, 320)
    assert fine[1] > 0.6 * coarse[1]


def test_an_atom_beyond_the_limit_has_the_energy_of_the_isolated_atom():
    potential = adaptive_potential()
    alone = molecule([[0.0, 0, 0], [LIMIT + 1e-6, 0, 0]], [1, 8])
    outputs = potential(batch_of(alone))
    assert outputs["atomic_energy"].tolist() == [SHIFTS["H"], SHIFTS["O"]]
    assert not outputs["forces"].any()
    reached = potential(batch_of(molecule([[0.0, 0, 0], [2.6, 0, 0]], [1, 8])))
    assert (
        abs(reached["atomic_energy"][0] - SHIFTS["H"]) > 1e-6
    )  # beyond the cutoff, within the limit: they see each other


def test_supercells_and_permutations_change_nothing():
    potential, frame = adaptive_potential(), make_frame(4, seed=4, box=6.0)
    energy = potential(batch_of(frame))["energy"].item()
    copies = np.concatenate([frame.positions + k * frame.cell[0] + m * frame.cell[1] for k in (0, 1) for m in (0, 1)])
    cell = frame.cell * np.array([[2.0], [2.0], [1.0]])
    large = dataclasses.replace(frame, positions=copies, numbers=np.tile(frame.numbers, 4), cell=cell)
    assert potential(batch_of(large))["energy"].item() == pytest.approx(4 * energy, rel=1e-12)
    order = np.random.default_rng(0).permutation(len(large))
    mixed = dataclasses.replace(large, positions=copies[order], numbers=large.numbers[order])
    a, b = potential(batch_of(large)), potential(batch_of(mixed))
    torch.testing.assert_close(a["forces"][torch.from_numpy(order)], b["forces"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a["atomic_energy"][torch.from_numpy(order)], b["atomic_energy"], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"zbl": True}])
def test_the_gradient_of_a_force_loss_is_its_derivative(options):
    """Double backward through the radii, against differences in the weights; with and without pairs."""
    potential = adaptive_potential(**options).train()
    batch = batch_of(water_and_visitor(1.9))
    by_edge = {key: value for key, value in batch.items() if key != "edge_reverse"}
    parameter = potential.model.layers[0].radial.weights[0]

    def loss(data) -> torch.Tensor:
        return potential(data)["forces"].square().sum()

    slopes = [torch.autograd.grad(loss(data), parameter)[0] for data in (batch, by_edge)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)
    for place in ((0, 0), (3, 5), (7, 2)):
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter[place] += step
            ends.append(loss(batch).item())
            with torch.no_grad():
                parameter[place] -= step
        assert slopes[0][place].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-6)


def test_positions_can_be_differentiated_twice():
    potential = adaptive_potential()
    frame = molecule([[0.0, 0, 0], [1.7, 0, 0], [3.4, 1.2, 0]], [8, 1, 1])
    batch = batch_of(frame)

    def energy(positions):
        return potential(batch | {"positions": positions}, forces=False)["energy"]

    positions = torch.tensor(frame.positions, requires_grad=True)
    assert torch.autograd.gradcheck(energy, (positions,), eps=1e-5, atol=1e-6)
    assert torch.autograd.gradgradcheck(energy, (positions,), eps=1e-5, atol=1e-5)


class PlainModel(nn.Module):
    def __init__(self, species, cutoff):
        super().__init__()


class KnowingModel(nn.Module):
    def __init__(self, species, cutoff, adaptive_cutoff):
        super().__init__()
        self.adaptive_cutoff = adaptive_cutoff


def test_a_model_that_does_not_know_it_refuses():
    facts = {"species": SPECIES, "cutoff": CUTOFF, "trust": CONFIG}
    with pytest.raises(ForgefieldError, match=r"data\.adaptive_cutoff is 3\.4.*PlainModel has no argument"):
        resolve_model({"name": f"{__name__}.PlainModel"}, adaptive_cutoff=LIMIT, **facts)
    for limit in (LIMIT, None):
        resolved = resolve_model({"name": f"{__name__}.KnowingModel"}, adaptive_cutoff=limit, **facts)
        assert build_model(resolved, precision="float64", seed=0, trust=CONFIG).adaptive_cutoff == limit
    assert adaptive_potential().adaptive_cutoff == LIMIT


def test_settings_that_contradict_are_refused():
    facts = {"species": SPECIES, "cutoff": CUTOFF, "statistics": STATISTICS}
    with pytest.raises(ForgefieldError, match=r"model\.adaptive_cutoff cannot be set: it comes from the data section"):
        resolve_model({**TINY, "adaptive_cutoff": 4.0}, **facts)
    with pytest.raises(ForgefieldError, match=r"above data\.cutoff=2"):
        resolve_model(TINY, adaptive_cutoff=1.5, **facts)
    with pytest.raises(ForgefieldError, match="per_edge_type_cutoff and data.adaptive_cutoff"):
        resolve_model({**TINY, "per_edge_type_cutoff": {"H": 1.5}}, adaptive_cutoff=3.0, **facts)


def test_without_the_option_a_resolved_model_is_as_before():
    resolved = resolve_model(TINY, species=SPECIES, cutoff=CUTOFF, statistics=STATISTICS)
    assert "adaptive_cutoff" not in resolved
    assert build_model(resolved, precision="float64", seed=0).adaptive_cutoff is None


def test_a_list_of_nearest_neighbours_runs_and_its_forces_are_derivatives():
    """Without reverse edges the model takes every edge by itself; within one list forces are still exact."""
    frame = make_frame(7, seed=2, box=4.5)
    potential = build_model(
        resolve_model(TINY, species=SPECIES, cutoff=3.0, statistics=STATISTICS), precision="float64", seed=0
    ).train()
    batch = batch_of(frame, GraphOptions(3.0, max_neighbours=5))
    assert "edge_reverse" not in batch
    outputs = potential(batch, stress=True)
    outputs["forces"].square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in potential.parameters() if p.grad is not None)
    step = 1e-5
    moved = [batch["positions"].clone() for _ in range(2)]
    moved[0][2, 1] += step
    moved[1][2, 1] -= step
    ends = [potential(batch | {"positions": p}, forces=False)["energy"].item() for p in moved]
    assert outputs["forces"][2, 1].item() == pytest.approx(-(ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-7)
    everything = batch_of(frame, GraphOptions(3.0, max_neighbours=10_000))
    torch.testing.assert_close(
        potential(everything)["energy"], potential(batch_of(frame, GraphOptions(3.0)))["energy"], rtol=1e-12, atol=0
    )
