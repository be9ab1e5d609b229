"""Small snapshots with a made-up but consistent physics, and a config that learns from them in a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.fermi import dos_of_ldos, electron_number

GRID = EnergyGrid(-4.0, 2.0, 7)
ENERGIES = {"first": -4.0, "spacing": 2.0, "levels": 7}
TEMPERATURE, FERMI = 3000.0, 4.3
CELL = np.diag([2.0, 2.0, 3.0])


def write_snapshot(
    folder: Path, name: str, seed: int, grid: tuple[int, int, int] = (4, 3, 5), **info_changes: Any
) -> Path:
    """Six descriptors after three coordinates, seven levels that follow from them, and an `.info.json` that fits."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(*grid, 6)) * np.array([1.0, 5.0, 0.2, 1.0, 30.0, 1.0]) + np.array([0, 3, 0, -1, 400, 0])
    mixing = np.random.default_rng(0).normal(size=(6, 7))
    scaled = (features - features.mean((0, 1, 2))) / features.std((0, 1, 2))
    ldos = 0.05 * (1.2 + np.tanh(scaled @ mixing * 0.4)).astype(np.float32)
    axes = np.meshgrid(*(np.arange(n) * CELL[i, i] / n for i, n in enumerate(grid)), indexing="ij")
    np.save(folder / f"{name}.in.npy", np.concatenate([np.stack(axes, -1), features], -1).astype(np.float32))
    np.save(folder / f"{name}.out.npy", ldos)
    volume = float(np.linalg.det(CELL)) / np.prod(grid)
    dos = dos_of_ldos(torch.from_numpy(ldos), volume)
    info = {
        "fermi_energy_dft": FERMI,
        "temperature": TEMPERATURE,
        "number_of_electrons_exact": float(electron_number(dos, GRID, TEMPERATURE, FERMI)),
        "band_energy_dft_calculation": 3.0,
        "grid_dimensions": list(grid),
        "atoms": {"numbers": [4, 4], "positions": [[0, 0, 0], [1, 1, 1.5]], "cell": CELL.tolist()},
    }
    info |= info_changes
    (folder / f"{name}.info.json").write_text(
        json.dumps({key: value for key, value in info.items() if value is not None})
    )
    return folder / f"{name}.in.npy"


def point_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """120 training points in 9 steps of 14, 60 validation points. changes: section -> keys."""
    for number in range(3):
        if not (folder / f"s{number}.in.npy").exists():
            write_snapshot(folder, f"s{number}", seed=number + 1)
    config: dict[str, Any] = {
        "name": "points",
        "out": str(folder / "runs"),
        "seed": 5,
        "data": {
            "train": [str(folder / "s0.in.npy"), str(folder / "s1.in.npy")],
            "val": str(folder / "s2.in.npy"),
            "batch": {"points": 14},
            "points": {"energies": ENERGIES},
        },
        "model": {"name": "ldos", "hidden": [8], "activation": "silu"},
        "task": {"ldos": {}, "observables": {"metrics": ["band_energy", "density"]}},
        "training": {"lr": 0.01, "ema": 0.9, "tensorboard": 0, "block": 4, "checkpoint": {"every_epochs": 1}},
        "trainer": {"max_epochs": 3, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    for section, values in changes.items():
        both = isinstance(values, dict) and isinstance(config.get(section), dict) and section not in ("model", "task")
        config[section] = {**config[section], **values} if both else values
    return config
