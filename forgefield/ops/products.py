"""Products of features with weight matrices: the only operation that a training may compute in less than float32.

Inside `ops.execution.products_in(dtype)` both factors of `product` are rounded to bfloat16 or float16 and sums are computed
in float32; so are the products that its derivatives consist of, to any order, in forward and in reverse mode. Everything
else, the result included, keeps its precision. Float16 has a small range: each factor is first scaled by a power of two, which
is exact, such that its largest entry is near the top of that range; neither overflow nor loss scaling is then an issue.
Factors in float64 are never rounded. Models use an ordinary product (`@`) where geometry enters, for the basis of edge
lengths, and where energies are read out: little is computed there, and rounding would cost the most accuracy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forgefield.ops.execution import current


def is_lowered(x: Tensor) -> bool:
    """Whether products of x with weights are computed in less than the precision of x."""
    return current().lowering is not None and x.dtype == torch.float32


def lowered_type() -> torch.dtype | None:
    """The type that factors are rounded to at present; None: they are not rounded."""
    lowering = current().lowering
    return None if lowering is None else lowering.dtype


def count_lowered() -> torch.dtype | None:
    """As `lowered_type`, for kernels that compute the products of `product` themselves: it counts as one rounded product."""
    lowering = current().lowering
    if lowering is not None:
        lowering.count += 1
    return lowered_type()


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x (..., c) times matrix (c, d): (..., d), in the precision that `products_in` sets."""
    lowering = current().lowering
    if lowering is None or x.dtype != torch.float32 or matrix.dtype != torch.float32:
        return x @ matrix
    lowering.count += 1
    if x.dim() == 1:
        return _Product.apply(x.unsqueeze(0), matrix, lowering.dtype).squeeze(0)
    if x.dim() == 2:
        return _Product.apply(x, matrix, lowering.dtype)
    return _Product.apply(x.flatten(0, -2), matrix, lowering.dtype).unflatten(0, x.shape[:-1])


def add_product(start: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """start (n, d) plus x (n, c) times matrix (c, d)."""
    return torch.addmm(start, x, matrix) if current().lowering is None else start + product(x, matrix)


class _Product(torch.autograd.Function):
    """Its derivatives are such products, too."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.dtype = dtype
        return _lowered(a, b, dtype)

    @staticmethod
    def backward(ctx, grad: Tensor | None):
        if grad is None:
            return None, None, None
        a, b = ctx.saved_tensors
        wants_a, wants_b, _ = ctx.needs_input_grad
        of_a = _Product.apply(grad, b.t(), ctx.dtype) if wants_a else None
        of_b = _Product.apply(a.t(), grad, ctx.dtype) if wants_b else None
        return of_a, of_b, None

    @staticmethod
    def jvp(ctx, d_a: Tensor | None, d_b: Tensor | None, dtype: None) -> Tensor | None:
        a, b = ctx.saved_tensors
        by_a = None if d_a is None else _Product.apply(d_a, b, ctx.dtype)
        by_b = None if d_b is None else _Product.apply(a, d_b, ctx.dtype)
        return by_b if by_a is None else by_a if by_b is None else by_a + by_b


def _lowered(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a (n, c) times b (c, d), float32, of rounded factors."""
    if any(not isinstance(size, torch.SymInt) and size == 0 for size in (*a.shape, *b.shape)):
        return a.new_zeros(a.shape[0], b.shape[1])
    if dtype == torch.bfloat16:
        return _rounded_product(a, b, dtype)
    by_a, by_b = _scaling(a), _scaling(b)
    scaled = _rounded_product(a * torch.exp2(by_a), b * torch.exp2(by_b), dtype)
    # In two halves: the full factor may be out of range where the result is not.
    back = -(by_a + by_b)
    half = torch.floor(0.5 * back)
    return scaled.mul_(torch.exp2(half)).mul_(torch.exp2(back - half))


def _scaling(x: Tensor) -> Tensor:
    """Exponent, float32, of the power of two that brings the largest entry of x to [2^14, 2^15). Never waits for the device."""
    exponent = torch.frexp(torch.linalg.vector_norm(x, ord=math.inf)).exponent
    return (15 - exponent).clamp(-126, 126).to(torch.float32)


def _rounded_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
    # On other devices PyTorch would round the result as well; float32 products of rounded factors give the same numbers.
    name = str(dtype).removeprefix("torch.")
    return torch.mm(torch.ops.forgefield.rounded(a, name), torch.ops.forgefield.rounded(b, name))


@torch.library.custom_op("forgefield::rounded", mutates_args=())
def _rounded(x: Tensor, dtype: str) -> Tensor:
    """Float32 numbers rounded to the nearest number of the named type. A custom operator, because compilers remove a
    conversion to a shorter type and back."""
    return x.to(getattr(torch, dtype)).to(x.dtype)


@_rounded.register_fake
def _(x: Tensor, dtype: str) -> Tensor:
    return torch.empty_like(x)
