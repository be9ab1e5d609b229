"""Moving rows between atoms and edges: gather to edges, sum over the edges of an atom, the index lists both need, and pooling.

Gather and segment sum are each other's adjoint, so both are differentiable any number of times. Sums are computed in a fixed
order on every device: in place on a CPU, over row pointers on a GPU, where atomic additions would change the order. The
reference is PyTorch's embedding bag; `forgefield.kernels` registers faster implementations when it is imported
(`register_segment_kernels`), and this package never imports kernels. In traces the sum is a single operator, for any sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

PointerKernel = Callable[[Tensor, int], Tensor | None]
"""(sorted segment index of each row, number of segments) -> row pointers; None where the kernel is not to be used."""
SumKernel = Callable[[Tensor, Tensor | None, Tensor], Tensor | None]
"""(rows (n_rows, columns), order, pointers) -> sums (count, columns); None where the kernel cannot run."""


class _Registered:
    pointers: PointerKernel | None = None
    sums: SumKernel | None = None


_registered = _Registered()


def register_segment_kernels(*, pointers: PointerKernel, sums: SumKernel) -> None:
    """Use these kernels wherever they do not return None."""
    _registered.pointers, _registered.sums = pointers, sums


def row_pointers(index: Tensor, count: int, *, rows_are_sorted: bool) -> Tensor:
    """(count + 1,) int64: where each segment begins among rows sorted by segment. index: (n_rows,), the segment of each row."""
    if rows_are_sorted and _registered.pointers is not None:
        pointers = _registered.pointers(index, count)
        if pointers is not None:
            return pointers
    members = index.new_zeros(count + 1).index_add_(0, index + 1, torch.ones_like(index))
    return torch.cumsum(members, 0)


def sum_by_pointers(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    """Row k of the result is the sum of values[order[i]], i from pointers[k] to pointers[k + 1]; (count, ...).

    values: (n_rows, ...).
    order: (n_rows,); None where rows are sorted already.
    pointers: (count + 1,).
    """
    if any(isinstance(size, torch.SymInt) for size in values.shape):
        return torch.ops.forgefield.sum_by_pointers(values, order, pointers)
    return _sum(values, order, pointers)


def _sum(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    count = pointers.shape[0] - 1
    if values.shape[0] == 0 or count == 0 or values.numel() == 0:
        return values.new_zeros((count, *values.shape[1:]))
    flat = values.reshape(values.shape[0], -1).contiguous()
    summed = None if _registered.sums is None else _registered.sums(flat, order, pointers)
    if summed is None:
        rows = torch.arange(flat.shape[0], device=flat.device) if order is None else order
        summed = torch.nn.functional.embedding_bag(rows, flat, pointers, mode="sum", include_last_offset=True)
    return summed.view(count, *values.shape[1:])


@torch.library.custom_op("forgefield::sum_by_pointers", mutates_args=())
def _operation(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    return _sum(values, order, pointers)


@_operation.register_fake
def _(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    return values.new_empty((pointers.shape[0] - 1, *values.shape[1:]))


class GradientSwitch:
    """Whether gradients still have to flow to the edge vectors; the code that owns the edge vectors turns it off.

    After the forces have been computed, a training step differentiates its loss only with respect to parameters. Operations
    that hold a switch then skip gradients that are not used.
    """

    __slots__ = ("off",)

    def __init__(self) -> None:
        self.off = False


@dataclass(frozen=True)
class Segments:
    """A partition of rows: `index` (n_rows,) int64 is the segment of each row, out of `count`.

    `rows_are_sorted`: `index` does not decrease. `precomputed`: `order` and `pointers` where they have been computed already,
    or None and the latter.
    """

    index: Tensor
    count: int
    rows_are_sorted: bool = False
    precomputed: tuple[Tensor | None, Tensor] | None = None

    @cached_property
    def order(self) -> Tensor:
        """(n_rows,) rows sorted by segment."""
        if self.precomputed is not None and self.precomputed[0] is not None:
            return self.precomputed[0]
        if self.rows_are_sorted:
            return torch.arange(self.index.shape[0], device=self.index.device)
        return torch.argsort(self.index, stable=True)

    @cached_property
    def pointers(self) -> Tensor:
        """(count + 1,) where each segment starts in `order`."""
        if self.precomputed is not None:
            return self.precomputed[1]
        return row_pointers(self.index, self.count, rows_are_sorted=self.rows_are_sorted)


@dataclass(frozen=True)
class EdgeGraph:
    """Edges `source` -> `destination`, both (n_edges,) int64, of `n_atoms` atoms; sorted by destination.

    `reverse` (n_edges,) is the number of every edge's reverse, where the list is known to hold both directions of every edge.
    `in_pairs`: what depends on the length alone is then computed once for each undirected pair; these are numbered when they
    are first used. `pointers` (n_atoms + 1,): first edge of each destination, where it is known; edges from the last of them on
    are ignored in sums.
    """

    source: Tensor
    destination: Tensor
    n_atoms: int
    reverse: Tensor | None = None
    in_pairs: bool = False
    pointers: Tensor | None = None

    @property
    def pair(self) -> Tensor | None:
        """(n_edges,) the pair of every edge."""
        return self._pairs[0] if self.in_pairs else None

    @property
    def pair_edge(self) -> Tensor | None:
        """(n_edges / 2,) the first edge of every pair."""
        return self._pairs[1] if self.in_pairs else None

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        assert self.reverse is not None
        number = torch.ops.forgefield.number_pairs if is_traced(self.reverse) else _number_pairs
        return number(self.reverse)

    @cached_property
    def by_source(self) -> Segments:
        if self.reverse is None:
            return Segments(self.source, self.n_atoms)
        # Edges are sorted by destination, so their reverses are sorted by source.
        return Segments(self.source, self.n_atoms, precomputed=(self.reverse, self.by_destination.pointers))

    @cached_property
    def by_destination(self) -> Segments:
        known = None if self.pointers is None else (None, self.pointers)
        return Segments(self.destination, self.n_atoms, rows_are_sorted=True, precomputed=known)

    @property
    def n_edges(self) -> int:
        return self.source.shape[0]


def _number_pairs(reverse: Tensor) -> tuple[Tensor, Tensor]:
    """Pair of every edge, and the first edge of every pair."""
    numbers = torch.arange(reverse.shape[0], device=reverse.device)
    is_first = numbers < reverse
    pair_edge = torch.argsort(is_first.to(torch.int8), descending=True, stable=True)[: reverse.shape[0] // 2]
    rank = torch.cumsum(is_first, 0) - 1
    return rank.index_select(0, torch.minimum(numbers, reverse)), pair_edge.contiguous()


@torch.library.custom_op("forgefield::number_pairs", mutates_args=())
def _number_pairs_once(reverse: Tensor) -> tuple[Tensor, Tensor]:
    """The same as one operation: a compiler would otherwise recompute it for every element that it indexes."""
    pair, pair_edge = _number_pairs(reverse)
    return pair, pair_edge.clone()


@_number_pairs_once.register_fake
def _(reverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(reverse), reverse.new_empty(reverse.shape[0] // 2)


def pair_graph(source: Tensor, destination: Tensor, n_atoms: int, reverse: Tensor) -> EdgeGraph:
    """The graph with its undirected pairs, from the number of every edge's reverse. Never waits for the device."""
    return EdgeGraph(source, destination, n_atoms, reverse=reverse, in_pairs=True)


