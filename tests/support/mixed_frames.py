"""A data set of frames that differ in size, cell, labels and fields."""

from __future__ import annotations

import numpy as np

from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable


def frames(sizes: list[int]) -> list[Frame]:
    """Periodic and isolated structures of two species, with a field of frames and one of atoms; energies, forces and fields are
    missing here and there."""
    random = np.random.default_rng(len(sizes))
    made = []
    for i, n in enumerate(sizes):
        periodic = i % 2 == 0
        made.append(
            Frame(
                random.uniform(0, 4, (n, 3)),
                random.choice([29, 79], n),
                (3.7 + i % 3) * np.eye(3) if periodic else np.zeros((3, 3)),
                np.full(3, periodic),
                None if i % 5 == 1 else float(n),
                None if i % 4 == 2 else random.normal(size=(n, 3)),
                source="a.xyz",
                index=i,
                fields={"gap": np.array(float(i)), "charge": random.normal(size=n)} if i % 3 else {},
                per_atom=frozenset(["charge"]),
            )
        )
    return made


SIZES = [1, 2, 9, 3, 3, 5, 1, 1, 7, 2, 2, 4, 6, 1, 3, 8, 2]
DATASET = GraphDataset(frames(SIZES), SpeciesTable(["Cu", "Au"]), 3.0)
