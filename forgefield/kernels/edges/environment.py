"""Sums of weighted harmonics over the edges of atoms, and their adjoint, as operators of PyTorch with kernels inside.

`forgefield::environment` and `forgefield::project` are each accompanied by an operator for their cotangents and one for the
derivatives of these. Like those of the convolution they are single nodes of a trace, whose kernels Inductor and AOTInductor
compile. Nothing of the size of edges times components times channels is ever stored. On a CPU they are computed by
`environment_reference.py`, as are derivatives beyond the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.generation import launcher, mark_of_code, module_from, operator
from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.cpu.environment import CEnvironment
from forgefield.kernels.edges import environment_source
from forgefield.kernels.edges.environment_reference import ReferenceEdges
from forgefield.kernels.edges.environment_source import ARGUMENTS, EdgePass, write_pass
from forgefield.ops.graph import GradientSwitch, Segments, is_traced


def environment_by_operator(
    weights: Tensor,
    harmonics: Tensor,
    edges: Segments,
    *,
    shared: bool,
    switch: GradientSwitch | None = None,
    in_c: bool = False,
) -> Tensor:
    """(components, n_atoms, channels): sums over the edges of each atom of harmonics times weights.

    weights: (n_edges, degrees x channels) or, shared by all degrees, (n_edges, channels). harmonics: (n_edges, (l_max + 1)^2),
    the first of which is taken as one. edges: those of each atom, sorted. switch: once it is off, harmonics get no gradient.
    in_c: by C code on a CPU.
    """
    return _Values.apply(_Form("environment", edges, shared, switch, in_c), weights, harmonics)


def project_by_operator(
    rows: Tensor,
    weights: Tensor,
    harmonics: Tensor,
    edges: Segments,
    *,
    shared: bool,
    switch: GradientSwitch | None = None,
    in_c: bool = False,
) -> Tensor:
    """(n_edges, channels): rows (components, n_atoms, channels) of an edge's atom dotted with its weighted harmonics."""
    return _Values.apply(_Form("project", edges, shared, switch, in_c), rows, weights, harmonics)


# ---- derivatives


