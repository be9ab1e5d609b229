"""Liquid water to benchmark with where there is no data: 64 molecules at experimental density, 192 atoms per frame.

The molecules are on a grid, with random orientations and small displacements of all atoms. Labels are the energies and forces
between rigid molecules of the TIP3P model (as in ASE); they are meant for timing, not for learning.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.calculators.tip3p import TIP3P

from forgefield.bench.machine import slots
from forgefield.config.loading import load_config
from forgefield.config.schema import Config, DataOptions
from forgefield.data.sampling.batching import training_budget
from forgefield.parallel.ranks import Ranks

MOLECULES_ALONG_EDGE = 4
BOX = 12.42
"""A; 64 molecules in it are 0.999 g/cm^3."""
CUTOFF = 5.0
"""A, as in NequIP's own benchmarks."""
DISPLACEMENT = 0.05
"""A, standard deviation of each coordinate."""
SEED = 7
FRAMES = 8
"""In a batch, unless overridden."""


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
    """Write this many different frames; the same ones for the same number."""
    rng = np.random.default_rng(SEED)
    ase.io.write(path, [water(rng) for _ in range(frames)], format="extxyz")


def water_config(path: Path) -> dict[str, Any]:
    """A config that trains on the frames of `path` with preset S; everything in it may be overridden."""
    return {
        "name": "water",
        "data": {"train": str(path), "val": 0, "cutoff": CUTOFF, "batch": {"frames": FRAMES}, "cache": False},
        "model": {"name": "nequip", "preset": "S"},
        "task": {"energy": {"weight": 1.0}, "forces": {"weight": 1.0}},
    }


def frames_for(options: DataOptions, ranks: int) -> int:
    """How many frames a training with this data section needs for full batches on this many ranks."""
    budget, atoms = training_budget(options), 3 * MOLECULES_ALONG_EDGE**3
    per_frame = {"frames": 1, "atoms": atoms, "edges": 55 * atoms}[budget.kind]
    return max(4, (1 + budget.size // per_frame) * ranks)


@contextmanager
def water_training(
    file: str | None, overrides: list[str], ranks: Ranks, *, most: int | None, trust_code: bool = False
) -> Iterator[Config]:
    """Inside, the config of a training on water, whose frames are in a temporary folder of the same name on every node.

    file: config whose model and training are used; default: preset S of NequIP. most: number of processes to write frames for;
    default: all that fit on this machine or were started by a launcher.
    """
    folder = Path(tempfile.gettempdir()) / ranks.broadcast(f"forgefield-water-{os.getpid()}-{os.urandom(4).hex()}")
    path = folder / "water.extxyz"
    water = load_config(water_config(path), overrides if file is None else [])
    config = water if file is None else load_config(file, overrides, trust_code=trust_code)
    if file is not None:  # everything of the config but its data
        kept = {key: copy.deepcopy(getattr(config.data, key)) for key in ("cutoff", "batch", "neighbours")}
        config.data, config.task = water.data, water.task
        for key, value in kept.items():
            setattr(config.data, key, value)
    if most is None:
        most = ranks.world_size if ranks.launch.launcher != "none" else slots(config)[0]
    writes = ranks.launch.local_rank == 0
    try:
        if writes:
            folder.mkdir(mode=0o700)
            write_water(path, frames_for(config.data, most))
        ranks.barrier()
        yield config
    finally:
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
