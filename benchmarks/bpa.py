"""Accuracy on 3BPA at 300 K and the time it takes, next to the published numbers.

    python benchmarks/bpa.py --data FOLDER [--epochs 1000 | --minutes 5] [--out runs/bpa] [--figure FILE]
                             [key=value ...]

FOLDER holds train_300K.xyz and test_300K.xyz. Trains NequIP (l_max 3, four layers, 64 features of each degree, radial networks
and cutoff function as in the published settings) on 450 of the 500 training frames, validates on the other 50 and tests on all
test frames; after the training it prints the curve of the validation errors by minutes. Running it again continues.
`--minutes`: as many epochs as take so long, by the speed of a short training before; validations, the test and the start come
on top. `key=value` overrides the config."""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

import forgefield

PUBLISHED = {"NequIP": (3.3, 10.8), "MACE": (3.0, 8.8)}
"""RMSE of energies, meV, and forces, meV/A, at 300 K with 500 training frames."""
SHORT = 20
"""Epochs of the training that tells the speed."""


def config(data: Path, out: Path, epochs: int) -> dict[str, Any]:
    return {
        "name": "3bpa",
        "out": str(out),
        "seed": 1,
        "data": {
            "train": str(data / "train_300K.xyz"),
            "val": 50,
            "test": str(data / "test_300K.xyz"),
            "cutoff": 5.0,
            "batch": {"frames": 5},
            "eval_batch": 100,
        },
        "model": {
            "name": "nequip",
            "num_layers": 4,
            "l_max": 3,
            "parity": False,
            "num_features": 64,
            "polynomial_cutoff_p": 2,
            "radial_mlp_depth": 3,
            "radial_mlp_width": 64,
        },
        "task": {"energy": {"weight": 1.0, "per_atom": True}, "forces": {"weight": 1.0}},
        "training": {
            "lr": 0.01,
            "ema": 0.99,
            "clip_norm": 10.0,
            "engine": "graphs" if torch.cuda.is_available() else "auto",
            "scheduler": {"name": "CosineAnnealingLR", "T_max": "${trainer.max_epochs}"},
            "checkpoint": {"every_epochs": 50},
            "tensorboard": 0,
        },
        "trainer": {"max_epochs": epochs, "check_val_every_n_epoch": 10, "enable_progress_bar": False},
    }


def seconds_of_epochs(run: Any) -> dict[int, float]:
    with open(run.path / "timing.csv") as file:
        return {int(row["epoch"]): float(row["seconds"]) for row in csv.DictReader(file)}


def epochs_in(minutes: float, arguments: argparse.Namespace) -> int:
    """How many epochs take so long here."""
    short = config(arguments.data, arguments.out / "speed", SHORT)
    short["data"].pop("test")
    run = forgefield.train(short, *arguments.overrides)
    usual = statistics.median(list(seconds_of_epochs(run).values())[SHORT // 2 :])
    print(f"{usual:.3f} s an epoch: {round(60 * minutes / usual)} epochs")
    return max(1, round(60 * minutes / usual))


def curve(run: Any) -> list[tuple[float, float, float]]:
    """Epochs, minutes of training, validation errors."""
    seconds = seconds_of_epochs(run)
    rows, trained = [], 0.0
    for row in run.metrics():
        trained += seconds.get(int(row["epoch"]), 0.0)
        if row.get("val/forces_rmse") is not None:
            rows.append((row["epoch"], trained / 60, row["val/forces_rmse"]))
    return rows


def show_curve(run: Any) -> None:
    """About a dozen rows of it."""
    rows = curve(run)
    print("epoch, minutes of training, validation RMSE of forces meV/A")
    shown = rows[:: max(1, len(rows) // 12)]
    for epoch, minutes, error in shown if shown[-1:] == rows[-1:] else [*shown, rows[-1]]:
        print(f"  {epoch:5.0f} {minutes:6.2f} {error:8.1f}")


def errors_of_test(run: Any) -> tuple[float, float] | None:
    """RMSE of energies, meV, and of forces, meV/A; None for a training that was stopped."""
    if not (run.path / "test.json").exists():
        return None
    errors = json.loads((run.path / "test.json").read_text())["errors"]
    return errors["energy_total_rmse"], errors["forces_rmse"]


def draw_curve(run: Any, path: Path) -> None:
    """With the error of the test, where there is one, at the end."""
    rows, tested = curve(run), errors_of_test(run)
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.plot([minutes for _, minutes, _ in rows], [error for *_, error in rows], label="Forgefield, validation")
    if rows and tested is not None:
        axes.plot([rows[-1][1]], [tested[1]], "o", color="C3", label=f"Forgefield, test: {tested[1]:.1f}")
    for name, (_, forces) in PUBLISHED.items():
        axes.axhline(forces, color="0.5", dashes=(4, 2), linewidth=1)
        text = f"{name}, published (test): {forces}"
        axes.text(0.01, forces, text, va="bottom", color="0.4", fontsize=9, transform=axes.get_yaxis_transform())
    axes.set_yscale("log")
    axes.set_yticks([8, 10, 15, 20, 30, 50, 100], labels=["8", "10", "15", "20", "30", "50", "100"])
    axes.minorticks_off()
    axes.set_ylim(8, 100)
    axes.grid(alpha=0.3)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("RMSE of forces, meV/Å")
    axes.set_title("3BPA at 300 K, 450 training frames")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="of training, in place of --epochs")
    parser.add_argument("--out", type=Path, default=Path("runs/bpa"))
    parser.add_argument("--figure", type=Path, help="PNG or SVG of the validation errors by minutes")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    epochs = arguments.epochs if arguments.minutes is None else epochs_in(arguments.minutes, arguments)
    start = time.perf_counter()
    run = forgefield.train(config(arguments.data, arguments.out, epochs), *arguments.overrides)
    minutes = (time.perf_counter() - start) / 60
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"\n3BPA, 300 K, {device}, torch {torch.__version__}")
    show_curve(run)
    if arguments.figure is not None:
        draw_curve(run, arguments.figure)
    if (tested := errors_of_test(run)) is not None:
        energy, forces = tested
        print(f"{'Forgefield':12} energy {energy:5.1f} meV, forces {forces:5.1f} meV/A, {minutes:.1f} minutes in all")
    else:
        print(f"{'Forgefield':12} stopped after {minutes:.1f} minutes; run again to go on")
    for name, (energy, forces) in PUBLISHED.items():
        print(f"{name:12} energy {energy:5.1f} meV, forces {forces:5.1f} meV/A  published")


if __name__ == "__main__":
    main()
