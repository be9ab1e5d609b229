"""A snapshot: descriptors and targets on the points of one grid, and metadata of the calculation.

Files are never modified: leading columns of coordinates are removed and units are converted when values are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.ldos.data.info import SnapshotInfo, read_info
from forgefield.ldos.data.rows import RowFile, open_rows, require_file
from forgefield.ldos.data.units import STANDARD, TARGET_UNITS, factor_from_si, require_target, target_factor

COORDINATES = 3
"""Columns of coordinates in front of descriptors."""


class Snapshot:
    """inputs, targets: files of rows, either of which may be missing. info: metadata, or the file that contains it.

    target: ldos, dos or density. units: of the targets in the file; None: as stated in the file or the metadata, else the
    standard unit. coordinates: whether inputs begin with three columns of coordinates; None: as stated in the metadata, else
    detected: coordinates are a linear function of the grid indices. folder: where other files of the calculation are; None: the
    folder of the inputs or targets.
    """

    def __init__(
        self,
        name: str,
        inputs: Path | str | None,
        targets: Path | str | None,
        info: SnapshotInfo | Path | str | None = None,
        *,
        target: str = "ldos",
        units: str | None = None,
        coordinates: bool | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name, self.target = name, require_target(target)
        self.inputs = None if inputs is None else open_rows(Path(inputs))
        self.targets = None if targets is None else open_rows(Path(targets))
        if self.inputs is None and self.targets is None:
            raise ForgefieldError(f"snapshot {name} has neither inputs nor targets")
        self.folder = next(file.path.parent for file in self._files()) if folder is None else folder
        if isinstance(info, (str, Path)):
            require_file(Path(info))
            info = read_info(Path(info))
        self.info = SnapshotInfo(source=f"snapshot {name}") if info is None else info
        self.grid_shape = self._common_grid()
        self.n_points = next(file.n_rows for file in self._files())
        if self.info.grid_shape is None:
            self.info.grid_shape = self.grid_shape
        self.factor = self._unit_factor(units)
        self.cut = COORDINATES if self._has_coordinates(coordinates) else 0

    def _files(self) -> list[RowFile]:
        return [file for file in (self.inputs, self.targets) if file is not None]

    def _common_grid(self) -> tuple[int, int, int] | None:
        """The grid of all files; None where none of them has one."""
        grids = [(str(file.path), file.grid_shape, file.n_rows) for file in self._files()]
        if self.info.grid_shape is not None:
            grids.append((self.info.source, self.info.grid_shape, int(np.prod(self.info.grid_shape))))
        for (first_source, first_grid, first_rows), (second_source, other_grid, other_rows) in itertools.combinations(
            grids, 2
        ):
            if first_rows != other_rows or (
                first_grid is not None and other_grid is not None and first_grid != other_grid
            ):
                raise ForgefieldError(
                    f"{first_source} has {_grid_text(first_grid, first_rows)}, but {second_source} has "
                    f"{_grid_text(other_grid, other_rows)}; the files of a snapshot must be from one calculation"
                )
        return next((first_grid for _, first_grid, _ in grids if first_grid is not None), None)

    def _unit_factor(self, units: str | None) -> float:
        """Factor for stored targets. An explicit unit and one stated in a file must agree."""
        requested = None if units is None else target_factor(self.target, units)
        stated: list[tuple[str, float]] = []
        if self.targets is not None and self.targets.unit_si not in (None, 1.0):
            stated.append((str(self.targets.path), factor_from_si(self.target, float(self.targets.unit_si or 1.0))))
        if self.info.units is not None:
            stated.append(
                (self.info.source, target_factor(self.target, self.info.units, f"{self.info.source}: target_units"))
            )
        for source, factor in stated:
            if requested is not None and abs(requested / factor - 1) > 1e-5:
                near = (
                    unit
                    for unit in TARGET_UNITS[self.target]
                    if abs(target_factor(self.target, unit) / factor - 1) < 1e-5
                )
                raise ForgefieldError(
                    f"{source} states that targets are in {next(near, 'another unit')}, but units={units} is given; leave "
                    "that out"
                )
        return stated[0][1] if stated else 1.0 if requested is None else requested

    def _has_coordinates(self, stated: bool | None) -> bool:
        stated = self.info.coordinates if stated is None else stated
        if self.inputs is None:
            return False
        if stated is None and self.inputs.grid_shape is None and self.inputs.n_columns > COORDINATES:
            raise ForgefieldError(
                f"{self.inputs.path} has {self.inputs.n_columns} columns and no grid: it is unclear whether the first "
                "three are coordinates; set coordinates: true or coordinates: false"
            )
        has_coordinates = _are_coordinates(self.inputs) if stated is None else stated
        if has_coordinates and self.inputs.n_columns <= COORDINATES:
            raise ForgefieldError(
                f"{self.inputs.path} has {self.inputs.n_columns} columns; nothing is left without coordinates"
            )
        return has_coordinates

    # ---- values

    @property
    def units(self) -> str:
        """The unit of the targets that `read` returns."""
        return STANDARD[self.target]

    @property
    def n_inputs(self) -> int:
        """Descriptors of a point."""
        return 0 if self.inputs is None else self.inputs.n_columns - self.cut

    @property
    def n_targets(self) -> int:
        """Target values of a point, such as levels of the LDOS."""
        return 0 if self.targets is None else self.targets.n_columns

    def read(
        self, start: int = 0, stop: int | None = None, dtype: np.dtype | type | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (n, n_inputs) and targets (n, n_targets) of points start to stop. dtype: default as stored."""
        stop = self.n_points if stop is None else stop
        inputs, targets = (
            np.empty((stop - start, columns), dtype=dtype or (np.float32 if file is None else file.dtype))
            for columns, file in ((self.n_inputs, self.inputs), (self.n_targets, self.targets))
        )
        self.read_into(start, inputs, targets)
        return inputs, targets

    def read_into(self, start: int, inputs: np.ndarray | None, targets: np.ndarray | None) -> None:
        """Fill arrays, (n, n_inputs) and (n, n_targets), with the points from `start` on. None: skip."""
        if inputs is not None and self.inputs is not None:
            _fill(self.inputs, start, inputs, self.cut, 1.0)
        if targets is not None and self.targets is not None:
            _fill(self.targets, start, targets, 0, self.factor)

    def where(self, point: int) -> str:
        """Description of a point for messages."""
        if self.grid_shape is None:
            return f"{self.name}, point {point}"
        return f"{self.name}, grid point {tuple(int(i) for i in np.unravel_index(point, self.grid_shape))}"


