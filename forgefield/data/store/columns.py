"""Frames as columns: one array per quantity, the atoms of all frames one after the other.

A part is a run of frames that are stored together, in memory (`MemoryColumns`) or in a store (`store.StoreColumns`); both
provide columns of per-frame values, the atoms of some frames, and where a frame begins. Columns of frequently used properties
(species, largest forces) are computed once, when frames become columns.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Field, Fields, field_values, fields_of

FIELDS: dict[str, Field] = {
    "positions": Field("atom", (3,), "float64", "A"),
    "numbers": Field("atom", (), "uint8"),
    "forces": Field("atom", (3,), "float64", "eV/A"),
    "cell": Field("frame", (3, 3), "float64", "A"),
    "pbc": Field("frame", (3,), "bool"),
    "energy": Field("frame", (), "float64", "eV"),
    "stress": Field("frame", (3, 3), "float64", "eV/A^3"),
    "weight": Field("frame", (), "float64"),
    "digest": Field("frame", (2,), "uint64"),
    "source": Field("frame", (), "int32"),
    "index": Field("frame", (), "int64"),
    "max_force": Field("frame", (), "float64", "eV/A"),
    "element": Field("component", (), "uint8"),
    "element_count": Field("component", (), "int32"),
    "force_squares": Field("component", (), "float64", "eV^2/A^2"),
    "first_atom": Field("offsets", (), "int64"),
    "first_component": Field("offsets", (), "int64"),
}
"""Every column. NaN in a label means that the frame does not carry it. `source` is a row of the part's list of sources, `index`
the frame's number there; `digest` is a hash of structure and labels; `force_squares` is summed over the atoms of the
component; offsets have one entry more than there are frames."""

EDGE_FIELDS: dict[str, Field] = {
    "degree": Field("atom", (), "int32"),
    "edge_source": Field("edge", (), "int32"),
    "edge_shift": Field("edge", (3,), "int16"),
    "edge_reverse": Field("edge", (), "int32"),
    "neighbours": Field("component", (), "int64"),
    "closest": Field("frame", (), "float64", "A"),
    "first_edge": Field("offsets", (), "int64"),
}
"""Columns of neighbour lists. `neighbours` is the sum of `degree` over the atoms of a component, `closest` the shortest edge
of the frame (infinite where there is none). `edge_reverse` is missing where not every edge has one."""

OPTIONAL = ("energy", "forces", "stress")
"""Left out if no frame of a part has them."""


class Columns(ABC):
    """The frames of one part."""

    sources: Sequence[str]
    origin: str = ""
    """Distinguishes these sources from others of the same name: the store that contains them."""
    fields: Fields
    """Columns beyond those that all have."""

    @property
    @abstractmethod
    def n_frames(self) -> int: ...

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether any frame has this label."""

    @abstractmethod
    def column(self, name: str) -> np.ndarray:
        """A column that is not per atom. Read-only."""

    @abstractmethod
    def copy(self, name: str, first: np.ndarray, counts: np.ndarray, out: np.ndarray, begins: np.ndarray) -> None:
        """Values first[k] to first[k] + counts[k] - 1 of a column per atom or edge, to begins[k] and on in `out`."""


