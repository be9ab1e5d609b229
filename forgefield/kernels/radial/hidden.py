"""Hidden layers of radial networks at the knots of a table: values, slopes, the polynomials between knots, and gradients.

With v = x W and v' = x' W for the basis x and its slope x', the first hidden layer is h = f(v), h' = f'(v) v', f = silu. The
polynomials of its channels are computed in float64 and rounded; the last matrix is applied to them, since they are linear in h
and h'. For networks with one hidden layer one kernel does all of this (`HiddenCurves`). Deeper ones, which have the same widths
in all layers of a model, are computed layer by layer (`deep_curves`): products of all networks in one batch, and kernels for
activations with their slopes. Everything is float64 except the weights and the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forgefield.kernels.core.generation import LaunchArguments
from forgefield.kernels.core.runtime import interpreted
from forgefield.ops.autograd import AutogradContext

KNOTS, CHANNELS = 16, 32
"""Knots and channels of one program."""


def _tile() -> tuple[int, int]:
    """Larger for the interpreter, which takes time for every program, not for every element."""
    return (1024, 128) if interpreted() else (KNOTS, CHANNELS)


@dataclass(frozen=True)
class HiddenCurves:
    """Hidden channels of the radial network of one layer.

    basis: (n_intervals + 1, 2, n_basis) float64, values and slopes at the knots.
    first: (n_basis, width), first matrix. scale, gain: factors of the matrix and of the result.
    """

    basis: Tensor
    first: Tensor
    scale: float
    gain: float

    @torch.no_grad()
    def curves(self) -> Tensor:
        """Polynomials of the channels, (n_intervals, 4, width), in the precision of the weights."""
        curves = self.first.new_empty((self.basis.shape[0] - 1, 4, self.first.shape[1]))
        _kernels().curves[self._grid(curves.shape[0])](**self._arguments(self._first()), out=curves, num_warps=8)
        return curves

    @torch.no_grad()
    def gradient(self, to_curves: Tensor) -> Tensor:
        """Cotangent of the first matrix, from that of the curves."""
        first, grid = self._first(), self._grid(self.basis.shape[0])
        n_weights = first.numel()
        parts, gradient = self.basis.new_empty((grid[0], n_weights)), torch.empty_like(first)
        _kernels().to_first[grid](
            **self._arguments(first), inputs=to_curves.contiguous(), parts=parts, n_weights=n_weights, num_warps=8
        )
        _kernels().add_parts[(-(-n_weights // 128),)](
            parts=parts, out=gradient, n_parts=grid[0], n_columns=n_weights, block=128, num_warps=4
        )
        return gradient

    def _first(self) -> Tensor:
        return self.first.detach().contiguous()

    def _grid(self, n_knots: int) -> tuple[int, int]:
        knots, channels = _tile()
        return -(-n_knots // knots), -(-self.first.shape[1] // channels)

    def _arguments(self, first: Tensor) -> LaunchArguments:
        """Arguments that the kernels of both directions have."""
        (n_basis, width), (knots, channels) = first.shape, _tile()
        sizes = {"n_intervals": self.basis.shape[0] - 1, "n_basis": n_basis, "width": width}
        factors = {"scale": self.scale, "gain": self.gain}
        return {"basis": self.basis, "first": first, **sizes, **factors, "knots": knots, "channels": channels}


def _kernels() -> Any:
    from forgefield.kernels.radial import source as radial_source

    return radial_source


BLOCK = 256
"""Elements of one program."""


def _block() -> int:
    """Larger for the interpreter, which takes time for every program, not for every element."""
    return 65536 if interpreted() else BLOCK


def deep_curves(
    basis: Tensor, networks: Sequence[Sequence[Tensor]], scales: Sequence[float], gain: float
) -> tuple[Tensor, ...]:
    """For every network the polynomials of its last hidden channels, (n_intervals, 4, width), in the precision of the weights,
    with gradients in the weights.

    basis: (n_intervals + 1, 2, n_basis) float64, values and slopes at the knots.
    networks: matrices of the hidden layers of each network. scales, gain: factors of the matrices and of the result.
    """
    by_depth = [torch.stack(list(matrices)) for matrices in zip(*networks, strict=True)]
    return _Curves.apply(basis, tuple(scales), gain, *by_depth).unbind()


class _Curves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, basis: Tensor, scales: tuple[float, ...], gain: float, *matrices: Tensor
    ) -> Tensor:
        factors = [matrix.double() for matrix in matrices]
        inner = [torch.matmul(basis.flatten(0, 1), factors[0])]  # (networks, knots and slopes in turn, width)
        hidden: list[Tensor] = []
        for factor, scale in zip(factors[1:], scales[:-1], strict=True):
            hidden.append(torch.empty_like(inner[-1]))
            _launch("activate", hidden[-1].numel() // 2, inputs=inner[-1], out=hidden[-1], scale=scale)
            inner.append(torch.bmm(hidden[-1], factor))
        n_intervals = basis.shape[0] - 1
        shape = (len(inner[-1]), n_intervals, 4, inner[-1].shape[2])
        curves = torch.empty(shape, dtype=matrices[0].dtype, device=basis.device)
        about: dict[str, float] = {"n_intervals": n_intervals, "scale": scales[-1], "gain": gain}
        _launch("curves_of", curves.numel() // 4, inputs=inner[-1], out=curves, **about)
        ctx.save_for_backward(basis, *factors, *inner, *hidden)
        ctx.scales, ctx.gain, ctx.dtype = scales, gain, matrices[0].dtype
        return curves

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, to_curves: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.scales)
        basis, *rest = ctx.saved_tensors
        factors, inner, hidden = rest[:depth], rest[depth : 2 * depth], rest[2 * depth :]
        to = torch.empty_like(inner[-1])
        about = {"n_intervals": basis.shape[0] - 1, "scale": ctx.scales[-1], "gain": ctx.gain}
        _launch("to_last", to.numel() // 2, inputs=inner[-1], to=to_curves.contiguous(), out=to, **about)
        gradients: list[Tensor] = []
        for number in range(depth - 1, 0, -1):
            gradients.append(torch.bmm(hidden[number - 1].transpose(1, 2), to))
            to_hidden = torch.bmm(to, factors[number].transpose(1, 2))
            to = torch.empty_like(to)
            scale = ctx.scales[number - 1]
            _launch("to_inner", to.numel() // 2, inputs=inner[number - 1], to=to_hidden, out=to, scale=scale)
        gradients.append(torch.matmul(basis.flatten(0, 1).t(), to))
        return (None, None, None, *(gradient.to(ctx.dtype) for gradient in reversed(gradients)))


def _launch(name: str, n: int, *, inputs: Tensor, **arguments: Tensor | float) -> None:
    """Launch a kernel for n elements of hidden channels, each with its slope. given: rows as wide as the networks."""
    block = _block()
    kernel = getattr(_kernels(), name)
    kernel[(-(-n // block),)](inputs=inputs, **arguments, n=n, width=inputs.shape[2], block=block, num_warps=4)
