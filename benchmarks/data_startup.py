"""What happens before the first step, for stores of a thousand to a million frames: opening, statistics, order, plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from data_measure import CACHE, Settings, Table, Timing, best_of, timed

from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.options import DataOptions
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.order import EveryFrameOnce, WeightedDraws, system_probabilities
from forgefield.data.sampling.plan import Budget, StepPlan
from forgefield.data.species import SpeciesTable
from forgefield.data.splits import resolve_splits
from forgefield.data.statistics import compute_statistics
from forgefield.data.store.store import ALL_FIELDS, FORMAT, MANIFEST, VERSION, manifest_hash
from forgefield.data.store.writer import PartStatistics, PartWriter

CUTOFF = 3.0
VALIDATION = 1000
STAGES = ("open_and_split", "species", "graphs", "statistics", "order_and_plan", "first_batch")
LATER_BATCH, LATER = "later_batch", 5
"""Batches over which those after the first are averaged."""
PARTS_OF_STORE = 64
"""As many as a conversion makes of much data."""


def write_store(folder: Path, n_frames: int) -> int:
    """A store of small random frames with neighbour lists; all parts hold the same numbers. Returns its bytes."""
    n_parts = PARTS_OF_STORE if n_frames > 10_000 else 1
    n_frames -= n_frames % n_parts
    first = folder / "part-00000"
    writer = PartWriter(first, GraphOptions(CUTOFF))
    frames = small_frames(n_frames // n_parts)
    for begin in range(0, len(frames), 256):
        writer.add(frames[begin : begin + 256])
    about = writer.finish()
    parts = []
    for number in range(n_parts):
        name = f"part-{number:05d}"
        if number:
            shutil.copytree(first, folder / name)
        parts.append({**about, "name": name})
    statistics = PartStatistics()
    for part in parts:
        statistics.merge(PartStatistics.from_dict(part.pop("statistics")))
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "n_frames": n_frames,
        "n_atoms": n_parts * about["n_atoms"],
        "n_edges": n_parts * about["n_edges"],
        "fields": {name: asdict(ALL_FIELDS[name]) for name in about["columns"]},
        "graph": asdict(GraphOptions(CUTOFF)),
        "statistics": statistics.to_dict(),
        "parts": parts,
    }
    manifest = json.loads(json.dumps(manifest))
    manifest["hash"] = manifest_hash(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return sum(entry["bytes"] for part in parts for entry in part["columns"].values())


def small_frames(n: int) -> list[Frame]:
    """6 to 10 atoms of three species on a shaken grid, with energies and forces of springs to its points."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3), -1).reshape(-1, 3) * 2.2
    cell, pbc = 12.0 * np.eye(3), np.ones(3, dtype=bool)
    frames = []
    for i, size in enumerate(rng.integers(6, 11, n)):
        shift = rng.normal(0, 0.1, (size, 3))
        energy = 0.5 * float((shift**2).sum()) - 3.0 * size
        numbers = rng.choice([1, 6, 8], size)
        frames.append(Frame(grid[:size] + shift, numbers, cell, pbc, energy, -shift, None, 1.0, "small", i))
    return frames


# ---- start of a run


def start_up(store: Path, n_frames: int) -> dict[str, Timing]:
    """From a folder to the first batch, as a training does it, by stages."""
    options = DataOptions(train=str(store), val=min(VALIDATION, n_frames // 10), cutoff=CUTOFF)
    taken: dict[str, Timing] = {}

    def stage(name: str, work: Callable[[], Any]) -> Any:
        result, taken[name] = timed(work)
        return result

    splits = stage("open_and_split", lambda: resolve_splits(options, 0))
    species = stage("species", lambda: SpeciesTable.from_frames(splits.train))
    train, val = stage(
        "graphs", lambda: [GraphDataset(part, species, GraphOptions(CUTOFF)) for part in (splits.train, splits.val)]
    )
    assert train.edges.kind == "read from the store"
    stage("statistics", lambda: compute_statistics(train, options, [val]))
    loader = stage("order_and_plan", lambda: _planned(FrameLoader(train, Budget("frames", 64), shuffle=True)))
    batches = iter(loader)
    stage("first_batch", lambda: next(batches))
    stage(LATER_BATCH, lambda: [next(batches) for _ in range(LATER)])
    return {**taken, LATER_BATCH: taken[LATER_BATCH].over(LATER)}


def _planned(loader: FrameLoader) -> FrameLoader:
    assert len(loader)
    return loader


def startup(settings: Settings) -> None:
    """Stages of the start, with statistics computed and with statistics known from an earlier run."""
    out = Table(
        "Start of a run on a store with neighbour lists (one part; 64 parts from 1e5 frames on): CPU ms of its stages, all up "
        "to the first batch of 64, and CPU ms of a later batch",
        frames=9, MB=5, known=11, **dict.fromkeys(STAGES, 15), CPU_s=7, wall_s=7, later_batch=12,
    )  # fmt: skip
    for n in (1_000, 100_000) if settings.quick else (1_000, 100_000, 1_000_000):
        store = settings.scratch / f"store-{n}"
        store.mkdir()
        size = write_store(store, n) / 1e6
        for known in (False, True):
            runs = [
                _start_up_once(store, n, settings.scratch, known) for _ in range(2 if n > 100_000 else settings.repeats)
            ]
            cpu = [min(run[name].cpu for run in runs) for name in (*STAGES, LATER_BATCH)]
            totals = [sum((run[name] for name in STAGES), Timing(0, 0)).over(1000) for run in runs]
            all_ = min(total.cpu for total in totals), min(total.wall for total in totals)
            out.row(f"{n:g}", size, "statistics" if known else "nothing", *cpu[:-1], *all_, cpu[-1])
        shutil.rmtree(store)


def _start_up_once(store: Path, n_frames: int, scratch: Path, known: bool) -> dict[str, Timing]:
    """known: statistics are in the cache, from an earlier run."""
    if not known:
        shutil.rmtree(scratch / CACHE, ignore_errors=True)
    return start_up(store, n_frames)


# ---- order and plan


def plans(settings: Settings) -> None:
    """Order of an epoch, weighted draws, and plans by atoms."""
    n = 100_000 if settings.quick else 1_000_000
    rng = np.random.default_rng(0)
    atoms = rng.integers(2, 200, n)
    works: dict[str, Callable[[], object]] = {"shuffled order": lambda: EveryFrameOnce(n, 0).rows(3)}
    for systems in (10, n // 10):
        of_row = np.sort(np.concatenate([np.arange(systems), rng.integers(0, systems, n - systems)]))
        chances = system_probabilities("uniform", np.bincount(of_row, minlength=systems))
        works[f"weighted draws, {systems} systems, made"] = lambda o=of_row, c=chances: WeightedDraws(o, c, n)
        draws = WeightedDraws(of_row, chances, n)
        works[f"weighted draws, {systems} systems, an epoch"] = lambda d=draws: d.rows(3)
    for ranks in (1, 2, 64):
        works[f"plan by atoms (4096), {ranks} ranks"] = lambda r=ranks: StepPlan(atoms, Budget("atoms", 4096), r)
    times = best_of(works, 1 if settings.quick else 2)
    out = Table(f"An epoch of {n:g} frames", what=44, CPU_s=8, wall_s=8)
    for name, timing in times.items():
        out.row(name, timing.over(1000).cpu, timing.over(1000).wall)


PARTS = {"startup": startup, "plans": plans}
