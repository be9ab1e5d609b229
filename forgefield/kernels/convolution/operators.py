"""The convolution as operators of torch: values, cotangents, and the derivatives of these, each one node of a traced graph.

`forgefield::convolve` and what it is differentiated by are Triton operators: `make_fx` and `torch.export` keep them whole,
Inductor and AOTInductor look inside and compile the kernels with everything around them. On a CPU each is computed by plain
operations (`plain_operators.py`), which are also what the kernels are compared with. Features, weights and outputs are the rows
of the plain convolution; the first harmonic is one, whatever it is given as, and has no derivative.
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
from forgefield.kernels.core.generation import launcher, operator
from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.edges.segments import sum_in_trace
from forgefield.ops.graph import EdgeGraph


def convolve_by_operator(
    features: Tensor, harmonics: Tensor, weights: Tensor, graph: EdgeGraph, form_key: str
) -> Tensor:
    """As `ops.convolution.convolve`, of harmonics (n_edges, (l_max + 1)^2) in place of couplings. Twice differentiable.

    form_key: what `form_key.key_of_plan` says of the plan.
    """
    by_source = graph.by_source
    lists = (graph.source, graph.destination, graph.by_destination.pointers, by_source.order, by_source.pointers)
    return torch.ops.forgefield.convolve(features, harmonics, weights, *lists, graph.pair, graph.pair_edge, form_key)


# ---- launches on rows


def _held(shape: Shape, *rows: Tensor) -> Field:
    """Rows (n_atoms, dim) in the place of a field, which is read as the form says; of values, or of values and tangents."""
    flat = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
    return Field(flat, rows[0].shape[0], shape)


class _OverRows(Convolution):
    """Launches that a trace holds, of features and cotangents as rows."""

    def __init__(
        self, form: Form, graph: EdgeGraph, harmonics: Tensor, weights: Tensor, *, still: bool = False
    ) -> None:
        row = torch.arange(graph.n_edges, device=graph.source.device) if graph.pair is None else graph.pair
        radial = Radial(weights.contiguous(), row.contiguous())
        super().__init__(form, graph, harmonics.contiguous(), radial, still=still)
        self.stored, self.narrow = harmonics.dtype, False
        self.of_edges: Tensor | None = None

    def launcher(self, kernel: Any) -> Any:
        return launcher(kernel)

    def _sum(self, rows: Tensor, to_x: Field | None, place: int, first: int = 0) -> None:
        self.of_edges = rows  # summed as rows, not into a field

    def summed(self) -> Tensor:
        """(n_atoms, dim): the cotangents of features that the last pass has left for every edge."""
        assert self.of_edges is not None
        by_source = self.graph.by_source
        return sum_in_trace(self.of_edges, by_source.order, by_source.pointers)

    def shared(self, of_edges: Tensor) -> Tensor:
        """Cotangents of rows of weights, which an edge and its reverse may share, from those of every edge."""
        if self.graph.pair_edge is None:
            return of_edges
        back = self.graph.by_source.order.index_select(0, self.graph.pair_edge)
        return of_edges.index_select(0, self.graph.pair_edge) + of_edges.index_select(0, back)

    def output(self, of: Tensor) -> Field:
        return _held(self.form.outputs, of.new_empty((self.graph.n_atoms, self.form.outputs.dim)))

    def _kind(self, **flags: bool) -> Kind:
        return Kind(**flags)  # whatever the sizes, which may be symbols

    def _one_by_one(self, kind: Kind) -> bool:
        return False

    def geometry(self, of: Tensor) -> Tensor:
        """Room for cotangents of harmonics, of every program for itself."""
        return of.new_empty((self.form.n_chunks, self.graph.n_edges, self.form.n_harmonics))


# ---- what the operators compute


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
    convolution = _OverRows(form_of_key(form), graph, harmonics, weights)
    out = convolution.output(features)
    convolution.values(_held(convolution.form.features, features), out)
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
    first are wanted; they have no rows otherwise."""
    lists = (source, destination, pointers, order, order_pointers, pair, pair_edge)
    if not can_launch(features):
        given = (grad, features, harmonics, weights, *lists, form, of_features)
        return torch.ops.forgefield.plain_convolve_backward(*given)
    graph = edges_of(features.shape[0], *lists)
    convolution = _OverRows(form_of_key(form), graph, harmonics, weights)
    x = _held(convolution.form.features, features)
    parts = convolution.geometry(features)
    of_w = convolution.forces(x, _held(convolution.form.outputs, grad), x if of_features else None, parts)
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
    """Cotangents of grad, features, harmonics and weights from those of what `convolve_backward` gives, which are a direction
    for features, harmonics and weights. of_features: whether features move. of_harmonics: whether cotangents of
    harmonics are wanted; they are zero otherwise."""
    lists = (source, destination, pointers, order, order_pointers, pair, pair_edge)
    if not can_launch(features):
        along = (along_features, along_harmonics, along_weights)
        given = (*along, grad, features, harmonics, weights, *lists, form, of_features, of_harmonics)
        return torch.ops.forgefield.plain_convolve_double_backward(*given)
    graph = edges_of(features.shape[0], *lists)
    along_features = along_features if of_features else torch.zeros_like(features)
    convolution = _OverRows(form_of_key(form), graph, harmonics, weights, still=not of_features)
    form_of_rows = convolution.form
    x = _held(form_of_rows.features, features, along_features)
    motion = Motion(along_harmonics.contiguous(), weights=along_weights.contiguous())
    out = convolution.output(features)
    convolution.tangents(x, out, motion)
    to_grad = out.flat
    of_edges: list[Rows] = []
    convolution.back(x, _held(form_of_rows.outputs, torch.zeros_like(grad), grad), x, motion, of_edges.append)
    to_x, to_w = convolution.summed(), convolution.shared(of_edges[0].of_w)
    if not of_harmonics:
        return to_grad, to_x, torch.zeros_like(harmonics), to_w
    to_y = torch.zeros_like(harmonics)
    g = _held(form_of_rows.outputs, grad)
    for moving, rows in ((features, along_weights), (along_features, weights)):  # linear in each
        part = _OverRows(form_of_key(form), graph, harmonics, rows)
        parts = part.geometry(features)
        part.forces(_held(form_of_rows.features, moving), g, None, parts)
        to_y = to_y + parts.sum(0)
    return to_grad, to_x, to_y, to_w


