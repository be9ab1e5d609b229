"""The study behind the default settings of a potential: learning rate, schedule, average, loss weights, batch size, clipping.

    python benchmarks/defaults.py --data FOLDER [--out runs/defaults] [--stage first|final|models|table]
        [--steps 1500] [--log FILE]

FOLDER holds rmd17/, 3bpa/, mlearn/ and water_dp/. Only their training files are read: a part of each trains, another part
validates. `first` changes one setting at a time, one seed; `final` trains the finalists with two seeds and twice the number of
steps; `models` trains them with other architectures; `table` only prints what is there. Finished trainings are not repeated, so
the study can be interrupted and started again.

Every training sees the same number of atoms (128 x --steps), so that all cost the same whatever the batch size. The score of a
training is sqrt(energy MAE x forces MAE) of the best checkpoint on the validation frames; a setting is judged by the geometric
mean, over data sets, of its score relative to that of the reference. The last table chooses on all data sets but one and shows
what the choice is worth on that one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import forgefield

ATOMS_PER_BATCH = 128
MODEL = {
    "name": "nequip",
    "num_layers": 2,
    "l_max": 1,
    "parity": False,
    "num_features": [32, 16],
    "radial_mlp_width": 32,
}
"""A small NequIP: preset S with a quarter of its channels."""
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "allegro": {"name": "allegro", "num_layers": 1, "l_max": 1, "num_scalar_features": 16, "num_tensor_features": 8},
    "mace": {"name": "mace", "hidden_irreps": "16x0e+16x1o", "max_ell": 2, "correlation": 2},
    "painn": {"name": "painn", "num_features": 32, "num_layers": 2},
}
OTHER_SETS = ("aspirin", "Li", "water")
"""Data sets on which the other architectures are trained."""
COSINE = {"name": "cosine_to", "stop_lr_ratio": 0.01}


def data_sets(folder: Path) -> dict[str, dict[str, Any]]:
    """Section `data` of each data set, mean number of atoms of a frame and number of training frames included."""
    rmd17 = {"units": {"energy": "kcal/mol"}, "val": {"indices": "900:1000"}}
    return {
        "ethanol": {
            "train": str(folder / "rmd17/rmd17_ethanol_train_01.npz"),
            "indices": "0:200",
            **rmd17,
            "frames": 200,
            "atoms": 9,
        },
        "aspirin": {
            "train": str(folder / "rmd17/rmd17_aspirin_train_01.npz"),
            "indices": "0:100",
            **rmd17,
            "frames": 100,
            "atoms": 21,
        },
        "3BPA": {
            "train": str(folder / "3bpa/train_300K.xyz"),
            "indices": "0:150",
            "val": {"indices": "400:500"},
            "frames": 150,
            "atoms": 27,
        },
        "Li": {"train": str(folder / "mlearn/Li_train.xyz"), "val": 41, "frames": 200, "atoms": 48},
        "Cu": {
            "train": str(folder / "mlearn/Cu_train.xyz"),
            "indices": "0:262:2",
            "val": 31,
            "frames": 100,
            "atoms": 105,
        },
        "water": {"train": str(folder / "water_dp/data_0"), "val": 10, "frames": 70, "atoms": 192},
    }


REFERENCE: dict[str, Any] = {
    "lr": 0.01,
    "scheduler": COSINE,
    "ema": 0.99,
    "forces": 10.0,
    "atoms": ATOMS_PER_BATCH,
    "clip": None,
    "cutoff": 5.0,
}
"""What the first stage varies one setting at a time."""
VARIATIONS: dict[str, dict[str, Any]] = {
    "reference": {},
    "lr 0.001": {"lr": 0.001},
    "lr 0.003": {"lr": 0.003},
    "lr 0.03": {"lr": 0.03},
    "constant rate": {"scheduler": None},
    "exponential to 1 %": {"scheduler": {"name": "exp", "stop_lr_ratio": 0.01, "smooth": True}},
    "no EMA": {"ema": None},
    "EMA 0.999": {"ema": 0.999},
    "forces weight 1": {"forces": 1.0},
    "forces weight 100": {"forces": 100.0},
    "half the batch": {"atoms": ATOMS_PER_BATCH // 2},
    "twice the batch": {"atoms": 2 * ATOMS_PER_BATCH},
    "clip_norm 10": {"clip": 10.0},
    "cutoff 4 A": {"cutoff": 4.0},
    "cutoff 6 A": {"cutoff": 6.0},
}
FINALISTS: dict[str, dict[str, Any]] = {
    "constant 0.01, forces 10": {"scheduler": None},
    "constant 0.01, forces 1": {"scheduler": None, "forces": 1.0},
    "cosine 0.03, forces 10": {"lr": 0.03},
    "cosine 0.03, forces 1": {"lr": 0.03, "forces": 1.0},
}
"""The settings before the study (first: as `init` wrote them; second: as they were when left out), and what the first stage
suggests."""


def config(
    name: str,
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    seed: int,
    steps: int,
    out: Path,
) -> dict[str, Any]:
    """The config of one training."""
    section = {key: value for key, value in data.items() if key not in ("frames", "atoms")}
    frames = max(1, round(settings["atoms"] / data["atoms"]))
    epochs = max(1, round(steps * ATOMS_PER_BATCH / (data["frames"] * data["atoms"])))
    return {
        "name": name,
        "out": str(out),
        "seed": seed,
        "data": {**section, "split_seed": 0, "cutoff": settings["cutoff"], "batch": {"frames": frames}},
        "model": dict(model),
        "task": {"energy": {"weight": 1.0}, "forces": {"weight": settings["forces"]}},
        "training": {
            "lr": settings["lr"],
            "scheduler": settings["scheduler"],
            "ema": settings["ema"],
            "clip_norm": settings["clip"],
            "engine": "eager",
            "monitor": "val/forces_mae",
            "checkpoint": {"every_epochs": 1000},
            "uncertainty": False,
            "tensorboard": 0,
        },
        "trainer": {
            "max_epochs": epochs,
            "check_val_every_n_epoch": max(1, epochs // 5),
            "enable_progress_bar": False,
            "accelerator": "cpu",
        },
    }


def train(folder: Path, out: Path, stage: str, variation: str, seed: int, steps: int, architecture: str = "") -> None:
    """Train one setting on the data sets, unless that was done; one line of results.jsonl for each."""
    finished = {(row["stage"], row["data"], row["setting"], row["seed"]) for row in results(out)}
    changes = (VARIATIONS if stage == "first" else FINALISTS)[variation]
    model = OTHER_MODELS.get(architecture, MODEL)
    for set_name, data in data_sets(folder).items():
        if architecture and set_name not in OTHER_SETS:
            continue
        name = f"{architecture} {set_name}".strip()
        if (stage, name, variation, seed) in finished:
            continue
        start = time.process_time()
        title = f"{stage}-{name}-{variation}-{seed}".replace(" ", "_").replace("%", "percent").replace(",", "")
        settings = config(title, data, model, {**REFERENCE, **changes}, seed=seed, steps=steps, out=out / "runs")
        with contextlib.redirect_stdout(io.StringIO()):
            run = forgefield.train(settings)
        rows = [row for row in run.metrics() if row.get("val/forces_mae") is not None]
        best = min(rows, key=lambda row: float(row["val/forces_mae"]))
        row = {
            "stage": stage, "data": name, "setting": variation, "seed": seed, "steps": int(rows[-1]["step"]),
            "energy_mae": float(best["val/energy_mae"]), "forces_mae": float(best["val/forces_mae"]),
            "cpu_s": round(time.process_time() - start, 1),
        }  # fmt: skip
        with open(out / "results.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def results(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def scores(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Setting -> data set -> score, the geometric mean over seeds; settings that were trained on all data sets only."""
    table: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        score = math.sqrt(row["energy_mae"] * row["forces_mae"])
        table.setdefault(row["setting"], {}).setdefault(row["data"], []).append(score)
    sets = {row["data"] for row in rows}
    return {
        setting: {name: geometric_mean(values) for name, values in found.items()}
        for setting, found in table.items()
        if set(found) == sets
    }


