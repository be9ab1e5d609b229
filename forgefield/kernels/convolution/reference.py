"""Reference implementation of the operators of `operators.py`, used where kernels cannot run: opaque operators that compute the
same by reference operations. Edges and shapes are common to both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from forgefield.kernels.convolution.form import plan_of_key
from forgefield.ops.convolution import gradients_of_convolution, sum_over_edges
from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.graph import EdgeGraph, Segments


@dataclass(frozen=True)
class RowEdges:
    """A graph in the form of operator arguments, with the attributes of `EdgeGraph`. pointers: of edges by destination. order:
    edges sorted by source, every edge's reverse where there are pairs; order_pointers: of these."""

    n_atoms: int
    source: Tensor
    destination: Tensor
    pointers: Tensor
    order: Tensor
    order_pointers: Tensor
    pair: Tensor | None
    pair_edge: Tensor | None

    @property
    def n_edges(self) -> int:
        return self.source.shape[0]

    @property
    def reverse(self) -> Tensor | None:
        return None if self.pair is None else self.order

    @property
    def by_destination(self) -> Segments:
        return Segments(self.destination, self.n_atoms, rows_are_sorted=True, precomputed=(None, self.pointers))

    @property
    def by_source(self) -> Segments:
        return Segments(self.source, self.n_atoms, precomputed=(self.order, self.order_pointers))


def edges_of(n_atoms: int, *lists: Tensor | None) -> EdgeGraph:
    """The graph of these lists, from `source` to `pair_edge`, with the attributes that convolutions use."""
    source, destination, pointers, order, order_pointers, pair, pair_edge = (
        None if tensor is None else tensor.contiguous() for tensor in lists
    )
    assert source is not None
    assert destination is not None
    assert pointers is not None
    assert order is not None
    assert order_pointers is not None
    graph = RowEdges(n_atoms, source, destination, pointers, order, order_pointers, pair, pair_edge)
    return cast(EdgeGraph, graph)


# ---- the operators


@torch.library.custom_op("forgefield::plain_convolve", mutates_args=())
def _convolve(
    features: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    source: Tensor,
    destination: Tensor,
    pointers: Tensor,
    order: Tensor,
    order_pointers: Tensor,
    pair: Tensor | None,
    pair_edge: Tensor | None,
    form: str,
) -> Tensor:
    plan = plan_of_key(form)
    graph = edges_of(features.shape[0], source, destination, pointers, order, order_pointers, pair, pair_edge)
    return sum_over_edges(features, _couplings(harmonics, plan), weights, graph, plan)


@torch.library.custom_op("forgefield::plain_convolve_backward", mutates_args=())
def _convolve_backward(
    grad: Tensor,
    features: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    source: Tensor,
    destination: Tensor,
    pointers: Tensor,
    order: Tensor,
    order_pointers: Tensor,
    pair: Tensor | None,
    pair_edge: Tensor | None,
    form: str,
    of_features: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = plan_of_key(form)
    graph = edges_of(features.shape[0], source, destination, pointers, order, order_pointers, pair, pair_edge)
    to_x, to_y, to_w = _gradients(grad, features, _couplings(harmonics, plan), weights, graph, plan)
    return (to_x if of_features else features.new_empty((0, plan.in_dim))), to_y, to_w


@torch.library.custom_op("forgefield::plain_convolve_double_backward", mutates_args=())
def _convolve_double_backward(
    along_features: Tensor,
    along_harmonics: Tensor,
    along_weights: Tensor,
    grad: Tensor,
    features: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    source: Tensor,
    destination: Tensor,
    pointers: Tensor,
    order: Tensor,
    order_pointers: Tensor,
    pair: Tensor | None,
    pair_edge: Tensor | None,
    form: str,
    of_features: bool,
    of_harmonics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The convolution is linear in features, harmonics and weights, so each term has the direction of one of them instead of
    its value."""
    plan = plan_of_key(form)
    graph = edges_of(features.shape[0], source, destination, pointers, order, order_pointers, pair, pair_edge)
    m, a_m = _couplings(harmonics, plan), _couplings(along_harmonics, plan, first=0.0)
    a_x = along_features if of_features else torch.zeros_like(features)
    terms = [(a_x, m, weights), (features, a_m, weights), (features, m, along_weights)]
    to_grad = torch.stack([sum_over_edges(*term, graph, plan) for term in terms]).sum(0)
    x, y, w = (_gradients(grad, *term, graph, plan) for term in terms)
    to_y = x[1] + w[1] if of_harmonics else torch.zeros_like(harmonics)
    return to_grad, y[0] + w[0], to_y, x[2] + y[2]


def _with_first_harmonic(harmonics: Tensor, first: float) -> Tensor:
    """Harmonics with their first column replaced by a number."""
    return torch.cat([torch.full_like(harmonics[:, :1], first), harmonics[:, 1:]], 1)


def _couplings(harmonics: Tensor, plan: ConvolutionPlan, first: float = 1.0) -> Tensor:
    return _with_first_harmonic(harmonics, first) @ plan.coupling_matrix().to(harmonics)


def _gradients(
    grad: Tensor, features: Tensor, couplings: Tensor, weights: Tensor, graph: EdgeGraph, plan: ConvolutionPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of features, harmonics and weights."""
    to_x, to_m, to_w = gradients_of_convolution(grad.contiguous(), features, couplings, weights, graph, plan)
    return to_x, _with_first_harmonic(to_m @ plan.coupling_matrix().to(to_m).t(), 0.0), to_w


# ---- shapes


def empty_values(features: Tensor, harmonics: Tensor, weights: Tensor, *rest: Tensor | str | None) -> Tensor:
    key = rest[-1]
    assert isinstance(key, str)
    return features.new_empty((features.shape[0], plan_of_key(key).out_dim))


def empty_cotangents(
    grad: Tensor, features: Tensor, harmonics: Tensor, weights: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    of_features = rest[-1]
    to_x = features.new_empty((features.shape[0] if of_features else 0, features.shape[1]))
    return to_x, harmonics.new_empty(harmonics.shape), weights.new_empty(weights.shape)


def empty_second(
    a_x: Tensor,
    a_y: Tensor,
    a_w: Tensor,
    grad: Tensor,
    features: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, features, harmonics, weights = (t.new_empty(t.shape) for t in (grad, features, harmonics, weights))
    return grad, features, harmonics, weights


_convolve.register_fake(empty_values)
_convolve_backward.register_fake(empty_cotangents)
_convolve_double_backward.register_fake(empty_second)
