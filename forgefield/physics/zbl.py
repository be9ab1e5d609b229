"""The Ziegler-Biersack-Littmark repulsion of screened nuclei, in eV and A, as LAMMPS' `pair_style zbl` defines it."""

from __future__ import annotations

import torch
from torch import Tensor

COULOMB = 14.399645
"""e^2 / (4 pi epsilon_0), eV A: LAMMPS' value in metal units."""
_EXPONENTS = (3.19980, 0.94229, 0.40290, 0.20162)
_COEFFICIENTS = (0.18175, 0.50986, 0.28022, 0.02817)
_LENGTH, _POWER = 0.46850, 0.23


def zbl_pair_energy(distance: Tensor, z_i: Tensor, z_j: Tensor) -> Tensor:
    """Energy of a pair of nuclei, eV, without any cutoff.

    `distance`: A; `z_i`, `z_j`: atomic numbers; all of one shape.
    """
    x = distance * (z_i**_POWER + z_j**_POWER) / _LENGTH
    screening = sum(c * torch.exp(-d * x) for c, d in zip(_COEFFICIENTS, _EXPONENTS))
    return COULOMB * z_i * z_j / distance * screening
