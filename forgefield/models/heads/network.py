"""The network inside a head: layers with norm, residual connections and dropout, species shifts, and the step to frames.

Dropout is a function of keys in the batch (`frame_key`, of seed, epoch and position in it), never of a generator's state: the
same values are dropped on any number of ranks, after a resume, and by every engine.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.heads.options import HeadOptions
from forgefield.ops.functions import activate
from forgefield.ops.graph import Segments, gather, segment_sum
from forgefield.ops.keyed import combined, in_subset
from forgefield.ops.linear import unit_normal
from forgefield.ops.products import product

NORM_EPSILON = 1e-5
"""Added to the variance that a layer is divided by."""


class HeadNetwork(nn.Module):
    """Base of heads: weights of layers from `n_in` over the hidden layers of `options` to `n_out`, and the buffers `shift`
    (n_species, size of a value) and `scale`, float64.

    A hidden layer is: product with its weights, norm, activation, dropout; with `residual` its input is added where it has the
    same width. Initial weights depend on `seed` and `name` only, not on the other heads.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        name: str,
        options: HeadOptions,
        *,
        n_in: int,
        n_out: int,
        n_species: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.options, self.n_species = options, n_species
        self.activation, self.residual, self.dropout = options.activation, options.residual, options.dropout
        self.name_key = zlib.crc32(name.encode())
        sizes = [n_in, *options.hidden, n_out]
        generator = torch.Generator().manual_seed((seed << 32) ^ self.name_key)
        self.weights = nn.ParameterList(
            nn.Parameter(unit_normal(a, b, generator=generator, dtype=dtype) / math.sqrt(a))
            for a, b in itertools.pairwise(sizes)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes[1:])
        normed: Sequence[int] = options.hidden if options.norm == "layer" else []
        self.norm_scales = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=dtype)) for n in normed)
        self.norm_shifts = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in normed)

    def register_scaling(self) -> None:
        """Register the buffers `shift` and `scale`."""
        size = math.prod(self.options.output_shape)
        shift = torch.zeros(self.n_species, size, dtype=torch.float64)
        if self.options.shift is not None:
            shift = torch.tensor(self.options.shift, dtype=torch.float64).reshape(self.n_species, size)
        self.register_buffer("shift", shift)
        self.register_buffer("scale", torch.tensor(self.options.scale, dtype=torch.float64))

    @property
    def dtype(self) -> torch.dtype:
        result: torch.dtype = self.weights[0].dtype
        return result

    @property
    def last_width(self) -> int:
        """Width of the input of the last layer."""
        result: int = self.weights[-1].shape[0]
        return result

    def hidden(self, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """All layers but the last. x: (n_atoms, n_in)."""
        for number in range(len(self.weights) - 1):
            x = self._layer(number, x, product(x, self.weights[number]), batch)
        return x

    def hidden_from(self, first: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """As `hidden`, from the product of the first layer on."""
        x = self._layer(0, None, first, batch)
        for number in range(1, len(self.weights) - 1):
            x = self._layer(number, x, product(x, self.weights[number]), batch)
        return x

    def last(self, x: Tensor) -> Tensor:
        """The last layer."""
        result: Tensor = x @ self.weights[-1] + self.biases[-1]
        return result

    def _layer(self, number: int, x: Tensor | None, products: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Output of a hidden layer. x: its input, None where it cannot be added. products: of its input with its weights."""
        y = products + self.biases[number]
        if len(self.norm_scales):
            y = y - y.mean(1, keepdim=True)
            y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + NORM_EPSILON)
            y = y * self.norm_scales[number] + self.norm_shifts[number]
        y = activate(self.activation, y)
        if self.dropout and self.training:
            y = y * self._dropout_factors(number, y, batch)
        return x + y if self.residual and x is not None and x.shape[1] == y.shape[1] else y

    def _dropout_factors(self, layer: int, y: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(n_atoms, width): zero where a value is dropped, otherwise the factor that preserves the mean."""
        if "frame_key" not in batch:
            raise ForgefieldError(
                "A head with dropout is trained with batches that contain frame_key, which decides what is dropped; get them "
                "from FrameData.serve(BatchSpec(frame_keys=True)), or call eval() on the model."
            )
        n_atoms, frame = batch["n_atoms"], batch["frame"]
        first_atom = (torch.cumsum(n_atoms, 0) - n_atoms).index_select(0, frame)
        atom = torch.arange(frame.shape[0], device=frame.device) - first_atom
        layer_key = combined(batch["frame_key"], torch.full_like(n_atoms, (self.name_key + layer) % (1 << 32)))
        atom_key = combined(layer_key.index_select(0, frame), torch.bitwise_and(atom, (1 << 32) - 1))
        keys = combined(atom_key.unsqueeze(1), torch.arange(y.shape[1], device=y.device))
        return in_subset(keys, 1.0 - self.dropout).to(y.dtype) / (1.0 - self.dropout)


def frame_values(values: Tensor, batch: Mapping[str, Tensor], reduce: str) -> Tensor:
    """(n_atoms, size) -> (n_frames, size), by sum or mean."""
    n_atoms = batch["n_atoms"]
    sums = segment_sum(values, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
    return sums / n_atoms.to(values.dtype).unsqueeze(1) if reduce == "mean" else sums


def subtract_frame_mean(values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """(n_atoms, size): values minus their mean over each frame, so that their sum is zero."""
    atoms = Segments(batch["frame"], batch["n_atoms"].shape[0], rows_are_sorted=True)
    return values - gather(frame_values(values, batch, "mean"), atoms)
