"""Numbers that stand for a species: learnt from its place in the list of species, or from its electronic configuration.

The configuration of the free atom is written as one number per spin orbital, so that elements of one group look alike and
species that were never trained get a meaning from those that were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.ops.graph import Segments, gather

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
"""Atoms that differ from the rule: from and to which subshell an electron moves. The last two as DeePMD-kit has them."""
_LETTERS = "spdf"


def occupations(symbol: str) -> dict[str, int]:
    """Electrons in each subshell of the free atom."""
    number = atomic_numbers.get(symbol, 0)
    if not 1 <= number <= 118:
        raise ForgefieldError(
            f"'{symbol}' is not an element, so it has no electronic configuration; "
            "set descriptor.use_econf_tebd to false or name elements in data.species"
        )
    found = dict.fromkeys(SUBSHELLS.split(), 0)
    for name in FILLING.split():
        found[name] = min(number, 2 * _orbitals(name))
        number -= found[name]
    moves = MOVED.get(symbol, "").split()
    for origin, target in zip(moves[::2], moves[1::2]):
        found[origin] -= 1
        found[target] += 1
    return found


def electronic_configuration(symbol: str) -> list[float]:
    """118 numbers, together of length one: for each orbital two, positive where it holds an electron.

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

    As every layer of these networks it adds its input where the width stays, and twice side by side where it doubles.
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


FEW = 256
"""Up to so many rows of a table are picked by products with unit vectors on an accelerator."""


def pick_rows(table: Tensor, kinds: Tensor) -> Tensor:
    """Row `kinds[i]` of the table for every i: (n_kinds, c), (n,) -> (n, c).

    Its gradient sums over all i of one kind. Where these are few and long such sums are products on an accelerator.
    """
    n_kinds = table.shape[0]
    if kinds.is_cuda and n_kinds <= FEW:
        return nn.functional.one_hot(kinds, n_kinds).to(table.dtype) @ table
    return gather(table, Segments(kinds, n_kinds))
