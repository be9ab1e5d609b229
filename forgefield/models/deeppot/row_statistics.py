"""Mean and deviation of rows of the environment in the training data, by species of the centre, as DeePMD-kit computes them.

With `sel` its empty slots, all zero, are included. Without, they are those of the actual neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import environment_rows
from forgefield.models.deeppot.options import RowOptions, excluded_kinds
from forgefield.models.edges import edge_vectors

LEAST_DEVIATION = 1e-2
"""Deviations are at least this; DeePMD-kit calls it the protection."""
UNSEEN_DEVIATION = 1e-1
"""Deviation for species that are not in the data."""


class Moments:
    """Sums for mean and deviation of several columns."""

    def __init__(self, columns: int) -> None:
        self.number, self.sum, self.squares = (np.zeros(columns) for _ in range(3))

    def add(self, number: np.ndarray | float, values: np.ndarray | float, squares: np.ndarray | float) -> None:
        self.number += number
        self.sum += values
        self.squares += squares

    @property
    def mean(self) -> np.ndarray:
        return self.sum / np.maximum(self.number, 1)

    @property
    def deviation(self) -> np.ndarray:
        number = np.maximum(self.number, 1)
        deviation = np.sqrt(np.clip(self.squares / number - (self.sum / number) ** 2, 0, None))
        return np.where(self.number > 0, np.maximum(deviation, LEAST_DEVIATION), UNSEEN_DEVIATION)


class RowStatistics:
    """Mean and deviation of the rows around atoms of each species.

    slots: rows of an atom, empty ones included; None: of its neighbours alone. start: where the switch begins, A. columns: of a
    row, 1 or 4. exclude_types: pairs that do not see each other. pair_exclude_types: pairs that are no neighbours.
    """

    def __init__(
        self,
        n_species: int,
        cutoff: float,
        *,
        slots: int | None,
        start: float,
        columns: int = 4,
        env_protection: float = 0.0,
        exclude_types: Sequence[Sequence[int]] = (),
        pair_exclude_types: Sequence[Sequence[int]] = (),
    ) -> None:
        self.n, self.cutoff, self.slots, self.start, self.columns = n_species, cutoff, slots, start, columns
        self.protection = env_protection
        self.radial, self.angular = Moments(n_species), Moments(n_species)
        self.present = present = torch.tensor(excluded_kinds(pair_exclude_types, n_species), dtype=torch.float64)
        self.seen = present * torch.tensor(excluded_kinds(exclude_types, n_species), dtype=torch.float64)
        self.most, self.atoms, self.neighbours = np.zeros(n_species, dtype=int), 0, 0.0

    def add(self, batch: Mapping[str, Tensor]) -> None:
        species, (source, centre) = batch["species"], batch["edge_index"]
        kinds = species[centre] * self.n + species[source]
        seen, present = self.seen[kinds], self.present[kinds]
        vectors = edge_vectors(dict(batch))
        rows = environment_rows(vectors, self.start, self.cutoff, self.protection) * seen.unsqueeze(1)
        of_centre = species[centre]
        atoms = torch.bincount(species, minlength=self.n).double()
        number = atoms * self.slots if self.slots is not None else self._by_centre(seen, of_centre)
        self.radial.add(number.numpy(), *self._sums(rows[:, 0], of_centre))
        sums, squares = zip(*(self._sums(rows[:, axis], of_centre) for axis in (1, 2, 3)))
        self.angular.add(3 * number.numpy(), sum(sums), sum(squares))
        counts = torch.zeros(len(species) * self.n, dtype=torch.float64)
        counts.index_add_(0, centre * self.n + species[source], present)
        self.most = np.maximum(self.most, counts.view(-1, self.n).amax(0).int().numpy())
        self.atoms += len(species)
        self.neighbours += float(seen.sum())

    def _by_centre(self, values: Tensor, centre: Tensor) -> Tensor:
        return torch.zeros(self.n, dtype=torch.float64).index_add_(0, centre, values)

    def _sums(self, values: Tensor, centre: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return self._by_centre(values, centre).numpy(), self._by_centre(values.square(), centre).numpy()

    def result(self) -> dict[str, Any]:
        if not self.atoms:
            raise ForgefieldError("the statistics of the descriptor need training data, and there is none.")
        means, radial, angular = self.radial.mean, self.radial.deviation, self.angular.deviation
        return {
            "davg": [[float(mean), 0.0, 0.0, 0.0][: self.columns] for mean in means],
            "dstd": [[float(r), *[float(a)] * 3][: self.columns] for r, a in zip(radial, angular)],
            "mean_neighbours": self.neighbours / self.atoms,
            "max_neighbours": [int(number) for number in self.most],
        }


def embedding_statistics(
    options: RowOptions,
    *,
    species: tuple[str, ...],
    cutoff: float,
    pair_exclude_types: Sequence[Sequence[int]],
    columns: int,
) -> RowStatistics:
    """Statistics of the rows that the descriptor with these options reads."""
    sel = options.sel
    return RowStatistics(
        len(species),
        cutoff,
        slots=sum(sel) if isinstance(sel, list) else sel if isinstance(sel, int) else None,
        start=options.rcut_smth,
        columns=columns,
        env_protection=options.env_protection,
        exclude_types=options.exclude_types,
        pair_exclude_types=pair_exclude_types,
    )
