"""What all parts of `data.py` share: timing in turns, tables, the machine, real data as tables of frames."""

from __future__ import annotations

import datetime
import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forgefield.data.options import UnitOptions
from forgefield.data.reading import read_table
from forgefield.data.store.table import FrameTable

CACHE = "cache"
"""Folder in the scratch folder for what Forgefield keeps between runs."""


@dataclass(frozen=True)
class Settings:
    data: Path
    """Folder with water_dp, mlearn, rmd17 and matsciml_lmdb."""
    scratch: Path
    """Folder for stores, emptied afterwards."""
    quick: bool
    device: str

    @property
    def repeats(self) -> int:
        return 3 if self.quick else 9


@dataclass(frozen=True)
class Timing:
    """Milliseconds."""

    cpu: float
    wall: float

    def over(self, n: float) -> Timing:
        return Timing(self.cpu / n, self.wall / n)

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.cpu + other.cpu, self.wall + other.wall)


def timed(work: Callable[[], object]) -> tuple[object, Timing]:
    """What `work` returns and what it took, once. CPU time counts all threads of the process."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, Timing(1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall))


def best_of(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """The least time of each, run in turns; the first turn warms up and does not count."""
    taken: dict[str, list[Timing]] = {name: [] for name in works}
    gc.collect()
    for turn in range(repeats + 1):
        for name, work in works.items():
            timing = timed(work)[1]
            if turn:
                taken[name].append(timing)
    return {name: Timing(min(t.cpu for t in all_), min(t.wall for t in all_)) for name, all_ in taken.items()}


class Table:
    """Printed row by row. columns: heading to width; the first is text, flush left."""

    def __init__(self, title: str, **columns: int) -> None:
        self._widths = list(columns.values())
        print(f"\n{title}")
        self.row(*(name.replace("_", " ") for name in columns))

    def row(self, first: str, *rest: object) -> None:
        width, *widths = self._widths
        print(f"{first:{width}}" + "".join(f" {_text(value):>{w}}" for value, w in zip(rest, widths)), flush=True)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine() -> str:
    """Processor and cores in words, and the day."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.split(":", 1)[1] for line in info.read_text().splitlines() if line.startswith("model name")]
        name = " ".join(models[0].split()) if models else name
    return f"{name}, {os.cpu_count()} cores, {datetime.date.today()}"


def rows_of_batches(n: int, size: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """`count` batches of `size` rows each, drawn as shuffled epochs draw them."""
    rng = np.random.default_rng(seed)
    passes = -(-size * count // n)
    order = np.concatenate([rng.permutation(n) for _ in range(passes)])
    return [order[i * size : (i + 1) * size] for i in range(count)]


# ---- real data


def water(settings: Settings) -> FrameTable | None:
    """400 frames of 192 atoms, periodic."""
    return _read(settings, "water_dp", 192)


def copper(settings: Settings) -> FrameTable | None:
    """241 frames of 108 atoms, periodic."""
    return _read(settings, "mlearn/Cu_*.xyz", 108)


def lips(settings: Settings) -> FrameTable | None:
    """200 frames of Li27P12S44, periodic."""
    return _read(settings, "matsciml_lmdb/lips", 83)


def aspirin(settings: Settings) -> FrameTable | None:
    """1000 frames of 21 atoms."""
    return _read(settings, "rmd17/rmd17_aspirin_train_01.npz", 21, UnitOptions(energy="kcal/mol"))


def _read(settings: Settings, name: str, n_atoms: int, units: UnitOptions | None = None) -> FrameTable | None:
    if not any(settings.data.glob(name)):
        print(f"left out: there is no {name} in the data folder")
        return None
    table = read_table(str(settings.data / name), units=units)
    rows = np.flatnonzero(table.n_atoms == n_atoms)
    return table if len(rows) == len(table) else FrameTable.from_frames(table.select(rows))
