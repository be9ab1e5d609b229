"""The data of a training on points: snapshots found and divided, scalings measured, rows kept where there is room.

Kept rows are held as the layers of the network see them, scaled in float64 and rounded once, inputs and targets of a point side
by side: a step is then one gather, and nothing is scaled twice. Files stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.data.options import DEFAULT_POINTS, DataOptions
from forgefield.data.sampling.loader import prepared_ahead
from forgefield.errors import ForgefieldError
from forgefield.ldos.data import (
    EveryPoint,
    PointBlock,
    PointLoader,
    PointMoments,
    PointTable,
    Scaling,
    Selection,
    StreamLoader,
    find_snapshots,
    measure_points,
    place_for,
    split_points,
)
from forgefield.ldos.model import LDOSNetwork
from forgefield.parallel.ranks import Ranks

EVALUATED = 16384
"""Points of a batch in validation, where nothing is said."""
CHUNK = 16384
"""Points that are read and scaled at once."""


class Part:
    """Points of one split: `selection` among those of `table`. kept: their scaled rows, once they are in memory."""

    def __init__(self, table: PointTable, selection: Selection) -> None:
        self.table, self.selection = table, selection
        self.kept: KeptRows | None = None

    def __len__(self) -> int:
        return self.selection.n

    @property
    def is_whole(self) -> bool:
        """Whether it has all points of its snapshots."""
        return isinstance(self.selection, EveryPoint)


@dataclass(frozen=True)
class RowLayout:
    """Inputs and targets of a point side by side in one row, each padded to a multiple of 8 columns."""

    n_inputs: int
    n_targets: int

    @property
    def targets_at(self) -> int:
        return -(-self.n_inputs // 8) * 8

    @property
    def width(self) -> int:
        return self.targets_at + -(-self.n_targets // 8) * 8

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of rows (..., width), without a copy."""
        return rows[..., : self.n_inputs], rows[..., self.targets_at : self.targets_at + self.n_targets]


class KeptRows:
    """Scaled rows of all points of a table, on a device or in memory."""

    def __init__(self, table: PointTable, model: LDOSNetwork, device: torch.device, workers: int) -> None:
        self.layout = RowLayout(table.n_inputs, table.n_targets)
        self.rows = torch.zeros(table.n_points, self.layout.width, dtype=model.dtype, device=device)
        starts, computing = range(0, table.n_points, CHUNK), model.input_shift.device

        def read(number: int) -> list[Tensor]:
            return [torch.from_numpy(array) for array in read_rows(table, starts[number], CHUNK)]

        for start, (inputs, targets) in zip(starts, prepared_ahead(read, len(starts), workers, 2 * workers)):
            into = self.layout.split(self.rows[start : start + len(inputs)])
            into[0].copy_(model.scaled_inputs(inputs.to(computing)))
            into[1].copy_(model.scaled_targets(targets.to(computing)))
        numbers = torch.from_numpy(table.snapshot_of(np.arange(table.n_points)))
        self.block = PointBlock(*self.layout.split(self.rows), numbers.to(device))


