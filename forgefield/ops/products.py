"""Products of features with weight matrices, the one place where a training may compute in less than float32.

Inside `products_in(dtype)` both factors of `product` are rounded to bfloat16 or float16 and the sums are made in float32; so
are the products that its derivatives consist of, to any order and in both directions. Everything else, the result included,
stays as it is. Float16 has a small range: each factor is first scaled by a power of two that brings its largest entry near the
top of it, which is exact, so that neither overflow nor scaled losses exist. Factors in float64 are never rounded. Models use a
plain product where geometry enters, on the basis of the lengths, and where energies leave: little is computed there, and that
rounding would cost the most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)
"""What factors can be rounded to."""


@dataclass
class Lowering:
    """dtype: what factors are rounded to. count: calls of `product` that it has lowered."""

    dtype: torch.dtype
    count: int = 0


class _Current:
    """Of the whole process, as torch's own setting for tf32 is: backward passes run in threads of torch's own."""

    lowering: Lowering | None = None


_current = _Current()


@contextmanager
def products_in(dtype: torch.dtype | None) -> Iterator[Lowering | None]:
    """Inside, `product` rounds its factors to `dtype`; None: it does not. Derivatives of what was made inside follow it."""
    if dtype is not None and dtype not in LOW:
        raise ValueError(f"products can be made in bfloat16 or float16, not in {dtype}")
    before = _current.lowering
    _current.lowering = None if dtype is None else Lowering(dtype)
    try:
        yield _current.lowering
    finally:
        _current.lowering = before


def is_lowered(x: Tensor) -> bool:
    """Whether products of x with weights are being made in less than its precision."""
    return _current.lowering is not None and x.dtype == torch.float32


def lowering_in_force() -> torch.dtype | None:
    """What factors are rounded to now; None: as they are."""
    return None if _current.lowering is None else _current.lowering.dtype


def lowered_to() -> torch.dtype | None:
    """The same for kernels that make the products of `product` themselves, which counts."""
    if _current.lowering is not None:
        _current.lowering.count += 1
    return lowering_in_force()


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x (..., c) times matrix (c, d): (..., d), in the precision that `products_in` asks for."""
    lowering = _current.lowering
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
    return torch.addmm(start, x, matrix) if _current.lowering is None else start + product(x, matrix)


class _Product(torch.autograd.Function):
    """Its derivatives are such products again."""

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
    made = _rounded_product(a * torch.exp2(by_a), b * torch.exp2(by_b), dtype)
    # In two halves: the whole factor may be out of range where the result is not.
    back = -(by_a + by_b)
    half = torch.floor(0.5 * back)
    return made.mul_(torch.exp2(half)).mul_(torch.exp2(back - half))


def _scaling(x: Tensor) -> Tensor:
    """Power of two, float32, that brings the largest entry of x to at least 2^14 and below 2^15. Never waits for the device."""
    exponent = torch.frexp(torch.linalg.vector_norm(x, ord=math.inf)).exponent
    return (15 - exponent).clamp(-126, 126).to(torch.float32)


def _rounded_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
    # Elsewhere torch would round the result as well. The same numbers come from float32 products of rounded factors.
    name = str(dtype).removeprefix("torch.")
    return torch.mm(torch.ops.forgefield.rounded(a, name), torch.ops.forgefield.rounded(b, name))


@torch.library.custom_op("forgefield::rounded", mutates_args=())
def _rounded(x: Tensor, dtype: str) -> Tensor:
    """Float32 numbers to the nearest that the named type holds. An operation of its own, because compilers take out a
    conversion to a shorter type and back."""
    return x.to(getattr(torch, dtype)).to(x.dtype)


@_rounded.register_fake
def _(x: Tensor, dtype: str) -> Tensor:
    return torch.empty_like(x)
