"""The equivariant convolution: gather source features, couple them to edge harmonics, weight, sum over destinations.

For one edge a path (l1, l2 -> l3) maps channel u of a source block to w_u sum_ij C_ijk x_iu Y_j. The harmonics are
first contracted with the Clebsch-Gordan coefficients to one small matrix per edge and source block, shared by all
layers of the same structure; what is left is a batched product with channels contiguous, a scaling, and the sum.
`convolve` is an autograd function with a written-out second derivative: nothing of the size (edges x outputs) is kept
between passes, and on a CPU the edges go through in slices that fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, is_traced, sum_rows
from forgefield.ops.harmonics import clebsch_gordan

CACHE_FLOATS = 1 << 17
"""Floats of one per-edge intermediate that a slice of edges may fill on a CPU: about half a megabyte."""


class Block(NamedTuple):
    """`mul` channels that transform as degree `l` and parity `p` (+1 or -1), stored as (2l + 1, mul)."""

    mul: int
    l: int  # noqa: E741
    p: int

    @property
    def dim(self) -> int:
        return (2 * self.l + 1) * self.mul


class Path(NamedTuple):
    """Source block number, degree of the harmonic, degree and parity of the result."""

    source: int
    l2: int
    l3: int
    p3: int


@dataclass(frozen=True, eq=False)
class _Group:
    """Source blocks of equal width that go through one batched product.

    `features` is where they lie in a feature row, `couplings` in a coupling row, `weights` in a weight row and
    `outputs` in an output row. `coupling` maps harmonics to the group's couplings; `path_of_row` (n_out,) and `row_sum`
    (n_paths, n_out) say which rows belong to which path.
    """

    channels: int
    n_in: int
    n_out: int
    features: slice
    couplings: slice
    weights: slice
    outputs: slice
    coupling: Tensor
    path_of_row: Tensor
    row_sum: Tensor

    @property
    def n_paths(self) -> int:
        return self.row_sum.shape[0]

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """`path_of_row` and `row_sum` on the device and in the precision of `like`."""
        return _tables(self, like.device, like.dtype)

    def rows_of_paths(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(n_paths, longest): rows of each path, filled up with row 0, and one where a row is real, zero where it is not."""
        return _rows_of_paths(self, like.device, like.dtype)


