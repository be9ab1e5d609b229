"""Attention between the neighbours of one atom, as in DPA-1 (Zhang et al., npj Comput. Mater. 10, 94, 2024), on edge lists.

Queries, keys and values are computed per edge and laid out by centre only where neighbours meet neighbours. Empty places of
that layout need no computation of their own: each adds one to the denominator of a smooth attention, and as many as a given
number of slots asks for are added in closed form. All of it can be differentiated twice, and in reverse along a tangent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forgefield.models.deeppot.networks import Layer
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.graph import cut, is_traced
from forgefield.ops.products import add_product

SHIFT = 20.0
"""Shift of the logarithmic weight of a neighbour at the cutoff relative to the others, in a smooth attention."""


@dataclass(frozen=True)
class Slots:
    """Neighbours arranged by centre, `width` slots for each of `n_atoms` atoms, of which the last is always empty.

    slot: (n_edges,) int64 of each edge; that of edges which take none is the empty one of their atom. takes: (n_edges, 1), one
    or zero; None where all edges take a place. counts: (n_atoms,) int64, edges that do.
    """

    slot: Tensor
    takes: Tensor | None
    counts: Tensor
    width: int

    @property
    def n_atoms(self) -> int:
        return self.counts.shape[0]

    def spread(self, rows: Tensor) -> Tensor:
        """(n_edges, c) -> (n_atoms, width, c); zero in empty slots."""
        rows = rows if self.takes is None else rows * self.takes
        result: Tensor = _Spread.apply(rows, self.slot, self.n_atoms * self.width).unflatten(
            0, (self.n_atoms, self.width)
        )
        return result

    def collect(self, rows_in_slots: Tensor) -> Tensor:
        """(n_atoms, width, c) -> (n_edges, c); zero for edges without a slot."""
        rows = _Collect.apply(rows_in_slots.flatten(0, 1), self.slot)
        result: Tensor = rows if self.takes is None else rows * self.takes
        return result

    def is_empty(self) -> Tensor:
        """(n_atoms, width) bool."""
        return torch.arange(self.width, device=self.counts.device) >= self.counts.unsqueeze(1)


def count_edges(chosen: Tensor, pointers: Tensor) -> Tensor:
    """(n_atoms,) int64: how many edges of each atom are chosen, (n_edges,) bool. pointers: (n_atoms + 1,) their first edges."""
    starts = _chosen_before(chosen).index_select(0, pointers)
    return starts[1:] - starts[:-1]


def lay_out(
    chosen: Tensor, centre: Tensor, pointers: Tensor, needed: int, dtype: torch.dtype, *, all_chosen: bool = False
) -> Slots:
    """`needed` slots and an empty one per atom, for the chosen edges, (n_edges,) bool; further edges get none.

    centre: (n_edges,) int64, ascending. all_chosen: every edge is chosen and gets a slot.
    """
    width = needed + 1
    before = _chosen_before(chosen)
    starts = before.index_select(0, pointers)
    rank = before[:-1] - starts.index_select(0, centre)
    takes = chosen & (rank < needed)
    slot = centre * width + torch.where(takes, rank, needed)
    return Slots(slot, None if all_chosen else takes.to(dtype).unsqueeze(1), starts[1:] - starts[:-1], width)


def _chosen_before(chosen: Tensor) -> Tensor:
    """(n_edges + 1,) int64: how many of the edges before each are chosen."""
    return torch.cat([chosen.new_zeros(1, dtype=torch.int64), torch.cumsum(chosen, 0)])


class _Spread(TypedFunction):
    """Rows to their places among `n_slots_total`, zero elsewhere. Rows that share a place are equal."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, slot: Tensor, n_slots_total: int) -> Tensor:
        ctx.slot, ctx.n_slots_total = slot, n_slots_total
        return rows.new_zeros(n_slots_total, rows.shape[1]).index_copy_(0, slot, rows)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return _Collect.apply(grad, ctx.slot), None, None

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, slot: None, n_slots_total: None) -> Tensor:
        result: Tensor = _Spread.apply(tangent, ctx.slot, ctx.n_slots_total)
        return result


