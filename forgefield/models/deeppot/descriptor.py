"""Descriptors of the Deep Potential family: from the neighbours of each atom to numbers that fitting networks read.

A descriptor is a module built from its options, all of them explicit. Its class declares which options it has and how those
that the config leaves open follow from statistics of the training data, so that a model is rebuilt without its data.

The environment of an atom has one row per neighbour, (1/r, x/r^2, y/r^2, z/r^2) times a switch that ends at the cutoff. Rows
are standardised with mean and deviation of the centre's species before networks read them. All of it is float64.

A type embedding represents a species by a few numbers, learnt from its index or from its electronic configuration: one number
per spin orbital of the free atom, so that elements of one group are similar and species that were never trained are related to
those that were.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.options import AnyDescriptorOptions
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import Inputs
from forgefield.ops.graph import Segments, gather, is_traced


def switch(lengths: Tensor, start: float, end: float) -> Tensor:
    """1 up to `start`, 0 from `end` on, in between a polynomial of degree 5 with two continuous derivatives. All in A."""
    u = (1 - (end - lengths) / (end - start)).clamp(0, 1)
    return 1 - u * u * u * (10 - u * (15 - 6 * u))


def environment_rows(vectors: Tensor, start: float, cutoff: float, protection: float = 0.0) -> Tensor:
    """(n_edges, 4), 1/A, of edge vectors (n_edges, 3), A. start: where the switch begins. protection: added to lengths, A."""
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    inverse = _inverse(lengths, protection)
    radial = switch(lengths, start, cutoff) * inverse
    return torch.cat([radial.unsqueeze(1), vectors * (radial * inverse).unsqueeze(1)], 1)


def radial_rows(vectors: Tensor, start: float, cutoff: float, protection: float = 0.0) -> Tensor:
    """(n_edges, 1): the first column of `environment_rows`."""
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    return (switch(lengths, start, cutoff) * _inverse(lengths, protection)).unsqueeze(1)


def _inverse(lengths: Tensor, protection: float) -> Tensor:
    """1 / (lengths + protection), written as a difference: a sum of tensor and number has no tangent in a trace."""
    return torch.reciprocal(lengths if protection == 0 else -(-protection - lengths))


class Standardise(torch.nn.Module):
    """Standardises rows: minus the mean, divided by the deviation of their centre's species.

    mean, deviation: (n_species, c), 1/A.
    shift_rows: without, the mean is subtracted only from the input of networks; rows then vanish at the cutoff, which is
        necessary if no empty slots replace neighbours that leave.
    """

    mean: Tensor
    deviation: Tensor
    empty: Tensor

    def __init__(self, mean: list[list[float]], deviation: list[list[float]], *, shift_rows: bool) -> None:
        super().__init__()
        self.shift_rows = shift_rows
        means, deviations = torch.tensor(mean, dtype=torch.float64), torch.tensor(deviation, dtype=torch.float64)
        self.register_buffer("mean", means, persistent=False)
        self.register_buffer("deviation", deviations, persistent=False)
        self.register_buffer("empty", -means / deviations, persistent=False)
        self.has_shift = bool((means != 0).any())

    def forward(self, rows: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised rows (n_edges, c) and the input of networks (n_edges,). centre: (n_edges,) species of the centre."""
        rows = rows / self.deviation.index_select(0, centre)
        if not self.has_shift:
            return rows, rows[:, 0]
        if self.shift_rows:
            rows = rows + self.empty.index_select(0, centre)
            return rows, rows[:, 0]
        return rows, rows[:, 0] + self.empty[:, 0].index_select(0, centre)


OptionsT = TypeVar("OptionsT", bound=AnyDescriptorOptions)


class DescriptorStatistics(Protocol):
    """Statistics of the training data, collected batch by batch."""

    def add(self, batch: Mapping[str, Tensor]) -> None:
        """Take a batch with edges into account."""
        ...

    def result(self) -> dict[str, Any]:
        """The statistics by name, as plain values: entries of `statistics["environment"]`."""
        ...


