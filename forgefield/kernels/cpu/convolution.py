"""The equivariant convolution on a CPU by compiled C code (`convolution_source.py`): the same function of features, harmonics
and weights as `forgefield.ops.convolution.convolve`, twice differentiable in reverse mode and once in forward mode.

It is used wherever tensors are on a CPU and a C compiler is available, unless it is excluded with `execution(c_code=0)` or
`execution(operators=False)`. Without a compiler, PyTorch's operations compute the same, several times slower; this is logged
once. Traces and compiled engines use PyTorch's operations.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forgefield.kernels.cpu.compiler import CompilerUnavailable, find_compiler, load_c
from forgefield.kernels.cpu.convolution_source import convolution_source, count_couplings
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.execution import C_CONVOLUTIONS, current, requested_operators
from forgefield.ops.graph import EdgeGraph, GradientSwitch

_LOG = logging.getLogger(__name__)
CFunction = Callable[..., object]
REAL = {torch.float32: "float", torch.float64: "double"}
MAX_COUPLINGS = 4000
"""Plans with more couplings use PyTorch's operations: their code would take minutes to compile."""


def can_use_c() -> bool:
    """Whether a C compiler is available; the first time that there is none, this is logged."""
    reason = _why_no_compiler()
    if reason is not None:
        _log_once(reason)
    return reason is None


@cache
def _why_no_compiler() -> str | None:
    try:
        find_compiler()
        load_c("int forgefield_test(void) { return 1; }\n")
    except CompilerUnavailable as error:
        return str(error)
    return None


@cache
def _log_once(reason: str) -> None:
    _LOG.warning(
        "Convolutions on the CPU use PyTorch's operations, which are several times slower than compiled code, because there is "
        "no working C compiler: %s. Install one, such as gcc (apt install gcc, conda install gcc), or name it in $CC.",
        reason,
    )


def use_c(x: Tensor, plan: ConvolutionPlan) -> bool:
    """Whether the convolution of x is computed by compiled C code."""
    return runs_on_cpu(x) and current().c_code >= C_CONVOLUTIONS and _is_small_enough(plan) and can_use_c()


