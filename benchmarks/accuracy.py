"""Accuracy on public data sets, next to published numbers, with the same recipe for all of them.

    python benchmarks/accuracy.py rmd17 --data FOLDER [--only ethanol,aspirin] [--frames 50] [--seeds 1,2,3]
    python benchmarks/accuracy.py 3bpa --data FOLDER
    python benchmarks/accuracy.py mlearn --data FOLDER [--only Li,Ni,Cu]
    python benchmarks/accuracy.py water --data FOLDER

FOLDER holds the files of the set: rmd17_<molecule>_train_01.npz and rmd17_<molecule>_test_01.npz; train_300K.xyz and
test_300K.xyz (test_600K.xyz and test_1200K.xyz are used if they are there); <element>_train.xyz and <element>_test.xyz; data_0
to data_3 of DeePMD-kit's water example.

The settings are those of `forgefield init --accurate`, the same for every molecule, element and seed; model and number of steps
depend on the number of training frames. They were chosen by validation frames; test frames are evaluated once, at the end. A
finished training is not repeated, an interrupted one is resumed. --model selects the architecture, --ensemble the number of
models whose predictions are averaged, --at-once how many trainings run at the same time; `key=value` overrides the config.
--log FILE also writes the table to a file, --figure FILE draws it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ase.io import iread

from forgefield.data import recipe

MODELS: dict[str, dict[str, Any]] = {
    "nequip": {
        "name": "nequip",
        "num_layers": 4,
        "l_max": 3,
        "parity": False,
        "num_features": 32,
        "radial_mlp_depth": 2,
        "radial_mlp_width": 64,
    },
    "mace": {},
}
"""Section `model` of each architecture; that of MACE depends on the number of training frames."""
TRAINING = {**recipe.TRAINING, "uncertainty": False, "tensorboard": 0}
TASK = {name: recipe.target(name) for name in ("energy", "forces")}

Published = Mapping[str, tuple[float, float]]
"""Errors of energies and forces by model."""

RMD17_50: dict[str, Published] = {
    molecule: {"ACE": ace, "NequIP": nequip, "MACE": mace}
    for molecule, ace, nequip, mace in (
        ("aspirin", (26.2, 63.8), (19.5, 52.0), (17.0, 43.9)),
        ("azobenzene", (9.0, 28.8), (6.0, 20.0), (5.4, 17.7)),
        ("benzene", (0.2, 2.7), (0.6, 2.9), (0.7, 2.7)),
        ("ethanol", (8.6, 43.0), (8.7, 40.2), (6.7, 32.6)),
        ("malonaldehyde", (12.8, 63.5), (12.7, 52.5), (10.0, 43.3)),
        ("naphthalene", (3.8, 19.7), (2.1, 10.0), (2.1, 9.2)),
        ("paracetamol", (13.6, 45.7), (14.3, 39.7), (9.7, 31.5)),
        ("salicylic", (8.9, 41.7), (8.0, 35.0), (6.5, 28.4)),
        ("toluene", (5.3, 27.1), (3.3, 15.1), (3.1, 12.1)),
        ("uracil", (6.5, 36.2), (7.3, 40.1), (4.4, 25.9)),
    )
}
"""MAE of energies, meV, and forces, meV/A, with 50 training frames, as published by MACE's authors (NeurIPS 2022)."""
RMD17_1000: dict[str, Published] = {
    molecule: {"NequIP": nequip, "Allegro": allegro, "MACE": mace}
    for molecule, nequip, allegro, mace in (
        ("aspirin", (2.3, 8.2), (2.3, 7.3), (2.2, 6.6)),
        ("azobenzene", (0.7, 2.9), (1.2, 2.6), (1.2, 3.0)),
        ("benzene", (0.04, 0.3), (0.3, 0.2), (0.4, 0.3)),
        ("ethanol", (0.4, 2.8), (0.4, 2.1), (0.4, 2.1)),
        ("malonaldehyde", (0.8, 5.1), (0.6, 3.6), (0.8, 4.1)),
        ("naphthalene", (0.9, 1.3), (0.2, 0.9), (0.5, 1.6)),
        ("paracetamol", (1.4, 5.9), (1.5, 4.9), (1.3, 4.8)),
        ("salicylic", (0.7, 4.0), (0.9, 2.9), (0.9, 3.1)),
        ("toluene", (0.3, 1.6), (0.4, 1.8), (0.5, 1.5)),
        ("uracil", (0.4, 3.1), (0.6, 1.8), (0.5, 2.1)),
    )
}
"""The same with 1000 frames, of which 50 validate."""
BPA: dict[str, Published] = {
    "300K": {"NequIP": (3.3, 10.8), "MACE": (3.0, 8.8), "Allegro": (3.84, 12.98)},
    "600K": {"NequIP": (11.2, 26.4), "MACE": (9.7, 21.8), "Allegro": (12.07, 29.17)},
    "1200K": {"NequIP": (38.5, 76.2), "MACE": (29.8, 62.0), "Allegro": (42.6, 83.0)},
}
"""RMSE of energies, meV, and forces, meV/A, with 500 training frames at 300 K."""


