"""The network inside a head: layers with norm, residual connections and dropout as asked for.

Dropout is a function of keys that come with the batch (`frame_key`, of seed, epoch and place in it), never of a generator's
state: the same values are dropped on any number of ranks, after a resume, and by every engine.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.ops.activations import activate
from forgefield.ops.keyed import combined, kept
from forgefield.ops.linear import unit_normal
from forgefield.ops.products import product

NORMS = ("none", "layer")
TINY = 1e-5
"""Added to the variance that a layer is divided by."""


class HeadNetwork(nn.Module):
    """Base of heads: weights of layers from `n_in` over `hidden` to `n_out`.

    A hidden layer is: product with its weights, norm, activation, dropout; with `residual` its input is added where it has the
    same width. seed, name: first weights depend on these alone, whatever other heads there are.
    """

    def __init__(
        self,
        name: str,
        *,
        n_in: int,
        hidden: Sequence[int],
        n_out: int,
        activation: str,
        norm: str,
        residual: bool,
        dropout: float,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.activation, self.residual, self.dropout = activation, residual, dropout
        self.name_key = zlib.crc32(name.encode())
        sizes = [n_in, *hidden, n_out]
        generator = torch.Generator().manual_seed((seed << 32) ^ self.name_key)
        self.weights = nn.ParameterList(
            nn.Parameter(unit_normal(a, b, generator=generator, dtype=dtype) / math.sqrt(a))
            for a, b in itertools.pairwise(sizes)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes[1:])
        normed = list(hidden) if norm == "layer" else []
        self.norm_scales = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=dtype)) for n in normed)
        self.norm_shifts = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in normed)

    @property
    def dtype(self) -> torch.dtype:
        result: torch.dtype = self.weights[0].dtype
        return result

    @property
    def last_width(self) -> int:
        """Of what the last layer reads."""
        result: int = self.weights[-1].shape[0]
        return result

    def hidden(self, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """All layers but the last. x: (n_atoms, n_in)."""
        for number in range(len(self.weights) - 1):
            x = self._layer(number, x, product(x, self.weights[number]), batch)
        return x

    def hidden_from(self, first: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The same where the first layer's product is known."""
        x = self._layer(0, None, first, batch)
        for number in range(1, len(self.weights) - 1):
            x = self._layer(number, x, product(x, self.weights[number]), batch)
        return x

    def last(self, x: Tensor) -> Tensor:
        result: Tensor = x @ self.weights[-1] + self.biases[-1]
        return result

    def _layer(self, number: int, x: Tensor | None, made: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        y = made + self.biases[number]
        if len(self.norm_scales):
            y = y - y.mean(1, keepdim=True)
            y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + TINY)
            y = y * self.norm_scales[number] + self.norm_shifts[number]
        y = activate(self.activation, y)
        if self.dropout and self.training:
            y = y * self._not_dropped(number, y, batch)
        return x + y if self.residual and x is not None and x.shape[1] == y.shape[1] else y

    def _not_dropped(self, layer: int, y: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(n_atoms, width): zero where a value is dropped, else what keeps the mean."""
        if "frame_key" not in batch:
            raise ForgefieldError(
                "A head with dropout is trained with batches that carry frame_key, which decides what is dropped; take them "
                "from FrameData.serve(BatchSpec(frame_keys=True)), or call eval() on the model."
            )
        n_atoms, frame = batch["n_atoms"], batch["frame"]
        first_atom = (torch.cumsum(n_atoms, 0) - n_atoms).index_select(0, frame)
        atom = torch.arange(frame.shape[0], device=frame.device) - first_atom
        of_layer = combined(batch["frame_key"], torch.full_like(n_atoms, (self.name_key + layer) % (1 << 32)))
        of_atom = combined(of_layer.index_select(0, frame), torch.bitwise_and(atom, (1 << 32) - 1))
        keys = combined(of_atom.unsqueeze(1), torch.arange(y.shape[1], device=y.device))
        return kept(keys, 1.0 - self.dropout).to(y.dtype) / (1.0 - self.dropout)