def runs_on_cpu(x: Tensor) -> bool:
    """Whether C code can be called with x: a tensor on a CPU, while nothing traces or counts operations."""
    return (
        x.device.type == "cpu"
        and x.dtype in REAL
        and requested_operators() is not False
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


@lru_cache(maxsize=256)
def _is_small_enough(plan: ConvolutionPlan) -> bool:
    return count_couplings(plan) <= MAX_COUPLINGS


def convolve_by_c(
    features: Tensor,
    harmonics: Tensor,
    couplings: Tensor,
    weights: Tensor,
    graph: EdgeGraph,
    plan: ConvolutionPlan,
    switch: GradientSwitch | None,
) -> Tensor:
    """(n_atoms, plan.out_dim), as `ops.convolution.convolve`.

    features: (n_atoms, plan.in_dim). harmonics: (n_edges, (l_max + 1)^2), the first of which is one.
    couplings: harmonics times `plan.coupling_matrix()`, without a gradient: gradients are those of the harmonics.
    weights: (n_edges, plan.n_weights), or one row per pair where `graph.pair` is set.
    """
    code = CConvolution.of(plan, features.dtype)
    result: Tensor = _Convolution.apply(
        features, harmonics, couplings, weights, graph, code, switch or GradientSwitch()
    )
    return result


class CConvolution:
    """The compiled passes of one plan."""

    def __init__(self, plan: ConvolutionPlan, dtype: torch.dtype) -> None:
        self.plan = plan
        self.library = load_c(convolution_source(plan, REAL[dtype]))
        matrix = plan.coupling_matrix().to(dtype)
        matrix[0] = 0.0  # the first harmonic is constant
        self.tangent_matrix = matrix
        """((l_max + 1)^2, n_couplings): tangents of harmonics times this are tangents of couplings."""

    @staticmethod
    @lru_cache(maxsize=256)
    def of(plan: ConvolutionPlan, dtype: torch.dtype) -> CConvolution:
        """Compiled when it is first used."""
        return CConvolution(plan, dtype)

    def values(self, x: Tensor, m: Tensor, w: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_atoms, out_dim)."""
        return self._forward(self.library.values, [x, m, w], graph)

    def tangents(self, x: Tensor, dx: Tensor, m: Tensor, dm: Tensor, w: Tensor, dw: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_atoms, out_dim): the derivative of `values` along (dx, dm, dw)."""
        return self._forward(self.library.tangents, [x, dx, m, dm, w, dw], graph)

    def gradients(
        self, g: Tensor, x: Tensor, m: Tensor, w: Tensor, graph: EdgeGraph, *, harmonics: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of sum(g * values) in features, harmonics (None unless requested) and weights."""
        function = self.library.gradients_harmonics if harmonics else self.library.gradients
        return self._backward(function, [g, x, m, w], w, graph, harmonics)

    def second(
        self,
        g: Tensor,
        x: Tensor,
        dx: Tensor,
        m: Tensor,
        dm: Tensor,
        w: Tensor,
        dw: Tensor,
        graph: EdgeGraph,
        *,
        harmonics: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of sum(g * tangents) in features, harmonics (None unless requested) and weights."""
        function = self.library.second_harmonics if harmonics else self.library.second
        return self._backward(function, [g, x, dx, m, dm, w, dw], w, graph, harmonics)

    def _forward(self, function: CFunction, inputs: list[Tensor], graph: EdgeGraph) -> Tensor:
        out = inputs[0].new_empty(graph.n_atoms, self.plan.out_dim)
        call(function, *inputs, graph.source, graph.by_destination.pointers, graph.pair, graph.n_atoms, out)
        return out

    def _backward(
        self, function: CFunction, inputs: list[Tensor], w: Tensor, graph: EdgeGraph, harmonics: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        to_x = w.new_empty(graph.n_atoms, self.plan.in_dim)
        of_edges = w.new_empty(graph.n_edges, self.plan.n_weights)
        to_y = w.new_empty(graph.n_edges, (self.plan.l_max + 1) ** 2) if harmonics else None
        by_source = graph.by_source
        lists = (graph.destination, by_source.order, by_source.pointers, graph.pair)
        call(function, *inputs, *lists, graph.n_atoms, to_x, of_edges, to_y)
        if graph.pair_edge is None:
            return to_x, to_y, of_edges
        to_w = torch.empty_like(w)
        call(self.library.pair_sums, of_edges, graph.pair_edge, graph.reverse, graph.pair_edge.shape[0], to_w)
        return to_x, to_y, to_w


def call(function: CFunction, *arguments: Tensor | int | None) -> None:
    """Call a function of the library with tensors, sizes and, last, the number of threads."""
    tensors = [value.contiguous() if isinstance(value, Tensor) else value for value in arguments]
    function(
        *(ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else _number(v) for v in tensors),
        ctypes.c_int(torch.get_num_threads()),
    )


def _number(value: int | None) -> ctypes.c_void_p | ctypes.c_int64:
    return ctypes.c_void_p(None) if value is None else ctypes.c_int64(value)


class _Convolution(TypedFunction):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        features: Tensor,
        harmonics: Tensor,
        couplings: Tensor,
        weights: Tensor,
        graph: EdgeGraph,
        code: CConvolution,
        switch: GradientSwitch,
    ) -> Tensor:
        ctx.save_for_backward(features, harmonics, couplings, weights)
        ctx.save_for_forward(features, harmonics, couplings, weights)
        ctx.structure = (graph, code, switch)
        return code.values(features, couplings, weights, graph)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        graph, code, switch = ctx.structure
        if not ctx.needs_input_grad[1]:
            switch = _OFF
        to_x, to_y, to_w = _Gradients.apply(grad, *ctx.saved_tensors, graph, code, switch)
        return to_x, to_y, None, to_w, None, None, None

    @staticmethod
    def jvp(
        ctx: AutogradContext,
        d_features: Tensor,
        d_harmonics: Tensor,
        d_couplings: None,
        d_weights: Tensor,
        graph: None,
        code: None,
        switch: None,
    ) -> Tensor:
        x, y, m, w = ctx.saved_tensors
        graph_, code_, _ = ctx.structure
        tangents: Tensor = _Tangents.apply(x, d_features, y, d_harmonics, m, w, d_weights, graph_, code_)
        return tangents


class _Gradients(TypedFunction):
    """Gradients of `_Convolution` in features, harmonics and weights, themselves differentiable once."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        grad: Tensor,
        features: Tensor,
        harmonics: Tensor,
        couplings: Tensor,
        weights: Tensor,
        graph: EdgeGraph,
        code: CConvolution,
        switch: GradientSwitch,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.save_for_backward(grad, features, couplings, weights, harmonics)
        ctx.structure = (graph, code, switch)
        ctx.set_materialize_grads(False)
        return code.gradients(grad, features, couplings, weights, graph, harmonics=not switch.off)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: AutogradContext, along_x: Tensor | None, along_y: Tensor | None, along_w: Tensor | None
    ) -> Gradients:
        graph, code, switch = ctx.structure
        g, x, m, w, _ = ctx.saved_tensors
        dx = torch.zeros_like(x) if along_x is None else along_x
        dw = torch.zeros_like(w) if along_w is None else along_w
        dm = torch.zeros_like(m) if along_y is None else along_y @ code.tangent_matrix
        to_g = code.tangents(x, dx, m, dm, w, dw, graph)
        to_x, to_y, to_w = code.second(g, x, dx, m, dm, w, dw, graph, harmonics=not switch.off)
        return to_g, to_x, to_y, None, to_w, None, None, None


class _Tangents(TypedFunction):
    """Tangents of `_Convolution`, differentiable once."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        features: Tensor,
        d_features: Tensor,
        harmonics: Tensor,
        d_harmonics: Tensor,
        couplings: Tensor,
        weights: Tensor,
        d_weights: Tensor,
        graph: EdgeGraph,
        code: CConvolution,
    ) -> Tensor:
        d_couplings = d_harmonics @ code.tangent_matrix
        ctx.save_for_backward(features, d_features, couplings, d_couplings, weights, d_weights)
        ctx.structure = (graph, code)
        return code.tangents(features, d_features, couplings, d_couplings, weights, d_weights, graph)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        graph, code = ctx.structure
        x, dx, m, dm, w, dw = ctx.saved_tensors
        needs_y, needs_dy = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        to_x, to_y, to_w = code.second(grad, x, dx, m, dm, w, dw, graph, harmonics=needs_y)
        to_dx, to_dy, to_dw = code.gradients(grad, x, m, w, graph, harmonics=needs_dy)
        return to_x, to_dx, to_y, to_dy, None, to_w, to_dw, None, None


_OFF = GradientSwitch()
_OFF.off = True