@lru_cache(maxsize=256)
def _tables(group: _Group, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with _disable_current_modes():  # they outlive a trace during which they may be asked for first
        return group.path_of_row.to(device), group.row_sum.to(device, dtype)


@lru_cache(maxsize=256)
def _rows_of_paths(group: _Group, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with _disable_current_modes():
        members = [torch.nonzero(row).flatten() for row in group.row_sum]
        rows = torch.nn.utils.rnn.pad_sequence(members, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in members], batch_first=True)
        return rows.to(device), real.to(device, dtype)


@dataclass(frozen=True, eq=False)
class ConvolutionPlan:
    """Everything about a convolution that does not depend on the data.

    `out_blocks` holds one block per path, in path order; a row of the output is these blocks one after another.
    """

    in_blocks: tuple[Block, ...]
    l_max: int
    paths: tuple[Path, ...]
    out_blocks: tuple[Block, ...]
    groups: tuple[_Group, ...]
    n_weights: int
    n_couplings: int

    @property
    def in_dim(self) -> int:
        return sum(block.dim for block in self.in_blocks)

    @property
    def out_dim(self) -> int:
        return sum(block.dim for block in self.out_blocks)

    def coupling_matrix(self) -> Tensor:
        """((l_max + 1)^2, n_couplings) float64: harmonics times this are couplings."""
        return torch.cat([group.coupling for group in self.groups], dim=1)


def list_paths(in_blocks: tuple[Block, ...], l_max: int, out: frozenset[tuple[int, int]]) -> tuple[Path, ...]:
    """All couplings of the blocks with harmonics up to `l_max` whose result (l, p) is in `out`: by block, l2, l3."""
    return tuple(
        Path(number, l2, l3, block.p * (-1) ** l2)
        for number, block in enumerate(in_blocks)
        for l2 in range(l_max + 1)
        for l3 in range(abs(block.l - l2), block.l + l2 + 1)
        if (l3, block.p * (-1) ** l2) in out
    )


@lru_cache(maxsize=64)
def plan_convolution(
    in_blocks: tuple[Block, ...], l_max: int, out: frozenset[tuple[int, int]], widest: int = 16
) -> ConvolutionPlan:
    """Plan of the convolution of `in_blocks` with harmonics up to `l_max`, keeping results in `out`.

    The scale is e3nn's for component normalisation: each path carries sqrt(2 l3 + 1). Neighbouring blocks of equal
    width go into one product of at most `widest` input components: fewer and larger operations, at the price of
    multiplying with structural zeros.
    """
    paths = list_paths(in_blocks, l_max, out)
    runs = _group_blocks(in_blocks, sorted({path.source for path in paths}), widest)
    starts = [sum(block.dim for block in in_blocks[:number]) for number in range(len(in_blocks) + 1)]
    groups: list[_Group] = []
    couplings = weights = outputs = 0
    for run in runs:
        mul = in_blocks[run[0]].mul
        group_paths = [path for path in paths if path.source in run]
        n_in = sum(2 * in_blocks[number].l + 1 for number in run)
        n_out = sum(2 * path.l3 + 1 for path in group_paths)
        coupling = torch.zeros((l_max + 1) ** 2, n_out, n_in, dtype=torch.float64)
        rows, row = [], 0
        for path in group_paths:
            l1 = in_blocks[path.source].l
            column = sum(2 * in_blocks[number].l + 1 for number in run if number < path.source)
            values = clebsch_gordan(l1, path.l2, path.l3).permute(1, 2, 0) * (2 * path.l3 + 1) ** 0.5
            rows.append(2 * path.l3 + 1)
            coupling[path.l2**2 : (path.l2 + 1) ** 2, row : row + rows[-1], column : column + 2 * l1 + 1] = values
            row += rows[-1]
        sizes = (n_in * n_out, len(group_paths) * mul, n_out * mul)
        groups.append(
            _Group(
                channels=mul,
                n_in=n_in,
                n_out=n_out,
                features=slice(starts[run[0]], starts[run[-1] + 1]),
                couplings=slice(couplings, couplings + sizes[0]),
                weights=slice(weights, weights + sizes[1]),
                outputs=slice(outputs, outputs + sizes[2]),
                coupling=coupling.flatten(1),
                path_of_row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)),
                row_sum=torch.block_diag(*(torch.ones(1, n) for n in rows)),
            )
        )
        couplings, weights, outputs = couplings + sizes[0], weights + sizes[1], outputs + sizes[2]
    return ConvolutionPlan(
        in_blocks=in_blocks,
        l_max=l_max,
        paths=paths,
        out_blocks=tuple(Block(in_blocks[path.source].mul, path.l3, path.p3) for path in paths),
        groups=tuple(groups),
        n_weights=weights,
        n_couplings=couplings,
    )


def _group_blocks(in_blocks: tuple[Block, ...], used: list[int], widest: int) -> list[list[int]]:
    """Numbers of blocks to be multiplied together."""
    runs: list[list[int]] = []
    for number in used:
        last = runs[-1] if runs else []
        components = sum(2 * in_blocks[i].l + 1 for i in [*last, number])
        fits = last and last[-1] == number - 1 and in_blocks[number].mul == in_blocks[last[0]].mul
        if fits and components <= widest:
            last.append(number)
        else:
            runs.append([number])
    return runs


def convolve(
    features: Tensor,
    couplings: Tensor,
    weights: Tensor,
    graph: EdgeGraph,
    plan: ConvolutionPlan,
    switch: GradientSwitch | None = None,
) -> Tensor:
    """Sum over the edges of each atom of the weighted couplings.

    `features`: (n_atoms, plan.in_dim); `couplings`: (n_edges, plan.n_couplings), harmonics times
    `plan.coupling_matrix()`; `weights`: (n_edges, plan.n_weights), or one row per pair where `graph.pair` is set.
    Returns (n_atoms, plan.out_dim). Twice differentiable.
    """
    return _Convolution.apply(features, couplings, weights, graph, plan, switch or GradientSwitch())


