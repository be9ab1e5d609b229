"""Average cosine similarity distance: how well descriptors distinguish points with different targets, without training.

For two points, the cosine similarity of their descriptors minus that of their LDOS is positive where the descriptors look alike
although the LDOS differ. The distance is the mean of the positive part over pairs of points: 0 is best. As in MALA, it includes
the pairs of a point with itself, and the similarity of single numbers is the smaller divided by the larger one.
(Fiedler et al., Mach. Learn.: Sci. Technol. 3, 045008 (2022).)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.grid import make_descriptors
from forgefield.ldos.descriptors.neighbourhoods import default_sigma

ROWS = 1024
"""Rows of the matrix of similarities that are computed at a time."""
READ_VALUES = 1 << 26
"""Values of a snapshot up to which all of it is read, and otherwise point by point."""


@dataclass(frozen=True)
class Score:
    """Average cosine similarity distance of some snapshots.

    settings: how the descriptors were computed; None: those in the files. columns: of the descriptors. distances: by name of
    the snapshot. left_out: points without direction, whose descriptors or LDOS are all zero.
    """

    settings: DescriptorOptions | None
    columns: int
    distances: dict[str, float]
    left_out: int

    @property
    def mean(self) -> float:
        """Mean over the snapshots."""
        return float(np.mean(list(self.distances.values())))


def cosine_distance(descriptors: np.ndarray, targets: np.ndarray) -> float:
    """Average cosine similarity distance over all pairs of points. descriptors: (n, columns); targets: (n, levels)."""
    first, second = _directions(descriptors), _directions(targets)
    total = 0.0
    for start in range(0, len(descriptors), ROWS):
        rows = slice(start, start + ROWS)
        total += float((_similarities(first, rows) - _similarities(second, rows)).clip(min=0).sum())
    return total / len(descriptors) ** 2


def _directions(values: np.ndarray) -> np.ndarray:
    """Unit vectors, or single numbers as they are."""
    values = values.astype(np.float64)
    return values if values.shape[1] == 1 else values / np.linalg.norm(values, axis=1, keepdims=True)


def _similarities(directions: np.ndarray, rows: slice) -> np.ndarray:
    if directions.shape[1] > 1:
        return directions[rows] @ directions.T
    some, all_values = directions[rows], directions[:, 0]
    return np.minimum(some, all_values) / np.maximum(some, all_values)


def score_descriptors(
    snapshots: Sequence[Snapshot],
    candidates: Sequence[DescriptorOptions],
    *,
    points: int = 2000,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Distances of all candidates, the best first; without candidates, that of the descriptors in the files.

    points: number of random points of each snapshot, all pairs of which are compared. They are the same for all candidates,
    whose descriptors are computed at these points only.
    """
    if points < 2:
        raise ForgefieldError(f"pairs of points are compared, which takes at least 2 points, not {points}")
    samples = [_sample(snapshot, points, seed) for snapshot in snapshots]
    scores, total = [], max(1, len(candidates)) * len(snapshots)
    for number, settings in enumerate(candidates or [None]):
        distances, columns, left_out = {}, 0, 0
        for index, (snapshot, sample) in enumerate(zip(snapshots, samples)):
            if settings is None:
                values = _stored(snapshot, sample.rows)
            else:
                values = _computed(snapshot, sample.rows, settings, device)
            usable = values.any(axis=1) & sample.targets.any(axis=1)
            if usable.sum() < 2:
                raise ForgefieldError(
                    f"{snapshot.name}: descriptors or LDOS are zero at nearly all of {len(values)} points"
                )
            distances[snapshot.name] = cosine_distance(values[usable], sample.targets[usable])
            columns, left_out = values.shape[1], left_out + int((~usable).sum())
            if progress is not None:
                progress(number * len(snapshots) + index + 1, total)
        scores.append(Score(settings, columns, distances, left_out))
    return sorted(scores, key=lambda score: score.mean)


def candidate_settings(choices: dict[str, Sequence[Any]]) -> list[DescriptorOptions]:
    """All combinations of the values of some options of descriptors."""
    return [DescriptorOptions.from_mapping(dict(zip(choices, each))) for each in itertools.product(*choices.values())]


@dataclass(frozen=True)
class _Sample:
    """rows: (n,), points of a snapshot; targets: (n, levels)."""

    rows: np.ndarray
    targets: np.ndarray


def _sample(snapshot: Snapshot, points: int, seed: int) -> _Sample:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(snapshot.n_points, min(points, snapshot.n_points), replace=False))
    return _Sample(rows, _read(snapshot, rows)[1])


def _read(snapshot: Snapshot, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of some points."""
    if snapshot.n_points * (snapshot.n_inputs + snapshot.n_targets) <= READ_VALUES:
        inputs, targets = snapshot.read()
        return inputs[rows], targets[rows]
    pieces = [snapshot.read(int(row), int(row) + 1) for row in rows]
    return np.concatenate([inputs for inputs, _ in pieces]), np.concatenate([targets for _, targets in pieces])


def _stored(snapshot: Snapshot, rows: np.ndarray) -> np.ndarray:
    if snapshot.inputs is None:
        raise ForgefieldError(
            f"{snapshot.name} has no file of descriptors; name settings to compute them, for example --twojmax 6 8 10"
        )
    return _read(snapshot, rows)[0]


def _computed(snapshot: Snapshot, rows: np.ndarray, settings: DescriptorOptions, device: str) -> np.ndarray:
    info = snapshot.info.require("numbers", "positions", "cell", "grid_shape", why="the computation of descriptors")
    assert info.grid_shape is not None
    assert info.numbers is not None
    assert info.cell is not None
    assert info.positions is not None
    species = [chemical_symbols[number] for number in sorted(set(info.numbers.tolist()))]
    options = settings
    if settings.type == "gaussian" and settings.sigma is None:
        options = replace(settings, sigma=default_sigma(torch.as_tensor(info.cell), info.grid_shape))
    fractions = np.stack(np.unravel_index(rows, info.grid_shape), axis=1) / np.array(info.grid_shape)
    values = make_descriptors(options, species).at_points(
        fractions @ info.cell, info.cell, info.positions, info.numbers, True, device
    )
    return values.cpu().numpy()
