"""The convolution as PyTorch operators: values, cotangents, and the derivatives of these, each one node of a traced graph.

`forgefield::convolve` and its derivatives are Triton operators: `make_fx` and `torch.export` treat them as single nodes,
Inductor and AOTInductor compile their kernels together with the rest of the graph. On a CPU they are computed by reference
operations (`reference.py`), with which the kernels are compared. Features, weights and outputs are rows as in the reference
convolution; the first harmonic is taken as one, and has no derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.kernels.convolution.form import Form, Kind, form_of_key
from forgefield.kernels.convolution.passes import Convolution, Motion, Radial, Rows
from forgefield.kernels.convolution.reference import (
    edges_of,
    empty_cotangents,
    empty_second,
    empty_values,
)
from forgefield.kernels.core.fields import Field, Shape
from forgefield.kernels.core.generation import Launchable, TritonFunction, launcher, operator
from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.edges.segments import sum_in_trace
from forgefield.ops.autograd import AutogradContext
from forgefield.ops.graph import EdgeGraph


def convolve_by_operator(
    features: Tensor, harmonics: Tensor, weights: Tensor, graph: EdgeGraph, form_key: str
) -> Tensor:
    """As `ops.convolution.convolve`, with harmonics (n_edges, (l_max + 1)^2) instead of couplings. Twice differentiable.

    form_key: `form.key_of_plan` of the plan.
    """
    by_source = graph.by_source
    lists = (graph.source, graph.destination, graph.by_destination.pointers, by_source.order, by_source.pointers)
    return torch.ops.forgefield.convolve(features, harmonics, weights, *lists, graph.pair, graph.pair_edge, form_key)


# ---- launches on rows


def _as_field(shape: Shape, *rows: Tensor) -> Field:
    """Rows (n_atoms, dim) of values, or of values and tangents, as a field whose layout is that of the form."""
    flat = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
    return Field(flat, rows[0].shape[0], shape)


class _RowConvolution(Convolution):
    """A convolution of rows whose launches are recorded by traces."""

    def __init__(
        self, form: Form, graph: EdgeGraph, harmonics: Tensor, weights: Tensor, *, still: bool = False
    ) -> None:
        row = torch.arange(graph.n_edges, device=graph.source.device) if graph.pair is None else graph.pair
        radial = Radial(weights.contiguous(), row.contiguous())
        super().__init__(form, graph, harmonics.contiguous(), radial, still=still)
        self.stored, self.narrow = harmonics.dtype, False
        self.of_edges: Tensor | None = None

    def launcher(self, kernel: TritonFunction) -> Launchable:
        return launcher(kernel)

    def _sum(self, rows: Tensor, to_x: Field | None, slot: int, first: int = 0) -> None:
        self.of_edges = rows  # summed as rows, not into a field

    def summed(self) -> Tensor:
        """(n_atoms, dim): the cotangents of features of every edge from the last pass, summed."""
        assert self.of_edges is not None
        by_source = self.graph.by_source
        return sum_in_trace(self.of_edges, by_source.order, by_source.pointers)

    def shared(self, of_edges: Tensor) -> Tensor:
        """Cotangents of rows of weights, which an edge and its reverse may share, from those of single edges."""
        if self.graph.pair_edge is None:
            return of_edges
        back = self.graph.by_source.order.index_select(0, self.graph.pair_edge)
        return of_edges.index_select(0, self.graph.pair_edge) + of_edges.index_select(0, back)

    def output(self, like: Tensor) -> Field:
        return _as_field(self.form.outputs, like.new_empty((self.graph.n_atoms, self.form.outputs.dim)))

    def _kind(self, **flags: bool) -> Kind:
        return Kind(**flags)  # independent of sizes, which may be symbolic

    def _one_by_one(self, kind: Kind) -> bool:
        return False

    def geometry(self, like: Tensor) -> Tensor:
        """Uninitialised cotangents of harmonics, separate for every program."""
        return like.new_empty((self.form.n_chunks, self.graph.n_edges, self.form.n_harmonics))


# ---- operators


@operator("forgefield::convolve")
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
    """(n_atoms, plan.out_dim)."""
    lists = (source, destination, pointers, order, order_pointers, pair, pair_edge)
    if not can_launch(features):
        return torch.ops.forgefield.plain_convolve(features, harmonics, weights, *lists, form)
    graph = edges_of(features.shape[0], *lists)
    convolution = _RowConvolution(form_of_key(form), graph, harmonics, weights)
    out = convolution.output(features)
    convolution.values(_as_field(convolution.form.features, features), out)
    return out.flat


@operator("forgefield::convolve_backward")
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
    """Cotangents of features, harmonics and weights from those of the output, (n_atoms, plan.out_dim). of_features: whether the
    first are needed; otherwise they have no rows."""
    lists = (source, destination, pointers, order, order_pointers, pair, pair_edge)
    if not can_launch(features):
        arguments = (grad, features, harmonics, weights, *lists, form, of_features)
        return torch.ops.forgefield.plain_convolve_backward(*arguments)
    graph = edges_of(features.shape[0], *lists)
    convolution = _RowConvolution(form_of_key(form), graph, harmonics, weights)
    x = _as_field(convolution.form.features, features)
    parts = convolution.geometry(features)
    of_w = convolution.forces(x, _as_field(convolution.form.outputs, grad), x if of_features else None, parts)
    to_x = convolution.summed() if of_features else features.new_empty((0, features.shape[1]))
    return to_x, parts.sum(0), convolution.shared(of_w)


@operator("forgefield::convolve_double_backward")
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
    """Cotangents of grad, features, harmonics and weights from those of the results of `convolve_backward`, which are a
    direction for features, harmonics and weights. of_features: whether features have a direction. of_harmonics: whether
    cotangents of harmonics are needed; otherwise they are zero."""
    lists = (source, destination, pointers, order, order_pointers, pair, pair_edge)
    if not can_launch(features):
        along = (along_features, along_harmonics, along_weights)
        arguments = (*along, grad, features, harmonics, weights, *lists, form, of_features, of_harmonics)
        return torch.ops.forgefield.plain_convolve_double_backward(*arguments)
    graph = edges_of(features.shape[0], *lists)
    along_features = along_features if of_features else torch.zeros_like(features)
    convolution = _RowConvolution(form_of_key(form), graph, harmonics, weights, still=not of_features)
    form_of_rows = convolution.form
    x = _as_field(form_of_rows.features, features, along_features)
    motion = Motion(along_harmonics.contiguous(), weights=along_weights.contiguous())
    out = convolution.output(features)
    convolution.tangents(x, out, motion)
    to_grad = out.flat
    of_edges: list[Rows] = []
    convolution.back(x, _as_field(form_of_rows.outputs, torch.zeros_like(grad), grad), x, motion, of_edges.append)
    to_x, to_w = convolution.summed(), convolution.shared(of_edges[0].of_w)
    if not of_harmonics:
        return to_grad, to_x, torch.zeros_like(harmonics), to_w
    to_y = torch.zeros_like(harmonics)
    g = _as_field(form_of_rows.outputs, grad)
    for moving, rows in ((features, along_weights), (along_features, weights)):  # linear in each
        convolution_of_term = _RowConvolution(form_of_key(form), graph, harmonics, rows)
        parts = convolution_of_term.geometry(features)
        convolution_of_term.forces(_as_field(form_of_rows.features, moving), g, None, parts)
        to_y = to_y + parts.sum(0)
    return to_grad, to_x, to_y, to_w


# ---- shapes and derivatives


_convolve.register_fake(empty_values)
_convolve_backward.register_fake(empty_cotangents)
_convolve_double_backward.register_fake(empty_second)


N_LISTS = 7
"""Number of tensors of edges in the arguments of every operator, after the rows and before the key of the form."""


def _save_inputs(ctx: AutogradContext, inputs: tuple[object, ...], output: object) -> None:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
    ctx.others = [value for value in inputs if not isinstance(value, Tensor)]
    ctx.save_for_backward(*tensors)


def _saved_inputs(ctx: AutogradContext) -> list[Any]:
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]


def _first_derivative(ctx: AutogradContext, grad: Tensor) -> tuple[Any, ...]:
    of_features = ctx.needs_input_grad[0]
    to_x, to_y, to_w = torch.ops.forgefield.convolve_backward(grad, *_saved_inputs(ctx), of_features)
    return to_x if of_features else None, to_y, to_w, *(None for _ in range(N_LISTS + 1))


def _second_derivative(ctx: AutogradContext, a_x: Tensor, a_y: Tensor, a_w: Tensor) -> tuple[Any, ...]:
    arguments = (a_x, a_y, a_w, *_saved_inputs(ctx), ctx.needs_input_grad[2])
    cotangents = torch.ops.forgefield.convolve_double_backward(*arguments)
    return *cotangents, *(None for _ in range(N_LISTS + 2))


def _no_third_derivative(ctx: AutogradContext, *cotangents: Tensor) -> None:
    raise ForgefieldError(
        "the convolution's kernels have no third derivative; compute it inside "
        "forgefield.ops.execution.execution(operators=False)"
    )


_convolve.register_autograd(_first_derivative, setup_context=_save_inputs)
_convolve_backward.register_autograd(_second_derivative, setup_context=_save_inputs)
_convolve_double_backward.register_autograd(_no_third_derivative)
