"""The convolution by generated kernels, in its four passes, against the plain sum it stands for and the derivatives of that.

The oracle is that sum in float64, path by path and edge by edge. Without a GPU kernels run in Triton's interpreter, which has
to be asked for before Triton is imported: `TRITON_INTERPRET=1 pytest tests/kernels`.
"""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt

import pytest
import torch
from e3nn import o3
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.kernels.convolution import passes as convolution
from forgefield.kernels.convolution.form import Form, Kind, form_of
from forgefield.kernels.convolution.passes import Convolution, Motion, Radial, Rows, with_shares
from forgefield.kernels.core.fields import TANGENT, VALUE, Field, Shape
from forgefield.kernels.radial.packing import StoredTable, pack_by_operations, unpack
from forgefield.ops.convolution_plan import Block, ConvolutionPlan, list_paths, plan_convolution
from forgefield.ops.execution import execution
from forgefield.ops.graph import EdgeGraph, pair_graph, reverse_edges
from forgefield.ops.harmonics import clebsch_gordan, lowering_terms
from forgefield.training.precision import Precision
from tests.support.kernels import (
    DEVICE,
    assert_only_written,
    assert_same,
    draw,
    filled,
    needs_kernels,
    nowhere_written,
)

pytestmark = needs_kernels

FIXED = {
    "one block": (((3, 0, 1),), 1, {(0, 1), (1, -1)}),
    "two programs for a block": (((131, 0, 1), (128, 1, -1)), 1, {(0, 1), (1, -1)}),
    "blocks that nobody reads": (((5, 0, -1), (3, 1, -1), (2, 2, -1), (4, 1, 1), (1, 0, -1)), 1, {(0, 1)}),
    "both parities": (((2, 0, 1), (3, 0, -1), (4, 1, 1), (1, 1, -1)), 1, {(0, 1), (0, -1), (1, 1), (1, -1)}),
    "scalars to every degree": (((17, 0, 1),), 4, {(0, 1), (1, -1), (2, 1), (3, -1), (4, 1)}),
    "every degree to scalars": (((5, 0, 1), (3, 1, -1), (2, 2, 1), (1, 3, -1), (40, 4, 1)), 4, {(0, 1)}),
    "degree 3": (((3, 0, 1), (2, 1, -1), (2, 2, 1), (1, 3, -1)), 3, {(0, 1), (1, -1), (3, -1)}),
}
CASES = [*FIXED, *(f"random {seed}" for seed in range(4))]
GRAPHS = {
    "some": ([1, 0, 2, 0, 4], [0, 1, 1, 3, 3], 5),  # atoms 2 and 4 have no edges, atom 3 sends none
    "no edges": ([], [], 2),
    "one atom": ([0, 0, 0], [0, 0, 0], 1),
    "no atoms": ([], [], 0),
}


def irreps_of(case: str) -> ConvolutionPlan:
    """A case with a name of its own, or blocks, widths, parities and results drawn by number; l_max goes from 1 to 4."""
    if case in FIXED:
        blocks, l_max, out = FIXED[case]
        return plan_convolution(tuple(Block(*block) for block in blocks), l_max, frozenset(out))
    seed = int(case.removeprefix("random "))
    chance = random.Random(seed)
    l_max = 1 + seed % 4
    drawn = tuple(
        Block(chance.choice([1, 3, 5, 17, 40]), chance.randint(0, l_max), chance.choice([1, -1]))
        for _ in range(chance.randint(2, 3))
    )
    everything = frozenset((degree, parity) for degree in range(l_max + 1) for parity in (1, -1))
    reachable = sorted({(path.l3, path.p3) for path in list_paths(drawn, l_max, everything)})
    return plan_convolution(drawn, l_max, frozenset(chance.sample(reachable, min(2, len(reachable)))))


def graph_of(name: str, paired: bool = False) -> EdgeGraph:
    """paired: pairs of atoms 0-1, 0-2 and of atom 0 with its own image, atom 3 being alone."""
    if not paired:
        source, destination, n_atoms = GRAPHS[name]
        integer = {"dtype": torch.int64, "device": DEVICE}
        return EdgeGraph(torch.tensor(source, **integer), torch.tensor(destination, **integer), n_atoms)
    edges = torch.tensor([[1, 2, 0, 0, 0, 0], [0, 0, 0, 0, 1, 2]])
    shift = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 0, 0], [0, 0, 0]])
    reverse = reverse_edges(edges, shift)
    return pair_graph(edges[0].to(DEVICE), edges[1].to(DEVICE), 4, reverse.to(DEVICE))


