"""Linear maps between irreps, the gate, and small perceptrons, on features stored with channels contiguous.

Features are lists of blocks (n_atoms, 2l + 1, channels), one per irrep. Weights are stored with unit variance and scaled
by 1 / sqrt(fan in) when used, as in e3nn, so that one learning rate suits all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn

from forgefield.ops.convolution_plan import Block
from forgefield.ops.functions import activate, second_moment_scale
from forgefield.ops.graph import Segments, cut, gather, is_traced, join
from forgefield.ops.products import product


class WeightArguments(TypedDict):
    """Arguments of all layers that draw initial weights: the random generator, and the precision of the weights."""

    generator: torch.Generator
    dtype: torch.dtype


def unit_normal(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Unit normal numbers, the same up to rounding in every precision."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def unit_uniform(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Uniform numbers of zero mean and unit variance, the same up to rounding in every precision."""
    return ((torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1) * math.sqrt(3)).to(dtype)


class IrrepsLinear(nn.Module):
    """One matrix per irrep, shared by its 2l + 1 components. `weight` contains them flat, in block order."""

    norm: Tensor

    def __init__(
        self,
        channels: Sequence[tuple[int, int]],
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        """`channels`: (in, out) of every block; `scale` multiplies the map."""
        super().__init__()
        self.channels = tuple(channels)
        self.sizes = [n_in * n_out for n_in, n_out in channels]
        self.weight = nn.Parameter(unit_normal(sum(self.sizes), generator=generator, dtype=dtype))
        self.norms = [scale / math.sqrt(n_in) for n_in, _ in channels]
        self.register_buffer("norm", _spread(self.norms, self.sizes).to(dtype), persistent=False)

    def matrices(self) -> list[Tensor]:
        """The (in, out) matrix of each block, scaled to preserve variance, and by `scale`."""
        flat = cut(self.weight * self.norm, self.sizes, 0)
        return [part.view(shape) for part, shape in zip(flat, self.channels)]


def _spread(values: Sequence[float], sizes: Sequence[int]) -> Tensor:
    """Each value repeated `size` times, float64."""
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), torch.tensor(sizes))