def _parts(graph: EdgeGraph, plan: ConvolutionPlan, on_cpu: bool) -> Iterator[_Part]:
    """Ranges of edges to work on one after another: on a CPU so short that what they need stays in the cache."""
    if is_traced(graph.source):
        yield _Part(graph, slice(None))
        return
    step = max(16, CACHE_FLOATS // plan.out_dim) if on_cpu else max(graph.n_edges, 1)
    for start in range(0, graph.n_edges, step):
        yield _Part(graph, slice(start, min(start + step, graph.n_edges)))


class _Part:
    """Rows of a range of edges, gathered from and added to the tensors of a convolution."""

    def __init__(self, graph: EdgeGraph, edges: slice) -> None:
        self.graph, self.edges = graph, edges
        self.source, self.destination = graph.source[edges], graph.destination[edges]
        self.pair = None if graph.pair is None else graph.pair[edges]

    def weights(self, weights: Tensor) -> Tensor:
        return weights[self.edges] if self.pair is None else weights.index_select(0, self.pair)

    def add_to_sources(self, total: Tensor, groups: list[Tensor], plan: ConvolutionPlan) -> None:
        """groups: what each group has for its features, (edges, n_in, c)."""
        if _sums_whole(total):
            sums = [_sum_of(group, self.graph.by_source) for group in groups]
            total.copy_(_feature_rows(sums, plan))
        else:
            total.index_add_(0, self.source, _feature_rows(groups, plan))

    def add_to_destinations(self, total: Tensor, groups: list[Tensor]) -> None:
        """groups: what each group has for its outputs, (edges, n_out, c)."""
        if _sums_whole(total):
            total.copy_(_rows([_sum_of(group, self.graph.by_destination) for group in groups]))
        else:
            total.index_add_(0, self.destination, _rows(groups))

    def add_to_weights(self, total: Tensor, values: Tensor) -> None:
        graph = self.graph
        if graph.pair_edge is None or graph.reverse is None or self.pair is None:
            total[self.edges] = values
        elif _sums_whole(total):
            total.copy_(
                values.index_select(0, graph.pair_edge)
                + values.index_select(0, graph.reverse.index_select(0, graph.pair_edge))
            )
        else:
            total.index_add_(0, self.pair, values)


def _sums_whole(total: Tensor) -> bool:
    """Whether all edges come in one part, each of whose groups is summed for itself."""
    return total.is_cuda or is_traced(total)


def _sum_of(group: Tensor, segments: Segments) -> Tensor:
    return sum_rows(group.flatten(1), segments).unflatten(1, tuple(group.shape[1:]))


def _inputs(rows: Tensor, group: _Group) -> Tensor:
    """(edges, in_dim) -> (edges, n_in, c)."""
    return rows[:, group.features].unflatten(1, (group.n_in, group.channels))


def _outputs(rows: Tensor, group: _Group) -> Tensor:
    """(edges, out_dim) -> (edges, n_out, c)."""
    return rows[:, group.outputs].unflatten(1, (group.n_out, group.channels))


def _couplings(rows: Tensor, group: _Group) -> Tensor:
    """(edges, n_couplings) -> (edges, n_out, n_in)."""
    return rows[:, group.couplings].unflatten(1, (group.n_out, group.n_in))


def _row_weights(rows: Tensor, group: _Group) -> Tensor:
    """(edges, n_weights) -> (edges, n_out, c): every output row with the weight of its path."""
    by_path = rows[:, group.weights].unflatten(1, (-1, group.channels))
    return by_path if group.n_paths == group.n_out else by_path.index_select(1, group.tables(rows)[0])


def _sum_paths(values: Tensor, group: _Group) -> Tensor:
    """Sum over the rows of each path: (edges, n_out, c) -> (edges, n_paths * c)."""
    if group.n_paths == group.n_out:
        return values.flatten(1)
    if is_traced(values):  # one expression for all paths, which a compiler fuses with what makes the values
        rows, real = group.rows_of_paths(values)
        gathered = values.index_select(1, rows.flatten()).unflatten(1, tuple(rows.shape))
        return (gathered * real.unsqueeze(2)).sum(2).flatten(1)
    path_of_row, row_sum = group.tables(values)
    if values.is_cuda:
        return torch.matmul(row_sum, values).flatten(1)
    total = values.new_zeros(values.shape[0], group.n_paths, group.channels)
    return total.index_add_(1, path_of_row, values).flatten(1)


def _feature_rows(parts: list[Tensor], plan: ConvolutionPlan) -> Tensor:
    """The groups' (edges, n_in, c) as rows (edges, in_dim), zero for blocks that no path uses."""
    flat: list[Tensor] = []
    column = 0
    for group, part in zip(plan.groups, parts):
        if group.features.start > column:
            flat.append(part.new_zeros(part.shape[0], group.features.start - column))
        flat.append(part.flatten(1))
        column = group.features.stop
    if plan.in_dim > column:
        flat.append(parts[0].new_zeros(parts[0].shape[0], plan.in_dim - column))
    return _rows(flat)


def _rows(parts: list[Tensor]) -> Tensor:
    """The groups' rows side by side."""
    return parts[0].flatten(1) if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)


