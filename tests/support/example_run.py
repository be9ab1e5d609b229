"""Writes a run folder with numbers of realistic size, to lay out and test the report without a training.

The numbers come from a generator with a fixed seed; they describe no real model.
    python tests/support/example_run.py FOLDER
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

SYMBOLS = ("Cu", "Au")
CONFIG = """\
# A copper-gold alloy, labelled with effective medium theory.
name: copper-gold
seed: 0
data:
  train: data/copper-gold.extxyz  # file, folder, glob, or a list of them
  val: 0.1
  cutoff: 5.0  # radius of the neighbour list, A
  batch: {frames: 8}
model: {name: nequip, preset: S}
training:
  lr: 0.01
  ema: 0.99  # decay of the average of the weights
  monitor: val/loss
trainer: {max_epochs: 120}
"""


def write_example_run(folder: Path, *, epochs: int = 120, frames: int = 60, stress: bool = True, seed: int = 0) -> Path:
    """A complete run folder; returns it."""
    random = np.random.default_rng(seed)
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "run.json").write_text(json.dumps(_info(), indent=1))
    rows, timing = _history(random, epochs, stress)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_csv(folder / "metrics.csv", rows)
    _write_csv(folder / "timing.csv", timing)
    for split in ("val", "test"):
        arrays = make_predictions(random, frames, stress=stress)
        np.savez_compressed(folder / "predictions" / f"{split}.npz", **arrays)
    errors = _plain_errors(arrays)
    test = {"source": "data/copper-gold-hot.extxyz", "weights": "best", "frames": frames, "errors": errors}
    (folder / "test.json").write_text(json.dumps(test))
    return folder


def make_predictions(random: np.random.Generator, frames: int, *, stress: bool = True) -> dict[str, np.ndarray]:
    """Arrays as a predictions file holds them: thermal forces with errors that grow with the force."""
    n_atoms = random.integers(16, 33, frames)
    atoms = int(n_atoms.sum())
    species = random.integers(0, 2, atoms)
    forces = random.normal(0, 1, (atoms, 3)) * random.gamma(2.0, 0.45, (atoms, 1))
    spread = (0.008 + 0.012 * np.abs(forces)) * np.where(species == 1, 1.4, 1.0)[:, None]
    error = random.standard_t(4, (atoms, 3)) * spread
    per_atom = random.normal(-3.2, 0.09, frames)
    arrays = {
        "n_atoms": n_atoms,
        "species": species,
        "species_symbols": np.array(SYMBOLS),
        "energy_ref": per_atom * n_atoms,
        "energy_pred": (per_atom + random.normal(0, 1.6e-3, frames)) * n_atoms,
        "forces_ref": forces,
        "forces_pred": forces + error,
    }
    if stress:
        half = random.normal(0, 0.012, (frames, 3, 3))
        reference = half + half.transpose(0, 2, 1)
        noise = random.normal(0, 4e-4, (frames, 3, 3))
        arrays |= {"stress_ref": reference, "stress_pred": reference + noise + noise.transpose(0, 2, 1)}
    return arrays


def _plain_errors(arrays: dict[str, np.ndarray]) -> dict[str, float]:
    energy = 1000 * (arrays["energy_pred"] - arrays["energy_ref"]) / arrays["n_atoms"]
    forces = 1000 * (arrays["forces_pred"] - arrays["forces_ref"])
    values = {"energy": energy, "forces": forces}
    if "stress_ref" in arrays:
        values["stress"] = 160.21766208 * (arrays["stress_pred"] - arrays["stress_ref"])
    mae = {f"{name}_mae": float(np.abs(error).mean()) for name, error in values.items()}
    return mae | {f"{name}_rmse": float(np.sqrt((error**2).mean())) for name, error in values.items()}


Rows = list[dict[str, Any]]


def _history(random: np.random.Generator, epochs: int, stress: bool) -> tuple[Rows, Rows]:
    rows, timing = [], []
    for epoch in range(epochs):
        decay = np.exp(-4.2 * (1 - np.exp(-epoch / (0.35 * epochs))))
        shake = np.exp(random.normal(0, 0.10, 8))
        rate = 0.01 * 0.5 ** (epoch // max(epochs // 4, 1))
        row = {"epoch": epoch, "step": (epoch + 1) * 45, "lr": rate}
        for split, factor in (("train", 1.0), ("val", 1.12 + 0.25 * epoch / epochs)):
            row[f"{split}/loss"] = 0.35 * (decay * factor * shake[0]) ** 2
            row[f"{split}/energy_mae"] = 62 * decay * factor * shake[1]
            row[f"{split}/energy_rmse"] = 80 * decay * factor * shake[1]
            row[f"{split}/forces_mae"] = 480 * decay * factor * shake[2] ** 0.4
            row[f"{split}/forces_rmse"] = 640 * decay * factor * shake[2] ** 0.4
            if stress:
                row[f"{split}/stress_mae"] = 2.1 * decay * factor * shake[3] ** 0.5
        rows.append(row)
        speed = random.normal(8100, 160) * (0.6 if epoch == 0 else 1.0)
        seconds = 360 * 24 / speed
        timing.append(
            {
                "epoch": epoch,
                "step": row["step"],
                "seconds": seconds,
                "frames_per_second": speed / 24,
                "atoms_per_second": speed,
            }
        )
    return rows, timing


def _info() -> dict[str, Any]:
    return {
        "name": "copper-gold",
        "status": "finished",
        "versions": {"forgefield": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "lightning": "2.6.6"},
        "species": list(SYMBOLS),
        "cutoff": 5.0,
        "precision": "float32",
        "seed": 0,
        "parameters": 612_480,
        "model": {"name": "nequip", "layers": 2, "l_max": 1, "features": [128, 64], "parity": False},
        "task": {"energy": "weight 1, mse, per atom", "forces": "weight 1, mse"},
        "data": [
            ["source", "data/copper-gold.extxyz"],
            ["frames", "360 to train, 40 to val (random), 60 to test (files)"],
            ["atoms per frame", "16 to 32"],
            ["frames with labels", "energy 360, forces 360, stress 360"],
            ["cutoff", "5.0 A, 42.5 neighbours per atom"],
        ],
        "statistics": {
            "n_frames": 360,
            "n_atoms": 8640,
            "species_counts": {"Cu": 4420, "Au": 4220},
            "mean_neighbours": 42.5,
            "mean_neighbours_by_species": {"Cu": 43.1, "Au": 41.9},
            "reference_energies": {"Cu": -3.4921, "Au": -3.1875},
            "reference_kind": "fit",
            "energy_residual_std": 0.087,
            "forces_rms": 1.08,
            "forces_rms_by_species": {"Cu": 1.02, "Au": 1.14},
            "labels": {"energy": 360, "forces": 360, "stress": 360},
            "min_distance": 2.11,
        },
    }


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    print(write_example_run(Path(sys.argv[1])))