class MemoryColumns(Columns):
    """Columns held in memory. arrays: as `columns_of` makes them, of these fields."""

    def __init__(self, arrays: dict[str, np.ndarray], sources: Sequence[str], fields: Fields | None = None) -> None:
        self._arrays = arrays
        self.sources = list(sources)
        self.fields = fields or {}

    @property
    def n_frames(self) -> int:
        return len(self._arrays["first_atom"]) - 1

    def has(self, name: str) -> bool:
        return name in self._arrays

    def column(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def copy(self, name: str, first: np.ndarray, counts: np.ndarray, out: np.ndarray, begins: np.ndarray) -> None:
        copy_ranges(self._arrays[name], first, counts, out, begins)


LONG_RANGE = 2000
"""Bytes. Ranges that are longer on average are copied one by one, shorter ones all at once through their numbers."""


def copy_ranges(array: np.ndarray, first: np.ndarray, counts: np.ndarray, out: np.ndarray, begins: np.ndarray) -> None:
    """array[first[k] : first[k] + counts[k]] to begins[k] and on in `out`."""
    total = int(counts.sum())
    if total * array[:1].nbytes > LONG_RANGE * len(counts):
        for begin, start, n in zip(begins.tolist(), first.tolist(), counts.tolist()):
            out[begin : begin + n] = array[start : start + n]
    elif total == len(out) and (begins[1:] >= begins[:-1]).all():
        array.take(ranges(first, counts), axis=0, out=out, mode="clip")
    else:
        out[ranges(begins, counts)] = array[ranges(first, counts)]


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0]+1, ... (counts[0] of them), then first[1], ...: (sum of counts,) int64."""
    total = int(counts.sum())
    ends = counts.cumsum()
    return np.arange(total) + np.repeat(first - (ends - counts), counts)


def columns_of(
    frames: Sequence[Frame], source_rows: dict[str, int], fields: Fields | None = None
) -> dict[str, np.ndarray]:
    """All columns of these frames, at least one. source_rows: name of a source to its row; new names are added.

    fields: those that become columns; all that frames carry, if None.
    """
    fields = fields_of(frames) if fields is None else fields
    n_atoms = np.array([len(frame) for frame in frames], dtype=np.int64)
    numbers = np.concatenate([frame.numbers for frame in frames])
    nothing = np.full((3, 3), np.nan)
    arrays: dict[str, np.ndarray] = {
        "positions": np.concatenate([frame.positions for frame in frames]),
        "numbers": numbers,
        "forces": np.concatenate(
            [np.full((len(f), 3), np.nan) if f.forces is None else f.forces for f in frames], dtype=np.float64
        ),
        "cell": np.stack([frame.cell for frame in frames]),
        "pbc": np.stack([frame.pbc for frame in frames]),
        "energy": np.array([np.nan if frame.energy is None else frame.energy for frame in frames]),
        "stress": np.stack([nothing if frame.stress is None else frame.stress for frame in frames]),
        "weight": np.array([frame.weight for frame in frames]),
        "source": np.array([source_rows.setdefault(frame.source, len(source_rows)) for frame in frames]),
        "index": np.array([frame.index for frame in frames]),
        "digest": np.frombuffer(b"".join(map(frame_digest, frames)), dtype="<u8").reshape(-1, 2),
        "first_atom": offsets(n_atoms),
    }
    arrays.update(_components(arrays, n_atoms))
    arrays.update({name: field_values(frames, name, field) for name, field in fields.items()})
    for name in (*OPTIONAL, *fields):
        if np.isnan(arrays[name]).all():
            del arrays[name]
    all_fields: Mapping[str, Field] = {**FIELDS, **fields}
    return {name: np.ascontiguousarray(array, dtype=all_fields[name].dtype) for name, array in arrays.items()}


def offsets(counts: np.ndarray) -> np.ndarray:
    """(n + 1,) int64: 0, counts[0], counts[0] + counts[1], ..."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _components(arrays: dict[str, np.ndarray], n_atoms: np.ndarray) -> dict[str, np.ndarray]:
    """Per frame and species: how many atoms, and the sum of their squared force components."""
    frame = np.repeat(np.arange(len(n_atoms)), n_atoms)
    forces = arrays["forces"]
    key, component = np.unique(frame * 256 + arrays["numbers"], return_inverse=True)
    squares = np.bincount(component, weights=(forces**2).sum(axis=1), minlength=len(key))
    first = offsets(n_atoms)[:-1]
    largest = np.maximum.reduceat(np.abs(forces).max(axis=1), first)
    return {
        "element": key % 256,
        "element_count": np.bincount(component, minlength=len(key)),
        "force_squares": squares,
        "first_component": offsets(np.bincount(key // 256, minlength=len(n_atoms))),
        "max_force": largest,
    }


def frame_digest(frame: Frame) -> bytes:
    """16 bytes that are the same for two frames only if structure and labels are."""
    digest = hashlib.blake2b(digest_size=16)
    structure = (frame.numbers.astype("<i8"), frame.positions, frame.cell, frame.pbc)
    for value in (*structure, frame.energy, frame.forces, frame.stress):
        data = b"-" if value is None else np.ascontiguousarray(value).tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    for name in sorted(frame.fields):
        data = np.ascontiguousarray(frame.fields[name], dtype=np.float64).tobytes()
        digest.update(f"{name} {name in frame.per_atom} {len(data)} ".encode() + data)
    return digest.digest()
