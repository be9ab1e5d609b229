"""Time of `training.ensemble`: one model, and several side by side and one after another, through the real command.

    python benchmarks/ensembles.py [--size 4] [--epochs 60] [--data FILE] [--out FOLDER] [--mps] [key=value ...]

The case is that of `benchmarks/training.py`: NequIP (4 layers, l_max 2, 64 features), frames of 27 atoms in batches of 5. Times
are the wall clock of the whole command, and that of the epochs alone (timing.csv; the longest member, or the sum of all members
if they are trained in turn). `--mps`: also side by side with NVIDIA's multi-process service. `key=value` overrides the
config.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.training import config, synthetic


def epochs_s(folder: Path) -> float:
    """Seconds of the epochs of a run."""
    with (folder / "timing.csv").open() as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file))


def train(case: dict, folder: Path, overrides: list[str], **variables: str) -> tuple[float, list[float]]:
    """Wall clock of the command, and seconds of the epochs of each model."""
    path = folder / f"{case['name']}.yaml"
    path.write_text(yaml.safe_dump(case))
    began = time.monotonic()
    command = [sys.executable, "-m", "forgefield", "train", str(path), *overrides]
    with (folder / f"{case['name']}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, env={**os.environ, **variables})
    wall, run = time.monotonic() - began, Path(case["out"]) / case["name"]
    members = sorted((run / "members").glob("*")) or [run]
    return wall, [epochs_s(member) for member in members]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mps", action="store_true")
    arguments, overrides = parser.parse_known_args()
    folder = arguments.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    data = arguments.data
    if data is None:
        synthetic(data := folder / "frames.extxyz")
    size = arguments.size
    cases: list[tuple[str, object, dict[str, str]]] = [
        ("first", None, {}),
        ("one", None, {}),
        ("together", {"size": size, "together": size}, {}),
        *(
            [("mps", {"size": size, "together": size}, {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps")})]
            if arguments.mps
            else []
        ),
        ("in_turn", {"size": size, "together": 1}, {}),
    ]
    print(f"{'case':10} {'command, s':>12} {'epochs, s':>12} {'of one':>8}   epochs of the members, s", flush=True)
    single = None
    for name, ensemble, variables in cases:
        case = config(data, folder, name, 2 if name == "first" else arguments.epochs, None)
        case.update(callbacks=[], out=str(folder / "runs"), name=name)
        case["training"]["ensemble"] = ensemble
        if name == "mps":
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **variables}, check=False)
        try:
            wall, seconds = train(case, folder, overrides, **variables)
        except (OSError, subprocess.SubprocessError) as error:
            print(
                f"{name:10} failed: {error}",
                *(folder / f"{name}.log").read_text().splitlines()[-5:],
                sep="\n",
                flush=True,
            )
            continue
        total = sum(seconds) if name == "in_turn" else max(seconds)
        single = total if name == "one" else single
        ratio = "" if single is None else f"{total / single:.2f}"
        print(f"{name:10} {wall:12.1f} {total:12.2f} {ratio:>8}   {', '.join(f'{s:.2f}' for s in seconds)}", flush=True)


if __name__ == "__main__":
    main()
