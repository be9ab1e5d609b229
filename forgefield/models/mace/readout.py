"""Energies from the scalars of an atom: linear for all layers but the last, a small network for the last; one for each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from forgefield.ops.functions import activate, second_moment_scale
from forgefield.ops.linear import unit_normal


class LinearReadout(nn.Module):
    """(n, channels) -> (n, n_heads)."""

    def __init__(self, channels: int, n_heads: int, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(unit_normal(channels, n_heads, generator=generator, dtype=dtype))
        self.scale = 1 / math.sqrt(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale)

    def last_layer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, n_weights) and weights (n_weights,), float64, whose product is the output of a readout with one head."""
        return x.double(), self.weight[:, 0].double() * self.scale


class GatedReadout(nn.Module):
    """A hidden layer of `width` neurons for each head: (n, channels) -> (n, n_heads). With `bias` two of them, with biases."""

    def __init__(
        self,
        channels: int,
        width: int,
        n_heads: int,
        *,
        gate: str | None,
        bias: bool,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.gate, self.gain = gate, 1.0 if gate is None else second_moment_scale(gate)
        self.enter = nn.Parameter(unit_normal(n_heads, channels, width, generator=generator, dtype=dtype))
        self.leave = nn.Parameter(unit_normal(n_heads, width, 1, generator=generator, dtype=dtype))
        # mace-torch has one layer for the neurons of all heads, and masks those of the others.
        self.enter_scale, self.scale = 1 / math.sqrt(channels), 1 / math.sqrt(n_heads * width)
        self.has_bias = bias
        if bias:
            self.middle = nn.Parameter(unit_normal(n_heads, width, width, generator=generator, dtype=dtype))
            self.middle_bias = nn.Parameter(torch.zeros(n_heads, width, dtype=dtype))
            self.leave_bias = nn.Parameter(torch.zeros(n_heads, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        result = (self._hidden(x) @ (self.leave * self.scale)).squeeze(2).T
        return result + self.leave_bias if self.has_bias else result

    def last_layer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As that of `LinearReadout`; the last weight is the bias, if there is one."""
        features, weights = self._hidden(x)[0].double(), self.leave[0, :, 0].double() * self.scale
        if not self.has_bias:
            return features, weights
        ones = torch.ones_like(features[:, :1])
        return torch.cat([features, ones], 1), torch.cat([weights, self.leave_bias[:1].double()])

    def _hidden(self, x: Tensor) -> Tensor:
        """(n_heads, n, width)."""
        hidden = self._activated(torch.matmul(x, self.enter * self.enter_scale))
        if self.has_bias:
            hidden = self._activated(hidden @ (self.middle * self.scale) + self.middle_bias.unsqueeze(1))
        return hidden

    def _activated(self, x: Tensor) -> Tensor:
        return x if self.gate is None else activate(self.gate, x, self.gain)
