"""The convolution as operators: derivatives against the plain convolution and against differences, and what traces hold of it.

By default the operators compute by plain operations here; with `TRITON_INTERPRET=1` (and on a GPU) by kernels.
"""

import shutil
import threading

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from forgefield.errors import ForgefieldError
from forgefield.kernels.convolution import dispatch
from forgefield.kernels.convolution.dispatch import evaluation, use_operators
from forgefield.kernels.convolution.form import key_of_plan, plan_of_key
from forgefield.kernels.convolution.operators import convolve_by_operator
from forgefield.kernels.core.runtime import interpreted
from forgefield.ops.convolution import convolve
from forgefield.ops.convolution_plan import Block, ConvolutionPlan, plan_convolution
from forgefield.ops.execution import execution, requested_operators
from forgefield.ops.graph import EdgeGraph, pair_graph, reverse_edges
from forgefield.training.engines.tracing import export_evaluation, trace
from tests.support.e3nn_oracle import e3nn_convolution, to_e3nn
from tests.support.kernels import DEVICE, assert_same, draw, needs_kernels
from tests.support.structures import make_batch, make_frame, make_potential

by_plain_operations = pytest.mark.skipif(interpreted() or DEVICE == "cuda", reason="of what runs without kernels")
BLOCKS = {
    "one block": (((3, 0, 1),), 1, {(0, 1), (1, -1)}),
    "a block that nobody reads": (((5, 0, -1), (3, 1, -1), (2, 2, -1)), 1, {(0, 1)}),
    "both parities": (((2, 0, 1), (3, 0, -1), (4, 1, 1), (1, 1, -1)), 1, {(0, 1), (0, -1), (1, 1), (1, -1)}),
    "unequal widths": (((3, 0, 1), (1, 1, -1), (2, 2, 1)), 2, {(0, 1), (1, -1), (2, 1)}),
}
CASES = [*((name, "pairs") for name in BLOCKS), ("both parities", "edges"), ("a block that nobody reads", "no edges")]


def plan_of(name: str) -> ConvolutionPlan:
    blocks, l_max, out = BLOCKS[name]
    return plan_convolution(tuple(Block(*block) for block in blocks), l_max, frozenset(out))


def graph_of(name: str) -> EdgeGraph:
    """pairs: an edge and its reverse share their weights, atom 0 meets its own image, atom 3 is alone."""
    integer = {"dtype": torch.int64, "device": DEVICE}
    if name == "pairs":
        edges = torch.tensor([[1, 2, 0, 0, 0, 0], [0, 0, 0, 0, 1, 2]])
        shift = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 0, 0], [0, 0, 0]])
        return pair_graph(*edges.to(DEVICE), 4, reverse_edges(edges, shift).to(DEVICE))
    source, destination = ([1, 0, 2, 0, 4], [0, 1, 1, 3, 3]) if name == "edges" else ([], [])
    return EdgeGraph(torch.tensor(source, **integer), torch.tensor(destination, **integer), 5)


def inputs_of(plan: ConvolutionPlan, graph: EdgeGraph) -> list[Tensor]:
    """Features, harmonics and weights. The first harmonic is not one, as nobody reads it."""
    n_rows = graph.n_edges if graph.pair_edge is None else graph.pair_edge.shape[0]
    rows = [(graph.n_atoms, plan.in_dim), (graph.n_edges, (plan.l_max + 1) ** 2), (n_rows, plan.n_weights)]
    return [draw(number, *shape).requires_grad_(True) for number, shape in enumerate(rows)]


def arguments_of(plan: ConvolutionPlan, graph: EdgeGraph) -> tuple:
    """What operators are given behind rows."""
    lists = (graph.source, graph.destination, graph.by_destination.pointers)
    of = graph.by_source
    return *lists, of.order, of.pointers, graph.pair, graph.pair_edge, key_of_plan(plan)


def derivatives(function, plan: ConvolutionPlan, graph: EdgeGraph) -> list[Tensor]:
    """Values, cotangents, and the cotangents of what these are made of, for numbers drawn at random."""
    inputs = inputs_of(plan, graph)
    out = function(*inputs)
    grad = draw(4, *out.shape).requires_grad_(True)
    first = torch.autograd.grad(out, inputs, grad, create_graph=True)
    along = [draw(5 + number, *found.shape) for number, found in enumerate(first)]
    return [out, *first, *torch.autograd.grad(first, [grad, *inputs], along)]


@pytest.mark.parametrize(("name", "graph_name"), CASES)
def test_values_and_two_derivatives_are_those_of_the_plain_convolution(name, graph_name):
    plan, graph = plan_of(name), graph_of(graph_name)

    def plain(features: Tensor, harmonics: Tensor, weights: Tensor) -> Tensor:
        harmonics = torch.cat([torch.ones_like(harmonics[:, :1]), harmonics[:, 1:]], 1)
        return convolve(features, harmonics @ plan.coupling_matrix().to(DEVICE), weights, graph, plan)

    def operator(*rows: Tensor) -> Tensor:
        return convolve_by_operator(*rows, graph, key_of_plan(plan))

    for found, expected in zip(derivatives(operator, plan, graph), derivatives(plain, plan, graph), strict=True):
        assert_same(found, expected)