@dataclass(frozen=True)
class Case:
    """One data set to train on.

    data: section `data` of the config. n_train: training frames. errors: names of the errors of energies and forces in
    the results of a test. published: errors by test set; a single one has the name of the case.
    """

    name: str
    data: dict[str, Any]
    n_train: int
    errors: tuple[str, str]
    published: Mapping[str, Published]


TOTAL_MAE = ("energy_total_mae", "forces_mae")
TOTAL_RMSE = ("energy_total_rmse", "forces_rmse")
PER_ATOM_MAE = ("energy_mae", "forces_mae")
PER_ATOM_RMSE = ("energy_rmse", "forces_rmse")
UNITS = {"energy_total_mae": "meV", "energy_total_rmse": "meV", "energy_mae": "meV/atom", "energy_rmse": "meV/atom"}


def rmd17(folder: Path, only: Sequence[str], frames: int) -> list[Case]:
    """The first frames of the official split 1 train, the last 50 of its 1000 training frames validate."""
    if not 0 < frames <= 950:
        raise SystemExit(f"--frames={frames}: rMD17 has 950 training frames besides the 50 of the validation.")
    published = {50: RMD17_50, 950: RMD17_1000}.get(frames, {})
    return [
        Case(
            name=f"{molecule}-{frames}",
            data={
                "train": str(folder / f"rmd17_{molecule}_train_01.npz"),
                "indices": f"0:{frames}",
                "val": {"indices": "950:1000"},
                "test": {molecule: str(folder / f"rmd17_{molecule}_test_01.npz")},
                "units": {"energy": "kcal/mol"},
                "batch": {"frames": 5},
            },
            n_train=frames,
            errors=TOTAL_MAE,
            published={molecule: published.get(molecule, {})},
        )
        for molecule in only or ("ethanol", "aspirin")
    ]


def bpa(folder: Path, only: Sequence[str], frames: int) -> list[Case]:
    """500 frames at 300 K, of which 50 validate."""
    tests = {name: folder / f"test_{name}.xyz" for name in BPA if (folder / f"test_{name}.xyz").exists()}
    return [
        Case(
            name="3bpa",
            data={
                "train": str(folder / "train_300K.xyz"),
                "val": 50,
                "test": {name: str(path) for name, path in tests.items()},
                "batch": {"frames": 5},
            },
            n_train=450,
            errors=TOTAL_RMSE,
            published={name: BPA[name] for name in tests},
        )
    ]


def mlearn(folder: Path, only: Sequence[str], frames: int) -> list[Case]:
    """A tenth of the training frames validates."""
    cases = []
    for element in only or ("Li", "Ni", "Cu"):
        path = folder / f"{element}_train.xyz"
        sizes = [len(atoms) for atoms in iread(path)]
        data = {
            "train": str(path),
            "val": 0.1,
            "test": {element: str(folder / f"{element}_test.xyz")},
            "batch": {"frames": recipe.batch_frames(statistics.fmean(sizes))},
        }
        n_train = len(sizes) - round(0.1 * len(sizes))
        cases.append(Case(element, data, n_train, errors=PER_ATOM_RMSE, published={element: {}}))
    return cases