class SpeciesLinear(nn.Module):
    """A linear map per irrep whose matrix depends linearly on an embedding of the atom's species.

    It is e3nn's fully connected tensor product of features with type attributes: `weight` contains, flat, one tensor
    (in, embedding, out) per block.
    """

    norm: Tensor

    def __init__(
        self, channels: Sequence[tuple[int, int]], n_embedding: int, *, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.channels, self.n_embedding = tuple(channels), n_embedding
        self.sizes = [n_in * n_embedding * n_out for n_in, n_out in channels]
        self.weight = nn.Parameter(unit_normal(sum(self.sizes), generator=generator, dtype=dtype))
        self.norms = [1 / math.sqrt(n_in * n_embedding) for n_in, _ in channels]
        self.register_buffer("norm", _spread(self.norms, self.sizes).to(dtype), persistent=False)

    def matrices(self, table: Tensor | None) -> list[Tensor]:
        """(in * n, out) matrix of each block for inputs `x[u] * a[s]`, u slow and s fast.

        With a `table` (n_species, embedding) a is the one-hot species, n = n_species; without, a is the embedding.
        """
        flat = cut(self.weight * self.norm, self.sizes, 0)
        result = []
        for part, (n_in, n_out) in zip(flat, self.channels):
            weight = part.view(n_in, self.n_embedding, n_out)
            result.append((weight if table is None else torch.matmul(table, weight)).flatten(0, 1))
        return result

    def by_species(self) -> list[Tensor]:
        """(n_embedding, in, out) of each block: the matrix of each species, for attributes that are one-hot."""
        flat = cut(self.weight * self.norm, self.sizes, 0)
        return [
            part.view(n_in, self.n_embedding, n_out).transpose(0, 1) for part, (n_in, n_out) in zip(flat, self.channels)
        ]


_ONE_HOT_UP_TO = 16
"""Number of species up to which one product with all matrices is cheaper than a copy of a matrix for each atom."""


def product_by_species(x: Tensor, matrices: Tensor, species: Tensor) -> Tensor:
    """x (n, d, c) times the matrix of each row's species: (n, d, e). matrices: (n_species, c, e). species: (n,) int64."""
    count = matrices.shape[0]
    if count == 1:
        return product(x, matrices[0])
    if x.is_cuda or is_traced(x):
        if count > _ONE_HOT_UP_TO:
            return torch.bmm(x, gather(matrices, Segments(species, count)))
        one_hot = (species.unsqueeze(1) == torch.arange(count, device=species.device)).to(x.dtype)
        expanded = one_hot.view(-1, 1, count, 1) * x.unsqueeze(2)
        return product(expanded.flatten(2), matrices.flatten(0, 1))
    members = [torch.nonzero(species == number).squeeze(1) for number in torch.unique(species).tolist()]
    parts = [product(x.index_select(0, rows), matrices[int(species[rows[0]])]) for rows in members]
    if not parts:
        return x.new_zeros(0, x.shape[1], matrices.shape[2])
    return join(parts, 0).index_select(0, torch.argsort(torch.cat(members)))


class Perceptron(nn.Module):
    """Dense layers without bias on scalars, with the activation between layers, not after the last.

    The last layer is never computed in less than the precision of the weights, because its output is an energy.
    """

    def __init__(
        self, sizes: Sequence[int], *, activation: str | None, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weights = nn.ParameterList(
            nn.Parameter(unit_uniform(n_in, n_out, generator=generator, dtype=dtype))
            for n_in, n_out in itertools.pairwise(sizes)
        )
        gain = 1.0 if activation is None else math.sqrt(2)
        self.scales = [(1.0 if i == 0 else gain) / math.sqrt(n_in) for i, n_in in enumerate(sizes[:-1])]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) @ (self.weights[-1] * self.scales[-1])

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the last layer."""
        for number in range(len(self.weights) - 1):
            x = product(x, self.weights[number] * self.scales[number])
            x = x if self.activation is None else activate(self.activation, x)
        return x


class Gate(nn.Module):
    """Applies an activation to scalars, and multiplies every other channel by a separate activated scalar, its gate.

    Input blocks, in order: odd scalars if any, even scalars followed by all gates, then the gated blocks sorted by
    (l, parity); output blocks: even scalars, odd scalars, then the gated blocks in the order of `gated`.
    """

    def __init__(
        self,
        scalars: Sequence[Block],
        gated: Sequence[Block],
        *,
        even: str = "silu",
        odd: str = "tanh",
        gate: str = "silu",
    ) -> None:
        super().__init__()
        self.scalars, self.gated = tuple(scalars), tuple(gated)
        self.acts = {1: even, -1: odd, 0: gate}
        self.act_scales = {key: second_moment_scale(name) for key, name in self.acts.items()}
        even_scalars = sum(block.mul for block in scalars if block.p == 1)
        self.even_split = [even_scalars, *(block.mul for block in gated)]
        n_odd = sum(block.mul for block in scalars if block.p == -1)
        ranked = sorted(gated, key=lambda block: (block.l, block.p))
        self.in_blocks = tuple(
            block for block in (Block(n_odd, 0, -1), Block(sum(self.even_split), 0, 1), *ranked) if block.mul > 0
        )
        self.out_blocks = self.scalars + self.gated
        self._where = {(block.l, block.p): number for number, block in enumerate(self.in_blocks)}

    def forward(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """[(n_atoms, 2l + 1, channels)] by `in_blocks` -> the same by `out_blocks`."""
        even = blocks[self._where[0, 1]]
        if self.acts[1] == self.acts[0]:
            scalars, *gates = cut(activate(self.acts[1], even, self.act_scales[1]), self.even_split, 2)
        else:
            scalars, *gates = cut(even, self.even_split, 2)
            scalars = activate(self.acts[1], scalars, self.act_scales[1])
            gates = [activate(self.acts[0], part, self.act_scales[0]) for part in gates]
        result = []
        for block in self.scalars:
            is_even = block.p == 1
            odd = None if is_even else blocks[self._where[0, -1]]
            result.append(scalars if odd is None else activate(self.acts[-1], odd, self.act_scales[-1]))
        for block, factor in zip(self.gated, gates):
            result.append(blocks[self._where[block.l, block.p]] * factor)
        return result


class NormActivation(nn.Module):
    """Replaces the length of every channel by the activation of that length; directions do not change."""

    def __init__(self, scalars: Sequence[Block], gated: Sequence[Block], *, even: str = "silu") -> None:
        super().__init__()
        self.activation = even
        self.out_blocks = tuple(scalars) + tuple(gated)
        self.in_blocks = tuple(sorted(self.out_blocks, key=lambda block: (block.l, block.p)))
        self._order = [self.in_blocks.index(block) for block in self.out_blocks]

    def forward(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        result = []
        for number in self._order:
            length = blocks[number].square().sum(1, keepdim=True).clamp(min=1e-16).sqrt()
            result.append(blocks[number] * (activate(self.activation, length) / length))
        return result
