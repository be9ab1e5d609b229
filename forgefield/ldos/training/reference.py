"""What kernels of our own are compared with: autograd on products of the same rounded factors, and targets to compare on.

A comparison has to come out alike at the start of a training and after a resume near its end. Hence nothing in it may depend on
how well the network fits: residuals are made up, as large as the targets vary. Factors are rounded to the numbers that kernels
store and multiplied in float32, so that what is left to differ is the order of sums, and now and then the last bit of a factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from forgefield.ldos.loss import PointLoss, PointTask
from forgefield.ldos.model import ACTIVATIONS, LDOSNetwork
from forgefield.ldos.training.data import RowLayout
from forgefield.ldos.training.fused import KNOWN_BY_VALUE, FusedGradient, FusedStep, Tiles, rounded_to_tf32
from forgefield.ldos.training.gradient import ByAutograd

TOLERANCES = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Largest difference between own kernels and `RoundedReference`, relative to the largest entry of each tensor: one unit in
the last place of a factor (float32: of tf32). Sums that differ by 1e-6 of their size move some factors by such a unit, and
gradients by up to 3e-4 (tf32) and 8e-4 (bfloat16), measured with up to four hidden layers; sums that differ by 1e-4 move most
factors, and gradients by about half of what is allowed."""
NEAR = 2.0**-6
"""Share of the largest entry below which the sign before relu and leakyrelu is taken from the kernels."""


def made_up_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets (n, t) from which outputs differ by 0.5 to 1.5 times the spread of the true ones, always the same. The sign is
    one for each level: so points add up in gradients, instead of cancelling down to what rounding changes."""
    generator = torch.Generator().manual_seed(0)
    sizes = 0.5 + torch.rand(targets.shape, generator=generator, dtype=torch.float64)
    signs = 1.0 - 2.0 * torch.randint(2, targets.shape[1:], generator=generator)
    spread = float(targets.to(torch.float64).std(correction=0)) or 1.0
    return (outputs - (spread * sizes * signs).to(outputs)).to(targets.dtype)


def packed_rows(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same side by side, as in kept rows."""
    layout = RowLayout(inputs.shape[1], targets.shape[1])
    rows = inputs.new_zeros(len(inputs), layout.width)
    for room, values in zip(layout.split(rows), (inputs, targets)):
        room.copy_(values)
    return layout.split(rows)


def largest_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Of tensors from the second of each pair, relative to its largest entry; NaN where one of them holds one."""
    found = []
    for mine, expected in pairs:
        size = float(expected.abs().max())
        found.append(float((mine - expected).abs().max()) / (size or 1.0))
    return math.nan if any(math.isnan(value) for value in found) else max(found)


@torch.no_grad()
def difference_of_kernels(
    model: LDOSNetwork, task: PointTask, rows: tuple[Tensor, Tensor], dtype: torch.dtype, tiles: Tiles | None = None
) -> float:
    """Largest difference of errors and gradients by `FusedStep` from autograd, relative to the largest entry of each tensor.
    rows: scaled inputs (n, f) and targets (n, t); dtype: of factors. To be used in precision float32."""
    reference = RoundedReference(model, task.loss, dtype)
    batch = packed_rows(rows[0], made_up_targets(reference.outputs(rows[0]), rows[1]))
    layout, n = RowLayout(rows[0].shape[1], rows[1].shape[1]), len(rows[0])
    factor = task.slope_factor(n).to(rows[0])
    kernels = FusedGradient(FusedStep(model, task.loss, layout, n, None, dtype, tiles))
    errors = kernels(*batch, factor, None)
    reference.follow(kernels.step, *batch, factor)
    expected = reference(*batch, factor, None)
    return largest_difference([(errors, expected), *zip(kernels.gradients, reference.gradients)])


class RoundedReference(ByAutograd):
    """Errors and gradients by autograd, of products in float32 whose factors are rounded as `FusedStep` rounds them. dtype: of
    factors; float32 means tf32. To be used in precision float32."""

    def __init__(self, model: LDOSNetwork, loss: PointLoss, dtype: torch.dtype) -> None:
        super().__init__(model, loss)
        self.dtype = dtype
        self.positive: list[Tensor | None] = [None] * len(model.weights)

    @torch.no_grad()
    def follow(self, step: FusedStep, inputs: Tensor, targets: Tensor, factor: Tensor) -> None:
        """Let relu and leakyrelu take the side that the last call of `step` took, where a value is so near to 0 that the order
        of a sum decides: a single such point would change its entries of the gradients by much more than rounding."""
        n, last, options = len(inputs), len(self.positive) - 1, self.model.options
        if options.activation in KNOWN_BY_VALUE:
            self.positive[:last] = [step._values[k + 1][:n, : step.widths[k + 1]] > 0 for k in range(last)]
        if options.output_activation in KNOWN_BY_VALUE:  # of outputs the kernels keep no more than the slope
            outputs = self.outputs(inputs)
            least = 0.1 * (self.loss.slopes(outputs - targets) * factor).abs()
            slopes = step._slopes[last][:n, : step.widths[-1]].to(least.dtype).abs()
            self.positive[last] = torch.where(least > 0, slopes > least, outputs > 0)

    def outputs(self, x: Tensor) -> Tensor:
        """Scaled inputs (n, f) to scaled outputs (n, t)."""
        options, last = self.model.options, len(self.positive) - 1
        for number, (weight, bias) in enumerate(zip(self.model.weights, self.model.biases)):
            x = _Product.apply(x, weight, self.dtype) + bias
            name = options.activation if number < last else options.output_activation
            x = x if name is None else self._activated(name, x, self.positive[number])
        return x

    def _activated(self, name: str, x: Tensor, positive: Tensor | None) -> Tensor:
        if positive is None:
            return ACTIVATIONS[name](x)
        size = x.detach().abs()
        positive = torch.where(size < NEAR * size.max(), positive, x > 0)
        return torch.where(positive, x, x * (0.0 if name == "relu" else 0.01))


class _Product(torch.autograd.Function):
    """x (n, k) times weight (m, k) transposed, and its derivatives, of rounded factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x, weight = _rounded(x, dtype), _rounded(weight, dtype)
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        slope = _rounded(slope, ctx.dtype)
        return slope @ weight, slope.t() @ x, None


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded_to_tf32(values.contiguous()) if dtype == torch.float32 else values.to(dtype).to(values.dtype)