def water(folder: Path, only: Sequence[str], frames: int) -> list[Case]:
    """data_3 is DeePMD-kit's validation set, and is the test here: a twentieth of the training frames validates."""
    return [
        Case(
            name="water",
            data={
                "train": [str(folder / f"data_{number}") for number in range(3)],
                "val": 0.05,
                "test": {"water": str(folder / "data_3")},
                "batch": {"frames": 1},
            },
            n_train=304,
            errors=PER_ATOM_RMSE,
            published={"water": {}},
        )
    ]


SETS = {"rmd17": rmd17, "3bpa": bpa, "mlearn": mlearn, "water": water}


def config(case: Case, model: str, seed: int, ensemble: int, out: Path) -> dict[str, Any]:
    """The config of one training."""
    name = f"{case.name}-{model}{'' if ensemble == 1 else f'-x{ensemble}'}-{seed}"
    training = {**TRAINING, "ensemble": ensemble} if ensemble > 1 else dict(TRAINING)
    steps = recipe.training_steps(case.n_train)
    return {
        "name": name,
        "out": str(out),
        "seed": seed,
        "data": {"cutoff": 5.0, "split_seed": 0, **case.data},
        "model": MODELS[model] or recipe.model(case.n_train),
        "task": TASK,
        "training": training,
        "trainer": {
            "max_steps": steps,
            "max_epochs": -1,
            "val_check_interval": steps // 100,
            "check_val_every_n_epoch": None,
            "enable_progress_bar": False,
        },
    }


def train(arguments: argparse.Namespace, case: Case, seed: int) -> None:
    """Train one model, or resume its training, unless it is finished."""
    import torch  # only processes that train need it

    import forgefield

    settings = config(case, arguments.model, seed, arguments.ensemble, arguments.out)
    settings["training"]["engine"] = "graphs" if torch.cuda.is_available() else "auto"
    start = time.perf_counter()
    run = forgefield.train(settings, *arguments.overrides)
    path = run.path / "seconds.json"
    before = json.loads(path.read_text()) if path.exists() else 0.0
    path.write_text(json.dumps(before + time.perf_counter() - start))


def train_all(arguments: argparse.Namespace, jobs: Sequence[tuple[Case, int]]) -> None:
    """Train `jobs`, each in a process of its own if several run at the same time."""
    if arguments.at_once == 1:
        for case, seed in jobs:
            train(arguments, case, seed)
        return

    def in_process(job: tuple[Case, int]) -> None:
        case, seed = job
        command = [sys.executable, __file__, *sys.argv[1:], "--job", f"{case.name}:{seed}"]
        with open(arguments.out / f"{case.name}-{arguments.model}-{seed}.log", "w") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        print(
            f"{case.name}, seed {seed}: {'finished' if status == 0 else f'exit code {status}, see {log.name}'}",
            flush=True,
        )

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(in_process, jobs))


@dataclass(frozen=True)
class Row:
    """Errors on one test set. forgefield: energy and forces of each seed."""

    test: str
    case: Case
    forgefield: list[tuple[float, float]]
    minutes: list[float]


def measured(arguments: argparse.Namespace, cases: Sequence[Case], seeds: Sequence[int]) -> list[Row]:
    """The errors of the trainings that are finished."""
    rows = []
    for case in cases:
        for test in case.published:
            errors, minutes = [], []
            for seed in seeds:
                name = config(case, arguments.model, seed, arguments.ensemble, arguments.out)["name"]
                path = arguments.out / name / f"test-{test}.json"
                if path.exists():
                    values = json.loads(path.read_text())["errors"]
                    errors.append((values[case.errors[0]], values[case.errors[1]]))
                    minutes.append(json.loads((path.parent / "seconds.json").read_text()) / 60)
            if errors:
                rows.append(Row(test, case, errors, minutes))
    return rows