_TINY = 400
"""Below so many multiplications per matrix the library's batched product runs an unvectorised loop on a CPU."""


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched (n, i) @ (i, c) with c contiguous, by whichever way is fast for small matrices."""
    if a.shape[2] == 1:
        return a * b
    if is_traced(a) or (not a.is_cuda and a.shape[1] * a.shape[2] * b.shape[2] < _TINY):
        return (a.unsqueeze(3) * b.unsqueeze(1)).sum(2)
    return torch.bmm(a, b)


def _contract(a: Tensor, b: Tensor) -> Tensor:
    """Batched (n, c) @ (i, c)^T, over the contiguous dimension."""
    if b.shape[1] == 1:
        return (a * b).sum(2, keepdim=True)
    if a.is_cuda or a.shape[1] * b.shape[1] * a.shape[2] < _TINY:
        return torch.bmm(a, b.transpose(1, 2))
    return torch.bmm(a, b.transpose(1, 2).contiguous())


_OFF = GradientSwitch()
_OFF.off = True


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, couplings, weights, graph, plan, switch):
        ctx.save_for_backward(features, couplings, weights)
        ctx.save_for_forward(features, couplings, weights)
        ctx.structure = (graph, plan, switch)
        out = features.new_zeros(graph.n_atoms, plan.out_dim)
        for part in _parts(graph, plan, on_cpu=not features.is_cuda):
            x, m, w = features.index_select(0, part.source), couplings[part.edges], part.weights(weights)
            messages = [
                _product(_couplings(m, group), _inputs(x, group)).mul_(_row_weights(w, group)) for group in plan.groups
            ]
            part.add_to_destinations(out, messages)
        return out

    @staticmethod
    def backward(ctx, grad):
        graph, plan, switch = ctx.structure
        features, couplings, weights = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            switch = _OFF
        results = _ConvolutionGradient.apply(grad.contiguous(), features, couplings, weights, graph, plan, switch)
        return *results, None, None, None

    @staticmethod
    def jvp(ctx, d_features, d_couplings, d_weights, graph: None, plan: None, switch: None):
        graph, plan, _ = ctx.structure
        features, couplings, weights = ctx.saved_tensors
        return _ConvolutionTangent.apply(features, d_features, couplings, d_couplings, weights, d_weights, graph, plan)


class _ConvolutionTangent(torch.autograd.Function):
    """How the convolution changes along (dx, dm, dw): w (m dx + dm x) + dw (m x), summed. Once differentiable.

    Couplings are geometry: where neither they nor their tangent ask for a gradient, none is made.
    """

    @staticmethod
    def forward(ctx, features, d_features, couplings, d_couplings, weights, d_weights, graph, plan):
        ctx.save_for_backward(features, d_features, couplings, d_couplings, weights, d_weights)
        ctx.structure = (graph, plan)
        out = features.new_zeros(graph.n_atoms, plan.out_dim)
        for part in _parts(graph, plan, on_cpu=not features.is_cuda):
            x, dx = features.index_select(0, part.source), d_features.index_select(0, part.source)
            m, dm = couplings[part.edges], d_couplings[part.edges]
            w, dw = part.weights(weights), part.weights(d_weights)
            messages = []
            for group in plan.groups:
                x_g, m_g = _inputs(x, group), _couplings(m, group)
                u = _product(m_g, _inputs(dx, group)).add_(_product(_couplings(dm, group), x_g))
                t = _product(m_g, x_g)
                messages.append(u.mul_(_row_weights(w, group)).addcmul_(t, _row_weights(dw, group)))
            part.add_to_destinations(out, messages)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        graph, plan = ctx.structure
        features, d_features, couplings, d_couplings, weights, d_weights = ctx.saved_tensors
        geometry = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        grad = grad.contiguous()
        to_x, to_dx, to_w, to_dw = (torch.zeros_like(v) for v in (features, features, weights, weights))
        to_m, to_dm = (torch.empty_like(couplings) if geometry else None for _ in range(2))
        for part in _parts(graph, plan, on_cpu=not features.is_cuda):
            x, dx = features.index_select(0, part.source), d_features.index_select(0, part.source)
            m, dm = couplings[part.edges], d_couplings[part.edges]
            w, dw = part.weights(weights), part.weights(d_weights)
            g = grad.index_select(0, part.destination)
            rows: list[list[Tensor]] = [[] for _ in range(6)]
            for group in plan.groups:
                x_g, dx_g, g_g = _inputs(x, group), _inputs(dx, group), _outputs(g, group)
                m_g, dm_g = _couplings(m, group), _couplings(dm, group)
                gw, gdw = g_g * _row_weights(w, group), g_g * _row_weights(dw, group)
                u = _product(m_g, dx_g).add_(_product(dm_g, x_g))
                back, d_back = m_g.transpose(1, 2), dm_g.transpose(1, 2)
                rows[0].append(_product(d_back, gw).add_(_product(back, gdw)))
                rows[1].append(_product(back, gw))
                rows[2].append(_sum_paths(u.mul_(g_g), group))
                rows[3].append(_sum_paths(_product(m_g, x_g).mul_(g_g), group))
                if geometry:
                    rows[4].append(_contract(gw, dx_g).add_(_contract(gdw, x_g)))
                    rows[5].append(_contract(gw, x_g))
            part.add_to_sources(to_x, rows[0], plan)
            part.add_to_sources(to_dx, rows[1], plan)
            part.add_to_weights(to_w, _rows(rows[2]))
            part.add_to_weights(to_dw, _rows(rows[3]))
            if to_m is not None and to_dm is not None:
                to_m[part.edges], to_dm[part.edges] = _rows(rows[4]), _rows(rows[5])
        return to_x, to_dx, to_m, to_dm, to_w, to_dw, None, None


class _ConvolutionGradient(torch.autograd.Function):
    """Gradients of `_Convolution` in features, couplings and weights, themselves differentiable once.

    With t = m x per edge and g the gradient at the destination: dw = g t (summed over a path), dx = m^T (g w),
    dm = (g w) x^T. Couplings are left out when the switch is off.
    """

    @staticmethod
    def forward(ctx, grad, features, couplings, weights, graph, plan, switch):
        ctx.save_for_backward(grad, features, couplings, weights)
        ctx.structure = (graph, plan, switch)
        ctx.set_materialize_grads(False)
        d_features, d_weights = torch.zeros_like(features), torch.zeros_like(weights)
        d_couplings = None if switch.off else torch.empty_like(couplings)
        for part in _parts(graph, plan, on_cpu=not features.is_cuda):
            x, g = features.index_select(0, part.source), grad.index_select(0, part.destination)
            m, w = couplings[part.edges], part.weights(weights)
            dx, dw, dm = [], [], []
            for group in plan.groups:
                x_g, m_g, g_g = _inputs(x, group), _couplings(m, group), _outputs(g, group)
                dw.append(_sum_paths(_product(m_g, x_g).mul_(g_g), group))
                gw = g_g * _row_weights(w, group)
                dx.append(_product(m_g.transpose(1, 2), gw))
                if d_couplings is not None:
                    dm.append(_contract(gw, x_g))
            part.add_to_sources(d_features, dx, plan)
            part.add_to_weights(d_weights, _rows(dw))
            if d_couplings is not None:
                d_couplings[part.edges] = _rows(dm)
        return d_features, d_couplings, d_weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, a_features, a_couplings, a_weights):
        graph, plan, switch = ctx.structure
        grad, features, couplings, weights = ctx.saved_tensors
        a_features = torch.zeros_like(features) if a_features is None else a_features.contiguous()
        a_couplings = torch.zeros_like(couplings) if a_couplings is None else a_couplings.contiguous()
        a_weights = torch.zeros_like(weights) if a_weights is None else a_weights.contiguous()
        d_grad, d_features, d_weights = (torch.zeros_like(value) for value in (grad, features, weights))
        d_couplings = None if switch.off else torch.empty_like(couplings)
        for part in _parts(graph, plan, on_cpu=not features.is_cuda):
            x, ax = features.index_select(0, part.source), a_features.index_select(0, part.source)
            g = grad.index_select(0, part.destination)
            m, am = couplings[part.edges], a_couplings[part.edges]
            w, aw = part.weights(weights), part.weights(a_weights)
            dx, dg, dw, dm = [], [], [], []
            for group in plan.groups:
                x_g, ax_g, g_g = _inputs(x, group), _inputs(ax, group), _outputs(g, group)
                m_g, am_g = _couplings(m, group), _couplings(am, group)
                w_g, aw_g = _row_weights(w, group), _row_weights(aw, group)
                u = _product(m_g, ax_g).add_(_product(am_g, x_g))
                dw.append(_sum_paths(u * g_g, group))
                dg.append(u.mul_(w_g).addcmul_(_product(m_g, x_g), aw_g))
                gw, ga = g_g * w_g, g_g * aw_g
                dx.append(_product(m_g.transpose(1, 2), ga).add_(_product(am_g.transpose(1, 2), gw)))
                if d_couplings is not None:
                    dm.append(_contract(ga, x_g).add_(_contract(gw, ax_g)))
            part.add_to_destinations(d_grad, dg)
            part.add_to_sources(d_features, dx, plan)
            part.add_to_weights(d_weights, _rows(dw))
            if d_couplings is not None:
                d_couplings[part.edges] = _rows(dm)
        return d_grad, d_features, d_couplings, d_weights, None, None, None