@dataclass(frozen=True)
class _Form:
    """Name of the operator, and the edges it sums over. in_c: computed by C code on a CPU."""

    name: str
    edges: Segments
    shared: bool
    switch: GradientSwitch | None
    in_c: bool = False

    def __call__(self, derivative: str, *inputs: Tensor | bool) -> Any:
        """Call an operator. inputs: tensors, and for derivatives whether cotangents of harmonics are computed."""
        tensors = [part.contiguous() if isinstance(part, Tensor) else part for part in inputs]
        if self.in_c:
            return CEnvironment(self.edges, self.shared)(self.name + derivative, *tensors)
        operation = getattr(torch.ops.forgefield, self.name + derivative)
        return operation(*tensors, self.edges.index, self.edges.pointers, self.shared, mark())

    def wants_harmonics(self, needed: bool) -> bool:
        return needed and not (self.switch is not None and self.switch.off)

    def reference_second(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        reference = ReferenceEdges(self.edges.index, self.edges.count, inputs[-1].shape[1], self.shared)
        if self.name == "project":
            return reference.project_double_backward(*inputs)
        return reference.environment_double_backward(*inputs)


class _Values(torch.autograd.Function):
    """Values of a form of tensors, the last of which are the harmonics."""

    @staticmethod
    def forward(ctx, form: _Form, *inputs: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*inputs)
        return form("", *inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        of_harmonics = ctx.form.wants_harmonics(ctx.needs_input_grad[-1])
        return None, *_Cotangents.apply(ctx.form, of_harmonics, grad, *ctx.saved_tensors)


class _Cotangents(torch.autograd.Function):
    """Cotangents of the inputs of the values; None for harmonics where these are not requested."""

    @staticmethod
    def forward(ctx, form: _Form, of_harmonics: bool, grad: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.form = form
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, *inputs)
        *cotangents, to_y = form("_backward", grad, *inputs, of_harmonics)
        return *cotangents, to_y if of_harmonics else None

    @staticmethod
    def backward(ctx, *along: Tensor | None):
        _, *inputs = ctx.saved_tensors
        directions = [
            torch.zeros_like(tensor) if direction is None else direction for direction, tensor in zip(along, inputs)
        ]
        of_harmonics = ctx.form.wants_harmonics(ctx.needs_input_grad[-1])
        return None, None, *_Second.apply(ctx.form, of_harmonics, *directions, *ctx.saved_tensors)


class _Second(torch.autograd.Function):
    """Cotangents of the inputs of `_Cotangents`, along directions of its outputs."""

    @staticmethod
    def forward(ctx, form: _Form, of_harmonics: bool, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.form, ctx.of_harmonics = form, of_harmonics
        ctx.save_for_backward(*inputs)
        *cotangents, to_y = form("_double_backward", *inputs, of_harmonics)
        return *cotangents, to_y if of_harmonics else None

    @staticmethod
    def backward(ctx, *cotangents: Tensor | None):
        """By reference operations, which can be differentiated any number of times."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [tensor.view_as(tensor) for tensor in ctx.saved_tensors]  # one may have been computed from another
            pairs = [
                (output, along)
                for output, along in zip(ctx.form.reference_second(*inputs), cotangents)
                if along is not None and output.requires_grad
            ]
            outputs, along = [output for output, _ in pairs], [along for _, along in pairs]
            differentiable = [tensor for tensor in inputs if tensor.requires_grad]
            gradients = iter(torch.autograd.grad(outputs, differentiable, along, create_graph=again, allow_unused=True))
        return None, None, *(next(gradients) if tensor.requires_grad else None for tensor in inputs)


# ---- launches


def edge_pass(
    projection: bool, order: int, of_harmonics: bool, weights: Tensor, harmonics: Tensor, shared: bool
) -> EdgePass:
    """The kernel for tensors of these shapes. Rows and sums of an atom are held in registers, so that a program has fewer
    channels where components are many."""
    l_max = isqrt(harmonics.shape[1]) - 1
    channels = weights.shape[1] // (1 if shared else l_max + 1)
    tile = 64 if channels > 32 and l_max <= 2 and weights.dtype == torch.float32 else 32
    tile = max(tile, 1 << (harmonics.shape[1] - 1).bit_length())  # each lane writes the cotangent of a harmonic
    return EdgePass(projection, order, of_harmonics, l_max, channels, shared, tile)


@lru_cache(maxsize=256)
def edge_kernel(of: EdgePass) -> Any:
    """The Triton function; compiled when it is first launched."""
    return getattr(module_from(write_pass(of)), of.name)


def launch(of: EdgePass, **tensors: Tensor) -> None:
    """Launch a kernel. tensors: by their names in `ARGUMENTS`."""
    y, pointers = tensors["y"], tensors["pointers"]
    n_atoms = pointers.shape[0] - 1
    if not is_traced(pointers) and n_atoms == 0:
        return
    arguments = ARGUMENTS.bind(of.name, {**tensors, "n_edges": y.shape[0]}, unused=y, used=of.arguments)
    kernel = launcher(edge_kernel(of))
    kernel[(n_atoms, of.n_chunks)](**arguments, num_warps=of.edges, num_stages=1)


def _parts(of: EdgePass, harmonics: Tensor) -> Tensor:
    """Uninitialised cotangents of harmonics, separate for every program."""
    return harmonics.new_empty((of.n_chunks, harmonics.shape[0] if of.harmonics else 0, harmonics.shape[1]))


def _added(of: EdgePass, parts: Tensor) -> Tensor:
    return parts.view(parts.shape[1:]) if of.n_chunks == 1 else parts.sum(0)


def _room(of: EdgePass, weights: Tensor, pointers: Tensor) -> Tensor:
    """Uninitialised sums over the edges of each atom."""
    return weights.new_empty((of.n_harmonics, pointers.shape[0] - 1, of.channels))


def mark() -> str:
    """The argument `code` of the operators."""
    return mark_of_code(environment_source, edge_pass)


# ---- the operators


def _reference(destination: Tensor, pointers: Tensor, harmonics: Tensor, shared: bool) -> ReferenceEdges:
    return ReferenceEdges(destination, pointers.shape[0] - 1, harmonics.shape[1], shared)


@operator("forgefield::environment")
def _environment(
    weights: Tensor, harmonics: Tensor, destination: Tensor, pointers: Tensor, shared: bool, code: str
) -> Tensor:
    if not can_launch(weights):
        return _reference(destination, pointers, harmonics, shared).environment(weights, harmonics)
    of = edge_pass(False, 0, False, weights, harmonics, shared)
    out = _room(of, weights, pointers)
    launch(of, w=weights, y=harmonics, out=out, pointers=pointers)
    return out


@operator("forgefield::environment_backward")
def _environment_backward(
    grad: Tensor,
    weights: Tensor,
    harmonics: Tensor,
    of_harmonics: bool,
    destination: Tensor,
    pointers: Tensor,
    shared: bool,
    code: str,
) -> tuple[Tensor, Tensor]:
    """Cotangents of weights and harmonics; the latter have no rows where they are not requested."""
    if not can_launch(weights):
        reference = _reference(destination, pointers, harmonics, shared)
        return _requested(reference.environment_backward(grad, weights, harmonics), of_harmonics)
    of = edge_pass(False, 1, of_harmonics, weights, harmonics, shared)
    to_w, to_y = torch.empty_like(weights), _parts(of, harmonics)
    launch(of, q=grad, w=weights, y=harmonics, to_w=to_w, to_y=to_y, pointers=pointers)
    return to_w, _added(of, to_y)


@operator("forgefield::environment_double_backward")
def _environment_double_backward(
    along_weights: Tensor,
    along_harmonics: Tensor,
    grad: Tensor,
    weights: Tensor,
    harmonics: Tensor,
    of_harmonics: bool,
    destination: Tensor,
    pointers: Tensor,
    shared: bool,
    code: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of grad, weights and harmonics."""
    if not can_launch(weights):
        reference = _reference(destination, pointers, harmonics, shared)
        inputs = (along_weights, along_harmonics, grad, weights, harmonics)
        return _requested(reference.environment_double_backward(*inputs), of_harmonics)
    of = edge_pass(False, 2, of_harmonics, weights, harmonics, shared)
    out, to_w, to_y = _room(of, weights, pointers), torch.empty_like(weights), _parts(of, harmonics)
    tensors = {"aw": along_weights, "ay": along_harmonics, "q": grad, "w": weights, "y": harmonics}
    launch(of, **tensors, out=out, to_w=to_w, to_y=to_y, pointers=pointers)
    return out, to_w, _added(of, to_y)


@operator("forgefield::project")
def _project(
    rows: Tensor, weights: Tensor, harmonics: Tensor, destination: Tensor, pointers: Tensor, shared: bool, code: str
) -> Tensor:
    if not can_launch(weights):
        return _reference(destination, pointers, harmonics, shared).project(rows, weights, harmonics)
    of = edge_pass(True, 0, False, weights, harmonics, shared)
    out = weights.new_empty((weights.shape[0], of.channels))
    launch(of, q=rows, w=weights, y=harmonics, to_p=out, pointers=pointers)
    return out


@operator("forgefield::project_backward")
def _project_backward(
    grad: Tensor,
    rows: Tensor,
    weights: Tensor,
    harmonics: Tensor,
    of_harmonics: bool,
    destination: Tensor,
    pointers: Tensor,
    shared: bool,
    code: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of rows, weights and harmonics."""
    if not can_launch(weights):
        reference = _reference(destination, pointers, harmonics, shared)
        return _requested(reference.project_backward(grad, rows, weights, harmonics), of_harmonics)
    of = edge_pass(True, 1, of_harmonics, weights, harmonics, shared)
    out, to_w, to_y = torch.empty_like(rows), torch.empty_like(weights), _parts(of, harmonics)
    launch(of, p=grad, q=rows, w=weights, y=harmonics, out=out, to_w=to_w, to_y=to_y, pointers=pointers)
    return out, to_w, _added(of, to_y)


@operator("forgefield::project_double_backward")
def _project_double_backward(
    along_rows: Tensor,
    along_weights: Tensor,
    along_harmonics: Tensor,
    grad: Tensor,
    rows: Tensor,
    weights: Tensor,
    harmonics: Tensor,
    of_harmonics: bool,
    destination: Tensor,
    pointers: Tensor,
    shared: bool,
    code: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of grad, rows, weights and harmonics."""
    if not can_launch(weights):
        reference = _reference(destination, pointers, harmonics, shared)
        inputs = (along_rows, along_weights, along_harmonics, grad, rows, weights, harmonics)
        return _requested(reference.project_double_backward(*inputs), of_harmonics)
    of = edge_pass(True, 2, of_harmonics, weights, harmonics, shared)
    to_p, out, to_w = (torch.empty_like(tensor) for tensor in (grad, rows, weights))
    to_y = _parts(of, harmonics)
    tensors = {"aq": along_rows, "aw": along_weights, "ay": along_harmonics}
    tensors |= {"p": grad, "q": rows, "w": weights, "y": harmonics}
    launch(of, **tensors, to_p=to_p, out=out, to_w=to_w, to_y=to_y, pointers=pointers)
    return to_p, out, to_w, _added(of, to_y)


def _requested(cotangents: tuple[Tensor, ...], of_harmonics: bool) -> Any:
    """All cotangents; those of harmonics, which are the last, without rows where they are not requested."""
    *others, to_y = cotangents
    return *others, to_y if of_harmonics else to_y.new_empty((0, to_y.shape[1]))


# ---- shapes


@_environment.register_fake
def _(weights: Tensor, harmonics: Tensor, destination: Tensor, pointers: Tensor, shared: bool, code: str) -> Tensor:
    return _room(edge_pass(False, 0, False, weights, harmonics, shared), weights, pointers)


@_project.register_fake
def _(rows: Tensor, weights: Tensor, *rest: object) -> Tensor:
    return weights.new_empty((weights.shape[0], rows.shape[2]))


def _empty(tensors: tuple[Tensor, ...], of_harmonics: bool) -> Any:
    """Uninitialised tensors like these, the last of which are harmonics."""
    return _requested(tuple(tensor.new_empty(tensor.shape) for tensor in tensors), of_harmonics)


_environment_backward.register_fake(lambda grad, w, y, of_harmonics, *rest: _empty((w, y), of_harmonics))
_environment_double_backward.register_fake(lambda aw, ay, *others: _empty(others[:3], others[3]))
_project_backward.register_fake(lambda grad, q, w, y, of_harmonics, *rest: _empty((q, w, y), of_harmonics))
_project_double_backward.register_fake(lambda aq, aw, ay, *others: _empty(others[:4], others[4]))