def with_deviation(values: Sequence[float], digits: int = 1) -> str:
    """Mean and, of several values, their standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.{digits}f}"


def table(rows: Sequence[Row], arguments: argparse.Namespace, device: str) -> str:
    """Errors of Forgefield, and published ones below."""
    label = arguments.model if arguments.ensemble == 1 else f"{arguments.model}, mean of {arguments.ensemble}"
    kind = "RMSE" if rows[0].case.errors[1].endswith("rmse") else "MAE"
    lines = [
        f"{datetime.date.today()}, {device}: {Path(__file__).name} {' '.join(sys.argv[1:])}",
        f"{kind} on test frames; mean and standard deviation over seeds",
        f"{'test':14}{'model':26}{'energy, ' + UNITS[rows[0].case.errors[0]]:>18}{'forces, meV/A':>18}"
        f"{'minutes':>9}{'seeds':>6}",
    ]
    for row in rows:
        energy, forces = zip(*row.forgefield)
        minutes = f"{statistics.fmean(row.minutes):.1f}"
        lines.append(
            f"{row.test:14}{'Forgefield ' + label:26}{with_deviation(energy):>18}{with_deviation(forces):>18}{minutes:>9}"
            f"{len(energy):>6}"
        )
        for name, (energy_error, forces_error) in row.case.published[row.test].items():
            lines.append(f"{'':14}{name + ', published':26}{energy_error:>18}{forces_error:>18}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Errors of forces as bars, next to published ones."""
    import matplotlib.pyplot as plt

    names = ["Forgefield", *dict.fromkeys(name for row in rows for name in row.case.published[row.test])]
    figure, axes = plt.subplots(figsize=(max(4.5, 1.6 * len(rows) + 2), 4), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places, heights, bars = [], [], []
        for place, row in enumerate(rows):
            if name == "Forgefield":
                values = [forces for _, forces in row.forgefield]
                heights.append(statistics.fmean(values))
                bars.append(statistics.stdev(values) if len(values) > 1 else 0.0)
            elif name in row.case.published[row.test]:
                heights.append(row.case.published[row.test][name][1])
                bars.append(0.0)
            else:
                continue
            places.append(place + (number - (len(names) - 1) / 2) * width)
        axes.bar(places, heights, width, yerr=bars if any(bars) else None, label=name)
    axes.set_xticks(range(len(rows)), [row.test for row in rows])
    axes.set_ylabel(f"{'RMSE' if rows[0].case.errors[1].endswith('rmse') else 'MAE'} of forces, meV/Å")
    axes.legend()
    figure.savefig(path, dpi=110)


def device_name() -> str:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return f"{gpu or platform.processor() or platform.machine()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS, help="data set")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--only", default="", help="molecules or elements, separated by commas; default: two or three")
    parser.add_argument(
        "--frames", type=int, default=50, help="rMD17: number of training frames, up to 950; default: 50"
    )
    parser.add_argument("--model", choices=MODELS, default="mace", help="default: mace")
    parser.add_argument("--seeds", default="1", help="separated by commas; default: 1")
    parser.add_argument("--ensemble", type=int, default=1, help="models whose predictions are averaged")
    parser.add_argument("--at-once", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"), help="folder of the runs")
    parser.add_argument("--log", type=Path, help="also write the table to this file")
    parser.add_argument("--figure", type=Path, help="draw the errors of forces, as PNG or SVG")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # CASE:SEED, in a process of its own
    parser.add_argument("overrides", nargs="*", help="key=value settings of the config")
    arguments = parser.parse_intermixed_args()
    cases = SETS[arguments.set](arguments.data, [name for name in arguments.only.split(",") if name], arguments.frames)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    jobs = [(case, seed) for seed in seeds for case in cases]
    if arguments.job is not None:
        jobs = [(case, seed) for case, seed in jobs if f"{case.name}:{seed}" == arguments.job]
        train(arguments, *jobs[0])
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    train_all(arguments, jobs)
    rows = measured(arguments, cases, seeds)
    if not rows:
        raise SystemExit("No training is finished; run the same command again to resume.")
    text = table(rows, arguments, device_name())
    print(f"\n{text}")
    if arguments.log is not None:
        arguments.log.write_text(f"{text}\n")
    if arguments.figure is not None:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
