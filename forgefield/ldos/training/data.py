"""The data of a training on points: snapshots, splits, scalings, and rows in memory if there is enough space.

Resident rows are stored as the layers of the network need them: scaled in float64, rounded once, inputs and targets of a point
next to each other. A step is then one gather, and nothing is scaled twice. Files are never modified.
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
    Snapshot,
    StreamLoader,
    choose_location,
    find_snapshots,
    measure_points,
    split_points,
)
from forgefield.ldos.descriptors.computed import input_maker
from forgefield.ldos.model import LDOSNetwork
from forgefield.parallel.ranks import Ranks

EVALUATED = 16384
"""Default number of points of a validation batch."""
CHUNK = 16384
"""Points read and scaled at once."""


class PointSplit:
    """Points of one split: `selection` among those of `table`. resident: scaled rows of the table, once they are in memory."""

    def __init__(self, table: PointTable, selection: Selection) -> None:
        self.table, self.selection = table, selection
        self.resident: ResidentRows | None = None

    def __len__(self) -> int:
        return self.selection.n

    @property
    def is_complete(self) -> bool:
        """Whether the split has all points of its snapshots."""
        return isinstance(self.selection, EveryPoint)


@dataclass(frozen=True)
class RowLayout:
    """Inputs and targets of a point in one row, each padded to a multiple of 8 columns."""

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


class ResidentRows:
    """Scaled rows of all points of a table, on a device or in the memory of the host."""

    def __init__(self, table: PointTable, model: LDOSNetwork, device: torch.device, workers: int) -> None:
        self.layout = RowLayout(table.n_inputs, table.n_targets)
        self.rows = torch.zeros(table.n_points, self.layout.width, dtype=model.dtype, device=device)
        starts, model_device = range(0, table.n_points, CHUNK), model.input_shift.device

        def read(number: int) -> list[Tensor]:
            return [torch.from_numpy(array) for array in read_rows(table, starts[number], CHUNK)]

        for start, (inputs, targets) in zip(starts, prepared_ahead(read, len(starts), workers, 2 * workers)):
            columns = self.layout.split(self.rows[start : start + len(inputs)])
            columns[0].copy_(model.scaled_inputs(inputs.to(model_device)))
            columns[1].copy_(model.scaled_targets(targets.to(model_device)))
        numbers = torch.from_numpy(table.snapshot_of(np.arange(table.n_points)))
        self.block = PointBlock(*self.layout.split(self.rows), numbers.to(device))


def read_rows(table: PointTable, start: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of up to n points from `start` on, float64, in physical units."""
    n = min(n, table.n_points - start)
    inputs, targets = np.empty((n, table.n_inputs)), np.empty((n, table.n_targets))
    table.read_into(start, inputs, targets)
    return inputs, targets


