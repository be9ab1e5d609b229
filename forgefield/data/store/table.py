"""A table of frames: parts in memory or on disk, of which some rows are chosen. It reads like a list of frames.

Splits, development sets and other selections of frames select rows; nothing is copied. A single frame is made when
it is requested; columns serve code that needs all frames at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Field, Fields, fields_of, merge_fields
from forgefield.data.store.columns import FIELDS, Columns, MemoryColumns, columns_of, ranges


@dataclass(frozen=True)
class Share:
    """The share of all draws that the parts of one entry of a setting have together."""

    entry: int
    value: float


@dataclass(frozen=True)
class TablePart:
    """One part of a table. factor: multiplies the weights of its frames."""

    columns: Columns
    factor: float = 1.0
    share: Share | None = None
    branch: str | None = None
    """Which branch of the model learns from it, where the model has several."""
    hidden: frozenset[str] = frozenset()
    """Labels that are there and not to be seen; `weight`: all weights are `factor`."""
    chosen: Fields | None = None
    """Fields to be seen, whether or not its columns hold them; None: those that are there."""

    @property
    def fields(self) -> Fields:
        return self.columns.fields if self.chosen is None else self.chosen

    def has(self, name: str) -> bool:
        """Whether any frame has this label."""
        return name not in self.hidden and self.columns.has(name)

    def values(self, name: str, rows: np.ndarray | None = None, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Per-frame values of these rows of the part (all, if None). NaN where a label is missing. shape: of a field."""
        n = self.columns.n_frames if rows is None else len(rows)
        if name == "weight" and name in self.hidden:
            return np.broadcast_to(np.float64(self.factor), (n,))
        if not self.has(_LABEL_OF.get(name, name)):
            return np.broadcast_to(np.float64(np.nan), (n, *(FIELDS[name].shape if shape is None else shape)))
        values = self.columns.column(name)
        values = values if rows is None else values[rows]
        return values * self.factor if name == "weight" and self.factor != 1.0 else values


_READ_ROWS = 256
"""Frames read together."""
_FEW_ROWS = 4096
"""Number of rows up to which checking whether they ascend does not pay."""
_LABEL_OF = {"max_force": "forces"}
"""Columns derived from a label, which are hidden with it."""


@dataclass(frozen=True)
class Components:
    """Which species the frames of a table hold: one entry for each species of each frame, ordered by frame."""

    frame: np.ndarray
    """(n,) row of the table."""
    number: np.ndarray
    """(n,) atomic number."""
    count: np.ndarray
    """(n,) atoms of that species in that frame."""
    force_squares: np.ndarray
    """(n,) sum of their squared force components, eV^2/A^2; NaN if the frame has no forces."""


@dataclass(frozen=True)
class Systems:
    of_frame: np.ndarray
    """(n_frames,) number of the system of each frame."""
    names: list[str]
    """For each system its source, or the first of several."""
    shares: list[float | None]
    """The share of draws of each system, or None."""
    branches: list[str | None]
    """For each system the branch of the model that learns from it."""


@dataclass(frozen=True)
class RowView:
    """Rows of a table and the parts that contain them."""

    rows: np.ndarray
    n_atoms: np.ndarray
    located: list[tuple[TablePart, np.ndarray, np.ndarray]]
    """As returned by `FrameTable.located`."""
    fields: Fields
    """Those of the table."""

    def column(self, name: str) -> np.ndarray:
        """Per-frame values: (n, ...). NaN where a label is missing."""
        field = FIELDS.get(name) or self.fields[name]
        if len(self.located) == 1:
            part, _, local = self.located[0]
            return part.values(name, local, field.shape)
        out = np.empty((len(self.rows), *field.shape), dtype=field.dtype)
        for part, places, local in self.located:
            out[places] = part.values(name, local, field.shape)
        return out

    def atoms(self, name: str) -> np.ndarray:
        """Per-atom values, one frame after the other: (n_atoms, ...)."""
        return self.ranges(name, FIELDS.get(name) or self.fields[name], self.n_atoms, "first_atom")

    def field(self, name: str) -> np.ndarray:
        """Values of a field: (n, ...) or (n_atoms, ...). NaN where a frame does not carry it."""
        return self.atoms(name) if self.fields[name].per == "atom" else self.column(name)

    def ranges(self, name: str, field: Field, counts: np.ndarray, offsets: str) -> np.ndarray:
        """Values of a column of which each frame has `counts`, from its entry in the column `offsets` on: a fresh array."""
        ends = counts.cumsum()
        out = np.empty((int(ends[-1]) if len(ends) else 0, *field.shape), dtype=field.dtype)
        begins = ends - counts
        for part, places, local in self.located:
            n_rows, at = (counts, begins) if len(self.located) == 1 else (counts[places], begins[places])
            if part.has(name):
                part.columns.copy(name, part.columns.column(offsets)[local], n_rows, out, at)
            else:
                out[ranges(at, n_rows)] = np.nan
        return out