def test_values_are_those_of_e3nn():
    plan, graph = plan_of("unequal widths"), graph_of("edges")
    features, harmonics, weights = (rows.detach() for rows in inputs_of(plan, graph))
    harmonics[:, 0] = 1
    ours = convolve_by_operator(features, harmonics, weights, graph, key_of_plan(plan)).cpu()
    there = EdgeGraph(graph.source.cpu(), graph.destination.cpu(), graph.n_atoms)
    expected = e3nn_convolution(features.cpu(), harmonics.cpu(), weights.cpu(), there, plan)
    assert_same(to_e3nn(ours, plan.out_blocks), expected)


@by_plain_operations
@pytest.mark.parametrize("name", ["both parities", "unequal widths"])
def test_derivatives_are_those_of_differences(name):
    plan, graph = plan_of(name), graph_of("pairs")

    def operator(*rows: Tensor) -> Tensor:
        return convolve_by_operator(*rows, graph, key_of_plan(plan))

    assert torch.autograd.gradcheck(operator, inputs_of(plan, graph), fast_mode=True)
    assert torch.autograd.gradgradcheck(operator, inputs_of(plan, graph), fast_mode=True)


@by_plain_operations
def test_operators_are_what_torch_asks_of_operators():
    plan, graph = plan_of("both parities"), graph_of("pairs")
    inputs, more = inputs_of(plan, graph), arguments_of(plan, graph)
    grad = draw(4, graph.n_atoms, plan.out_dim).requires_grad_(True)
    along = [draw(8, *rows.shape) for rows in inputs]
    constant = [rows.detach() for rows in (grad, *inputs)]
    ours = torch.ops.forgefield
    for operator, given in (
        (ours.convolve.default, (*inputs, *more)),
        (ours.convolve_backward.default, (grad, *inputs, *more, True)),
        (ours.convolve_double_backward.default, (*along, *constant, *more, True, True)),
    ):
        assert set(torch.library.opcheck(operator, given).values()) == {"SUCCESS"}


def test_a_third_derivative_is_refused():
    plan, graph = plan_of("one block"), graph_of("edges")
    inputs = inputs_of(plan, graph)
    out = convolve_by_operator(*inputs, graph, key_of_plan(plan))
    for _ in range(2):
        (out,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(ForgefieldError, match="no third derivative"):
        torch.autograd.grad(out.square().sum(), inputs[:1])


def test_a_key_describes_its_plan():
    for name in BLOCKS:
        plan = plan_of(name)
        assert plan_of_key(key_of_plan(plan)).paths == plan.paths
    with pytest.raises(ForgefieldError, match="with the form"):
        plan_of_key('{"features": 3}')


def operators_in(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target).split(".")[1] for node in graph.nodes if "forgefield.convolve" in str(node.target)]


def test_exported_graphs_hold_one_node():
    plan, graph = plan_of("unequal widths"), graph_of("pairs")
    *lists, key = arguments_of(plan, graph)
    inputs = (*(rows.detach() for rows in inputs_of(plan, graph)), *lists)

    class Module(torch.nn.Module):
        def forward(self, *rows: Tensor) -> Tensor:
            return 2 * torch.ops.forgefield.convolve(*rows, key)

    exported = torch.export.export(Module(), inputs)
    assert operators_in(exported.graph) == ["convolve"]
    assert_same(exported.module()(*inputs), Module()(*inputs))


# ---- NequIP


MODEL = {"l_max": 1, "num_layers": 2, "num_features": 3}


def batch() -> dict[str, Tensor]:
    made = make_batch(make_frame(3, seed=1, box=4.5), make_frame(1, seed=4, periodic=False))
    return {key: value.to(DEVICE) for key, value in made.items()}


@pytest.fixture
def everywhere(monkeypatch):
    """Convolutions are operators, with kernels inside or without."""
    monkeypatch.setattr(dispatch, "use_operators", lambda features: True)


def test_nequip_of_operators_is_nequip(monkeypatch):
    potential, given = make_potential(precision="float64", **MODEL).to(DEVICE).eval(), batch()
    plain = potential(given, stress=True)
    monkeypatch.setattr(dispatch, "use_operators", lambda features: True)
    monkeypatch.setattr(dispatch, "convolve", None)
    ours = potential(given, stress=True)
    for name in ("energy", "forces"):
        assert_same(ours[name], plain[name], 1e-11)
    assert_same(ours["stress"][0], plain["stress"][0], 1e-11)