class _Collect(TypedFunction):
    """Rows from their slots."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, slot: Tensor) -> Tensor:
        ctx.slot, ctx.n_slots_total = slot, values.shape[0]
        return values.index_select(0, slot)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return _Spread.apply(grad, ctx.slot, ctx.n_slots_total), None

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, slot: None) -> Tensor:
        result: Tensor = _Collect.apply(tangent, ctx.slot)
        return result


@dataclass(frozen=True)
class Neighbourhood:
    """What attention layers have in common, computed once. Precision of the weights.

    switch: (n_edges, 1), from one to zero at the cutoff; None where attention is not smooth. start: what products of queries
    and keys are added to, (n_atoms, width or 1, width). gate: (n_atoms or 1, width, width) factors of the weights; None where
    there are none. missing: slots that a smooth attention counts beyond the width of the layout, also negative.
    """

    slots: Slots
    switch: Tensor | None
    start: Tensor
    gate: Tensor | None
    missing: float


def neighbourhood(
    slots: Slots,
    directions: Tensor,
    switch: Tensor,
    *,
    smooth: bool,
    dot_directions: bool,
    mask_diagonal: bool,
    n_slots: float,
) -> Neighbourhood:
    """directions: (n_edges, 3), of length one. switch: (n_edges, 1). n_slots: neighbours and empty slots of an atom."""
    gate = None
    if dot_directions:
        rows_in_slots = slots.spread(directions * switch if smooth else directions)
        gate = torch.bmm(rows_in_slots, rows_in_slots.transpose(1, 2))
    if mask_diagonal:
        others = 1 - torch.eye(slots.width, dtype=switch.dtype, device=switch.device)
        gate = others.unsqueeze(0) if gate is None else gate * others
    if smooth:
        # (q.k + SHIFT) s_q s_k: the switches of q.k are in the queries and keys, these are those of SHIFT.
        rows_in_slots = slots.spread(switch)
        return Neighbourhood(
            slots, switch, rows_in_slots * rows_in_slots.transpose(1, 2) * SHIFT, gate, n_slots - slots.width
        )
    lowest = torch.finfo(switch.dtype).min / 4
    return Neighbourhood(slots, None, (slots.is_empty().to(switch.dtype) * lowest).unsqueeze(1), gate, 0.0)


class AttentionLayer(nn.Module):
    """Gated self-attention over the neighbours of each atom, added to its input and normalised.

    scaling: of the products of queries and keys. trainable_norm: whether scale and shift of the normalisation are trained.
    """

    plain_factors: Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        scaling: float,
        normalise: bool,
        dot_directions: bool,
        trainable: bool,
        trainable_norm: bool,
        norm_eps: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.hidden, self.scaling, self.normalise, self.dot_directions = hidden, scaling, normalise, dot_directions
        self.norm_eps = norm_eps
        self.project_in = Layer(
            1, dim, 3 * hidden, activation="linear", residual=False, trainable=trainable, dtype=dtype
        )
        self.project_out = Layer(1, hidden, dim, activation="linear", residual=False, trainable=trainable, dtype=dtype)
        self.project_in.draw(0, generator)
        self.project_out.draw(0, generator)
        self.norm_scale = nn.Parameter(torch.ones(dim, dtype=dtype), requires_grad=trainable_norm)
        self.norm_shift = nn.Parameter(torch.zeros(dim, dtype=dtype), requires_grad=trainable_norm)
        self.register_buffer("plain_factors", torch.tensor([scaling, 1.0, 1.0], dtype=torch.float64), persistent=False)

    def forward(self, features: Tensor, around: Neighbourhood) -> Tensor:
        """(n_edges, dim) -> (n_edges, dim)."""
        attended = around.slots.collect(self._attend(features, around))
        if around.switch is not None and not self.dot_directions:
            attended = attended * around.switch
        return self._normalise(features, attended)

    def alone(self, features: Tensor) -> Tensor:
        """The same for rows (n, dim) that see no neighbour: those of empty slots."""
        return self._normalise(features, features.new_zeros(features.shape[0], self.hidden))

    def _normalise(self, features: Tensor, attended: Tensor) -> Tensor:
        """Normalised sum of features and the result of attention, (n, dim)."""
        rows = features + _affine(self.project_out, attended)
        return layer_norm(rows, self.norm_scale, self.norm_shift, self.norm_eps)

    def _attend(self, features: Tensor, around: Neighbourhood) -> Tensor:
        """(n_atoms, width, hidden)."""
        rows = _affine(self.project_in, features).unflatten(1, (3, self.hidden))
        factors = self._factors(around.switch, rows)
        rows = _turn_into_units(rows, factors) if self.normalise else rows * factors.unsqueeze(2)
        query, key, value = cut(around.slots.spread(rows.flatten(1)), [self.hidden] * 3, 2)
        weights = softmax(torch.bmm(query, key.transpose(1, 2)) + around.start)
        attended = torch.bmm(weights if around.gate is None else weights * around.gate, value)
        if not around.missing:
            return attended
        # The last slot is empty, so its weight is one over the sum over all slots.
        last = weights.narrow(2, weights.shape[2] - 1, 1)
        return attended * (1 - last * -around.missing).reciprocal()

    def _factors(self, switch: Tensor | None, rows: Tensor) -> Tensor:
        """(n_edges, 3): of query, key and value."""
        if switch is None:
            return self.plain_factors.to(rows.dtype).expand(rows.shape[0], 3)
        value = torch.ones_like(switch) if self.dot_directions else switch
        return torch.cat([switch * self.scaling, switch, value], 1)


def _affine(layer: Layer, rows: Tensor) -> Tensor:
    return add_product(layer.b.squeeze(0), rows, layer.w.squeeze(0))


def softmax(logits: Tensor) -> Tensor:
    """Over the last axis, with an explicit tangent: that of PyTorch cannot be differentiated in reverse mode."""
    logits, tangent = forward_ad.unpack_dual(logits)
    weights = torch.softmax(logits, -1)
    if tangent is None:
        return weights
    change = weights * tangent
    result: Tensor = forward_ad.make_dual(weights, change - weights * change.sum(-1, keepdim=True))
    return result


def layer_norm(rows: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Rows (n, c) with mean zero and variance one, scaled and shifted. Its tangent is explicit for the same reason."""
    rows, tangent = forward_ad.unpack_dual(rows)
    result = nn.functional.layer_norm(rows, (rows.shape[1],), scale, shift, eps)
    if tangent is None:
        return result
    centred = rows - rows.mean(1, keepdim=True)
    inverse = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    unit = centred * inverse
    change = tangent - tangent.mean(1, keepdim=True) - unit * (unit * tangent).mean(1, keepdim=True)
    dual: Tensor = forward_ad.make_dual(result, change * inverse * scale)
    return dual