def reverse_edges(edge_index: Tensor, edge_shift: Tensor) -> Tensor:
    """(n_edges,) number of each edge's reverse: source and destination exchanged, image shift negated.

    `edge_index`: (2, n_edges); `edge_shift`: (n_edges, 3) integers. Raises ValueError if some edge has no reverse.
    """
    reverse = _find_reverse(edge_index, edge_shift)
    if reverse is None:
        raise ValueError("the edge list does not hold both directions of every edge")
    return reverse


def _find_reverse(edge_index: Tensor, edge_shift: Tensor) -> Tensor | None:
    """As `reverse_edges`, or None. Both sorted, the list and its mirror image are the same edges in the same order."""
    (source, destination), shift = edge_index.cpu().numpy(), edge_shift.cpu().numpy()
    x, y, z = np.rint(shift).astype(np.int64).T
    order = np.lexsort((z, y, x, source, destination))
    mirrored = np.lexsort((-z, -y, -x, destination, source))
    same = (source[order] == destination[mirrored]) & (destination[order] == source[mirrored])
    same &= (x[order] == -x[mirrored]) & (y[order] == -y[mirrored]) & (z[order] == -z[mirrored])
    if not same.all():
        return None
    reverse = np.empty_like(order)
    reverse[mirrored] = order
    return torch.from_numpy(reverse).to(edge_index.device)


PAIRS_FROM_EDGES = 20_000
"""On an accelerator, computing radial weights once per pair pays from about this many edges on; on a CPU always."""