@by_plain_operations
def test_gradients_of_a_loss_of_forces_go_through_operators(monkeypatch):
    potential, given = make_potential(precision="float64", **MODEL).to(DEVICE).train(), batch()
    weights = list(potential.parameters())

    def gradients() -> list[Tensor]:
        out = potential(given)
        found = torch.autograd.grad(out["forces"].square().sum() + out["energy"].sum(), weights, allow_unused=True)
        return [torch.zeros(1) if gradient is None else gradient for gradient in found]

    plain = gradients()
    monkeypatch.setattr(dispatch, "use_operators", lambda features: True)
    for ours, expected in zip(gradients(), plain, strict=True):
        assert_same(ours, expected, 1e-10)


def test_traces_of_an_evaluation_hold_two_nodes_a_layer(everywhere):
    """For any sizes: a trace made of one batch is right for another."""
    potential = make_potential(precision="float64", **MODEL).to(DEVICE).eval().requires_grad_(False)
    given = batch()

    def evaluate(static: list[Tensor], of: dict[str, Tensor]) -> list[Tensor]:
        out = potential(of)
        return [out["energy"], out["forces"]]

    traced = trace(evaluate, [], given)
    assert operators_in(traced.graph.graph) == ["convolve"] * 2 + ["convolve_backward"] * 2
    other = make_batch(make_frame(4, seed=3, box=4.5), make_frame(2, seed=5), make_frame(3, seed=6))
    for found, expected in zip(traced.graph(*(other[key].to(DEVICE) for key in traced.keys)), evaluate([], other)):
        assert_same(found, expected.to(DEVICE), 1e-11)


READ = ("positions", "species", "frame", "n_atoms", "cell", "edge_index", "edge_shift", "edge_reverse")


@pytest.fixture
def exportable(everywhere):
    """An evaluation, and batches of several frames and of one."""
    potential = make_potential(precision="float64", l_max=1, num_layers=1, num_features=2).to(DEVICE)
    potential.eval().requires_grad_(False)
    several = [make_frame(4, seed=3, box=4.5), make_frame(2, seed=5), make_frame(3, seed=6)]
    made = batch(), make_batch(*several), make_batch(make_frame(5, seed=7, box=4.5))

    def evaluate(of: dict[str, Tensor]) -> dict[str, Tensor]:
        out = potential(of)
        return {name: out[name] for name in ("energy", "forces")}

    return evaluate, [{key: one[key].to(DEVICE) for key in READ} for one in made]


def assert_gives_the_same(program, evaluate, batches: list[dict[str, Tensor]]) -> None:
    """Whatever the order of keys."""
    for given in batches:
        found = program(**dict(reversed(given.items())))
        for name, expected in evaluate(given).items():
            assert_same(found[name], expected, 1e-11)


@pytest.mark.parametrize("example", [0, 2])
def test_an_exported_evaluation_holds_for_other_sizes(example, exportable):
    evaluate, batches = exportable
    exported = export_evaluation(evaluate, batches[example])
    assert operators_in(exported.graph) == ["convolve", "convolve_backward"]
    assert_gives_the_same(exported.module(), evaluate, batches)


QUICKLY = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
"""Headers are precompiled for many files, and there are two."""


@pytest.mark.slow
@by_plain_operations
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_package_of_an_exported_evaluation_gives_the_same(exportable, tmp_path):
    evaluate, batches = exportable
    exported = export_evaluation(evaluate, batches[0])
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "evaluation.pt2"), inductor_configs=QUICKLY
    )
    assert_gives_the_same(torch._inductor.aoti_load_package(path), evaluate, batches)


def test_plain_tracing_holds_operators_too():
    plan, graph = plan_of("one block"), graph_of("edges")
    inputs = [rows.detach() for rows in inputs_of(plan, graph)]

    def slope(*rows: Tensor) -> Tensor:
        rows = [tensor.requires_grad_(True) for tensor in rows]
        return torch.autograd.grad(convolve_by_operator(*rows, graph, key_of_plan(plan)).sum(), rows[0])[0]

    assert operators_in(make_fx(slope)(*inputs).graph) == ["convolve", "convolve_backward"]


def test_evaluations_of_several_threads_do_not_meet():
    inside, others = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with evaluation():
            inside.set()
            assert others.wait(10)
            seen.append(requested_operators())

    thread = threading.Thread(target=other)
    with evaluation():
        thread.start()
        assert inside.wait(10)
    others.set()
    thread.join()
    assert (seen, requested_operators()) == ([True], None)


@needs_kernels
def test_evaluations_take_operators_where_kernels_run_and_the_setting_allows():
    x = torch.zeros(1, device=DEVICE)
    assert not use_operators(x)
    with evaluation():
        assert use_operators(x)
        assert not use_operators(x.half())
        with torch.autograd.forward_ad.dual_level():
            assert not use_operators(x)
    with execution(operators=False), evaluation():
        assert not use_operators(x)
    with execution(operators=True):
        assert use_operators(x)
