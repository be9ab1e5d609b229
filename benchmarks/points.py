"""How fast loaders of grid points are, and how close streaming from disk is to a full shuffle.

    python benchmarks/points.py speed --data shared/data/be2_ldos
    python benchmarks/points.py mixing --data shared/data/be2_ldos

speed: points per second of loaders alone, 91 inputs and 250 targets, batch 1000, beside a bare gather of tensors and torch's
DataLoader, each in CPU time and in wall time, in one process.
mixing: real snapshots tiled to a larger grid; how much batch means of the targets scatter, relative to batches drawn
without order, and how alike the means of consecutive batches are.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from forgefield.ldos.data import (
    PointBlock,
    PointLoader,
    PointTable,
    Snapshot,
    StreamLoader,
    find_snapshots,
    measure_points,
)
from forgefield.ldos.data.stream import ShuffledBlocks

INPUTS, LEVELS, BATCH = 91, 250, 1000


def speed(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    n = args.points
    points = PointBlock(torch.rand(n, INPUTS), torch.rand(n, LEVELS), torch.zeros(n, dtype=torch.int64))
    loader = PointLoader(points, BATCH, shuffle=True)

    def bare() -> None:
        for rows in torch.randperm(n).split(BATCH):
            points.inputs.index_select(0, rows), points.targets.index_select(0, rows)

    def indexed() -> None:
        for rows in torch.randperm(n).split(BATCH):
            points.inputs[rows], points.targets[rows]

    works: dict[str, Callable[[], object]] = {
        "bare gather (index_select)": bare,
        "bare gather (tensor[rows])": indexed,
        "PointLoader": lambda: _run(loader),
        "torch.randperm": lambda: torch.randperm(n),
        "  its order alone": lambda: [loader.order(i, min(i + 65536, n)) for i in range(0, n, 65536)],
    }
    _show(works, n)
    few = min(n, 20_000)
    default = DataLoader(TensorDataset(points.inputs[:few], points.targets[:few]), batch_size=BATCH, shuffle=True)
    _show({"torch DataLoader, TensorDataset": lambda: _run(default)}, few)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        coordinates = torch.rand(n, 3)
        np.save(f"{folder}/tiled.in.npy", torch.cat([coordinates, points.inputs], dim=1).numpy())
        np.save(f"{folder}/tiled.out.npy", points.targets.numpy())
        table = PointTable([Snapshot("tiled", f"{folder}/tiled.in.npy", f"{folder}/tiled.out.npy", coordinates=True)])
        _show({"measure_points (scaling)": lambda: measure_points(table)}, n, 2)
        for workers in (1, 2):
            stream = StreamLoader(table, BATCH, shuffle=True, window=n // 4, workers=workers)
            name = f"StreamLoader, {workers} threads (files in the page cache)"
            _show({name: lambda stream=stream: _run(stream)}, n)


def _run(loader: object) -> None:
    for _ in loader:  # type: ignore[attr-defined]
        pass


def _show(works: dict[str, Callable[[], object]], n: int, repeats: int = 5) -> None:
    """Points per second of each, the best of some turns in which all take part."""
    best = {name: (float("inf"), float("inf")) for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            cpu, wall = time.process_time(), time.perf_counter()
            work()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            best[name] = (min(best[name][0], cpu), min(best[name][1], wall))
    for name, (cpu, wall) in best.items():
        print(f"{name:50s} {n / cpu / 1e6:7.3f} M points/s of CPU time {n / wall / 1e6:7.3f} M points/s of wall time")


def mixing(args: argparse.Namespace) -> None:
    fields = [snapshot.read()[1].reshape(*snapshot.grid_shape, -1) for snapshot in find_snapshots(args.data)]
    tiles = (args.tiles, args.tiles, max(1, args.tiles * 2 // 3), 1)
    values = np.concatenate([np.tile(field, tiles).reshape(-1, field.shape[-1]) for field in fields]).astype(np.float64)
    n = len(values)
    print(f"{len(fields)} snapshots tiled to {n} points in all, batches of {BATCH}")
    values = (values - values.mean(axis=0)) / values.std(axis=0)
    generator = np.random.default_rng(0)
    _report("full shuffle", values, lambda epoch: generator.permutation(n), args.epochs)
    _report("as they lie", values, lambda epoch: np.arange(n), 1)
    each = np.array_split(np.arange(n), len(fields))
    _report(
        "one snapshot after the other, shuffled inside",
        values,
        lambda epoch: np.concatenate([generator.permutation(rows) for rows in each]),
        args.epochs,
    )
    for share in (2, 8, 32, 128):
        for blocks in (24, 240, 960):
            window = -(-n // share)
            length = ShuffledBlocks(n, window, 0, 0, blocks).length
            name = f"window 1/{share} of the points, {blocks} blocks of {length}"
            _report(name, values, lambda epoch, w=window, b=blocks: _order(n, w, b, epoch), args.epochs)


def _order(n: int, window: int, blocks: int, epoch: int) -> np.ndarray:
    """The whole order of an epoch, as `StreamLoader` takes it."""
    plan = ShuffledBlocks(n, window, 7, epoch, blocks)
    found, start = [], 0
    for number, end in enumerate(plan.ends):
        room = np.empty(end - start, dtype=np.int64)
        for stretch in plan.row_ranges(number, 0, 1):
            room[stretch.at : stretch.at + stretch.stop - stretch.start] = np.arange(stretch.start, stretch.stop)
        found.append(room[plan.buffer_rows(number, range(start, end)).numpy()])
        start = end
    return np.concatenate(found)


def _report(name: str, values: np.ndarray, order: Callable[[int], np.ndarray], epochs: int) -> None:
    """Scatter of batch means over that of a full shuffle, and correlation of consecutive ones, over levels and epochs."""
    scatter, together = [], []
    for epoch in range(epochs):
        rows = order(epoch)
        whole = len(rows) // BATCH * BATCH
        means = values[rows[:whole]].reshape(-1, BATCH, values.shape[1]).mean(axis=1)
        scatter.append((means**2).mean() * BATCH * (len(rows) - 1) / (len(rows) - BATCH))
        together.append((means[1:] * means[:-1]).mean() / (means**2).mean())
    print(f"{name:52s} scatter {np.mean(scatter):8.3f}   consecutive batches {np.mean(together):6.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "mixing"])
    parser.add_argument("--data", type=Path, help="folder of snapshots, for mixing")
    parser.add_argument("--points", type=int, default=400_000, help="points of the speed test (400000)")
    parser.add_argument("--tiles", type=int, default=6, help="how often the grid is repeated along x and y (6)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs that are averaged (4)")
    parser.add_argument("--scratch", help="folder for the files of the speed test (the system's)")
    args = parser.parse_args()
    if args.what == "mixing" and args.data is None:
        parser.error("mixing needs --data")
    {"speed": speed, "mixing": mixing}[args.what](args)


if __name__ == "__main__":
    main()
