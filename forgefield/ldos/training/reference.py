"""The reference for Forgefield's kernels: autograd on products of the same rounded factors, and synthetic targets.

A comparison must have the same result at the start of a training and after a resume near its end, so nothing in it may depend
on how well the network fits: residuals are synthetic, with the magnitude of the variation of the targets. Factors are rounded
to the numbers that kernels store and multiplied in float32, so that only the order of sums differs, and sometimes the last bit
of a factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from forgefield.ldos.loss import PointLoss, PointTask
from forgefield.ldos.model import ACTIVATIONS, LDOSNetwork
from forgefield.ldos.training.data import RowLayout
from forgefield.ldos.training.fused import DERIVATIVE_FROM_VALUE, FusedGradient, FusedStep, Tiles, rounded_to_tf32
from forgefield.ldos.training.gradient import AutogradGradient
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction

TOLERANCES = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Largest difference between the kernels and `RoundedReference`, relative to the largest entry of each tensor: one unit in the
last place of a factor (float32: of tf32). Sums that differ by 1e-6 change some factors by such a unit, and gradients by up to
3e-4 (tf32) and 8e-4 (bfloat16), measured with up to four hidden layers; sums that differ by 1e-4 change most factors, and
gradients by about half of this tolerance."""
NEAR = 2.0**-6
"""Fraction of the largest entry below which the sign before relu and leakyrelu is taken from the kernels."""


def synthetic_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets (n, t) from which outputs differ by 0.5 to 1.5 standard deviations of the true targets; deterministic. The sign
    of the difference is that of its level, so that points add up in gradients and do not cancel down to rounding errors."""
    generator = torch.Generator().manual_seed(0)
    sizes = 0.5 + torch.rand(targets.shape, generator=generator, dtype=torch.float64)
    signs = 1.0 - 2.0 * torch.randint(2, targets.shape[1:], generator=generator)
    spread = float(targets.to(torch.float64).std(correction=0)) or 1.0
    return (outputs - (spread * sizes * signs).to(outputs)).to(targets.dtype)


def pack_rows(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets in the layout of resident rows."""
    layout = RowLayout(inputs.shape[1], targets.shape[1])
    rows = inputs.new_zeros(len(inputs), layout.width)
    for columns, values in zip(layout.split(rows), (inputs, targets)):
        columns.copy_(values)
    return layout.split(rows)


def largest_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Largest difference within pairs of tensors, relative to the largest entry of the second; NaN if any entry is NaN."""
    differences = []
    for actual, expected in pairs:
        size = float(expected.abs().max())
        differences.append(float((actual - expected).abs().max()) / (size or 1.0))
    return math.nan if any(math.isnan(value) for value in differences) else max(differences)


@torch.no_grad()
def kernel_difference(
    model: LDOSNetwork, task: PointTask, rows: tuple[Tensor, Tensor], dtype: torch.dtype, tiles: Tiles | None = None
) -> float:
    """Largest difference of errors and gradients between `FusedStep` and autograd, relative to the largest entry of each
    tensor. rows: scaled inputs (n, f) and targets (n, t); dtype: of factors. Requires precision float32."""
    reference = RoundedReference(model, task.loss, dtype)
    batch = pack_rows(rows[0], synthetic_targets(reference.outputs(rows[0]), rows[1]))
    layout, n = RowLayout(rows[0].shape[1], rows[1].shape[1]), len(rows[0])
    factor = task.slope_factor(n).to(rows[0])
    kernels = FusedGradient(FusedStep(model, task.loss, layout, n, None, dtype, tiles))
    errors = kernels(*batch, factor, None)
    reference.follow(kernels.step, *batch, factor)
    expected = reference(*batch, factor, None)
    return largest_difference([(errors, expected), *zip(kernels.gradients, reference.gradients)])


class RoundedReference(AutogradGradient):
    """Errors and gradients by autograd, for products in float32 whose factors are rounded as in `FusedStep`. dtype: of factors;
    float32 means tf32. Requires precision float32."""

    def __init__(self, model: LDOSNetwork, loss: PointLoss, dtype: torch.dtype) -> None:
        super().__init__(model, loss)
        self.dtype = dtype
        self.positive: list[Tensor | None] = [None] * len(model.weights)

    @torch.no_grad()
    def follow(self, step: FusedStep, inputs: Tensor, targets: Tensor, factor: Tensor) -> None:
        """Let relu and leakyrelu take the same branch as the last call of `step` where a value is so close to 0 that the order
        of a sum decides: a single such point would change gradients by much more than rounding."""
        n, last, options = len(inputs), len(self.positive) - 1, self.model.options
        if options.activations[0] in DERIVATIVE_FROM_VALUE:
            self.positive[:last] = [step._values[k + 1][:n, : step.widths[k + 1]] > 0 for k in range(last)]
        if options.output_activation in DERIVATIVE_FROM_VALUE:  # for outputs the kernels store only the slope
            outputs = self.outputs(inputs)
            least = 0.1 * (self.loss.slopes(outputs - targets) * factor).abs()
            slopes = step._slopes[last][:n, : step.widths[-1]].to(least.dtype).abs()
            self.positive[last] = torch.where(least > 0, slopes > least, outputs > 0)

    def outputs(self, x: Tensor) -> Tensor:
        """Scaled inputs (n, f) to scaled outputs (n, t)."""
        layers = zip(self.model.weights, self.model.biases, self.model.options.activations)
        for number, (weight, bias, name) in enumerate(layers):
            x = _Product.apply(x, weight, self.dtype) + bias
            x = x if name is None else self._activated(name, x, self.positive[number])
        return x

    def _activated(self, name: str, x: Tensor, positive: Tensor | None) -> Tensor:
        if positive is None:
            return ACTIVATIONS[name](x)
        size = x.detach().abs()
        positive = torch.where(size < NEAR * size.max(), positive, x > 0)
        return torch.where(positive, x, x * (0.0 if name == "relu" else 0.01))


class _Product(TypedFunction):
    """x (n, k) times weight (m, k) transposed, and its derivatives, with rounded factors."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x, weight = _rounded(x, dtype), _rounded(weight, dtype)
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x @ weight.t()

    @staticmethod
    def backward(ctx: AutogradContext, *cotangents: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        slope = _rounded(cotangents[0], ctx.dtype)
        return slope @ weight, slope.t() @ x, None


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded_to_tf32(values.contiguous()) if dtype == torch.float32 else values.to(dtype).to(values.dtype)