def _fill(file: RowFile, start: int, out: np.ndarray, cut: int, factor: float) -> None:
    if cut == 0 and file.read_into(start, out):
        if factor != 1.0:
            out *= out.dtype.type(factor)
        return
    out[...] = file.read(start, start + len(out))[:, cut:]
    if factor != 1.0:
        out *= out.dtype.type(factor)


def _grid_text(grid: tuple[int, int, int] | None, rows: int) -> str:
    return f"{rows} points" if grid is None else f"a grid of {' x '.join(map(str, grid))} points"


def _are_coordinates(file: RowFile) -> bool:
    """Whether the first three columns are origin + i a + j b + k c with independent steps a, b, c."""
    if file.grid_shape is None or file.n_columns <= COORDINATES:
        return False
    shape = file.grid_shape
    points = np.array([(0, 0, 0), *(np.eye(3, dtype=int)[axis] for axis in range(3)), *_some_points(shape)])
    points = np.minimum(points, np.array(shape) - 1)
    rows = np.ravel_multi_index(tuple(points.T), shape)
    values = np.array([file.read(int(row), int(row) + 1)[0, :COORDINATES].astype(np.float64) for row in rows])
    origin, steps = values[0], values[1:4] - values[0]
    extended = np.array([n > 1 for n in shape])
    lengths = np.linalg.norm(steps, axis=1)
    if np.linalg.matrix_rank(steps[extended], tol=1e-6 * max(lengths.max(), 1e-300)) < extended.sum():
        return False
    error = np.abs(origin + points @ np.where(extended[:, None], steps, 0.0) - values).max()
    return bool(error < 1e-3 * lengths[extended].min(initial=np.inf)) and bool(extended.any())


def _some_points(shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """Corners and some points between them."""
    corners = list(itertools.product(*((0, n - 1) for n in shape)))
    inside = [
        tuple((n * share) // 7 for n, share in zip(shape, shares)) for shares in ((1, 3, 5), (4, 2, 6), (6, 5, 1))
    ]
    return [*corners, *inside]


PSEUDOPOTENTIALS = "pseudopotentials"
"""Folder of a run that contains the pseudopotentials of its snapshots."""


def calculation_facts(infos: Iterable[SnapshotInfo]) -> dict[str, Any]:
    """Facts about the calculations of snapshots that predictions for new structures need, as JSON-compatible values.

    `spacing`: (3,), A, the smallest distance of grid points along each cell vector. `ecutrho`: Ry. `electrons_per_atom`: if
    equal in all snapshots. `pseudopotentials`: file names by element. `temperatures`: K. Unknown values are left out.
    """
    snapshot_infos = list(infos)
    spacings = [np.linalg.norm(info.voxel, axis=1) for info in snapshot_infos if info.voxel is not None]
    cutoffs = {info.ecutrho for info in snapshot_infos}
    shares = [
        info.electrons / info.n_atoms if info.electrons is not None and info.n_atoms else float("nan")
        for info in snapshot_infos
    ]
    temperatures = sorted({float(info.temperature) for info in snapshot_infos if info.temperature is not None})
    facts: dict[str, Any] = {
        "spacing": np.min(spacings, axis=0).tolist() if spacings else None,
        "ecutrho": cutoffs.pop() if len(cutoffs) == 1 else None,
        "electrons_per_atom": shares[0] if shares and np.ptp(shares) < 1e-6 else None,
        "pseudopotentials": {symbol: name for info in snapshot_infos for symbol, name in info.pseudopotentials.items()}
        or None,
        "temperatures": temperatures or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def copy_pseudopotentials(snapshots: Sequence[Snapshot], folder: str | None, run: Path) -> None:
    """Copy the pseudopotentials of snapshots from `folder` (default: the folder of the snapshots) into a run, so that the run
    is sufficient for total energies. Missing files are skipped."""
    for snapshot in snapshots:
        source_folder = Path(folder) if folder is not None else snapshot.folder
        for name in snapshot.info.pseudopotentials.values():
            source, target = source_folder / name, run / PSEUDOPOTENTIALS / name
            if source.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, source.read_bytes())
