"""Points per second of trainings of LDOS networks, beside MALA where it is installed.

    python benchmarks/ldos.py [--cases be-40 be-1000 al-1000] [--engines eager compile graphs] [--blocks 1 64]
                              [--precisions float32 tf32 bf16-mixed] [--points N] [--repeats 20] [--device cuda]

Whole trainings, as `forgefield train` and `mala.Trainer` run them, on rows of real snapshots that are repeated and slightly
perturbed: Be, 91-100-11, and Al, 91-800-800-800-250 (folders be2_ldos and al36_ldos under --data). An epoch is timed without
validation, the least of some: process CPU time on one thread of a CPU, wall time on a GPU. MALA 1.4.0 runs with the interpreter
that FORGEFIELD_MALA_PYTHON names, as it is and with its fast data set (on a GPU also with its graphs and mixed precision),
before and after us. `eager` runs in float32, with and without `data.fast`, in blocks of every length; `compile` in every
precision in the longest blocks; `graphs` in every precision in blocks of every length. For a GPU:

    python benchmarks/ldos.py --cases al-1000 --engines graphs --precisions tf32 bf16-mixed --blocks 64 256
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
CASES: dict[str, dict[str, Any]] = {
    "be-40": {"rows": "be", "hidden": [100], "batch": 40, "points": 16_000},
    "be-1000": {"rows": "be", "hidden": [100], "batch": 1000, "points": 60_000},
    "al-1000": {"rows": "al", "hidden": [800, 800, 800], "batch": 1000, "points": 12_000},
}
ON_GPU = {"be-40": 400_000, "be-1000": 8_000_000, "al-1000": 2_000_000}
"""Points of an epoch there."""


def real_rows(which: str, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Descriptors and LDOS of all points of the snapshots, float32."""
    names = {"be": "be2_ldos/Be_snapshot{}", "al": "al36_ldos/Al_debug_2k_nr{}"}[which]
    parts = [[np.load(data / f"{names.format(n)}.{kind}.npy") for kind in ("in", "out")] for n in range(2)]
    inputs, targets = (np.concatenate([part[i].reshape(-1, part[i].shape[-1]) for part in parts]) for i in range(2))
    return inputs[:, 3:].astype(np.float32), targets.astype(np.float32)


def write_rows(folder: Path, which: str, data: Path, points: int, batch: int) -> list[int]:
    """Training rows, repeated and perturbed, and a batch of validation rows; returns the numbers of columns."""
    inputs, targets = real_rows(which, data)
    rng = np.random.default_rng(0)
    for name, n in (("train", points), ("val", batch)):
        rows = np.arange(n) % len(inputs)
        noise = 1 + 1e-3 * rng.standard_normal((n, 1), dtype=np.float32)
        for kind, values in (("in", inputs), ("out", targets)):
            np.save(folder / f"{name}.{kind}.npy", (values[rows] * noise)[:, None, None])
    return [inputs.shape[1], targets.shape[1]]


def ours(folder: Path, case: dict[str, Any], columns: list[int], settings: dict[str, Any], repeats: int) -> float:
    """Seconds of an epoch."""
    import ldos_clock

    from forgefield.config.loading import load_config
    from forgefield.parallel.ranks import single_process
    from forgefield.training.fit import fit
    from forgefield.training.run.journal import Journal

    snapshots = {
        name: {
            "inputs": str(folder / f"{name}.in.npy"),
            "targets": str(folder / f"{name}.out.npy"),
            "coordinates": False,
        }
        for name in ("train", "val")
    }
    config = {
        "name": "bench",
        "out": str(folder / "runs"),
        "data": {
            **snapshots,
            "batch": {"points": case["batch"]},
            "points": {"energies": {"first": -10.0, "spacing": 0.1, "levels": columns[1]}},
            "fast": settings["fast"],
        },
        "model": {"name": "ldos", "hidden": case["hidden"]},
        "task": {"ldos": {}},
        "training": {
            "lr": 1e-5,
            "ema": None,
            "tensorboard": 0,
            "engine": settings["engine"],
            "block": settings["block"],
            "precision": settings["precision"],
            "checkpoint": {"every_epochs": 1000},
        },
        "trainer": {
            "max_epochs": repeats + 1,
            "enable_progress_bar": False,
            "accelerator": "cpu" if settings["device"] == "cpu" else "cuda",
            "devices": 1,
        },
        "callbacks": ["ldos_clock.EpochClock"],
    }
    ldos_clock.SECONDS.clear()
    with open(os.devnull, "w") as nowhere:
        kept, sys.stdout = sys.stdout, nowhere
        try:
            fit(load_config(config), fresh=True, journal=Journal(ranks=single_process()), ranks=single_process())
        finally:
            sys.stdout = kept
    return min(ldos_clock.SECONDS[1:])


def theirs(
    folder: Path, case: dict[str, Any], columns: list[int], kind: str, device: str, repeats: int
) -> float | None:
    """Seconds of an epoch of MALA; None where it cannot be had."""
    settings = {
        "folder": str(folder),
        "layers": [columns[0], *case["hidden"], columns[1]],
        "batch": case["batch"],
        "fast": kind != "default",
        "tuned": kind == "tuned",
        "device": device,
        "epochs": repeats,
    }
    command = [
        os.environ["FORGEFIELD_MALA_PYTHON"],
        str(Path(__file__).with_name("ldos_peer.py")),
        json.dumps(settings),
    ]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        print(f"  MALA failed: {(done.stderr.strip().splitlines() or [''])[-1][:160]}")
        return None
    return float(done.stdout.split()[-1])


def show(case: str, who: str, points: int, seconds: float | None) -> None:
    if seconds is not None:
        print(f"{case:8} {who:48} {points / seconds:12,.0f} points/s", flush=True)


def ways(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Settings of our trainings, see above."""
    plain = {"engine": "eager", "block": 1, "precision": "float32", "device": args.device, "fast": True}
    found = []
    if "eager" in args.engines:
        found = [{**plain, "fast": False}, *({**plain, "block": block} for block in args.blocks)]
    for engine in args.engines:
        for precision in args.precisions if engine != "eager" else ():
            blocks = args.blocks if engine == "graphs" else [max(args.blocks)]
            found += [{**plain, "engine": engine, "block": block, "precision": precision} for block in blocks]
    return found


def run_case(name: str, args: argparse.Namespace) -> None:
    case = CASES[name]
    points = args.points or (case["points"] if args.device == "cpu" else ON_GPU[name])
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        columns = write_rows(folder, case["rows"], args.data, points, case["batch"])
        kinds = ("default", "fast") if args.device == "cpu" else ("default", "fast", "tuned")
        kinds = kinds if os.environ.get("FORGEFIELD_MALA_PYTHON") else ()
        for kind in kinds:
            show(name, f"MALA, {kind}", points, theirs(folder, case, columns, kind, args.device, args.repeats))
        for way in ways(args):
            label = f"{way['engine']}, {way['block']} steps a block, {way['precision']}"
            label += "" if way["fast"] else ", data.fast=false"
            show(name, f"ours, {label}", points, ours(folder, case, columns, way, args.repeats))
        if "fast" in kinds:
            show(name, "MALA, fast, again", points, theirs(folder, case, columns, "fast", args.device, args.repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--engines", nargs="+", choices=("eager", "compile", "graphs"), default=["eager"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--precisions", nargs="+", default=["float32"])
    parser.add_argument("--points", type=int, help="of an epoch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread, CPU time"
    print(f"{name}, torch {torch.__version__}")
    for case in args.cases:
        run_case(case, args)


if __name__ == "__main__":
    main()