@dataclass(frozen=True)
class Problem:
    """A convolution, its inputs and how they move. x, dx: (n_atoms, in_dim). g, dg: cotangents of the outputs and of their
    tangents, (n_atoms, out_dim). dw: tangents of rows of weights; du: of the places in a table."""

    plan: ConvolutionPlan
    graph: EdgeGraph
    radial: Radial
    harmonics: Tensor
    motion: Motion
    x: Tensor
    dx: Tensor
    g: Tensor
    dg: Tensor
    still: bool

    @cached_property
    def targets(self) -> list[tuple[int, ...]]:
        """Paths by the kind of their result."""
        kinds = sorted({(block.l, block.p) for block in self.plan.out_blocks})
        return [tuple(n for n, b in enumerate(self.plan.out_blocks) if (b.l, b.p) == kind) for kind in kinds]

    @cached_property
    def form(self) -> Form:
        """Blocks of the output have one, zero, two, one... columns more than paths need."""
        return form_of(self.plan, tuple(self.targets), tuple((1, 0, 2)[n % 3] for n in range(len(self.targets))))

    @property
    def convolution(self) -> Convolution:
        return Convolution(self.form, self.graph, self.harmonics, self.radial, still=self.still)

    def field(self, shape: Shape) -> Field:
        return nowhere_written(shape, self.graph.n_atoms, self.x.dtype)

    def features(self, *, moving: bool) -> Field:
        """Tangents stay NaN where nobody may read them."""
        x = filled(split(self.x, self.plan.in_blocks), VALUE, self.field(self.form.features))
        return filled(split(self.dx, self.plan.in_blocks), TANGENT, x) if moving and not self.still else x

    def cotangents(self, *, both: bool) -> Field:
        """NaN in the columns that belong to no path."""
        field = self.field(self.form.outputs)
        for path, column in enumerate(split(self.dg, self.plan.out_blocks)):
            self.columns(field, path, TANGENT).copy_(column)
        if both:
            for path, column in enumerate(split(self.g, self.plan.out_blocks)):
                self.columns(field, path, VALUE).copy_(column)
        return field

    def columns(self, field: Field, path: int, place: int) -> Tensor:
        """Of a path, (n_atoms, 2l + 1, mul)."""
        (number,) = (n for n, paths in enumerate(self.targets) if path in paths)
        before = sum(self.plan.out_blocks[p].mul for p in self.targets[number] if p < path)
        return field.block(number, place)[:, :, before : before + self.plan.out_blocks[path].mul]

    def results(self, field: Field, place: int) -> Tensor:
        """(n_atoms, out_dim), path by path; what belongs to no path has not been written."""
        found = [self.columns(field, path, place).flatten(1).clone() for path in range(len(self.plan.paths))]
        for path in range(len(self.plan.paths)):
            self.columns(field, path, place).fill_(torch.nan)
        assert_only_written(field)
        return torch.cat(found, 1)

    def exact(self) -> "Problem":
        """In float64."""

        def double(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.double()

        radial = Radial(self.coefficients().double(), self.radial.row, double(self.radial.position))
        motion = Motion(
            *(double(value) for value in (self.motion.harmonics, self.motion.weights, self.motion.position))
        )
        tensors = {name: getattr(self, name).double() for name in ("harmonics", "x", "dx", "g", "dg")}
        return replace(self, radial=radial, motion=motion, **tensors)

    def coefficients(self) -> Tensor:
        """Of the table, or rows of weights."""
        packed = StoredTable(self.radial.weights, self.radial.unit)
        return self.radial.weights if packed.unit is None else unpack(packed)

    def edge_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of every edge, their slopes by the place in the table and their tangents, (n_edges, n_weights)."""
        rows = self.radial.weights[self.radial.row.long()]
        if self.radial.position is None:
            return rows, torch.zeros_like(rows), self.motion.weights[self.radial.row]
        c0, c1, c2, c3 = rows.unbind(1)
        u, du = self.radial.position.unsqueeze(1), self.motion.position.unsqueeze(1)
        slope = c1 + 2 * u * c2 + 3 * u**2 * c3
        return c0 + u * c1 + u**2 * c2 + u**3 * c3, slope, slope * du


def split(rows: Tensor, blocks: tuple[Block, ...]) -> list[Tensor]:
    parts = rows.split([block.dim for block in blocks], 1)
    return [part.unflatten(1, (2 * block.l + 1, block.mul)) for part, block in zip(parts, blocks)]


def problem(case: str, radial: str, graph: str = "some", still: bool = False, dtype=torch.float64) -> Problem:
    """radial: "rows" for every edge, "pairs" of edges that share them, or a "table" of four intervals, or that "packed"."""
    plan, edges = irreps_of(case), graph_of(graph, paired=radial == "pairs")
    n_edges, n_atoms = edges.n_edges, edges.n_atoms
    harmonics, d_harmonics = draw(1, 2, n_edges, (plan.l_max + 1) ** 2, dtype=dtype)
    harmonics[:, 0], d_harmonics[:, 0] = 1, 0  # the first is one by contract
    if radial in ("table", "packed"):
        at = torch.tensor([2, 0, 2, 1, 2], dtype=torch.int16, device=DEVICE)[:n_edges]  # the last interval has no edge
        place, d_place = draw(2, 2, n_edges, dtype=dtype)
        place = place.clamp(-0.5, 0.5).contiguous()
        place[:1] = 0
        table = StoredTable(draw(3, 4, 4, plan.n_weights, dtype=dtype))
        table = pack_by_operations(table.words) if radial == "packed" else table
        given, motion = Radial(table.words, at, place, table.unit), Motion(d_harmonics, position=d_place)
    else:
        row = torch.arange(n_edges, device=DEVICE) if edges.pair is None else edges.pair
        weights, d_weights = draw(3, 2, n_edges if edges.pair is None else n_edges // 2, plan.n_weights, dtype=dtype)
        given, motion = Radial(weights, row), Motion(d_harmonics, d_weights)
    x, dx = draw(4, 2, n_atoms, plan.in_dim, dtype=dtype)
    g, dg = draw(5, 2, n_atoms, plan.out_dim, dtype=dtype)
    dx = torch.zeros_like(dx) if still else dx
    return Problem(plan, edges, given, harmonics, motion, x, dx, g, dg, still)


def oracle(given: Problem, x: Tensor, harmonics: Tensor, weights: Tensor) -> Tensor:
    """The sum itself, (n_atoms, out_dim). weights: of every edge."""
    plan, graph = given.plan, given.graph
    blocks = split(x[graph.source], plan.in_blocks)
    messages = []
    for path, w in zip(plan.paths, weights.split([block.mul for block in plan.out_blocks], 1)):
        y = harmonics[:, path.l2**2 : (path.l2 + 1) ** 2]
        coefficients = clebsch_gordan(plan.in_blocks[path.source].l, path.l2, path.l3).to(x) * (2 * path.l3 + 1) ** 0.5
        messages.append(torch.einsum("ijk,eiu,ej,eu->eku", coefficients, blocks[path.source], y, w).flatten(1))
    return x.new_zeros(graph.n_atoms, plan.out_dim).index_add(0, graph.destination, torch.cat(messages, 1))


def tracked(*values: Tensor) -> list[Tensor]:
    return [value.detach().clone().requires_grad_() for value in values]


def assert_values(given: Problem, tolerance: float) -> None:
    exact, out = given.exact(), given.field(given.form.outputs)
    given.convolution.values(given.features(moving=False), out)
    assert_same(given.results(out, VALUE), oracle(exact, exact.x, exact.harmonics, exact.edge_weights()[0]), tolerance)


def assert_tangents(given: Problem, tolerance: float) -> None:
    exact, out = given.exact(), given.field(given.form.outputs)
    weights, _, d_weights = exact.edge_weights()
    given.convolution.tangents(given.features(moving=True), out, given.motion)
    primal, moved = (exact.x, exact.harmonics, weights), (exact.dx, exact.motion.harmonics, d_weights)
    _, expected = torch.func.jvp(lambda *inputs: oracle(exact, *inputs), primal, moved)
    assert_same(given.results(out, TANGENT), expected, tolerance)


def assert_forces(given: Problem, tolerance: float, features: bool = True) -> None:
    exact, form = given.exact(), given.form
    weights, slopes, _ = exact.edge_weights()
    columns = 4 if given.radial.in_table else form.n_harmonics
    parts = given.x.new_full((form.n_chunks, given.graph.n_edges, columns), torch.nan)
    to_x = given.field(form.features) if features else None
    of_rows = given.convolution.forces(given.features(moving=False), given.cotangents(both=False), to_x, parts)

    inputs = tracked(exact.x, exact.harmonics, weights)
    of_x, of_harmonics, of_weights = torch.autograd.grad(oracle(exact, *inputs), inputs, exact.dg)
    if to_x is not None:
        assert_only_written(to_x, TANGENT)
        assert_same(torch.cat([block.flatten(1) for block in to_x.blocks(TANGENT)], 1), of_x, tolerance)
    found = parts.sum(0)
    if given.radial.in_table:
        assert of_rows.shape == (0, form.n_weights)
        assert_same(found[:, 3], (of_weights * slopes).sum(1), tolerance)
        assert_same(found[:, :3], slopes_along(exact.harmonics, of_harmonics), tolerance)
    else:
        assert not found[:, 0].any()  # a constant
        assert_same(found[:, 1:], of_harmonics[:, 1:], tolerance)
        assert_same(of_rows, of_weights, tolerance)


def slopes_along(harmonics: Tensor, of_harmonics: Tensor) -> Tensor:
    """(n_edges, 3): cotangents of directions from those of harmonics, any numbers in place of these."""
    total = harmonics.new_zeros((harmonics.shape[0], 3))
    for degree in range(1, isqrt(harmonics.shape[1])):
        for (k, direction), terms in lowering_terms(degree).items():
            slope = sum(
                (value * harmonics[:, (degree - 1) ** 2 + i] for i, value in terms), torch.zeros_like(total[:, 0])
            )
            total[:, direction] += slope * of_harmonics[:, degree**2 + k]
    return total


def back(given: Problem, to_x: Field) -> tuple[Tensor, Tensor]:
    """Cotangents of the weights of every edge and of their tangents, wherever they come from."""
    whole = torch.full((2, given.graph.n_edges, given.form.n_weights), torch.nan, dtype=given.x.dtype, device=DEVICE)

    def take(rows: Rows) -> None:
        columns = slice(None) if rows.block is None else list(rows.block.columns)
        assert whole[:, :, columns].isnan().all()
        whole[0][:, columns], whole[1][:, columns] = rows.of_w.to(whole), rows.of_dw.to(whole)

    given.convolution.back(given.features(moving=True), given.cotangents(both=True), to_x, given.motion, take)
    return whole[0], whole[1]


def assert_back(given: Problem, tolerance: float) -> None:
    exact, to_x = given.exact(), given.field(given.form.features)
    weights, _, d_weights = exact.edge_weights()
    found = back(given, to_x)

    x, w, dw = tracked(exact.x, weights, d_weights)
    primal, moved = (x, exact.harmonics, w), (exact.dx, exact.motion.harmonics, dw)
    made = torch.func.jvp(lambda *inputs: oracle(exact, *inputs), primal, moved)
    expected = torch.autograd.grad(made, (x, w, dw), (exact.g, exact.dg))
    assert_only_written(to_x, VALUE)
    of_x = torch.cat([block.flatten(1) for block in to_x.blocks(VALUE)], 1)
    for one, other in zip((of_x, *found), expected):
        assert_same(one, other, tolerance)


PASSES = {"values": assert_values, "tangents": assert_tangents, "forces": assert_forces, "back": assert_back}


def assert_pass(name: str, given: Problem, tolerance: float) -> None:
    """That a pass writes what plain operations give, and nothing else."""
    PASSES[name](given, tolerance)


@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
@pytest.mark.parametrize("name", PASSES)
def test_every_pass_equals_the_plain_sum(name, number):
    assert_pass(name, problem(CASES[number], ("table", "rows", "pairs")[number % 3]), 1e-12)


@pytest.mark.parametrize("radial", ["rows", "pairs", "table"])
@pytest.mark.parametrize("name", PASSES)
def test_every_pass_knows_all_weights(name, radial):
    assert_pass(name, problem("both parities", radial), 1e-12)


@pytest.mark.parametrize("radial", ["pairs", "table"])
@pytest.mark.parametrize("name", ["tangents", "back"])
def test_features_that_do_not_move(name, radial):
    assert_pass(name, problem("two programs for a block", radial, still=True), 1e-12)


@pytest.mark.parametrize("radial", ["rows", "table"])
def test_forces_of_features_that_nobody_asks_for(radial):
    assert_forces(problem("blocks that nobody reads", radial), 1e-12, features=False)


@pytest.mark.parametrize("graph", [name for name in GRAPHS if name != "some"])
@pytest.mark.parametrize("radial", ["rows", "table"])
@pytest.mark.parametrize("name", PASSES)
def test_few_atoms_and_no_edges(name, radial, graph):
    assert_pass(name, problem("one block", radial, graph), 1e-12)


@pytest.mark.parametrize(("few", "shares"), [(0, 3), (1000, 2), (1000, 3)], ids=["many programs", "two", "three"])
@pytest.mark.parametrize("name", PASSES)
def test_edges_are_shared_out_where_programs_are_few(name, few, shares, monkeypatch):
    """Atoms with no edge, one, two, and three: shares differ in length, and some are empty."""
    monkeypatch.setattr(convolution, "FEW", few)
    monkeypatch.setattr(convolution, "SHARES", shares)
    for case, graph in (("two programs for a block", "some"), ("both parities", "one atom")):
        for radial in ("rows", "table"):
            given = problem(case, radial, graph)
            assert with_shares(Kind(), given.form, given.graph.n_atoms).shares == (shares if few else 1)
            assert_pass(name, given, 1e-12)


@pytest.mark.parametrize("long", [0, 10_000], ids=["block by block", "all blocks"])
@pytest.mark.parametrize("case", ["both parities", "degree 3"])
@pytest.mark.parametrize("name", PASSES)
def test_cotangents_of_many_programs(name, case, long, monkeypatch):
    """Blocks with much code are launched one by one; otherwise edges are shared out to two programs."""
    monkeypatch.setattr(convolution, "FEW", 0)
    monkeypatch.setattr(convolution, "LONG", long)
    given, kinds = problem(case, "table"), {"back": Kind(dual=True, backward=True), "forces": Kind(backward=True)}
    kind = with_shares(kinds.get(name, Kind()), given.form, given.graph.n_atoms)
    assert kind.shares == (2 if name in kinds and long else 1)
    assert given.convolution._one_by_one(kind) == (name in kinds and not long)
    assert_pass(name, given, 1e-12)


@pytest.mark.parametrize("still", [False, True], ids=["moving", "still"])
@pytest.mark.parametrize("case", ["blocks that nobody reads", "both parities", "two programs for a block"])
def test_blocks_write_one_after_the_other_where_they_write_much(case, still, monkeypatch):
    """The same bits as all together, and each block's rows are done with before the next are made."""
    given = problem(case, "table", still=still)
    whole = given.field(given.form.features)
    together = (*back(given, whole), whole.flat)
    monkeypatch.setattr(convolution, "MOST_ROWS", 0)
    assert_back(given, 1e-12)
    apart = given.field(given.form.features)
    for one, other in zip((*back(given, apart), apart.flat), together):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())

    told: list[str] = []

    class Sum:
        def __init__(self, rows: Rows) -> None:
            told.append("rows")

        def result(self) -> None:
            told.append("summed")

    fields = (given.features(moving=True), given.cotangents(both=True), given.field(given.form.features))
    last = given.convolution.back(*fields, given.motion, Sum)
    assert isinstance(last, Sum)
    n_blocks = len(given.form.blocks)
    assert told == ["rows", *["summed", "rows"] * (n_blocks - 1)]