# ---- shapes, and which operator is the derivative of which


_convolve.register_fake(empty_values)
_convolve_backward.register_fake(empty_cotangents)
_convolve_double_backward.register_fake(empty_second)


N_LISTS = 7
"""Tensors of edges that every operator is given, behind rows and before the key of the form."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    ctx.where = [isinstance(value, Tensor) for value in inputs]
    ctx.others = [value for value in inputs if not isinstance(value, Tensor)]
    ctx.save_for_backward(*tensors)


def _kept(ctx: Any) -> list[Any]:
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(tensors) if is_tensor else next(others) for is_tensor in ctx.where]


def _first_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    of_features = ctx.needs_input_grad[0]
    to_x, to_y, to_w = torch.ops.forgefield.convolve_backward(grad, *_kept(ctx), of_features)
    return to_x if of_features else None, to_y, to_w, *(None for _ in range(N_LISTS + 1))


def _second_derivative(ctx: Any, a_x: Tensor, a_y: Tensor, a_w: Tensor) -> tuple[Any, ...]:
    given = (a_x, a_y, a_w, *_kept(ctx), ctx.needs_input_grad[2])
    found = torch.ops.forgefield.convolve_double_backward(*given)
    return *found, *(None for _ in range(N_LISTS + 2))


def _no_third_derivative(ctx: Any, *cotangents: Tensor) -> None:
    raise ForgefieldError(
        "the convolution's kernels have no third derivative; compute it inside "
        "forgefield.ops.execution.execution(operators=False)"
    )


_convolve.register_autograd(_first_derivative, setup_context=_keep)
_convolve_backward.register_autograd(_second_derivative, setup_context=_keep)
_convolve_double_backward.register_autograd(_no_third_derivative)