def show(rows: list[dict[str, Any]], reference: str) -> str:
    """The table of one stage: scores relative to the reference, and the choice without each data set in turn."""
    table = scores(rows)
    if reference not in table:
        return ""
    sets = list(dict.fromkeys(row["data"] for row in rows))
    lines = [f"score relative to '{reference}' (less is better); seeds: {len({row['seed'] for row in rows})}"]
    lines.append(f"{'':28}" + "".join(f"{name:>9}" for name in sets) + f"{'mean':>9}{'rank':>7}")
    relative = {s: {n: table[s][n] / table[reference][n] for n in sets} for s in table}
    ranks = {n: sorted(table, key=lambda s: table[s][n]) for n in sets}
    for setting in sorted(table, key=lambda s: geometric_mean(relative[s].values())):
        mean_rank = statistics.fmean(ranks[name].index(setting) + 1 for name in sets)
        values = "".join(f"{relative[setting][name]:9.2f}" for name in sets)
        lines.append(f"{setting:28}{values}{geometric_mean(relative[setting].values()):9.2f}{mean_rank:7.1f}")
    lines.append("errors: energy MAE meV/atom / forces MAE meV/A, mean over seeds")
    for setting in table:
        cells = []
        for name in sets:
            same = [row for row in rows if row["setting"] == setting and row["data"] == name]
            energy, forces = (statistics.fmean(row[key] for row in same) for key in ("energy_mae", "forces_mae"))
            cells.append(f"{f'{energy:.2f}/{forces:.1f}':>14}")
        lines.append(f"{setting:28}" + "".join(cells))
    lines.append("chosen without one data set -> its score there, relative to the best setting of that data set")
    for left_out in sets:
        others = [name for name in sets if name != left_out]
        choice = min(table, key=lambda s: geometric_mean(relative[s][name] for name in others))
        best = min(table[s][left_out] for s in table)
        lines.append(f"  without {left_out:8} {choice:28} {table[choice][left_out] / best:6.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--stage", choices=("first", "final", "models", "table"), default="first")
    parser.add_argument(
        "--steps", type=int, default=1500, help="optimiser steps with 128 atoms; twice as many in the final stage"
    )
    parser.add_argument("--log", type=Path, help="append the tables to this file")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.stage == "first":
        for variation in VARIATIONS:
            train(arguments.data, arguments.out, "first", variation, 0, arguments.steps)
    if arguments.stage == "final":
        for seed in (1, 2):
            for variation in FINALISTS:
                train(arguments.data, arguments.out, "final", variation, seed, 2 * arguments.steps)
    if arguments.stage == "models":
        for architecture in OTHER_MODELS:
            for variation in FINALISTS:
                train(arguments.data, arguments.out, "models", variation, 0, arguments.steps, architecture)
    rows = results(arguments.out)
    minutes = sum(row["cpu_s"] for row in rows) / 60
    head = (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores (shared), {torch.get_num_threads()} thread, "
        f"torch {torch.__version__}: {len(rows)} trainings, {minutes:.0f} minutes of CPU time"
    )
    first = show([row for row in rows if row["stage"] == "first"], "reference")
    final = show([row for row in rows if row["stage"] == "final"], next(iter(FINALISTS)))
    models = show([row for row in rows if row["stage"] == "models"], next(iter(FINALISTS)))
    text = "\n\n".join(part for part in (head, first, final, models) if part) + "\n"
    print(text)
    if arguments.log is not None:
        arguments.log.write_text(text)


if __name__ == "__main__":
    main()
