"""Kernels beside the convolution, each against the plain operations it stands for: gates, geometry of edges, edge vectors and
forces, sums over intervals of a table and over the edges of an atom.

Without a GPU they run in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.convolution.sums import sum_into_field
from forgefield.kernels.core.fields import TANGENT, VALUE, Field, Shape
from forgefield.kernels.dense.gate import GateByKernels, Nonlinearity
from forgefield.kernels.edges.geometry import EDGES, EdgeGeometry, moved_geometry
from forgefield.kernels.edges.segments import forces_by_kernel, vectors_by_kernel
from forgefield.kernels.radial import table as table_module
from forgefield.kernels.radial.table import CHUNK, Intervals, TableGradient, polynomials
from forgefield.models.edges import edge_vectors
from forgefield.ops.convolution_plan import Block
from forgefield.ops.graph import EdgeGraph, Segments, segment_sum
from forgefield.ops.harmonics import SphericalHarmonics
from forgefield.ops.linear import Gate, NormActivation
from tests.support.kernels import (
    DEVICE,
    assert_only_written,
    assert_same,
    draw,
    filled,
    needs_kernels,
    nowhere_written,
)
from tests.support.structures import make_batch, make_frame

pytestmark = needs_kernels

# ---- gates

SCALARS, ODD = Block(5, 0, 1), Block(3, 0, -1)
GATES = {
    "silu and tanh": Gate([SCALARS, ODD], [Block(2, 2, 1), Block(4, 1, -1), Block(3, 1, 1)]),
    "tanh everywhere, odd scalars first": Gate([ODD, SCALARS], [Block(4, 1, -1)], even="tanh", gate="tanh"),
    "silu beside gates of tanh": Gate([SCALARS], [Block(1, 1, -1)], gate="tanh"),
    "gates alone": Gate([ODD], [Block(3, 1, 1)]),
    "scalars alone": Gate([SCALARS], []),
    "two programs for a block": Gate([Block(131, 0, 1)], [Block(130, 1, -1)]),
}
HARD = [0.0, 1e-9, 0.0999, -0.1001, 3.0, -8.0, 40.0]
"""Arguments of activations where their formulas change or come to an end."""


def shape_of(blocks: tuple[Block, ...]) -> Shape:
    return Shape(tuple((2 * block.l + 1, block.mul) for block in blocks))


def drawn_field(shape: Shape, n_atoms: int, seed: int, *places: int) -> Field:
    """Random numbers in these places, NaN in the others."""
    field = nowhere_written(shape, n_atoms)
    for place in places:
        blocks = [draw(seed + 10 * number + place, n_atoms, *block) for number, block in enumerate(shape.blocks)]
        filled(blocks, place, field)
    return field


def single(field: Field) -> Field:
    return filled(
        field.blocks(TANGENT),
        TANGENT,
        filled(field.blocks(VALUE), VALUE, nowhere_written(field.shape, field.n_atoms, torch.float32)),
    )


def pass_of_gate(name: str, nonlinearity: Nonlinearity, a: Field, to_h: Field) -> tuple[Field, int]:
    """What the pass writes, and to which place of it."""
    gate = nonlinearity.function
    shape = shape_of(gate.in_blocks if name in ("forces", "back") else gate.out_blocks)
    result = nowhere_written(shape, a.n_atoms, a.flat.dtype)
    given = (a, to_h, result) if name in ("forces", "back") else (a, result)
    getattr(nonlinearity, name)(*given)
    return result, VALUE if name in ("values", "back") else TANGENT


@pytest.mark.parametrize("case", GATES)
@pytest.mark.parametrize("name", ["values", "tangents", "forces", "back"])
def test_gates_in_every_pass(name, case):
    gate = GATES[case]
    before, after = shape_of(gate.in_blocks), shape_of(gate.out_blocks)
    moving = name in ("tangents", "back")
    a = drawn_field(before, 3, 1, *((VALUE, TANGENT) if moving else (VALUE,)))
    for block in a.blocks(VALUE):
        hard = torch.tensor(HARD, dtype=torch.float64, device=DEVICE)[: block.shape[2]]
        block[1, :, : hard.shape[0]] = hard
        block[2, :, : hard.shape[0]] = hard.flip(0)
    to_h = drawn_field(after, 3, 2, *((VALUE, TANGENT) if name == "back" else (TANGENT,)))
    expected, place = pass_of_gate(name, Nonlinearity(gate), a, to_h)
    for precision, tolerance in ((lambda field: field, 1e-12), (single, 1e-6)):
        found, _ = pass_of_gate(name, GateByKernels(gate), precision(a), precision(to_h))
        assert_only_written(found, place)
        for ours, plain in zip(found.blocks(place), expected.blocks(place)):
            assert_same(ours, plain, tolerance)


def test_gates_of_no_atoms_and_activations_that_kernels_do_not_know():
    gate = GATES["silu and tanh"]
    nothing = nowhere_written(shape_of(gate.in_blocks), 0)
    GateByKernels(gate).values(nothing, nowhere_written(shape_of(gate.out_blocks), 0))
    assert GateByKernels.supports(gate)
    assert not GateByKernels.supports(Gate([SCALARS], [], even="ssp"))
    assert not GateByKernels.supports(NormActivation([SCALARS], []))


# ---- harmonics and places of edges

N_EDGES = EDGES + 3
"""Two programs."""


def plain_geometry(vectors: Tensor, inverse: Tensor, l_max: int, n_intervals: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = vectors.square().sum(1).sqrt()
    harmonics = SphericalHarmonics(l_max).to(DEVICE)(vectors / lengths.unsqueeze(1))
    scaled = (lengths * inverse * n_intervals).clamp(max=n_intervals)
    at = scaled.detach().floor().clamp(max=n_intervals - 1)
    return harmonics, scaled - at - 0.5, at


def edges_at_random(each: bool) -> tuple[Tensor, Tensor]:
    """Vectors, some along an axis, about a third beyond the cutoff; one over the cutoff. each: of every edge its own."""
    vectors = draw(3, N_EDGES, 3)
    vectors[:3] = torch.eye(3, device=DEVICE) * 0.7
    cutoff = draw(4, N_EDGES).abs() + 1.2 if each else torch.tensor([1.9], device=DEVICE, dtype=torch.float64)
    assert 20 < (vectors.norm(dim=1) > cutoff).sum() < 80
    return vectors, 1 / cutoff


@pytest.mark.parametrize("l_max", range(5))
@pytest.mark.parametrize("each", [False, True], ids=["one cutoff", "cutoffs of edges"])
def test_geometry_of_edges_its_gradient_and_its_tangents(each, l_max):
    vectors, inverse = edges_at_random(each)
    n_intervals = 1024 if each else 7
    ours, plain = (vectors.clone().requires_grad_() for _ in range(2))
    harmonics, direction, place, at = EdgeGeometry.apply(ours, inverse, l_max, n_intervals, torch.float64)
    expected = plain_geometry(plain, inverse, l_max, n_intervals)
    assert_same(harmonics, expected[0])
    assert_same(direction, vectors / vectors.norm(dim=1, keepdim=True))
    assert_same(place, expected[1])
    assert at.dtype == torch.int16
    assert torch.equal(at.double(), expected[2])

    cotangents = draw(5, N_EDGES, 3), draw(6, N_EDGES)
    (found,) = torch.autograd.grad((direction, place), ours, cotangents)
    made = (plain / plain.norm(dim=1, keepdim=True), expected[1])
    assert_same(found, torch.autograd.grad(made, plain, cotangents)[0])

    tangents = draw(7, N_EDGES, 3)
    with forward_ad.dual_level():
        moved = plain_geometry(forward_ad.make_dual(vectors, tangents), inverse, l_max, n_intervals)[:2]
        wanted = [forward_ad.unpack_dual(value).tangent for value in moved]
    d_harmonics, d_place = moved_geometry(vectors, tangents, inverse, l_max, n_intervals, torch.float64)
    assert_same(d_harmonics, torch.zeros_like(d_harmonics) if wanted[0] is None else wanted[0])
    assert_same(d_place, wanted[1])


def test_geometry_is_rounded_only_when_it_is_written():
    vectors, inverse = edges_at_random(each=True)
    precise, rounded = (EdgeGeometry.apply(vectors, inverse, 3, 1024, d) for d in (torch.float64, torch.float32))
    moved = [moved_geometry(vectors, vectors.flip(0), inverse, 3, 1024, d) for d in (torch.float64, torch.float32)]
    for one, other in zip((*rounded, *moved[1]), (*precise, *moved[0])):
        assert torch.equal(one, other.to(one.dtype))
    assert {value.dtype for value in (*rounded[:3], *moved[1])} == {torch.float32}


@pytest.mark.parametrize("asked", [1, 2], ids=["directions", "places"])
def test_gradient_of_one_part_of_the_geometry(asked):
    vectors, inverse = edges_at_random(each=False)
    ours, plain = (vectors.clone().requires_grad_() for _ in range(2))
    part = EdgeGeometry.apply(ours, inverse, 2, 7, torch.float64)[asked]
    expected = plain_geometry(plain, inverse, 2, 7)[1] if asked == 2 else plain / plain.norm(dim=1, keepdim=True)
    g = draw(8, *part.shape)
    assert_same(torch.autograd.grad(part, ours, g)[0], torch.autograd.grad(expected, plain, g)[0])


def test_geometry_of_vectors_that_do_not_lie_in_one_piece():
    vectors, inverse = edges_at_random(each=True)
    spread = vectors.t().contiguous().t(), inverse.repeat_interleave(2)[::2]
    ours, other = (value.detach().requires_grad_() for value in (vectors, spread[0]))
    expected = EdgeGeometry.apply(ours, inverse, 2, 7, torch.float64)
    found = EdgeGeometry.apply(other, spread[1], 2, 7, torch.float64)
    assert all(torch.equal(one, another) for one, another in zip(found, expected))
    g = draw(10, N_EDGES, 3), draw(11, N_EDGES)
    assert torch.equal(torch.autograd.grad(found[1:3], other, g)[0], torch.autograd.grad(expected[1:3], ours, g)[0])


def test_geometry_of_no_edges():
    none = torch.zeros((0, 3), dtype=torch.float64, device=DEVICE)
    harmonics, direction, place, at = EdgeGeometry.apply(none, none.new_ones(1), 2, 7, torch.float32)
    assert (harmonics.shape, direction.shape, place.shape, at.shape) == ((0, 9), (0, 3), (0,), (0,))


# ---- edge vectors and forces


@pytest.mark.parametrize("integer", [False, True], ids=["shifts as they come", "integer shifts"])
def test_edge_vectors(integer):
    batch = make_batch(make_frame(5, seed=1), make_frame(3, seed=2, periodic=False), make_frame(2, seed=3), cutoff=4.5)
    batch = {key: value.to(DEVICE) for key, value in batch.items()}
    assert batch["edge_index"].shape[1] > EDGES
    assert batch["edge_shift"].any()
    given = [batch[key] for key in ("positions", "cell", "frame", "edge_index", "edge_shift")]
    given[0] = given[0].repeat_interleave(2, 1)[:, ::2]  # not in one piece
    if integer:
        given[4] = given[4].to(torch.int64)
    assert_same(vectors_by_kernel(*given), edge_vectors(batch))


@pytest.mark.parametrize("n_edges", [0, 3, 150])
def test_forces_of_edges(n_edges):
    """Of 150 edges more than one block belong to an atom, on both sides; atom 3 has none at all."""
    chance = torch.Generator().manual_seed(n_edges)
    source, destination = torch.randint(0, 3, (2, n_edges), generator=chance)
    graph = EdgeGraph(source.to(DEVICE), destination.sort().values.to(DEVICE), 4)
    slope = draw(9, n_edges, 3)
    expected = segment_sum(slope, graph.by_destination) - segment_sum(slope, graph.by_source)
    assert_same(forces_by_kernel(slope, graph), expected)


# ---- tables


def test_polynomials_meet_values_and_slopes_at_both_ends():
    curves = draw(11, 5, 2, 3)
    c0, c1, c2, c3 = polynomials(curves).unbind(1)
    for t, expected in ((-0.5, curves[:-1]), (0.5, curves[1:])):
        found = [c0 + t * c1 + t**2 * c2 + t**3 * c3, c1 + 2 * t * c2 + 3 * t**2 * c3]
        assert_same(torch.stack(found, 1), expected)


@pytest.mark.parametrize("columns", [5, 131])
@pytest.mark.parametrize("n_edges", [0, 2 * CHUNK + 40])
def test_gradient_of_a_table_is_summed_over_intervals(n_edges, columns, monkeypatch):
    n_intervals = 6
    chance = torch.Generator().manual_seed(columns)
    at = torch.randint(0, n_intervals - 1, (n_edges,), generator=chance).to(DEVICE)  # the last has no edge
    at[: 2 * CHUNK + 3] = 1  # more than one chunk
    edges = Intervals(at.to(torch.int16), n_intervals)
    to_w, to_dw = draw(12, 2, n_edges, columns)
    place, d_place = draw(13, 2, n_edges)

    table = draw(14, n_intervals, 4, columns).requires_grad_()
    u, du = place.unsqueeze(1), d_place.unsqueeze(1)
    c0, c1, c2, c3 = table[at].unbind(1)
    made = (c0 + u * (c1 + u * (c2 + u * c3)), du * (c1 + u * (2 * c2 + 3 * u * c3)))
    (expected,) = torch.autograd.grad(made, table, (to_w, to_dw))
    for by_kernel in (True, False):
        monkeypatch.setattr(table_module, "sums_by_kernel", lambda place, answer=by_kernel: answer)
        whole, in_parts = (TableGradient(edges, place, d_place, columns) for _ in range(2))
        whole.add(to_w, to_dw)
        found = whole.result()
        assert_same(found, expected)
        for some in (range(1, columns, 2), range(0, columns, 2)):
            in_parts.add(to_w[:, some].contiguous(), to_dw[:, some].contiguous(), some)
        assert torch.equal(in_parts.result(), found)


# ---- sums over the edges of an atom


@pytest.mark.parametrize("place", [VALUE, TANGENT])
@pytest.mark.parametrize("blocks", [((1, 3),), ((1, 3), (3, 90), (5, 7))], ids=["narrow", "two programs"])
def test_rows_are_summed_into_one_place_of_a_field(blocks, place):
    shape = Shape(blocks)
    index = torch.tensor([3, 0, 3, 1, 0, 3], device=DEVICE)  # atom 2 has no row
    rows, field = draw(15, 6, shape.dim), nowhere_written(shape, 4)
    sum_into_field(rows, Segments(index, 4), field, place)
    assert_only_written(field, place)
    in_turn = nowhere_written(shape, 4)
    for start, part in zip(shape.starts, rows.split([k * c for k, c in blocks], 1)):
        sum_into_field(part.contiguous(), Segments(index, 4), in_turn, place, start)
    assert torch.equal(in_turn.flat.nan_to_num(), field.flat.nan_to_num())
    found = torch.cat([block.flatten(1) for block in field.blocks(place)], 1)
    assert_same(found, rows.new_zeros(4, shape.dim).index_add(0, index, rows))


@pytest.mark.parametrize("n_atoms", [0, 2])
def test_no_rows_sum_to_nothing(n_atoms):
    field = nowhere_written(Shape(((1, 3), (3, 2))), n_atoms)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    sum_into_field(draw(16, 0, 9), Segments(none, n_atoms), field, VALUE)
    assert_only_written(field, VALUE)
    assert not field.flat.nan_to_num().any()
