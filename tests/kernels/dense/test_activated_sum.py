"""Weighted sums of activated channels by a kernel against PyTorch's operations, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from forgefield.kernels.dense.activated_sum import activated_sum
from tests.support.kernels import draw, needs_kernels

pytestmark = needs_kernels
INNER, OUTER = 0.7, 1.3


@pytest.mark.parametrize("width", [1, 16, 21])
@pytest.mark.parametrize("n", [0, 1, 70])
def test_values_tangents_and_their_derivatives(n, width):
    channels, weights = draw(1, 2, n, width).requires_grad_(True), draw(2, width).requires_grad_(True)
    cotangents = draw(3, 2, n)

    def by_operations(x):
        return OUTER * F.silu(INNER * x) @ weights

    values = by_operations(channels[0])
    (slopes,) = torch.autograd.grad(values.sum(), channels, create_graph=True)  # rows are independent of each other
    tangents = (slopes[0] * channels[1]).sum(1)
    expected = torch.autograd.grad((torch.stack([values, tangents]) * cotangents).sum(), (channels, weights))
    found = activated_sum(channels, weights, inner=INNER, outer=OUTER)
    torch.testing.assert_close(found, torch.stack([values, tangents]), rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad((found * cotangents).sum(), (channels, weights)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_values_alone():
    channels, weights = draw(1, 1, 9, 5).requires_grad_(True), draw(2, 5)
    found = activated_sum(channels, weights, inner=INNER, outer=OUTER)
    expected = OUTER * F.silu(INNER * channels) @ weights
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (one,), (other,) = (torch.autograd.grad(values.sum(), channels) for values in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
