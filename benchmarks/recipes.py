"""The study behind the recipe of benchmarks/accuracy.py: one change of the settings at a time, on parts of training files.

    python benchmarks/recipes.py --data FOLDER --out runs/recipes [--sets ethanol,aspirin] [--seeds 1,2]
        [--steps 10000] [--workers 1] [--minutes 5] [--log FILE]

FOLDER holds rmd17_ethanol_train_01.npz, rmd17_aspirin_train_01.npz and train_300K.xyz (3BPA), and any number of files
<molecule>.npz as benchmarks/xtb_molecules.py writes them. 50 frames of each set train and others of the same file validate; no
test data is read. The errors are those of the best checkpoint on the validation frames.

Every worker is a process that trains one setting after another; on a GPU several share it (start CUDA's MPS for that). With
--minutes no training is started that would probably not be finished in time. Finished trainings are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accuracy import MODELS, TRAINING, device_name

BATCH = 5
"""Frames of a batch, unless a setting changes it."""

Changes = Mapping[str, Any]
"""Values by dotted key of the config; `steps` is a factor of the number of steps."""

VARIATIONS: dict[str, Changes] = {
    "nequip": {},
    "mace": {"model": MODELS["mace"]},
    "nequip, 4 x steps": {"steps": 4.0},
    "mace, 4 x steps": {"model": MODELS["mace"], "steps": 4.0},
    "nequip, lr 0.003": {"training.lr": 0.003},
    "nequip, lr 0.02": {"training.lr": 0.02},
    "mace, lr 0.003": {"model": MODELS["mace"], "training.lr": 0.003},
    "mace, lr 0.02": {"model": MODELS["mace"], "training.lr": 0.02},
    "nequip, forces 10": {"task.forces.weight": 10.0},
    "nequip, forces 0.1": {"task.forces.weight": 0.1},
    "mace, forces 10": {"model": MODELS["mace"], "task.forces.weight": 10.0},
    "nequip, mae": {"task.forces.loss": "mae", "task.energy.loss": "mae"},
    "nequip, huber": {"task.forces.loss": "huber", "task.energy.loss": "huber"},
    "nequip, 64 features": {"model.num_features": 64},
    "nequip, l_max 2": {"model.l_max": 2},
    "nequip, parity": {"model.parity": True},
    "nequip, 3 layers": {"model.num_layers": 3},
    "nequip, 6 layers": {"model.num_layers": 6},
    "nequip, cutoff 4": {"data.cutoff": 4.0},
    "nequip, cutoff 6": {"data.cutoff": 6.0},
    "nequip, cutoff exponent 2": {"model.polynomial_cutoff_p": 2},
    "nequip, batch of 2": {"data.batch": {"frames": 2}, "steps": 2.5},
    "nequip, batch of 10": {"data.batch": {"frames": 10}, "steps": 0.5},
    "nequip, adamw 0.1": {"training.optimizer": {"name": "adamw", "weight_decay": 0.1}},
    "nequip, EMA 0.999": {"training.ema": 0.999},
    "mace, 2e": {"model": {**MODELS["mace"], "hidden_irreps": "64x0e + 64x1o + 64x2e"}},
    "mace, 256 channels": {"model": {**MODELS["mace"], "hidden_irreps": "256x0e + 256x1o"}},
    "mace, 64 channels": {"model": {**MODELS["mace"], "hidden_irreps": "64x0e + 64x1o"}},
    "mace, correlation 2": {"model": {**MODELS["mace"], "correlation": 2}},
}
"""Settings by name."""
FOR_ALL = ("nequip", "mace", "nequip, 4 x steps", "mace, 4 x steps")
"""Settings that are tried on all sets, the others on the first ones."""


def data_sets(folder: Path) -> dict[str, dict[str, Any]]:
    """Section `data` of each set, without what is common to them."""
    units = {"energy": "kcal/mol"}
    sets: dict[str, dict[str, Any]] = {
        molecule: {
            "train": str(folder / f"rmd17_{molecule}_train_01.npz"),
            "indices": "0:50",
            "val": {"indices": "500:1000"},
            "units": units,
        }
        for molecule in ("ethanol", "aspirin")
    }
    for path in sorted(folder.glob("*.npz")):
        if not path.stem.startswith("rmd17_"):
            sets[path.stem] = {"train": str(path), "indices": "0:50", "val": {"indices": "100:400"}, "units": units}
    sets["3BPA"] = {"train": str(folder / "train_300K.xyz"), "indices": "0:50", "val": {"indices": "200:500"}}
    return {name: data for name, data in sets.items() if Path(data["train"]).exists()}


def config(set_name: str, data: Mapping[str, Any], setting: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """The config of one training."""
    changes = dict(VARIATIONS[setting])
    steps = round(steps * changes.pop("steps", 1.0))
    values: dict[str, Any] = {
        "name": f"{set_name}-{setting}-{seed}".replace(", ", "-").replace(" ", "_"),
        "out": str(out / "runs"),
        "seed": seed,
        "data": {"cutoff": 5.0, "split_seed": 0, "batch": {"frames": BATCH}, **data},
        "model": dict(changes.pop("model", MODELS["nequip"])),
        "task": {"energy": {"weight": 1.0, "per_atom": True}, "forces": {"weight": 1.0}},
        "training": {**TRAINING, "monitor": "val/forces_mae", "checkpoint": {"every_epochs": 10**6}},
        "trainer": {
            "max_steps": steps,
            "max_epochs": -1,
            "val_check_interval": max(1, steps // 20),
            "check_val_every_n_epoch": None,
            "enable_progress_bar": False,
        },
    }
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[last] = value
    return values


def train(folder: Path, out: Path, job: Mapping[str, Any]) -> None:
    """Train one setting; one line of a file of results."""
    import torch  # only processes that train need it

    from forgefield.config.loading import load_config
    from forgefield.parallel.ranks import single_process
    from forgefield.training.fit import fit
    from forgefield.training.run.journal import Journal

    data = data_sets(folder)[job["set"]]
    settings = config(job["set"], data, job["setting"], job["seed"], job["steps"], out)
    settings["training"]["engine"] = "graphs" if torch.cuda.is_available() else "auto"
    start = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # no test and no report
        ranks = single_process()
        run = fit(load_config(settings), fresh=True, journal=Journal(ranks=ranks), ranks=ranks).run
    rows = [row for row in run.metrics() if row.get("val/forces_mae") is not None]
    best = min(rows, key=lambda row: float(row["val/forces_mae"]))
    errors = {name: float(best[f"val/{name}"]) for name in ("energy_total_mae", "forces_mae", "forces_rmse")}
    trained = [float(row["train/forces_mae"]) for row in run.metrics() if row.get("train/forces_mae") is not None]
    row = {**job, **errors, "train_forces_mae": trained[-1], "best_step": int(best["step"])}
    row["seconds"] = round(time.perf_counter() - start, 1)
    with open(out / f"results-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(out.glob("results-*.jsonl")) for line in path.read_text().splitlines()]


def jobs_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trainings that are not finished, the most informative first."""
    available = data_sets(arguments.data)
    sets = [name for name in (arguments.sets.split(",") if arguments.sets else available) if name in available]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    settings = [name for name in VARIATIONS if not arguments.settings or name in arguments.settings.split(";")]
    jobs = [
        {"set": set_name, "setting": setting, "seed": seed, "steps": arguments.steps}
        for seed in seeds
        for setting in settings
        for set_name in (sets if setting in FOR_ALL else sets[: arguments.few])
    ]
    finished = [{key: row[key] for key in jobs[0]} for row in results(arguments.out)]
    return [job for job in jobs if job not in finished]


