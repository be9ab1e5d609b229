"""Accuracy on revised MD17 with 50 training frames, next to the published numbers, with a short training.

    python benchmarks/rmd17.py --data FOLDER [--molecules ethanol,aspirin] [--out runs/rmd17] [key=value ...]

FOLDER holds rmd17_<molecule>_train_01.npz and ..._test_01.npz (official split 1). Trains on the first 50 of the 1000 training
frames, validates on the last 50, tests on the 1000 test frames. Running it again continues. `key=value` overrides the config.

The settings were chosen on these two molecules; benchmarks/accuracy.py has one recipe for all molecules and data sets.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

import forgefield

PUBLISHED = {
    # MAE with 50 training frames, energy meV and forces meV/A
    "ethanol": {"NequIP": (8.7, 40.2), "MACE": (6.7, 32.6)},
    "aspirin": {"NequIP": (19.5, 52.0), "MACE": (17.0, 43.9)},
}


def config(molecule: str, data: Path, out: Path) -> dict:
    return {
        "name": molecule,
        "out": str(out),
        "seed": 1,
        "data": {
            "train": str(data / f"rmd17_{molecule}_train_01.npz"),
            "indices": "0:50",
            "val": {"indices": "950:1000"},
            "test": str(data / f"rmd17_{molecule}_test_01.npz"),
            "units": {"energy": "kcal/mol"},
            "cutoff": 5.0,
            "batch": {"frames": 5},
            "eval_batch": 100,
        },
        "model": {
            "name": "nequip",
            "num_layers": 4,
            "l_max": 3,
            "parity": False,
            "num_features": 32,
            "radial_mlp_depth": 2,
            "radial_mlp_width": 64,
        },
        "task": {"energy": {"weight": 1.0, "per_atom": True}, "forces": {"weight": 1.0}},
        "training": {
            "lr": 0.01,
            "ema": 0.99,
            "clip_norm": 10.0,
            "scheduler": {"name": "CosineAnnealingLR", "T_max": "${trainer.max_epochs}"},
            "checkpoint": {"every_epochs": 25},
            "tensorboard": 0,
        },
        "trainer": {"max_epochs": 1000, "check_val_every_n_epoch": 10},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--molecules", default="ethanol,aspirin", help="comma-separated")
    parser.add_argument("--out", type=Path, default=Path("runs/rmd17"))
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    rows = []
    for molecule in arguments.molecules.split(","):
        start = time.perf_counter()
        run = forgefield.train(config(molecule, arguments.data, arguments.out), *arguments.overrides)
        rows.append((molecule, run, time.perf_counter() - start))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"\nrMD17, 50 training frames, MAE on 1000 test frames; {device}, torch {torch.__version__}")
    print(f"{'molecule':10} {'model':12} {'energy meV':>10} {'forces meV/A':>12} {'minutes':>8}")
    for molecule, run, seconds in rows:
        test = run.path / "test.json"
        if test.exists():
            errors = json.loads(test.read_text())["errors"]
            energy, forces = errors["energy_total_mae"], errors["forces_mae"]
            print(f"{molecule:10} {'Forgefield':12} {energy:10.1f} {forces:12.1f} {seconds / 60:8.1f}")
        else:
            print(f"{molecule:10} Forgefield   stopped after {seconds / 60:.1f} minutes; run again to go on")
        for name, (energy, forces) in PUBLISHED[molecule].items():
            print(f"{molecule:10} {name:12} {energy:10.1f} {forces:12.1f}   published")


if __name__ == "__main__":
    main()