class FrameTable(Sequence[Frame]):
    def __init__(self, parts: Sequence[TablePart], rows: np.ndarray | None = None) -> None:
        """rows: frames chosen, numbered through all parts; None: all, in order."""
        self.parts = tuple(parts)
        self._begins = np.concatenate([[0], np.cumsum([part.columns.n_frames for part in self.parts])]).astype(np.int64)
        self._rows = rows

    @classmethod
    def from_frames(cls, frames: Iterable[Frame], fields: Fields | None = None) -> FrameTable:
        """Frames held in memory, at least one unless the table is to be empty. fields: default all that they carry."""
        frames = list(frames)
        if not frames:
            return cls([])
        names: dict[str, int] = {}
        fields = fields_of(frames) if fields is None else fields
        arrays = columns_of(frames, names, fields)
        return cls([TablePart(MemoryColumns(arrays, list(names), fields))])

    @cached_property
    def fields(self) -> Fields:
        """Additional values of its frames, by name."""
        places = [(part.columns.origin or "the files", part.fields) for part in self.parts if part.fields]
        return merge_fields(*places)

    # ---- rows

    def __len__(self) -> int:
        return int(self._begins[-1]) if self._rows is None else len(self._rows)

    def select(self, rows: np.ndarray) -> FrameTable:
        """The table of these rows of this one, in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        return FrameTable(self.parts, rows if self._rows is None else self._rows[rows])

    def __add__(self, other: FrameTable) -> FrameTable:
        """The rows of both, one table after the other."""
        shift = self._begins[-1]
        if self._rows is None and other._rows is None:
            return FrameTable([*self.parts, *other.parts])
        return FrameTable(
            [*self.parts, *other.parts],
            np.concatenate([self._global(self._every), other._global(other._every) + shift]),
        )

    def located(self, rows: np.ndarray) -> Iterator[tuple[TablePart, np.ndarray, np.ndarray]]:
        """For each part that contains any of these rows: the part, which of `rows` it contains, and their rows in the part."""
        rows = self._global(rows)
        if len(self.parts) == 1:
            yield self.parts[0], np.arange(len(rows)), rows
            return
        if len(rows) > _FEW_ROWS and (rows[1:] >= rows[:-1]).all():
            order, ends = None, np.searchsorted(rows, self._begins[1:]).tolist()
        else:
            owner = np.searchsorted(self._begins, rows, side="right") - 1
            ends = np.cumsum(np.bincount(owner, minlength=len(self.parts))).tolist()
            # Sorting 16-bit integers takes time in proportion to their number.
            order = np.argsort(owner.astype(np.int16) if len(self.parts) < 2**15 else owner, kind="stable")
        for number, (begin, end) in enumerate(zip([0, *ends], ends)):
            if begin < end:
                places = np.arange(begin, end) if order is None else order[begin:end]
                yield self.parts[number], places, rows[places] - self._begins[number]

    @property
    def _every(self) -> np.ndarray:
        return np.arange(len(self))

    def _global(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._rows is None else self._rows[rows]

    # ---- columns

    def column(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Per-frame values of these rows (all, if None): (n, ...). NaN where a label is missing."""
        if rows is None and self._rows is None and len(self.parts) == 1:
            field = FIELDS.get(name) or self.fields[name]
            return self.parts[0].values(name, None, field.shape)
        return self.find(self._every if rows is None else rows).column(name)

    def find(self, rows: np.ndarray) -> RowView:
        """These rows, looked up once for several columns."""
        return RowView(rows, self.n_atoms[rows], list(self.located(rows)), self.fields)

    @cached_property
    def n_atoms(self) -> np.ndarray:
        """(n_frames,) int64."""
        counts = np.empty(len(self), dtype=np.int64)
        for part, places, local in self.located(self._every):
            first = part.columns.column("first_atom")
            counts[places] = first[local + 1] - first[local]
        return counts

    def atoms(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Per-atom values of these rows, one frame after the other: (n_atoms, ...)."""
        return self.find(rows).atoms(name)

    @cached_property
    def components(self) -> Components:
        """Species of all frames. As large as a few columns of numbers per frame."""
        blocks: list[tuple[np.ndarray, ...]] = []
        for part, places, local in self.located(self._every):
            first = part.columns.column("first_component")
            counts = first[local + 1] - first[local]
            entries = ranges(first[local], counts)
            values = [part.columns.column(name)[entries] for name in ("element", "element_count", "force_squares")]
            if "forces" in part.hidden:
                values[2] = np.full(len(entries), np.nan)
            blocks.append((np.repeat(places, counts), *values))
        if not blocks:
            empty = np.zeros(0, dtype=np.int64)
            return Components(empty, empty, empty, empty.astype(np.float64))
        frame, number, count, squares = (np.concatenate(columns) for columns in zip(*blocks))
        number, count = number.astype(np.int64), count.astype(np.int64)
        if (frame[1:] >= frame[:-1]).all():
            return Components(frame, number, count, squares)
        order = np.argsort(frame, kind="stable")
        return Components(frame[order], number[order], count[order], squares[order])

    # ---- labels

    def carries(self, name: str) -> np.ndarray:
        """(n_frames,) whether each frame has energy, forces, stress or a field."""
        if not any(part.has(name) for part in self.parts):
            return np.zeros(len(self), dtype=bool)
        if name == "forces":
            return ~np.isnan(self.column("max_force"))
        if name in self.fields and self.fields[name].per == "atom":
            return self._carries_atoms(name)
        values = self.column(name)
        return ~np.isnan(values.reshape(len(self), -1)[:, 0])

    def _carries_atoms(self, name: str) -> np.ndarray:
        """(n_frames,) whether any atom of each frame has a value."""
        carried = np.zeros(len(self), dtype=bool)
        for begin in range(0, len(self), _READ_ROWS):
            rows = np.arange(begin, min(begin + _READ_ROWS, len(self)))
            values = self.atoms(name, rows)
            has_value = ~np.isnan(values.reshape(len(values), -1)[:, 0])
            ends = self.n_atoms[rows].cumsum()
            carried[rows] = np.logical_or.reduceat(has_value, ends - self.n_atoms[rows])
        return carried

    # ---- frames

    @overload
    def __getitem__(self, row: int) -> Frame: ...
    @overload
    def __getitem__(self, row: slice) -> FrameTable: ...
    def __getitem__(self, row: int | slice) -> Frame | FrameTable:
        if isinstance(row, slice):
            return self.select(self._every[row])
        if not -len(self) <= row < len(self):
            raise IndexError(f"there is no frame {row} among {len(self)}")
        return next(self.frames(np.array([row % len(self)])))

    def __iter__(self) -> Iterator[Frame]:
        for begin in range(0, len(self), _READ_ROWS):
            yield from self.frames(np.arange(begin, min(begin + _READ_ROWS, len(self))))

    def frames(self, rows: np.ndarray) -> Iterator[Frame]:
        """Frames of these rows, read together."""
        view = self.find(rows)
        counts, ends = view.n_atoms, view.n_atoms.cumsum()
        positions, numbers, forces = (view.atoms(name) for name in ("positions", "numbers", "forces"))
        cell, pbc, energy, stress, weight = (
            view.column(name) for name in ("cell", "pbc", "energy", "stress", "weight")
        )
        names, indices = self._names(rows), self.column("index", rows)
        columns = {name: (field.per == "atom", view.field(name)) for name, field in self.fields.items()}
        for i, (first, end) in enumerate(zip(ends - counts, ends)):
            fields = {name: values[first:end] if each else values[i] for name, (each, values) in columns.items()}
            fields = {name: np.asarray(value) for name, value in fields.items() if not np.isnan(value).all()}
            yield Frame(
                positions=positions[first:end],
                numbers=numbers[first:end].astype(np.int64),
                cell=cell[i],
                pbc=pbc[i],
                energy=None if np.isnan(energy[i]) else float(energy[i]),
                forces=None if np.isnan(forces[first, 0]) else forces[first:end],
                stress=None if np.isnan(stress[i, 0, 0]) else stress[i],
                weight=float(weight[i]),
                source=names[i],
                index=int(indices[i]),
                fields=fields,
                per_atom=frozenset(name for name in fields if columns[name][0]),
            )

    def origin(self, row: int) -> tuple[str, int]:
        """Source file of a frame and its index in that file, counted from 0. The file is "" for frames made in memory."""
        return self.origins(np.array([row]))[0]

    def origins(self, rows: np.ndarray) -> list[tuple[str, int]]:
        """`origin` of each of these rows."""
        return list(zip(self._names(rows), self.column("index", rows).tolist()))

    def where(self, row: int) -> str:
        """How messages name this frame."""
        source, index = self.origin(row)
        return f"{source or 'frames'}, frame {index}"

    def _names(self, rows: np.ndarray) -> list[str]:
        """Source of each of these rows."""
        names = [""] * len(rows)
        for part, places, local in self.located(rows):
            for row, source in zip(places.tolist(), part.columns.column("source")[local].tolist()):
                names[row] = part.columns.sources[source]
        return names

    # ---- all of it

    @cached_property
    def systems(self) -> Systems:
        """The systems of weighted sampling: the sources, except that all sources with a common share are one system.

        Numbered in the order of the parts; a source of which no frame was chosen keeps its number.
        """
        numbers: dict[object, int] = {}
        names: list[str] = []
        shares: list[float | None] = []
        branches: list[str | None] = []
        number_of: list[np.ndarray] = []
        for part in self.parts:
            keys = [(part.branch, part.share or (part.columns.origin, source)) for source in part.columns.sources]
            for key, source in zip(keys, part.columns.sources):
                if key not in numbers:
                    numbers[key] = len(numbers)
                    names.append(source)
                    shares.append(None if part.share is None else part.share.value)
                    branches.append(part.branch)
            number_of.append(np.array([numbers[key] for key in keys], dtype=np.int64))
        of_frame = np.empty(len(self), dtype=np.int64)
        tables = {id(part.columns): table for part, table in zip(self.parts, number_of)}
        for part, places, local in self.located(self._every):
            of_frame[places] = tables[id(part.columns)][part.columns.column("source")[local]]
        return Systems(of_frame, names, shares, branches)

    @property
    def branches(self) -> list[str | None]:
        """The branches of the model that learn from its parts, each once, in alphabetical order; [None] for most data."""
        return sorted({part.branch for part in self.parts}, key=lambda name: name or "")

    def branch_of_frame(self, names: Sequence[str | None]) -> np.ndarray:
        """(n_frames,) int64, index of each frame's branch in `names`; -1 for others."""
        number = {name: index for index, name in enumerate(names)}
        branch = np.empty(len(self), dtype=np.int64)
        for part, places, _ in self.located(self._every):
            branch[places] = number.get(part.branch, -1)
        return branch

    @cached_property
    def fingerprint(self) -> str:
        """Fixed by structures, labels, weights, branches and their order; file names do not enter."""
        digest = hashlib.blake2b(digest_size=16)
        hidden = sorted(
            {name for part in self.parts for name in part.hidden | (part.columns.fields.keys() - part.fields)}
        )
        digest.update(f"{len(self)} {hidden}".encode())
        for name in ("digest", "weight"):
            digest.update(np.ascontiguousarray(self.column(name)).data)
        if self.branches not in ([None], []):
            digest.update(repr(self.branches).encode() + self.branch_of_frame(self.branches).tobytes())
        return digest.hexdigest()
