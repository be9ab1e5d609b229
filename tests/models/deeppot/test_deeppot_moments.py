"""The fast ways of a Deep Potential against the plain one: sums by moments, tangents, traces for any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import forgefield.models.deeppot.se_e2 as sums
from forgefield.data.frame import Frame
from forgefield.models.deeppot.moments import Cells, expand
from forgefield.models.deeppot.networks import Groups, Networks, group_rows
from forgefield.models.edges import edge_vectors
from forgefield.ops.graph import edge_graph
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.verify import largest_difference
from tests.support.deeppots import make_deeppot
from tests.support.engine_cases import difference, labelled, step_function
from tests.support.structures import make_batch, make_frame

ROOM = {"sel": [200, 200]}
MODELS = {
    "plain": {},
    "with room": {**ROOM, "type_one_side": True},
    "step sizes": {"resnet_dt": True, **ROOM},
    "silu": {"activation_function": "silu"},
    "gelu": {"activation_function": "gelu", "neuron": [6], **ROOM},
    "excluded": {"exclude_types": [[0, 1]], **ROOM},
    "radial": {"kind": "se_e2_r"},
    "radial with room": {"kind": "se_e2_r", **ROOM},
}


def make(name: str, precision: str = "float64", **more: Any):
    options = {**MODELS[name], **more}
    return make_deeppot(options.pop("kind", "se_e2_a"), precision=precision, **options)


@pytest.fixture
def expansions(monkeypatch) -> list:
    """What `expand` gave, call by call; batches of tests are small, so it is made worth it."""
    found = []
    monkeypatch.setattr("forgefield.models.deeppot.moments.WORTH", 0)
    monkeypatch.setattr(sums, "expand", lambda *args: found.append(expand(*args)) or found[-1])
    return found


def without_moments(monkeypatch) -> None:
    monkeypatch.setattr(sums, "can_use_moments", lambda *args: False)


@pytest.mark.parametrize("name", MODELS)
def test_steps_by_moments_are_those_edge_by_edge(name, expansions, monkeypatch):
    """Loss, errors and every gradient, by both derivative forms; only rounding may differ."""
    potential = make(name)
    batch = labelled(30, 20, box=5.0)
    fast = [Engine(step_function(potential, derivative=form)).differentiate(batch) for form in ("double", "tangent")]
    assert expansions
    assert all(expansion is not None for expansion in expansions)
    without_moments(monkeypatch)
    function = step_function(potential)
    plain = Engine(function).differentiate(batch)
    for step in fast:
        assert largest_difference(step, plain, function.trained)[0] < 1e-11


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_moments_are_as_close_to_the_truth_as_the_plain_sum(name, expansions, monkeypatch):
    potential, exact = make(name, "float32"), make(name)
    exact.load_state_dict(potential.state_dict())
    function, batch = step_function(potential), labelled(30, 20, box=5.0)
    fast = Engine(function).differentiate(batch)
    assert expansions[0] is not None
    without_moments(monkeypatch)
    plain = Engine(function).differentiate(batch)
    truth = Engine(step_function(exact)).differentiate(batch)
    errors = [largest_difference(step, truth, function.trained)[0] for step in (fast, plain)]
    assert errors[0] < 4 * errors[1] + 1e-6


@pytest.mark.parametrize("targets", [("energy", "forces"), ("energy",)], ids="+".join)
def test_atoms_without_neighbours_and_frames_alone_are_summed_alike(targets, expansions, monkeypatch):
    potential = make("with room")
    for batch in (labelled(1, 20), labelled(2, periodic=False), labelled(25, 1, periodic=False, box=6.0)):
        function = step_function(potential, targets)
        fast = Engine(function).differentiate(batch)
        with monkeypatch.context() as patch:
            without_moments(patch)
            plain = Engine(function).differentiate(batch)
        assert largest_difference(fast, plain, function.trained)[0] < 1e-10


@pytest.mark.parametrize("activation", ["relu", "relu6"])
def test_networks_with_corners_are_summed_edge_by_edge(activation, expansions):
    make_deeppot(activation_function=activation).train()(labelled(30, 20, box=5.0))
    assert expansions == [None]


def test_an_expansion_is_the_network_on_its_interval():
    networks = Networks(
        2, [1, 5, 10], activation="tanh", dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    scalars = torch.linspace(-1, 7, 2000, dtype=torch.float64)
    expansion = expand(networks, scalars)
    assert expansion is not None
    angles = torch.arccos((scalars - expansion.middle) / expansion.half)
    waves = torch.cos(angles.unsqueeze(1) * torch.arange(expansion.coefficients.shape[1], dtype=torch.float64))
    for k in range(2):
        groups = Groups.in_order([len(scalars) if k == number else 0 for number in range(2)])
        torch.testing.assert_close(
            waves @ expansion.coefficients[k], networks(scalars.unsqueeze(1), groups), rtol=0, atol=1e-13
        )
    assert expand(networks, scalars[:100]) is None
    with torch.no_grad():
        networks.layers[0].w[0, 0, 0] = float("nan")
    assert expand(networks, scalars) is None


def test_every_edge_has_one_place_in_the_list_of_its_centre():
    batch = make_batch(make_frame(15, seed=2, box=4.5), make_frame(6, seed=3))
    graph = edge_graph(batch)
    kinds = batch["species"][graph.source]
    cells = Cells(kinds, graph, 3)
    assert sorted(cells.edge[cells.slot].tolist()) == list(range(graph.n_edges))
    assert sum(cells.sizes) == len(cells.atom)
    assert cells.sizes[2] == 0
    seen = 0
    for chunk in cells.chunks(7):
        for number, cell in enumerate(range(chunk.cells.start, chunk.cells.stop)):
            begin = chunk.slots.start + number * chunk.length
            edges = [e for e in cells.edge[begin : begin + chunk.length].tolist() if e < graph.n_edges]
            assert (graph.destination[edges] == cells.atom[cell]).all()
            assert len(set(kinds[edges].tolist())) == 1
            seen += len(edges)
    assert seen == graph.n_edges


def test_second_derivatives_of_the_energy_are_there(monkeypatch):
    """A Hessian goes through positions twice; it takes the plain way by itself."""
    potential = make("plain").eval()
    batch = make_batch(make_frame(12, seed=4, box=4.5))
    batch["positions"].requires_grad_(True)
    forces = potential(batch)["forces"]
    direction = torch.randn(forces.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (row,) = torch.autograd.grad((forces * direction).sum(), batch["positions"])
    step = 1e-5
    moved = []
    for sign in (1, -1):
        other = {**batch, "positions": batch["positions"].detach() + sign * step * direction}
        moved.append(potential(other)["forces"])
    expected = (moved[0] - moved[1]) / (2 * step)
    torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-7)


def test_blocks_hold_the_rows_of_one_group_each():
    """The layout of traces and accelerators, made here on a CPU by a number of rows that is a symbol there."""
    rng = np.random.default_rng(0)
    kind = torch.tensor(rng.integers(0, 3, 50))
    networks = Networks(
        3, [2, 4, 8], activation="tanh", resnet_dt=True, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    rows = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    known = group_rows(kind, 3, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forgefield.models.deeppot.networks.is_traced", lambda tensor: True)
        blocks = group_rows(kind, 3, 8)
    assert blocks.sizes is None
    assert blocks.block_group is not None
    assert blocks.block_group.shape[0] == 50 // 8 + 3
    spread = blocks.spread(rows)
    torch.testing.assert_close(blocks.collect(spread), rows, rtol=0, atol=0)
    expected = known.collect(networks(known.spread(rows), known))
    torch.testing.assert_close(blocks.collect(networks(spread, blocks)), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [("with room", "double"), ("radial", "tangent")],
)
def test_one_trace_serves_every_size(name, form):
    potential = make(name, neuron=[4, 8])  # a third layer would be traced as the second is
    engine, eager = ScriptEngine(step_function(potential, derivative=form)), Engine(step_function(potential))
    for number, atoms in enumerate([(1,), (4, 3), (5, 1, 2, 6)]):
        assert difference(engine, eager, labelled(*atoms, seed=number)) < 1e-9, atoms


@pytest.mark.slow
def test_short_range_terms_are_traced_and_differentiated_too(tmp_path):
    distances = 0.1 + 0.1 * np.arange(40)
    np.savetxt(
        tmp_path / "table.txt", np.stack([distances, *[k / distances * np.exp(-distances) for k in (1, 2, 3)]], 1)
    )
    short = {"use_srtab": str(tmp_path / "table.txt"), "sw_rmin": 0.8, "sw_rmax": 1.8, "zbl": True}
    potential = make_deeppot(model={**short, "pair_exclude_types": [[0, 0]]}, neuron=[8], **ROOM)
    eager = Engine(step_function(potential))
    tangent = step_function(potential, derivative="tangent")
    assert difference(Engine(tangent), eager, labelled(5, 3, 4)) < 1e-10
    assert difference(ScriptEngine(tangent), eager, labelled(5, 3, 4)) < 1e-9


def test_a_table_rules_where_atoms_are_close_and_forces_are_its_derivative(tmp_path):
    distances = 0.1 + 0.1 * np.arange(40)
    np.savetxt(tmp_path / "table.txt", np.stack([distances, *[k / distances for k in (1, 2, 3)]], 1))
    short = {"use_srtab": str(tmp_path / "table.txt"), "sw_rmin": 0.8, "sw_rmax": 1.8}
    potential = make_deeppot(model={**short, "out_bias": [0.0, 0.0]}).eval()

    def energy(distance: float):
        frame = Frame(
            np.array([[0.0, 0, 0], [0, 0, distance]]),
            np.array([1, 8]),
            np.zeros((3, 3)),
            np.zeros(3, bool),
            *[None] * 3,
        )
        return potential(make_batch(frame))

    assert float(energy(0.5)["energy"]) == pytest.approx(2 / 0.5, rel=1e-3)
    for distance in (0.5, 1.0, 1.3, 2.5):
        slope = (float(energy(distance + 1e-5)["energy"]) - float(energy(distance - 1e-5)["energy"])) / 2e-5
        assert float(energy(distance)["forces"][1, 2]) == pytest.approx(-slope, rel=1e-5)


def test_edge_vectors_and_their_switch_reach_the_sum(monkeypatch):
    """The fast way is taken in training, in evaluation and for energies alone, so that it is what users get."""
    used = []
    monkeypatch.setattr(sums, "can_use_moments", lambda *args: used.append(can(*args)) or used[-1])
    batch = labelled(5, 3)
    for potential in (make("plain").train(), make("plain").eval()):
        potential(batch)
        potential(batch, forces=False)
    assert used == [True] * 4
    assert edge_vectors(batch).shape[1] == 3


can = sums.can_use_moments
