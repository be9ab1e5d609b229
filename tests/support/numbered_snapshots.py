"""Snapshots in which the first descriptor and the first level of a point are its row number."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SHAPES = ((4, 5, 6), (3, 7, 5), (8, 4, 4))
VOXEL = np.array([[0.3, 0.0, 0.0], [-0.15, 0.26, 0.0], [0.02, 0.0, 0.4]])


def coordinates(shape: tuple[int, int, int]) -> np.ndarray:
    return np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1) @ VOXEL


def write_snapshot(
    folder: Path, name: str, shape: tuple[int, int, int], first: int = 0, dtype: type = np.float32
) -> Path:
    n = int(np.prod(shape))
    rng = np.random.default_rng(first)
    inputs, targets = rng.normal(size=(n, 4)), rng.random(size=(n, 3))
    inputs[:, 0] = targets[:, 0] = first + np.arange(n)
    grid = np.concatenate([coordinates(shape), inputs.reshape(*shape, 4)], axis=-1)
    np.save(folder / f"{name}.in.npy", grid.astype(dtype))
    np.save(folder / f"{name}.out.npy", targets.reshape(*shape, 3).astype(dtype))
    return folder / f"{name}.in.npy"