def work(arguments: argparse.Namespace) -> None:
    """One worker: every `workers`-th job."""
    number, deadline = arguments.worker, arguments.deadline
    longest = 0.0
    for job in jobs_of(arguments)[number :: arguments.workers]:
        length = float(VARIATIONS[job["setting"]].get("steps", 1.0))
        if time.time() + longest * length > deadline:
            continue
        start = time.time()
        try:
            train(arguments.data, arguments.out, job)
        except Exception as error:
            print(f"{job}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        else:
            longest = max(longest, (time.time() - start) / length)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def show(rows: list[dict[str, Any]]) -> str:
    """Errors by setting and set, and the geometric mean of the force errors relative to `nequip` on the same sets and seeds."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    errors: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        errors.setdefault((row["setting"], row["set"]), {})[row["seed"]] = row
    lines = ["validation MAE: energy meV / forces meV/A (forces of the training frames at the end)"]
    lines.append(f"{'':28}{'relative':>9}{'seeds':>6}{'s':>6}" + "".join(f"{name:>22}" for name in sets))
    for setting in dict.fromkeys(row["setting"] for row in rows):
        cells, ratios, seeds, seconds = [], [], set(), []
        for name in sets:
            found = errors.get((setting, name), {})
            reference = errors.get(("nequip", name), {})
            ratios += [
                row["forces_mae"] / reference[seed]["forces_mae"] for seed, row in found.items() if seed in reference
            ]
            seeds |= found.keys()
            seconds += [row["seconds"] for row in found.values()]
            mean = {
                key: statistics.fmean(row[key] for row in found.values())
                for key in ("energy_total_mae", "forces_mae", "train_forces_mae")
                if found
            }
            text = "{energy_total_mae:.2f}/{forces_mae:.1f} ({train_forces_mae:.1f})".format(**mean) if found else "-"
            cells.append(f"{text:>22}")
        relative = f"{geometric_mean(ratios):9.3f}" if ratios else f"{'-':>9}"
        lines.append(f"{setting:28}{relative}{len(seeds):6}{statistics.fmean(seconds):6.0f}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--sets", default="", help="separated by commas; default: all")
    parser.add_argument("--settings", default="", help="names of VARIATIONS, separated by semicolons; default: all")
    parser.add_argument("--few", type=int, default=2, help="number of sets for settings that are not tried on all")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--log", type=Path, help="also write the table to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.worker is not None:
        work(arguments)
        return
    deadline = time.time() + 60 * arguments.minutes
    command = [sys.executable, __file__, *sys.argv[1:], "--deadline", str(deadline), "--worker"]
    workers = [subprocess.Popen([*command, str(number)]) for number in range(arguments.workers)]
    for worker in workers:
        worker.wait()
    head = f"{datetime.date.today()}, {device_name()}, {arguments.workers} workers: benchmarks/recipes.py"
    text = f"{head}\n{show(results(arguments.out))}\n"
    print(text)
    if arguments.log is not None:
        arguments.log.write_text(text)


if __name__ == "__main__":
    main()
