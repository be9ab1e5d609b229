"""Structures of copper and gold on which models are checked."""

from __future__ import annotations

import numpy as np
from ase.build import bulk, fcc111, molecule

from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable

SPECIES = SpeciesTable(("Cu", "Au"))


def as_frame(atoms) -> Frame:
    return Frame(
        positions=np.array(atoms.positions),
        numbers=np.array(atoms.numbers, dtype=np.int64),
        cell=np.array(atoms.cell, dtype=np.float64),
        pbc=np.array(atoms.pbc),
    )


def structures() -> list[Frame]:
    """A crystal smaller than the cutoff, a slab, and a cluster without a cell."""
    random = np.random.default_rng(5)
    crystal = bulk("Cu", cubic=True, a=3.7)
    crystal.symbols[0] = "Au"
    slab = fcc111("Cu", size=(2, 2, 2), a=3.7, vacuum=4.0)
    slab.symbols[1] = "Au"
    slab.pbc = (True, True, False)
    cluster = molecule("CH4")
    cluster.symbols[:] = ["Au", "Cu", "Cu", "Au", "Cu"]
    cluster.positions *= 2.4
    for atoms in (crystal, slab, cluster):
        atoms.positions += random.normal(0, 0.1, size=atoms.positions.shape)
    return [as_frame(atoms) for atoms in (crystal, slab, cluster)]
