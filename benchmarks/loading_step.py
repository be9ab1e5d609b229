"""Does loading data hold up training? Whole steps with batches from memory, from a store, and with lists made on the way.

    python benchmarks/loading_step.py [--data FOLDER] [--steps 60] [--frames 64]

`data` is the time the training waited for its next batch. Aspirin of rMD17, preset S, in the precision of training.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from forgefield.bench.training import measure
from forgefield.config.loading import load_config
from forgefield.data.batch import to_device, with_edges
from forgefield.data.dataset import GraphDataset
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.options import UnitOptions
from forgefield.data.readers import read_frames
from forgefield.data.species import SpeciesTable
from forgefield.data.store.convert import convert
from forgefield.parallel.ranks import single_process

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
UNITS = {"energy": "kcal/mol"}
CUTOFF = 5.0
VARIANTS = {
    "memory": ("npz", {}),
    "store with lists": ("lists", {}),
    "store, lists made on the host": ("bare", {"neighbours": "vesin"}),
    "store, lists made on the device": ("bare", {"neighbours": "device"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED, help="folder that holds rmd17/")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--workers", default="0,1,2,4", help="numbers of threads that prepare batches")
    args = parser.parse_args()
    source = args.data / "rmd17" / "rmd17_aspirin_train_01.npz"
    if not source.is_file():
        raise SystemExit(f"{source} is not there; --data names the folder that holds rmd17/")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    print(
        f"{device}, torch {torch.__version__}, {datetime.date.today()}, {args.frames} frames of aspirin a batch, preset S"
    )
    print(f"{'source':<34}{'threads':>8}{'step ms':>10}{'data ms':>10}{'frames/s':>11}")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name, graph in (("lists", GraphOptions(CUTOFF)), ("bare", None)):
            convert(str(source), folder / name, units=UnitOptions(**UNITS), graph=graph)
        for name, (kind, settings) in VARIANTS.items():
            for workers in map(int, args.workers.split(",")):
                path = str(source) if kind == "npz" else str(folder / kind)
                data = {"train": path, "val": 0, "cutoff": CUTOFF, "batch": {"frames": args.frames}, "workers": workers}
                data |= settings | ({"units": UNITS} if kind == "npz" else {})
                model = {"name": "nequip", "preset": "S"}
                config = load_config({"name": "loading", "out": str(folder), "data": data, "model": model}, [])
                own = Path(tempfile.mkdtemp(dir=folder))
                found, _ = measure(config, single_process(), steps=args.steps, warmup=10, folder=own)
                if found is None:
                    raise SystemExit(f"{name}: nothing was measured")
                row = f"{name:<34}{workers:>8}{found.step_ms:>10.2f}{found.mean_ms['data']:>10.2f}"
                print(f"{row}{found.samples_per_second:>11.0f}", flush=True)
    if torch.cuda.is_available():
        parts_of_a_batch(source, args.frames)


def parts_of_a_batch(source: Path, frames: int) -> None:
    """What one batch costs, part by part, alone in its process."""
    read = read_frames(str(source), None, UnitOptions(**UNITS))
    species = SpeciesTable.from_frames(read)
    with_lists = GraphDataset(read, species, CUTOFF)
    without = GraphDataset(read, species, CUTOFF, on_device=True)
    rows = np.random.default_rng(0).permutation(len(read))[:frames]
    batch, bare = with_lists.batch(rows), to_device(without.batch(rows), "cuda")
    pinned = {name: tensor.pin_memory() for name, tensor in batch.items()}
    print(f"\nparts of one batch of {frames} frames ({with_lists.n_edges[rows].sum()} edges), ms")
    for part, work in {
        "assemble": lambda: with_lists.batch(rows),
        "into pinned memory": lambda: {name: tensor.pin_memory() for name, tensor in batch.items()},
        "to the device": lambda: to_device(pinned, "cuda"),
        "assemble without lists": lambda: without.batch(rows),
        "lists on the device": lambda: with_edges(bare, CUTOFF),
    }.items():
        print(f"{part:<34}{_milliseconds(work):>8.3f}", flush=True)


def _milliseconds(work: Callable[[], object], repeats: int = 100) -> float:
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin) / repeats


if __name__ == "__main__":
    main()
