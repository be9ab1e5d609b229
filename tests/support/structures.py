"""Small structures and models for the tests of potentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.models import Potential, build_model, resolve_model

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
SPECIES = ("H", "O")
STATISTICS = {"mean_neighbours": 9.0, "forces_rms": 1.3, "reference_energies": {"H": -13.6, "O": -75.0}}
TINY = {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": 4, "radial_mlp_width": 8}


def make_frame(
    n: int, seed: int = 0, periodic: bool = True, box: float = 4.0, numbers: tuple[int, ...] = (1, 8)
) -> Frame:
    """`n` atoms at random, at least 0.8 A apart, in a skewed cell or in the open."""
    rng = np.random.default_rng(seed)
    cell = np.eye(3) * box + rng.uniform(-0.4, 0.4, (3, 3))
    points: list[np.ndarray] = []
    while len(points) < n:
        point = rng.random(3) @ cell
        if all(np.linalg.norm(point - other) > 0.8 for other in points):
            points.append(point)
    return Frame(
        positions=np.array(points).reshape(n, 3),
        numbers=rng.choice(numbers, n).astype(np.int64),
        cell=cell if periodic else np.zeros((3, 3)),
        pbc=np.full(3, periodic),
        energy=None,
        forces=None,
        stress=None,
    )


def make_batch(*frames: Frame, cutoff: float = 3.0, species: tuple[str, ...] = SPECIES) -> dict[str, torch.Tensor]:
    return batch_from_frames(list(frames), SpeciesTable(species), cutoff)


def make_potential(
    precision: str = "float64", seed: int = 0, cutoff: float = 3.0, species: tuple[str, ...] = SPECIES, **options: Any
) -> Potential:
    statistics = STATISTICS | {
        "reference_energies": {s: STATISTICS["reference_energies"].get(s, -1.0) for s in species}
    }
    resolved = resolve_model({**TINY, **options}, species=species, cutoff=cutoff, statistics=statistics)
    return build_model(resolved, precision=precision, seed=seed)
