"""The neighbour sum by moments: networks are expanded in Chebyshev polynomials, edges are summed before networks are applied.

An embedding network is a smooth function of one number. Its expansion on the range that a batch covers converges like a power
series; it is truncated where coefficients reach rounding error, and computed from weights and batch each time. The sum over
neighbours is then one of polynomials, cosines of an angle, which do not depend on the weights; the network is evaluated only
at the nodes of the expansion, some hundred points instead of every edge. If coefficients do not decrease fast enough, as for
activations with kinks, there is no expansion and the sum is computed directly.

The moments have the derivatives that a training step needs: first derivatives by edge vectors, the derivatives of these by
their cotangents, and tangents. They are used on a CPU, where sizes are known, in chunks that fit into the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forgefield.models.deeppot.networks import Groups, Networks
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.graph import EdgeGraph, GradientSwitch

CHUNK = 1 << 17
"""Numbers of one intermediate (edges times polynomials) that a chunk may fill: half a megabyte to a megabyte."""
MULTIPLE = 4
"""Lists of neighbours are padded to a multiple of this, so that more atoms have lists of the same length."""
NODES = (64, 128, 256, 512, 1024)
"""Numbers of nodes that are tried, one after the other, until the last eighth of the coefficients is rounding error."""
ROUNDING = {torch.float64: 3e-15, torch.float32: 3e-9}
"""Fraction of the largest coefficient below which others are omitted: well below the effect of rounding of weights."""
WORTH = 2
"""Edges per node from which on an expansion pays."""
INSIDE = 0.98
"""Share of the interval of an expansion that is used; at its very ends the angle has no derivative."""


@dataclass(frozen=True)
class Chunk:
    """Lists of one length: ranges of cells and of slots."""

    length: int
    cells: slice
    slots: slice

    def lists(self, values: Tensor) -> Tensor:
        """Rows of the chunk, (slots, n) -> (cells, length, n)."""
        return values[self.slots].view(-1, self.length, values.shape[1])


class Cells:
    """Edges arranged by network, length of list, centre. A cell is the list of one centre's edges of one network.

    atom: (n_cells,) centre of each. sizes: cells of each network. slot: (n_edges,) place of each edge; edge: (n_slots,) edge of
    each place, n_edges for those that stay empty.
    """

    def __init__(self, kinds: Tensor, graph: EdgeGraph, n_networks: int) -> None:
        kind, centre = kinds.numpy(), graph.destination.numpy()
        n_atoms, n_edges = graph.n_atoms, len(kind)
        order = np.argsort(kind.astype(np.uint16), kind="stable")  # centres ascend within each network
        cell_of = kind[order] * n_atoms + centre[order]
        starts = np.flatnonzero(np.diff(cell_of, prepend=-1))
        counts = np.diff(starts, append=n_edges)
        cells = cell_of[starts]
        lengths = -(-counts // MULTIPLE) * MULTIPLE
        ranked = np.lexsort((lengths, cells // n_atoms))
        self.lengths = lengths[ranked]
        ends = np.cumsum(self.lengths)
        begins = np.empty_like(ends)
        begins[ranked] = ends - self.lengths
        slot = np.empty(n_edges, dtype=np.int64)
        slot[order] = np.repeat(begins - starts, counts) + np.arange(n_edges)
        edge = np.full(int(ends[-1]) if len(ends) else 0, n_edges, dtype=np.int64)
        edge[slot] = np.arange(n_edges)
        self.slot, self.edge = torch.from_numpy(slot), torch.from_numpy(edge)
        self.atom = torch.from_numpy(cells[ranked] % n_atoms)
        self.sizes = np.bincount(cells // n_atoms, minlength=n_networks).tolist()
        self.network = cells[ranked] // n_atoms

    def chunks(self, n_polynomials: int) -> Iterator[Chunk]:
        """Ranges of lists of one length that fit into the cache."""
        breaks = np.flatnonzero(np.diff(self.lengths)) + 1
        bounds = [0, *breaks.tolist(), len(self.lengths)] if len(self.lengths) else [0]
        begin = 0
        for first, last in itertools.pairwise(bounds):
            length = int(self.lengths[first])
            step = max(1, CHUNK // (length * n_polynomials))
            for cell in range(first, last, step):
                stop = min(cell + step, last)
                end = begin + (stop - cell) * length
                yield Chunk(length, slice(cell, stop), slice(begin, end))
                begin = end

    def to_slots(self, values: Tensor) -> Tensor:
        """(n_edges, c) -> (n_slots, c), zero in empty slots."""
        return torch.cat([values, values.new_zeros(1, values.shape[1])]).index_select(0, self.edge)

    def to_edges(self, values: Tensor) -> Tensor:
        """(n_slots, c) -> (n_edges, c)."""
        return values.index_select(0, self.slot)


class _Work:
    """The moments of one batch: sum over the edges of each cell of row (x) cos(k angle), k below `n`."""

    def __init__(self, cells: Cells, n: int, angles: Tensor, rows: Tensor) -> None:
        self.cells, self.n = cells, n
        self.orders = torch.arange(n, dtype=rows.dtype)
        placed = cells.to_slots(torch.cat([angles.unsqueeze(1), rows], 1))
        self.angles, self.rows = placed[:, 0].contiguous(), placed[:, 1:].contiguous()

    def _waves(self, chunk: Chunk, both: bool) -> list[Tensor]:
        """cos(k angle) and, if asked, sin(k angle), each (cells, length, n)."""
        phase = self.orders.unsqueeze(1) * self.angles[chunk.slots]
        waves = [torch.cos(phase), phase.sin_()] if both else [phase.cos_()]
        return [wave.view(self.n, -1, chunk.length).permute(1, 2, 0) for wave in waves]

    def sum(self) -> Tensor:
        """(n_cells, c, n)."""
        result = self.rows.new_empty(self.cells.atom.shape[0], self.rows.shape[1], self.n)
        for chunk in self.cells.chunks(self.n):
            (cosines,) = self._waves(chunk, both=False)
            torch.bmm(chunk.lists(self.rows).transpose(1, 2), cosines, out=result[chunk.cells])
        return result

    def slopes(self, grad: Tensor) -> Tensor:
        """Gradient of sum(grad * moments) in angles and rows: (n_edges, 1 + c)."""
        placed = self.rows.new_empty(self.rows.shape[0], 1 + self.rows.shape[1])
        towards = grad.transpose(1, 2)
        steeper = (grad * -self.orders).transpose(1, 2)
        for chunk in self.cells.chunks(self.n):
            cosines, sines = self._waves(chunk, both=True)
            placed[chunk.slots, 1:] = torch.bmm(cosines, towards[chunk.cells]).flatten(0, 1)
            by_angle = torch.bmm(sines, steeper[chunk.cells]).mul_(chunk.lists(self.rows))
            placed[chunk.slots, 0] = by_angle.sum(2).flatten()
        return self.cells.to_edges(placed)

    def changes(self, d_angles: Tensor, d_rows: Tensor | None) -> Tensor:
        """Tangents of the moments along these directions (n_edges,), (n_edges, c): (n_cells, c, n). None: zero direction."""
        if d_rows is None:
            d_rows = d_angles.new_zeros(d_angles.shape[0], self.rows.shape[1])
        placed = self.cells.to_slots(torch.cat([d_angles.unsqueeze(1), d_rows], 1))
        by_angle, by_row = self.rows * placed[:, :1], placed[:, 1:].contiguous()
        result = self.rows.new_empty(self.cells.atom.shape[0], self.rows.shape[1], self.n)
        for chunk in self.cells.chunks(self.n):
            cosines, sines = self._waves(chunk, both=True)
            part = torch.bmm(chunk.lists(by_angle).transpose(1, 2), sines).mul_(-self.orders)
            torch.baddbmm(part, chunk.lists(by_row).transpose(1, 2), cosines, out=result[chunk.cells])
        return result


class _Moments(TypedFunction):
    @staticmethod
    def forward(
        ctx: AutogradContext, angles: Tensor, rows: Tensor, cells: Cells, n: int, switch: GradientSwitch | None
    ) -> Tensor:
        ctx.save_for_backward(angles, rows)
        ctx.work, ctx.switch = _Work(cells, n, angles, rows), switch
        result: Tensor = ctx.work.sum()
        return result

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        if ctx.switch is not None and ctx.switch.off:
            return None, None, None, None, None
        gradients = _Slopes.apply(grad, *ctx.saved_tensors, ctx.work, ctx.switch)
        return gradients[:, 0], gradients[:, 1:], None, None, None

    @staticmethod
    def jvp(ctx: AutogradContext, d_angles: Tensor, d_rows: Tensor | None, *others: None) -> Tensor:
        result: Tensor = ctx.work.changes(d_angles, d_rows)
        return result


class _Slopes(TypedFunction):
    """Gradient of the moments in angles and rows, differentiable in `grad`."""

    @staticmethod
    def forward(
        ctx: AutogradContext, grad: Tensor, angles: Tensor, rows: Tensor, work: _Work, switch: GradientSwitch | None
    ) -> Tensor:
        ctx.work, ctx.switch = work, switch
        return work.slopes(grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, outer: Tensor) -> Gradients:
        if ctx.switch is None or not ctx.switch.off:
            raise RuntimeError("moments have no second derivative in edge vectors")
        return ctx.work.changes(outer[:, 0], outer[:, 1:]), None, None, None, None


@dataclass(frozen=True)
class Expansion:
    """Coefficients (n_networks, n, m) of networks on an interval: middle and half width of it."""

    coefficients: Tensor
    middle: float
    half: float


@cache
def _transform(nodes: int) -> Tensor:
    """(nodes, nodes): from values at the Chebyshev nodes to coefficients."""
    numbers = torch.arange(nodes)
    quarters = numbers.unsqueeze(1) * (2 * numbers + 1) % (4 * nodes)  # whole numbers: large angles would lose digits
    matrix = torch.cos(quarters.double() * (math.pi / (2 * nodes))) * (2 / nodes)
    matrix[0] /= 2
    return matrix


def expand(networks: Networks, scalars: Tensor) -> Expansion | None:
    """The networks on the range of `scalars` (n_edges,); None where there are too many coefficients to be worth it."""
    if scalars.shape[0] < max(1, WORTH * NODES[0] * networks.count):
        return None
    low, high = (float(end) for end in torch.aminmax(scalars.detach()))
    middle, half = 0.5 * (low + high), max(0.5 * (high - low), 1e-3 * (1 + abs(low))) / INSIDE
    for nodes in NODES:
        if scalars.shape[0] < WORTH * nodes * networks.count:
            return None
        abscissae = middle + half * torch.cos((torch.arange(nodes, dtype=torch.float64) + 0.5) * (math.pi / nodes))
        groups = Groups.in_order([nodes] * networks.count)
        values = networks(abscissae.repeat(networks.count).unsqueeze(1), groups).unflatten(0, (networks.count, nodes))
        coefficients = torch.matmul(_transform(nodes), values)
        sizes = coefficients.detach().abs().amax((0, 2))
        large = (sizes > ROUNDING[networks.dtype] * sizes.max()).nonzero()
        needed = int(large[-1]) + 1 if len(large) else nodes  # none is larger than one that is not a number
        if needed <= nodes - nodes // 8:
            return Expansion(coefficients[:, :needed], middle, half)
    return None


def sum_by_moments(
    expansion: Expansion,
    scalars: Tensor,
    rows: Tensor,
    kinds: Tensor,
    graph: EdgeGraph,
    switch: GradientSwitch | None,
) -> tuple[Tensor, Cells]:
    """Rows (x) embeddings, summed over each cell: (n_cells, c, m), and the cells.

    scalars: (n_edges,) float64; rows: (n_edges, c), in the precision of the result.
    """
    n_networks, n, _ = expansion.coefficients.shape
    cells = Cells(kinds, graph, n_networks)
    angles = torch.arccos((scalars - expansion.middle) / expansion.half).to(rows.dtype)
    moments = _Moments.apply(angles, rows, cells, n, switch)
    coefficients = expansion.coefficients.to(rows.dtype)
    return Groups.in_order(cells.sizes).product(moments, coefficients), cells