def edge_graph(batch: Mapping[str, Tensor]) -> EdgeGraph:
    """Index lists of a batch, with its pairs where that pays and the edge list holds both directions of every edge.

    Batches of the data layer contain `edge_reverse`; without it, it is computed here on a CPU. On a GPU and in a trace it is
    then not used.
    """
    source, destination = batch["edge_index"]
    reverse, n_atoms = batch.get("edge_reverse"), batch["species"].shape[0]
    if reverse is not None and reverse.shape != source.shape:
        raise ValueError("edge_reverse does not belong to these edges; drop it where edges are dropped")
    if source.is_cuda and not is_traced(source) and source.shape[0] < PAIRS_FROM_EDGES:
        return EdgeGraph(source, destination, n_atoms, reverse=reverse)
    if reverse is None and not source.is_cuda and not is_traced(source):
        reverse = _find_reverse(batch["edge_index"], batch["edge_shift"])
    if reverse is None:
        return EdgeGraph(source, destination, n_atoms)
    return pair_graph(source, destination, n_atoms, reverse)


def is_traced(tensor: Tensor) -> bool:
    """Whether the number of rows is symbolic: an engine is tracing for any size."""
    return isinstance(tensor.shape[0], torch.SymInt)


def sum_rows(values: Tensor, segments: Segments) -> Tensor:
    """Sum of the rows of each segment, without a gradient. `values`: (n_rows, ...) -> (count, ...)."""
    if not values.is_cuda:
        return values.new_zeros((segments.count, *values.shape[1:])).index_add_(0, segments.index, values)
    return sum_by_pointers(values, None if segments.rows_are_sorted else segments.order, segments.pointers)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return rows.index_select(0, segments.index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _SegmentSum.apply(grad, ctx.segments), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, segments: None) -> Tensor:
        return _Gather.apply(tangent, ctx.segments)


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return sum_rows(values, segments)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Gather.apply(grad.contiguous(), ctx.segments), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, segments: None) -> Tensor:
        return _SegmentSum.apply(tangent.contiguous(), ctx.segments)


def gather(rows: Tensor, segments: Segments) -> Tensor:
    """Row of its segment for every member: (count, ...) -> (n_rows, ...)."""
    return _Gather.apply(rows, segments)


def segment_sum(values: Tensor, segments: Segments) -> Tensor:
    """Sum of the rows of each segment: (n_rows, ...) -> (count, ...)."""
    return _SegmentSum.apply(values, segments)


class _Barrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, switch: GradientSwitch) -> Tensor:
        ctx.switch = switch
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None if ctx.switch.off else grad, None


def barrier(value: Tensor, switch: GradientSwitch | None) -> Tensor:
    """`value` itself; its gradient stops here once the switch is off."""
    return value if switch is None else _Barrier.apply(value, switch)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, *_Cut.apply(grad, ctx.sizes, ctx.dim)

    @staticmethod
    def jvp(ctx, dim: None, *tangents: Tensor) -> Tensor:
        return _Join.apply(ctx.dim, *tangents)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
        ctx.dim, ctx.sizes = dim, sizes
        return torch.split(tensor, sizes, dim)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _Join.apply(ctx.dim, *grads), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, sizes: None, dim: None) -> tuple[Tensor, ...]:
        return _Cut.apply(tangent, ctx.sizes, ctx.dim)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, whose second derivative is again one operation and not one per part."""
    return parts[0] if len(parts) == 1 else _Join.apply(dim, *parts)


def cut(tensor: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """`torch.split`, likewise; inverse of `join`. The parts must not be changed in place."""
    return (tensor,) if len(sizes) == 1 else _Cut.apply(tensor, list(sizes), dim)


def segment_max(rows: Tensor, segments: Segments) -> Tensor:
    """(n_rows, width) -> (count, width): the largest of each column."""
    largest = _largest(rows, segments)
    is_largest = (rows == largest.index_select(0, segments.index)).to(rows.dtype).detach()
    shares = is_largest / segment_sum(is_largest, segments).index_select(0, segments.index)
    return segment_sum(rows * shares, segments)


def segment_softmax(scores: Tensor, segments: Segments) -> Tensor:
    """(n_rows,) -> (n_rows,): positive weights that add up to one in every segment."""
    column = scores.unsqueeze(1)
    above = torch.exp(column - _largest(column, segments).index_select(0, segments.index))
    return (above / gather(segment_sum(above, segments), segments)).squeeze(1)


def _largest(rows: Tensor, segments: Segments) -> Tensor:
    """Without a gradient; zero where there is no row. A maximum is the same in whatever order it is taken."""
    rows = rows.detach()
    places = segments.index.unsqueeze(1).expand_as(rows)
    start = rows.new_full((segments.count, rows.shape[1]), -torch.inf)
    largest = torch.scatter_reduce(start, 0, places, rows, "amax")
    return torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