def read_rows(table: PointTable, start: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of up to n points from `start` on, float64, in physical units."""
    n = min(n, table.n_points - start)
    inputs, targets = np.empty((n, table.n_inputs)), np.empty((n, table.n_targets))
    table.read_into(start, inputs, targets)
    return inputs, targets


class PointData:
    """options: the config's `data` section. seed: orders points and draws splits."""

    train: Part
    val: Part | None
    test: Part | None
    inputs: Scaling
    outputs: Scaling
    place: str = "memory"

    def __init__(self, options: DataOptions, seed: int, ranks: Ranks) -> None:
        assert options.points is not None, "samples are points"
        self.options, self.points, self.seed, self.ranks = options, options.points, int(seed), ranks
        self.batch = int(options.batch.points or DEFAULT_POINTS)

    # ---- what there is

    def prepare(self) -> None:
        """Find the snapshots, divide points and measure the training points, one pass over them."""
        table = PointTable(self.find(self.options.train, "data.train"))
        shares: dict[str, float] = {}
        others: dict[str, Part | None] = {"val": None, "test": None}
        for name in others:
            value = getattr(self.options, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if value:
                    shares[name] = self._share(name, value)
            elif value is not None:
                other = PointTable(self.find(value, f"data.{name}"))
                PointTable([table.snapshots[0], *other.snapshots])  # says what does not fit
                _refuse_training_data(table, other, name)
                others[name] = Part(other, EveryPoint(other.n_points))
        seed = self.seed if self.options.split_seed is None else int(self.options.split_seed)
        selections = split_points(table.n_points, shares, seed) if shares else {"train": EveryPoint(table.n_points)}
        others |= {name: Part(table, selections[name]) for name in shares}
        self.train = Part(table, selections["train"])
        self.val, self.test = others["val"], others["test"]

    @property
    def tests(self) -> dict[str, Part]:
        """The test set, by the name of its results."""
        return {} if self.test is None else {"test": self.test}

    def find(self, spec: Any, setting: str) -> list[Any]:
        """Snapshots that a setting names."""
        return find_snapshots(spec, target=self.points.target, units=self.points.units, setting=setting)

    def _share(self, name: str, value: float) -> float:
        if not 0 < value < 1:
            raise ForgefieldError(f"data.{name}={value}: give snapshots, or a share of the points between 0 and 1.")
        return float(value)

    def measure(self) -> None:
        """Scalings of the training points: every rank reads its part of them."""
        ranks, kinds = self.ranks, self.points.scaling
        own = measure_points(self.train.table, self.train.selection, rank=ranks.rank, world_size=ranks.world_size)
        moments = PointMoments.merged(ranks.all_gather(own))
        assert moments.inputs is not None
        assert moments.targets is not None
        self.inputs = Scaling.of(kinds.inputs, moments.inputs, "data.points.scaling.inputs")
        self.outputs = Scaling.of(kinds.outputs, moments.targets, "data.points.scaling.outputs")
        self.spread = {"targets": float(moments.targets.over_all().std[0])}

    @property
    def fingerprint(self) -> str:
        parts = [self.train.table.fingerprint, str(len(self.train))]
        if self.val is not None:
            parts += [self.val.table.fingerprint, str(len(self.val))]
        return " ".join(parts)

    @property
    def symbols(self) -> list[str]:
        """Chemical symbols of all atoms that the snapshots tell of, by atomic number."""
        from ase.data import chemical_symbols

        infos = [snapshot.info for snapshot in self.train.table.snapshots]
        found = {int(number) for info in infos if info.numbers is not None for number in info.numbers}
        return [chemical_symbols[number] for number in sorted(found)]

    # ---- where it is

    def keep(self, model: LDOSNetwork, device: torch.device) -> None:
        """Bring rows to where they are kept: on the device, in memory, or nowhere."""
        self._dtype = model.dtype
        parts = [part for part in (self.train, self.val) if part is not None]
        tables = list({id(part.table): part.table for part in parts}.values())
        self.place = self._place(tables, model.dtype, device)
        if self.place == "disk":
            return
        where = device if self.place == "device" else torch.device("cpu")
        workers = 2 if self.options.workers is None else max(int(self.options.workers), 1)
        kept = {id(table): KeptRows(table, model, where, workers) for table in tables}
        for part in parts:
            part.kept = kept[id(part.table)]

    def _place(self, tables: list[PointTable], dtype: torch.dtype, device: torch.device) -> str:
        wanted = str(self.points.keep)
        on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        if wanted == "auto":
            found = place_for(tables, dtype, on_device=on_device, on_host=_free_memory() // self._local_ranks())
            order = ("device", "memory", "disk")
            return max(self.ranks.all_gather(found), key=order.index)
        if wanted == "device" and device.type == "cpu":
            return "memory"
        return wanted

    def _local_ranks(self) -> int:
        return max(self.ranks.launch.local_size, 1)

    # ---- batches

    def train_loader(self, device: torch.device) -> Any:
        """Batches of this rank, one for each step."""
        settings: dict[str, Any] = {
            "selection": self.train.selection,
            "shuffle": bool(self.options.shuffle),
            "seed": self.seed,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
        }
        kept = self.train.kept
        if kept is not None:
            return PointLoader(kept.block, self.batch, **settings)
        workers = 2 if self.options.workers is None else max(int(self.options.workers), 1)
        return StreamLoader(self.train.table, self.batch, workers=workers, device=device, dtype=self._dtype, **settings)

    def val_loader(self, device: torch.device) -> Any:
        """Validation points in their order, each rank its part."""
        part = self.val
        assert part is not None
        settings: dict[str, Any] = {
            "selection": part.selection,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
        }
        if part.kept is not None:
            return PointLoader(part.kept.block, self.eval_batch, **settings)
        return StreamLoader(part.table, self.eval_batch, device=device, dtype=self._dtype, **settings)

    @property
    def eval_batch(self) -> int:
        given = self.options.eval_batch
        if isinstance(given, dict):
            given = given["points"]
        return EVALUATED if given is None else int(given)

    def describe(self) -> list[tuple[str, str]]:
        """Rows (label, value) of a summary table."""
        table = self.train.table
        parts = {"train": self.train, "val": self.val, "test": self.test}
        points = [f"{name} {len(part):,}" for name, part in parts.items() if part is not None]
        snapshots = []
        for name, part in parts.items():
            if part is not None and (name == "train" or part.table is not table):
                names = [snapshot.name for snapshot in part.table.snapshots]
                more = f", ... ({len(names)})" if len(names) > 4 else ""
                snapshots.append(f"{name} {', '.join(names[:4])}{more}")
        rows = [
            ("points", ", ".join(points)),
            ("snapshots", "; ".join(snapshots)),
            ("a point", f"{table.n_inputs} descriptors -> {table.n_targets} values of {self.points.target}"),
            ("scaling", f"inputs {self.inputs.describe()}; outputs {self.outputs.describe()}"),
        ]
        if self.points.energies is not None:
            rows.append(("energies", str(self.points.energies).strip("{}").replace("'", "") + " eV"))
        return rows


def stretch_of(n_points: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and last + 1 of the points of a snapshot that a rank looks after, where ranks share whole snapshots."""
    return n_points * rank // world_size, n_points * (rank + 1) // world_size


class SnapshotRows:
    """Scaled inputs of the points of whole snapshots, from kept rows or from disk; targets in physical units, from disk."""

    def __init__(self, table: PointTable, model: LDOSNetwork, kept: KeptRows | None, *, remember: bool = False) -> None:
        self.table, self.model, self.kept = table, model, kept
        self._known: dict[tuple[int, int, int], Tensor] | None = {} if remember and kept is None else None

    @property
    def device(self) -> torch.device:
        return self.model.weights[0].device

    def inputs(self, number: int, start: int, stop: int) -> Iterator[Tensor]:
        """Of points start to stop of a snapshot, in pieces (n, f), on the device of the model."""
        first = self.table.first(number)
        for begin in range(start, stop, EVALUATED):
            end = min(begin + EVALUATED, stop)
            if self.kept is not None:
                yield self.kept.block.inputs[first + begin : first + end].to(self.device, non_blocking=True)
            else:
                yield self._read(number, begin, end)

    def _read(self, number: int, begin: int, end: int) -> Tensor:
        key = (number, begin, end)
        if self._known is not None and key in self._known:
            return self._known[key]
        array = np.empty((end - begin, self.table.n_inputs))
        self.table.snapshots[number].read_into(begin, array, None)
        found = self.model.scaled_inputs(torch.from_numpy(array).to(self.device))
        if self._known is not None:
            self._known[key] = found
        return found

    def targets(self, number: int, start: int, stop: int) -> Iterator[Tensor]:
        """Of points start to stop of a snapshot, in pieces (n, levels), float64, physical units."""
        for begin in range(start, stop, EVALUATED):
            array = np.empty((min(begin + EVALUATED, stop) - begin, self.table.n_targets))
            self.table.snapshots[number].read_into(begin, None, array)
            yield torch.from_numpy(array)


def _refuse_training_data(train: PointTable, other: PointTable, name: str) -> None:
    own = {_path(snapshot) for snapshot in train.snapshots}
    for snapshot in other.snapshots:
        if _path(snapshot) in own:
            raise ForgefieldError(
                f"data.{name} and data.train both name snapshot {snapshot.name}: errors on it would say nothing; a share of "
                f"the points is data.{name}=0.1."
            )


def _path(snapshot: Any) -> str:
    return str(snapshot.inputs.path.resolve())


def _free_memory() -> int:
    """Bytes that this machine could still give."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