class Descriptor(nn.Module, ABC, Generic[OptionsT]):
    """Base of descriptors.

    dim_out: numbers per atom.
    dim_rotation: rows M of the rotation matrix, 0 if it has none.
    mixed_types: whether the descriptor distinguishes species itself, so that one fitting network is used for all of them.
    rotates: whether the rotation matrix is read.
    ghost_atoms, inputs: see `AtomisticModel`.
    """

    Options: ClassVar[type[AnyDescriptorOptions]]
    """Dataclass of its options, `type` first; defaults are DeePMD-kit's."""
    options: OptionsT
    dim_out: int
    dim_rotation: int = 0
    rotates: bool = True
    mixed_types: bool = False
    ghost_atoms: str | None = "local"
    inputs: Inputs = {}
    optional_inputs: tuple[str, ...] = ()

    def __init__(
        self,
        options: OptionsT,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        """options: resolved. cutoff: A. dtype: of weights whose `precision` is default."""
        super().__init__()
        self.options, self.species, self.cutoff = options, tuple(species), float(cutoff)

    @classmethod
    @abstractmethod
    def complete(
        cls, options: OptionsT, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> OptionsT:
        """Options checked, with every number explicit. statistics: `statistics["environment"]` is the result of
        `environment_statistics`, if there is training data."""

    @classmethod
    @abstractmethod
    def statistics(
        cls,
        options: OptionsT,
        *,
        species: tuple[str, ...],
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> DescriptorStatistics:
        """What `complete` needs to know about the training data. options: as in the config."""

    @classmethod
    def refuses_species(cls, options: OptionsT, n_old: int, n_all: int) -> str | None:
        """Why a trained descriptor with these options cannot be extended from `n_old` to `n_all` species; None where it can."""
        return f"its descriptor {options.type} cannot be extended; train a new model."

    @classmethod
    def extended(cls, options: OptionsT, n_old: int, measured: Mapping[str, Any]) -> OptionsT:
        """Complete options with species after the first `n_old`. measured: statistics of data with all of them."""
        raise NotImplementedError(f"{cls.__name__} cannot be extended")

    def may_wait_for(self, tensor: Tensor) -> bool:
        """Whether the host may read values: not in a trace or a capture, nor in training on a GPU, which must not wait."""
        if is_traced(tensor):
            return False
        return not (tensor.is_cuda and (self.training or torch.cuda.is_current_stream_capturing()))

    @abstractmethod
    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Descriptor (n_atoms, dim_out) and rotation (n_atoms, dim_rotation, 3) or None, both in the descriptor's precision.

        mask: (n_edges,) float64, 0 for edges that are ignored.
        """


SUBSHELLS = "1s 2s 2p 3s 3p 3d 4s 4p 4d 4f 5s 5p 5d 5f 6s 6p 6d 7s 7p"
"""In the order of the vector's entries, two for each of the 2 l + 1 orbitals."""
FILLING = "1s 2s 2p 3s 3p 4s 3d 4p 5s 4d 5p 6s 4f 5d 6p 7s 5f 6d 7p"
"""In the order in which electrons enter (Madelung's rule)."""
MOVED = {
    "Cr": "4s 3d",
    "Cu": "4s 3d",
    "Nb": "5s 4d",
    "Mo": "5s 4d",
    "Ru": "5s 4d",
    "Rh": "5s 4d",
    "Pd": "5s 4d 5s 4d",
    "Ag": "5s 4d",
    "La": "4f 5d",
    "Ce": "4f 5d",
    "Gd": "4f 5d",
    "Pt": "6s 5d",
    "Au": "6s 5d",
    "Ac": "5f 6d",
    "Th": "5f 6d 5f 6d",
    "Pa": "5f 6d",
    "U": "5f 6d",
    "Np": "5f 6d",
    "Cm": "5f 6d",
    "Ds": "7s 6d",
    "Rg": "7s 6d",
}
"""Atoms that deviate from the rule: from and to which subshell an electron moves. The last two are as in DeePMD-kit."""
_LETTERS = "spdf"


def occupations(symbol: str) -> dict[str, int]:
    """Electrons in each subshell of the free atom."""
    number = atomic_numbers.get(symbol, 0)
    if not 1 <= number <= 118:
        raise ForgefieldError(
            f"'{symbol}' is not an element, so it has no electronic configuration; "
            "set descriptor.use_econf_tebd to false or name elements in data.species"
        )
    electrons = dict.fromkeys(SUBSHELLS.split(), 0)
    for name in FILLING.split():
        electrons[name] = min(number, 2 * _orbitals(name))
        number -= electrons[name]
    moves = MOVED.get(symbol, "").split()
    for origin, target in zip(moves[::2], moves[1::2]):
        electrons[origin] -= 1
        electrons[target] += 1
    return electrons


def electronic_configuration(symbol: str) -> list[float]:
    """A unit vector of 118 numbers: two for each orbital, positive where it contains an electron.

    Electrons of a subshell are paired as little as possible. An orbital with one electron is (negative, positive).
    """
    size = 1 / math.sqrt(sum(2 * _orbitals(name) for name in SUBSHELLS.split()))
    result = []
    for name, electrons in occupations(symbol).items():
        orbitals = _orbitals(name)
        for orbital in range(orbitals):
            paired, single = orbital < electrons - orbitals, orbital < electrons
            result += [size if paired else -size, size if single else -size]
    return result


def _orbitals(name: str) -> int:
    return 2 * _LETTERS.index(name[1]) + 1


class TypeEmbedding(nn.Module):
    """A table of `dim` numbers for each species: one affine map of unit vectors, or of electronic configurations.

    Like every layer of these networks it adds its input if the width is the same, and its input twice if the width doubles.
    """

    inputs: Tensor
    b: Tensor | None

    def __init__(
        self,
        species: Sequence[str],
        dim: int,
        *,
        from_configuration: bool,
        bias: bool,
        trainable: bool,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        rows = torch.eye(len(species), dtype=torch.float64)
        if from_configuration:
            rows = torch.tensor([electronic_configuration(symbol) for symbol in species], dtype=torch.float64)
        self.register_buffer("inputs", rows.to(dtype), persistent=False)
        n_in = rows.shape[1]
        self.repeats = dim // n_in if dim in (n_in, 2 * n_in) else 0
        weight = torch.randn(n_in, dim, generator=generator, dtype=torch.float64) / math.sqrt(n_in + dim)
        self.w = nn.Parameter(weight.to(dtype), requires_grad=trainable)
        self.b = None
        if bias:
            drawn = torch.randn(dim, generator=generator, dtype=torch.float64)
            self.b = nn.Parameter(drawn.to(dtype), requires_grad=trainable)

    def forward(self) -> Tensor:
        """(n_species, dim)."""
        table = self.inputs @ self.w
        if self.b is not None:
            table = table + self.b
        return table + torch.cat([self.inputs] * self.repeats, 1) if self.repeats else table


def refuses_types(width: int, n_old: int, n_all: int) -> str | None:
    """Why a type embedding of this width, learnt from indices of species, cannot be extended; None where it can."""
    if not any(width in (n, 2 * n) for n in (n_old, n_all)):
        return None
    return f"its type embedding of width {width} cannot be extended from {n_old} to {n_all} species; train a new model."


FEW = 256
"""Up to this number of rows of a table are selected by products with unit vectors on a GPU."""


def pick_rows(table: Tensor, kinds: Tensor) -> Tensor:
    """Row `kinds[i]` of the table for every i: (n_kinds, c), (n,) -> (n, c).

    Its gradient sums over all i of one kind; on a GPU, few long sums are computed as products.
    """
    n_kinds = table.shape[0]
    if kinds.is_cuda and n_kinds <= FEW:
        return nn.functional.one_hot(kinds, n_kinds).to(table.dtype) @ table
    return gather(table, Segments(kinds, n_kinds))