def _turn_into_units(rows: Tensor, factors: Tensor) -> Tensor:
    """Rows (n, k, c) normalised to length one, times factors (n, k). Rows of length zero stay zero, with zero derivatives."""
    result: Tensor = _Units.apply(rows, factors)
    return result


class _Units(TypedFunction):
    """f x / |x|, with explicit first and second derivatives: a training step needs both for a large array."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, factors: Tensor) -> Tensor:
        inverse = _inverse_length(rows)
        ctx.save_for_backward(rows, factors)
        ctx.save_for_forward(rows, factors)
        return rows * (factors * inverse).unsqueeze(-1)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        gradients: Gradients = _UnitsGradient.apply(grad, *ctx.saved_tensors)
        return gradients

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, d_factors: Tensor) -> Tensor:
        rows, factors = ctx.saved_tensors
        by_rows, _ = _UnitsGradient.apply(tangent, rows, factors)
        result: Tensor = by_rows + _Units.apply(rows, d_factors)
        return result


class _UnitsGradient(TypedFunction):
    """(f / |x|) (g - u (u.g)) and u.g, with u = x / |x|."""

    @staticmethod
    def forward(ctx: AutogradContext, grad: Tensor, rows: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        inverse = _inverse_length(rows)
        along = _dot(rows, grad) * inverse
        ctx.save_for_backward(grad, rows, factors, inverse, along)
        scale = factors * inverse
        of_rows = torch.addcmul(grad * scale.unsqueeze(-1), rows, (along * inverse * scale).unsqueeze(-1), value=-1)
        return of_rows, along

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, a: Tensor, b: Tensor) -> Gradients:
        grad, rows, factors, inverse, along = ctx.saved_tensors
        of_a = _dot(rows, a) * inverse
        both = _dot(a, grad)
        scale = factors * inverse
        of_grad = (a * scale.unsqueeze(-1)).addcmul_(rows, ((b - of_a * scale) * inverse).unsqueeze(-1))
        twice = scale * inverse
        of_rows = rows * (((3 * of_a * along - both) * twice - b * along * inverse) * inverse).unsqueeze(-1)
        of_rows.addcmul_(a, (along * twice).unsqueeze(-1), value=-1)
        of_rows.addcmul_(grad, (b * inverse - of_a * twice).unsqueeze(-1))
        return of_grad, of_rows, (both - of_a * along) * inverse


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of rows: (n, k, c), (n, k, c) -> (n, k)."""
    if a.is_cuda or is_traced(a):
        return (a * b).sum(-1)
    return torch.matmul(a.unsqueeze(-2), b.unsqueeze(-1)).squeeze(-1).squeeze(-1)


def _inverse_length(rows: Tensor) -> Tensor:
    """1 / |x| of each row; zero where it has no length."""
    squares = _dot(rows, rows)
    return torch.where(squares > 1e-24, squares.clamp(min=1e-24).rsqrt(), 0.0)
