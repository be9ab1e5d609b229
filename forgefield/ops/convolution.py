"""The equivariant convolution: gather source features, couple them to edge harmonics, weight, sum over destinations.

For one edge a path (l1, l2 -> l3) maps channel u of a source block to w_u sum_ij C_ijk x_iu Y_j. The harmonics are
first contracted with the Clebsch-Gordan coefficients to one small matrix per edge and source block, shared by all
layers of the same structure; what is left is a batched product with channels contiguous, a scaling, and the sum.
`convolve` is an autograd function with an explicit second derivative: nothing of the size (edges x outputs) is kept
between passes, and on a CPU edges are processed in slices that fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forgefield.ops.convolution_plan import ConvolutionPlan, Group
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, is_traced, sum_rows

CACHE_FLOATS = 1 << 17
"""Largest number of floats of a per-edge intermediate of a slice of edges on a CPU: about half a megabyte."""


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


def sum_over_edges(
    features: Tensor, couplings: Tensor, weights: Tensor, graph: EdgeGraph, plan: ConvolutionPlan
) -> Tensor:
    """As `convolve`, without a gradient."""
    with torch.no_grad():
        return _Convolution.apply(features, couplings, weights, graph, plan, GradientSwitch())


def gradients_of_convolution(
    grad: Tensor, features: Tensor, couplings: Tensor, weights: Tensor, graph: EdgeGraph, plan: ConvolutionPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of features, couplings and weights from that of the output, grad (n_atoms, plan.out_dim); they are not
    differentiable."""
    with torch.no_grad():
        return _ConvolutionGradient.apply(grad, features, couplings, weights, graph, plan, GradientSwitch())


def _parts(graph: EdgeGraph, plan: ConvolutionPlan, on_cpu: bool) -> Iterator[_Part]:
    """Ranges of edges to process one after another: on a CPU so short that their intermediates stay in the cache."""
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
        """groups: contributions of each group to its features, (edges, n_in, c)."""
        if _sums_at_once(total):
            sums = [_sum_of(group, self.graph.by_source) for group in groups]
            total.copy_(_feature_rows(sums, plan))
        else:
            total.index_add_(0, self.source, _feature_rows(groups, plan))

    def add_to_destinations(self, total: Tensor, groups: list[Tensor]) -> None:
        """groups: contributions of each group to its outputs, (edges, n_out, c)."""
        if _sums_at_once(total):
            total.copy_(_rows([_sum_of(group, self.graph.by_destination) for group in groups]))
        else:
            total.index_add_(0, self.destination, _rows(groups))

    def add_to_weights(self, total: Tensor, values: Tensor) -> None:
        graph = self.graph
        if graph.pair_edge is None or graph.reverse is None or self.pair is None:
            total[self.edges] = values
        elif _sums_at_once(total):
            total.copy_(
                values.index_select(0, graph.pair_edge)
                + values.index_select(0, graph.reverse.index_select(0, graph.pair_edge))
            )
        else:
            total.index_add_(0, self.pair, values)


def _sums_at_once(total: Tensor) -> bool:
    """Whether all edges are processed as one part, whose groups are summed separately."""
    return total.is_cuda or is_traced(total)


def _sum_of(group: Tensor, segments: Segments) -> Tensor:
    return sum_rows(group.flatten(1), segments).unflatten(1, tuple(group.shape[1:]))


def _inputs(rows: Tensor, group: Group) -> Tensor:
    """(edges, in_dim) -> (edges, n_in, c)."""
    return rows[:, group.features].unflatten(1, (group.n_in, group.channels))


def _outputs(rows: Tensor, group: Group) -> Tensor:
    """(edges, out_dim) -> (edges, n_out, c)."""
    return rows[:, group.outputs].unflatten(1, (group.n_out, group.channels))


def _couplings(rows: Tensor, group: Group) -> Tensor:
    """(edges, n_couplings) -> (edges, n_out, n_in)."""
    return rows[:, group.couplings].unflatten(1, (group.n_out, group.n_in))


def _row_weights(rows: Tensor, group: Group) -> Tensor:
    """(edges, n_weights) -> (edges, n_out, c): every output row with the weight of its path."""
    by_path = rows[:, group.weights].unflatten(1, (-1, group.channels))
    return by_path if group.n_paths == group.n_out else by_path.index_select(1, group.tables(rows)[0])


def _sum_paths(values: Tensor, group: Group) -> Tensor:
    """Sum over the rows of each path: (edges, n_out, c) -> (edges, n_paths * c)."""
    if group.n_paths == group.n_out:
        return values.flatten(1)
    if is_traced(values):  # one expression for all paths, which a compiler fuses with the computation of the values
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
"""With fewer multiplications per matrix, the batched product of a CPU runs an unvectorised loop."""


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched (n, i) @ (i, c) with c contiguous, with a faster method for small matrices."""
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
    """Tangent of the convolution along (dx, dm, dw): w (m dx + dm x) + dw (m x), summed. Once differentiable.

    Couplings are geometry: their gradient is computed only where they or their tangent require one.
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
