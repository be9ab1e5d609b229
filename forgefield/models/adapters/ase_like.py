"""Models of one structure with the words of ASE: `forward(atomic_numbers=, positions=, cell=, pbc=)` to its energy.

Called frame by frame with torch tensors, so that forces and stress are derivatives; neighbours, periodic images and smoothness
are the model's own. The result is a number, a tensor of one, or a dict with `energy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.adapters.foreign import Foreign
from forgefield.models.edges import Batch, EdgeContext


class AseLike(Foreign):
    """model.features: key of a dict result with features of atoms (n_atoms, n)."""

    def evaluate(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        numbers = self.numbers.index_select(0, batch["species"])
        energies, features, start = [], [], 0
        for frame, n_atoms in enumerate(batch["n_atoms"].tolist()):
            end = start + n_atoms
            found = self.module(
                atomic_numbers=numbers[start:end],
                positions=batch["positions"][start:end].to(self.dtype),
                cell=batch["cell"][frame].to(self.dtype),
                pbc=batch["pbc"][frame],
            )
            energies.append(self._energy(found))
            if self.options.features is not None:
                features.append(found[self.options.features])
            start = end
        return torch.stack(energies), torch.cat(features) if features else None

    def _energy(self, found: Any) -> Tensor:
        energy = found.get("energy") if isinstance(found, Mapping) else found
        if not isinstance(energy, Tensor) or energy.numel() != 1:
            raise ForgefieldError(
                f"{self.options.module}: the energy of a structure is wanted, one number or the key 'energy'."
            )
        return energy.reshape(())