class PointData:
    """options: the config's `data` section. seed: orders points and draws splits. output_scaling: kind of the scaling of the
    targets."""

    train: PointSplit
    val: PointSplit | None
    test: PointSplit | None
    inputs: Scaling
    outputs: Scaling
    location: str = "memory"

    def __init__(self, options: DataOptions, seed: int, ranks: Ranks, *, output_scaling: str) -> None:
        assert options.points is not None, "samples are points"
        self.output_scaling = output_scaling
        self.options, self.points, self.seed, self.ranks = options, options.points, int(seed), ranks
        self.batch = int(options.batch.points or DEFAULT_POINTS)

    # ---- sources, splits and scalings

    def prepare(self) -> None:
        """Find the snapshots and divide their points."""
        table = PointTable(self.find(self.options.train, "data.train"))
        shares: dict[str, float] = {}
        splits: dict[str, PointSplit | None] = {"val": None, "test": None}
        for name in splits:
            value = getattr(self.options, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if value:
                    shares[name] = self._share(name, value)
            elif value is not None:
                other = PointTable(self.find(value, f"data.{name}"))
                PointTable([table.snapshots[0], *other.snapshots])  # raises an error if they differ
                _refuse_training_data(table, other, name)
                splits[name] = PointSplit(other, EveryPoint(other.n_points))
        seed = self.seed if self.options.split_seed is None else int(self.options.split_seed)
        selections = split_points(table.n_points, shares, seed) if shares else {"train": EveryPoint(table.n_points)}
        splits |= {name: PointSplit(table, selections[name]) for name in shares}
        self.train = PointSplit(table, selections["train"])
        self.val, self.test = splits["val"], splits["test"]

    @property
    def tests(self) -> dict[str, PointSplit]:
        """The test set by the name of its results; empty without one."""
        return {} if self.test is None else {"test": self.test}

    def find(self, spec: object, setting: str) -> list[Snapshot]:
        """Snapshots named in a setting."""
        return find_snapshots(
            spec,
            target=self.points.target,
            units=self.points.units,
            setting=setting,
            make_inputs=input_maker(self.points.descriptors),
        )

    def _share(self, name: str, value: float) -> float:
        if not 0 < value < 1:
            raise ForgefieldError(f"data.{name}={value}: give snapshots, or a fraction of the points between 0 and 1.")
        return float(value)

    def measure(self) -> None:
        """Compute the scalings of the training points; every rank reads some of them."""
        ranks = self.ranks
        rank_moments = measure_points(
            self.train.table, self.train.selection, rank=ranks.rank, world_size=ranks.world_size
        )
        moments = PointMoments.merged(ranks.all_gather(rank_moments))
        assert moments.inputs is not None
        assert moments.targets is not None
        self.inputs = Scaling.of(self.points.scaling.inputs, moments.inputs, "data.points.scaling.inputs")
        self.outputs = Scaling.of(self.output_scaling, moments.targets, "data.points.scaling.outputs")
        self.spread = {"targets": float(moments.targets.over_all().std[0])}

    @property
    def fingerprint(self) -> str:
        values = [self.train.table.fingerprint, str(len(self.train))]
        if self.val is not None:
            values += [self.val.table.fingerprint, str(len(self.val))]
        return " ".join(values)

    @property
    def symbols(self) -> list[str]:
        """Chemical symbols of all atoms in the metadata of the snapshots, sorted by atomic number."""
        from ase.data import chemical_symbols

        infos = [snapshot.info for snapshot in self.train.table.snapshots]
        atomic_numbers = {int(number) for info in infos if info.numbers is not None for number in info.numbers}
        return [chemical_symbols[number] for number in sorted(atomic_numbers)]

    # ---- location

    def load(self, model: LDOSNetwork, device: torch.device) -> None:
        """Load the scaled rows to the device or into memory, unless they stay on disk."""
        self._dtype = model.dtype
        splits = [split for split in (self.train, self.val) if split is not None]
        tables = list({id(split.table): split.table for split in splits}.values())
        self.location = self._choose_location(tables, model.dtype, device)
        if self.location == "disk":
            return
        target = device if self.location == "device" else torch.device("cpu")
        workers = 2 if self.options.workers is None else max(int(self.options.workers), 1)
        tables_in_memory = {id(table): ResidentRows(table, model, target, workers) for table in tables}
        for split in splits:
            split.resident = tables_in_memory[id(split.table)]

    def _choose_location(self, tables: list[PointTable], dtype: torch.dtype, device: torch.device) -> str:
        requested = str(self.points.keep)
        on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        if requested == "auto":
            best = choose_location(tables, dtype, on_device=on_device, on_host=_free_memory() // self._local_ranks())
            order = ("device", "memory", "disk")
            return max(self.ranks.all_gather(best), key=order.index)
        if requested == "device" and device.type == "cpu":
            return "memory"
        return requested

    def _local_ranks(self) -> int:
        return max(self.ranks.launch.local_size, 1)

    # ---- batches

    def train_loader(self, device: torch.device) -> PointLoader | StreamLoader:
        """Batches of this rank, one for each step."""
        settings: dict[str, Any] = {
            "selection": self.train.selection,
            "shuffle": bool(self.options.shuffle),
            "seed": self.seed,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
        }
        resident = self.train.resident
        if resident is not None:
            return PointLoader(resident.block, self.batch, **settings)
        workers = 2 if self.options.workers is None else max(int(self.options.workers), 1)
        return StreamLoader(self.train.table, self.batch, workers=workers, device=device, dtype=self._dtype, **settings)

    def val_loader(self, device: torch.device) -> PointLoader | StreamLoader:
        """Validation points in the order of the data, distributed over the ranks."""
        split = self.val
        assert split is not None
        settings: dict[str, Any] = {
            "selection": split.selection,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
        }
        if split.resident is not None:
            return PointLoader(split.resident.block, self.eval_batch, **settings)
        return StreamLoader(split.table, self.eval_batch, device=device, dtype=self._dtype, **settings)

    @property
    def eval_batch(self) -> int:
        batch = self.options.eval_batch
        if isinstance(batch, dict):
            batch = batch["points"]
        return EVALUATED if batch is None else int(batch)

    def describe(self) -> list[tuple[str, str]]:
        """Rows (label, value) of a summary table."""
        table = self.train.table
        splits = {"train": self.train, "val": self.val, "test": self.test}
        points = [f"{name} {len(split):,}" for name, split in splits.items() if split is not None]
        snapshots = []
        for name, split in splits.items():
            if split is not None and (name == "train" or split.table is not table):
                names = [snapshot.name for snapshot in split.table.snapshots]
                more = f", ... ({len(names)})" if len(names) > 4 else ""
                snapshots.append(f"{name} {', '.join(names[:4])}{more}")
        rows = [
            ("points", ", ".join(points)),
            ("snapshots", "; ".join(snapshots)),
            ("per point", f"{table.n_inputs} descriptors -> {table.n_targets} values of {self.points.target}"),
            ("scaling", f"inputs {self.inputs.describe()}; outputs {self.outputs.describe()}"),
        ]
        if self.points.energies is not None:
            rows.append(("energies", str(self.points.energies).strip("{}").replace("'", "") + " eV"))
        return rows


def rank_range(n_points: int, rank: int, world_size: int) -> tuple[int, int]:
    """First point and last point + 1 of the share of a rank when ranks divide a snapshot."""
    return n_points * rank // world_size, n_points * (rank + 1) // world_size


class SnapshotRows:
    """Points of complete snapshots: scaled inputs from resident rows or from disk, targets in physical units from disk.

    remember: cache inputs that are read from disk.
    """

    def __init__(
        self, table: PointTable, model: LDOSNetwork, resident: ResidentRows | None, *, remember: bool = False
    ) -> None:
        self.table, self.model, self.resident = table, model, resident
        self._cache: dict[tuple[int, int, int], Tensor] | None = {} if remember and resident is None else None

    @property
    def device(self) -> torch.device:
        return self.model.weights[0].device

    def inputs(self, number: int, start: int, stop: int) -> Iterator[Tensor]:
        """Scaled inputs of points start to stop of a snapshot, in pieces (n, f), on the device of the model."""
        first = self.table.first(number)
        for begin in range(start, stop, EVALUATED):
            end = min(begin + EVALUATED, stop)
            if self.resident is not None:
                yield self.resident.block.inputs[first + begin : first + end].to(self.device, non_blocking=True)
            else:
                yield self._read(number, begin, end)

    def _read(self, number: int, begin: int, end: int) -> Tensor:
        key = (number, begin, end)
        if self._cache is not None and key in self._cache:
            return self._cache[key]
        array = np.empty((end - begin, self.table.n_inputs))
        self.table.snapshots[number].read_into(begin, array, None)
        inputs = self.model.scaled_inputs(torch.from_numpy(array).to(self.device))
        if self._cache is not None:
            self._cache[key] = inputs
        return inputs

    def targets(self, number: int, start: int, stop: int) -> Iterator[Tensor]:
        """Targets of points start to stop of a snapshot, in pieces (n, levels), float64, physical units."""
        for begin in range(start, stop, EVALUATED):
            array = np.empty((min(begin + EVALUATED, stop) - begin, self.table.n_targets))
            self.table.snapshots[number].read_into(begin, None, array)
            yield torch.from_numpy(array)


def _refuse_training_data(train: PointTable, other: PointTable, name: str) -> None:
    train_paths = {_path(snapshot) for snapshot in train.snapshots}
    for snapshot in other.snapshots:
        if _path(snapshot) in train_paths:
            raise ForgefieldError(
                f"data.{name} and data.train both name snapshot {snapshot.name}: errors on training data are meaningless; to "
                f"hold back a fraction of the points, set data.{name}=0.1."
            )


def _path(snapshot: Snapshot) -> str:
    assert snapshot.inputs is not None
    return str(snapshot.inputs.path.resolve())


def _free_memory() -> int:
    """Available memory of this machine in bytes."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
