"""Writes one part of a store, block by block, with hashes and statistics; memory holds one block.

A part is written under a temporary name and renamed when it is complete. `Moments` describe a column and can be merged: from
blocks to a part, from parts to a store.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Field, Fields
from forgefield.data.neighbours.edges import Geometry, build_block, edge_columns
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.store.columns import EDGE_FIELDS, FIELDS, OPTIONAL, columns_of
from forgefield.data.store.store import ALL_FIELDS, HEADER
from forgefield.errors import ForgefieldError


@dataclass
class Moments:
    """Count, mean, sum of squared deviations from it, and range of a set of numbers."""

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Of all that is not NaN."""
        values = values[~np.isnan(values)].reshape(-1)
        if values.size == 0:
            return cls()
        mean = float(values.mean())
        return cls(values.size, mean, float(((values - mean) ** 2).sum()), float(values.min()), float(values.max()))

    def merge(self, other: Moments) -> Moments:
        """Of both sets together."""
        if other.count == 0 or self.count == 0:
            return self if other.count == 0 else other
        count = self.count + other.count
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * other.count / count,
            self.squared_deviations + other.squared_deviations + step**2 * self.count * other.count / count,
            min(low for low in (self.low, other.low) if low is not None),
            max(high for high in (self.high, other.high) if high is not None),
        )

    @property
    def std(self) -> float | None:
        return (self.squared_deviations / self.count) ** 0.5 if self.count else None


LABELS = {"energy_per_atom": "eV/atom", "forces": "eV/A", "stress": "eV/A^3"}
"""Labels that are described, and their units."""


@dataclass
class PartStatistics:
    """Statistics of a part for the manifest of a store."""

    species: dict[str, int] = field(default_factory=dict)
    """Atoms of each species."""
    atoms: Moments = field(default_factory=Moments)
    """Of the number of atoms in a frame."""
    labels: dict[str, Moments] = field(default_factory=lambda: {name: Moments() for name in LABELS})
    """Of all energies per atom, force components, stress components, and numbers in fields."""

    def add(self, arrays: dict[str, np.ndarray], n_atoms: np.ndarray, fields: Iterable[str] = ()) -> None:
        """Take in a block of columns. fields: names of fields among them."""
        counts = np.bincount(arrays["numbers"])
        self.merge(
            PartStatistics(
                {chemical_symbols[z]: int(counts[z]) for z in np.flatnonzero(counts)},
                Moments.of(n_atoms.astype(np.float64)),
                {
                    "energy_per_atom": Moments.of(arrays["energy"] / n_atoms),
                    "forces": Moments.of(arrays["forces"]),
                    "stress": Moments.of(arrays["stress"]),
                    **{name: Moments.of(arrays[name]) for name in fields},
                },
            )
        )

    def merge(self, other: PartStatistics) -> None:
        """Take in those of other frames."""
        for symbol, count in other.species.items():
            self.species[symbol] = self.species.get(symbol, 0) + count
        self.atoms = self.atoms.merge(other.atoms)
        for name, moments in other.labels.items():
            self.labels[name] = self.labels.get(name, Moments()).merge(moments)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PartStatistics:
        labels = {name: Moments(**moments) for name, moments in values["labels"].items()}
        return cls(dict(values["species"]), Moments(**values["atoms"]), labels)


ABOUT = "part.json"
"""The description of a part for the manifest, written last."""


class _GrowingColumn:
    """A column file that is appended to. Its header has room for any number of rows."""

    def __init__(self, path: Path, field: Field) -> None:
        self.field = field
        self.dtype = np.dtype(field.dtype).newbyteorder("<")
        self.size = self.rows = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._stream = path.open("wb")
        self._stream.write(bytes(HEADER))

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype).data.cast("B") if values.size else b""
        self._stream.write(data)
        self._digest.update(data)
        self.size += len(data)
        self.rows += len(values)

    def finish(self) -> dict[str, Any]:
        self._stream.seek(0)
        self._stream.write(npy_header(self.dtype, (self.rows, *self.field.shape)))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return {"bytes": self.size, "hash": self._digest.hexdigest()}

    def close(self) -> None:
        self._stream.close()


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """First bytes of a `.npy` file, of fixed length."""
    about = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    body = about.ljust(HEADER - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + body.encode("latin1")


class PartWriter:
    """Collects frames into the folder `target`. graph: make and keep neighbour lists of these options. fields: to keep."""

    def __init__(self, target: Path, graph: GraphOptions | None = None, fields: Fields | None = None) -> None:
        self.target, self.graph, self.fields = target, graph, fields or {}
        self._folder = target.with_name(target.name + ".partial")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        names = list(FIELDS) + (list(EDGE_FIELDS) if graph is not None else [])
        if graph is not None and graph.max_neighbours is not None:
            names.remove("edge_reverse")
        all_fields = {**{name: ALL_FIELDS[name] for name in names}, **self.fields}
        self._optional = (*OPTIONAL, *self.fields)
        self._columns = {
            name: _GrowingColumn(self._folder / f"{name}.npy", field) for name, field in all_fields.items()
        }
        self._sources: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        """Last entry of each column of offsets."""
        self._carried: set[str] = set()
        self._statistics = PartStatistics()
        self.n_frames = self.n_atoms = self.n_edges = 0

    def add(self, frames: Sequence[Frame]) -> None:
        """Append these frames."""
        if not frames:
            return
        arrays = columns_of(frames, self._sources, self.fields)
        n_atoms = np.diff(arrays["first_atom"])
        self._carried.update(name for name in self._optional if name in arrays)
        for name in self._optional:
            if name not in arrays:
                field = self._columns[name].field
                rows = len(frames) if field.per == "frame" else int(n_atoms.sum())
                arrays[name] = np.full((rows, *field.shape), np.nan)
        self._statistics.add(arrays, n_atoms, self.fields)
        if self.graph is not None:
            geometry = Geometry(n_atoms, arrays["positions"], arrays["cell"], arrays["pbc"])
            block, shortest = build_block(geometry, self.graph, lambda i: frames[i].where)
            arrays.update(edge_columns(block, shortest, n_atoms, arrays["numbers"]))
            self.n_edges += int(block.n_edges.sum())
        for name, values in arrays.items():
            self._append(name, values)
        self.n_frames += len(frames)
        self.n_atoms += int(n_atoms.sum())

    def _append(self, name: str, values: np.ndarray) -> None:
        column = self._columns[name]
        if column.field.per != "offsets":
            column.append(values)
            return
        begin = self._ends.get(name, 0)
        column.append(values[1:] + begin if column.rows else values)
        self._ends[name] = begin + int(values[-1])

    def finish(self, **more: object) -> dict[str, Any]:
        """Complete the part. Returns its description for the manifest, including `more`."""
        if self.n_frames == 0:
            raise ForgefieldError(f"{self.target}: there is no frame to write")
        columns = {}
        for name, column in self._columns.items():
            entry = column.finish()
            if name in self._optional and name not in self._carried:
                (self._folder / f"{name}.npy").unlink()
            else:
                columns[name] = entry
        about = {
            "name": self.target.name,
            "n_frames": self.n_frames,
            "n_atoms": self.n_atoms,
            "n_edges": self.n_edges if self.graph is not None else None,
            "sources": list(self._sources),
            "columns": columns,
            "statistics": self._statistics.to_dict(),
            **more,
        }
        (self._folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        os.replace(self._folder, self.target)
        return about

    def abandon(self) -> None:
        """Remove the unfinished part."""
        for column in self._columns.values():
            column.close()
        shutil.rmtree(self._folder, ignore_errors=True)
