"""How fast data comes: loading, neighbour lists, start of a run. Everything is measured side by side in one run.

    python benchmarks/data.py [--data FOLDER] [--quick] [--only loading lists neighbours assembly startup plans]

Least CPU time of several turns (all threads of the process count; ours uses one), and wall time. Real data lies in FOLDER, by
default shared/data beside the checkout; what is not there, or a library that is not installed, is left out and said so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import data_graphs
import data_loading
import data_startup
import torch
from data_measure import CACHE, Settings, machine

PARTS = {**data_loading.PARTS, **data_graphs.PARTS, **data_startup.PARTS}
PEERS = ("numpy", "torch", "vesin", "matscipy", "ase", "deepmd-kit")


def versions() -> str:
    found = []
    for name in PEERS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1].resolve().parent / "shared" / "data")
    parser.add_argument("--quick", action="store_true", help="fewer turns, no store of a million frames")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cpu", help="where batches of the loading part go, such as cuda")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"benchmarks/data.py, {machine()}\n{versions()}; one thread")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FORGEFIELD_CACHE"] = str(Path(scratch) / CACHE)
        settings = Settings(arguments.data, Path(scratch), arguments.quick, arguments.device)
        for name in arguments.only:
            PARTS[name](settings)


if __name__ == "__main__":
    main()
