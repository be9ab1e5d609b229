"""Liquid water to measure with where there is no data: 64 molecules at experimental density, 192 atoms a frame.

Molecules stand on a grid, turned at random, all atoms displaced a little. Labels are real energies and forces, those between
rigid molecules of the TIP3P model (as in ASE); they are there to be computed with, not to be learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.calculators.tip3p import TIP3P

MOLECULES_ALONG_EDGE = 4
BOX = 12.42
"""A; 64 molecules in it are 0.999 g/cm^3."""
CUTOFF = 5.0
"""A, as in NequIP's own benchmarks."""
DISPLACEMENT = 0.05
"""A, standard deviation of each coordinate."""
SEED = 7
FRAMES = 8
"""Of a batch, unless the command line says otherwise."""


def water(rng: np.random.Generator, along_edge: int = MOLECULES_ALONG_EDGE) -> Atoms:
    """along_edge^3 molecules, three atoms each, with TIP3P energy (eV) and forces (eV/A)."""
    spacing = BOX / MOLECULES_ALONG_EDGE
    box = Atoms(cell=[spacing * along_edge] * 3, pbc=True)
    for corner in np.ndindex(along_edge, along_edge, along_edge):
        one = molecule("H2O")
        one.rotate(float(rng.uniform(0, 360)), rng.normal(size=3))
        one.translate(spacing * np.array(corner))
        box += one
    box.positions += DISPLACEMENT * rng.normal(size=box.positions.shape)
    box.calc = TIP3P(rc=min(4.5, 0.45 * spacing * along_edge), width=0.5)
    labels = {"energy": box.get_potential_energy(), "forces": box.get_forces()}
    box.calc = SinglePointCalculator(box, **labels)
    return box


def write_water(path: Path, frames: int) -> None:
    """So many different frames; the same ones for the same number."""
    rng = np.random.default_rng(SEED)
    ase.io.write(path, [water(rng) for _ in range(frames)], format="extxyz")


def water_config(path: Path) -> dict[str, Any]:
    """A training on the frames of `path` with preset S; everything in it may be overridden."""
    return {
        "name": "water",
        "data": {"train": str(path), "val": 0, "cutoff": CUTOFF, "batch": {"frames": FRAMES}, "cache": False},
        "model": {"name": "nequip", "preset": "S"},
        "task": {"energy": {"weight": 1.0}, "forces": {"weight": 1.0}},
    }


def frames_for(options: Any, ranks: int) -> int:
    """How many frames a training with this data section needs for full batches on so many ranks."""
    from forgefield.data.sampling.batching import training_budget

    budget, atoms = training_budget(options), 3 * MOLECULES_ALONG_EDGE**3
    per_frame = {"frames": 1, "atoms": atoms, "edges": 55 * atoms}[budget.kind]
    return max(4, (1 + budget.size // per_frame) * ranks)