@pytest.mark.parametrize("radial", ["pairs", "table", "packed"])
@pytest.mark.parametrize("name", PASSES)
def test_float32_loses_only_its_own_rounding(name, radial):
    """The terms of a sum over channels may be twenty times larger than the sum."""
    assert_pass(name, problem("random 1", radial, dtype=torch.float32), 20 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", PASSES)
def test_packed_tables_of_several_programs_for_a_block(name):
    """The last of them have channels to spare, for which nothing is read."""
    given = problem("two programs for a block", "packed", dtype=torch.float32)
    assert given.convolution._kind().packed
    assert_pass(name, given, 20 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("radial", ["rows", "table", "packed"])
@pytest.mark.parametrize("name", PASSES)
def test_storage_in_bfloat16_rounds_what_is_stored_and_nothing_else(name, radial):
    """Inputs that bfloat16 holds exactly: sums are those of float32, and only rows of edges are rounded, where there are any,
    which Triton's interpreter does towards zero."""
    given = problem("both parities", radial, dtype=torch.float32)
    weights = given.radial.weights.bfloat16().float() if radial == "table" else given.radial.weights
    exact = {name: getattr(given, name).bfloat16().float() for name in ("x", "dx")}
    given = replace(given, radial=replace(given.radial, weights=weights), **exact)
    with execution(storage="bfloat16"):
        assert_pass(name, given, 2**-7 if name in ("forces", "back") else 20 * torch.finfo(torch.float32).eps)
        if name == "back":
            written: list[Rows] = []
            fields = (given.features(moving=True), given.cotangents(both=True), given.field(given.form.features))
            given.convolution.back(*fields, given.motion, written.append)
            assert {rows.of_w.dtype for rows in written} == {torch.float32 if radial == "rows" else torch.bfloat16}


@pytest.mark.parametrize("radial", ["rows", "packed"])
def test_tf32_rounds_cotangents_of_weights_that_wait_for_their_sums_and_nothing_else(radial):
    given = problem("both parities", radial, dtype=torch.float32)

    def back() -> tuple[torch.Tensor, Rows]:
        written: list[Rows] = []
        to_x = given.field(given.form.features)
        given.convolution.back(
            given.features(moving=True), given.cotangents(both=True), to_x, given.motion, written.append
        )
        (rows,) = written
        return to_x.flat, rows

    to_x, exact = back()
    with Precision("tf32").applied("tf32"):
        also_to_x, rounded = back()
    torch.testing.assert_close(to_x, also_to_x, rtol=0, atol=0, equal_nan=True)  # places that are not written hold NaN
    for found, expected in ((rounded.of_w, exact.of_w), (rounded.of_dw, exact.of_dw)):
        assert found.dtype == (torch.float32 if radial == "rows" else torch.bfloat16)
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)  # the interpreter rounds towards zero


def test_bfloat16_is_refused_for_float64():
    with execution(storage="bfloat16"), pytest.raises(ForgefieldError, match="in float64 computes"):
        assert_values(problem("one block", "table"), 1e-12)


@pytest.mark.parametrize("case", ["both parities", "every degree to scalars", "random 2"])
def test_values_equal_e3nn_tensor_product(case):
    given = problem(case, "rows")
    plan, graph = given.plan, given.graph

    def to_e3nn(rows: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        return torch.cat([part.transpose(1, 2).flatten(1) for part in split(rows, blocks)], 1)

    irreps, out = (o3.Irreps([(b.mul, (b.l, b.p)) for b in blocks]) for blocks in (plan.in_blocks, plan.out_blocks))
    instructions = [(path.source, path.l2, number, "uvu", True) for number, path in enumerate(plan.paths)]
    harmonics = o3.Irreps.spherical_harmonics(plan.l_max)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # the precision in which e3nn keeps its coefficients
    try:
        product = o3.TensorProduct(irreps, harmonics, out, instructions, shared_weights=False, internal_weights=False)
    finally:
        torch.set_default_dtype(before)
    features = to_e3nn(given.x, plan.in_blocks)[graph.source]
    messages = product.to(DEVICE)(features, given.harmonics, given.radial.weights)
    total = messages.new_zeros(graph.n_atoms, out.dim).index_add(0, graph.destination, messages)
    field = given.field(given.form.outputs)
    given.convolution.values(given.features(moving=False), field)
    assert_same(to_e3nn(given.results(field, VALUE), plan.out_blocks), total)


def test_memory_laid_out_otherwise_is_refused():
    given = problem("one block", "rows")
    spread = replace(given, harmonics=given.harmonics.repeat_interleave(2, 1)[:, ::2])
    with pytest.raises(RuntimeError, match="argument y is not contiguous"):
        assert_values(spread, 1e-12)
