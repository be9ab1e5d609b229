"""A frame: one structure with its labels, in eV and A.

Readers return a `RawFrame` (values in the units and under the names of the source) or, for array formats, a `RawBlock` of
frames with equally many atoms. `labels/` selects labels, converts units and makes a `Frame`; `check_frame` defines what a
valid frame is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError

FLATTEST_CELL = 1e-6
"""Volume spanned by the periodic lattice vectors over the product of their lengths: below this the cell is flat."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    positions: np.ndarray
    """(n_atoms, 3), A."""
    numbers: np.ndarray
    """(n_atoms,) atomic numbers, int64."""
    cell: np.ndarray
    """(3, 3), rows are lattice vectors, A; zero rows where not periodic and unknown."""
    pbc: np.ndarray
    """(3,) bool."""
    energy: float | None = None
    """eV."""
    forces: np.ndarray | None = None
    """(n_atoms, 3), eV/A."""
    stress: np.ndarray | None = None
    """(3, 3), eV/A^3: (1/V) dE/d strain, the sign of ASE."""
    weight: float = 1.0
    source: str = ""
    index: int = 0
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Extra values by name, float64: of the frame, or (n_atoms, ...) for those in `per_atom`. Missing values are left out."""
    per_atom: frozenset[str] = frozenset()
    """Names of the fields that are values of atoms; atoms without a value have a row of NaN."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def volume(self) -> float:
        """Volume of the cell, A^3; 0 without a cell."""
        return float(abs(np.linalg.det(self.cell)))

    @property
    def where(self) -> str:
        """Name of this frame in messages."""
        return f"{self.source or 'frames'}, frame {self.index}"


@dataclass(slots=True)
class RawFrame:
    """A frame as a reader returns it: values in the units and under the names of the source."""

    positions: np.ndarray
    numbers: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    source: str
    index: int
    info: Mapping[str, Any] = field(default_factory=dict)
    """Values of the frame."""
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """Values of each atom."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """Results of an ASE calculator attached to the frame."""
    extra_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Additional keys, by label, under which this kind of source usually has a label."""
    comment: str = ""
    """The comment line of an xyz file."""
    constraints: Sequence[Any] = ()
    """Constraints of the structure, as in ASE."""

    @property
    def where(self) -> str:
        return f"{self.source}, frame {self.index}"


def check_frame(frame: Frame) -> Frame:
    """`frame`, if shapes are right, numbers are finite and periodic axes span a volume; else ForgefieldError."""
    n = len(frame.numbers)
    if n == 0:
        raise ForgefieldError(f"{frame.where}: the frame has no atoms")
    unknown = frame.numbers[(frame.numbers < 1) | (frame.numbers > 118)]
    if unknown.size:
        raise ForgefieldError(f"{frame.where}: {unknown[0]} is not an atomic number (1 to 118)")
    for name, value, shape in (
        ("positions", frame.positions, (n, 3)),
        ("cell", frame.cell, (3, 3)),
        ("energy", frame.energy, ()),
        ("forces", frame.forces, (n, 3)),
        ("stress", frame.stress, (3, 3)),
        ("weight", frame.weight, ()),
    ):
        if value is not None:
            _check_array(frame, name, np.asarray(value), shape)
    for name, value in frame.fields.items():
        _check_field(frame, name, value)
    if frame.weight < 0:
        raise ForgefieldError(f"{frame.where}: the weight is {frame.weight}; weights should not be negative")
    _check_cell(frame)
    return frame


def _check_array(frame: Frame, name: str, value: np.ndarray, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ForgefieldError(
            f"{frame.where}: {name} has shape {value.shape}; with {len(frame)} atoms it must be {shape}"
        )
    finite = np.isfinite(value)
    if not finite.all():
        atom = f" of atom {int(np.argwhere(~finite)[0][0])}" if name in ("positions", "forces") else ""
        raise ForgefieldError(
            f"{frame.where}: {name}{atom} contains NaN or infinity; remove the frame, or remove the label from it"
        )


def _check_field(frame: Frame, name: str, value: np.ndarray) -> None:
    missing = np.zeros(1, dtype=bool)
    if name in frame.per_atom:
        if value.shape[:1] != (len(frame),):
            raise ForgefieldError(
                f"{frame.where}: the field {name} has shape {value.shape}; its first axis "
                f"must have the length {len(frame)}, the number of atoms"
            )
        missing = np.isnan(value).reshape(len(frame), -1).all(axis=1)
        value = value[~missing]
    if missing.all() or not np.isfinite(value).all():
        raise ForgefieldError(
            f"{frame.where}: the field {name} contains NaN or infinity; remove the frame, or remove the value from it"
        )


def _check_cell(frame: Frame) -> None:
    if frame.pbc.any():
        rows = frame.cell[frame.pbc]
        lengths = np.linalg.norm(rows, axis=1)
        spanned = np.sqrt(max(np.linalg.det(rows @ rows.T), 0.0))
        if lengths.min() < FLATTEST_CELL or spanned < FLATTEST_CELL * lengths.prod():
            axes = "".join(axis for axis, periodic in zip("xyz", frame.pbc) if periodic)
            raise ForgefieldError(
                f"{frame.where}: the frame is periodic along {axes}, but its cell {frame.cell.tolist()} has no volume; "
                "specify the lattice vectors, or mark the axis as not periodic"
            )
    if frame.stress is not None and not frame.volume > 0:
        raise ForgefieldError(
            f"{frame.where}: the frame has a stress, but its cell has no volume, so the stress is undefined; "
            "remove it, or set data.labels.stress=none (and data.labels.virial=none)"
        )


REAL_KINDS = "fiu"
"""Kinds of numpy types that are real numbers; booleans, complex numbers, text and objects are not."""


def real_numbers(values: object, where: str, name: str) -> np.ndarray:
    """`values` as float64.

    where: the frame, for messages. name: what the values are called there.
    """
    array = _array(values, where, name)
    if array.dtype.kind not in REAL_KINDS and array.size:
        raise ForgefieldError(f"{where}: {name} must be real numbers, not values of type {_kind(array)}")
    return array.astype(np.float64)


def atomic_numbers_of(values: object, where: str) -> np.ndarray:
    """(n_atoms,) int64; ForgefieldError unless all `values` are integers."""
    array = _array(values, where, "atomic numbers")
    if array.ndim != 1:
        raise ForgefieldError(f"{where}: atomic numbers must have shape (n_atoms,), not {array.shape}")
    if array.dtype.kind not in REAL_KINDS and array.size:
        raise ForgefieldError(f"{where}: atomic numbers must be integers, not values of type {_kind(array)}")
    wrong = np.zeros(array.shape, dtype=bool)
    if array.dtype.kind == "f":
        wrong = ~(np.abs(array) < 2**31) | (array != np.round(array))  # NaN compares as false
    elif array.dtype.kind == "u":
        wrong = array >= 2**31
    if wrong.any():
        atom = int(np.flatnonzero(wrong)[0])
        raise ForgefieldError(f"{where}: the atomic number of atom {atom} is {array[atom]}, which is not an integer")
    return array.astype(np.int64)


def periodicity(values: object, where: str) -> np.ndarray:
    """(3,) bool from three booleans, or numbers 0 and 1."""
    array = _array(values, where, "pbc")
    if array.shape != (3,):
        raise ForgefieldError(f"{where}: pbc must have shape (3,), not {array.shape}")
    if not is_logical(array):
        raise ForgefieldError(f"{where}: pbc must be three booleans (or 0 and 1), not {array.tolist()!r:.60}")
    return array.astype(bool)


def is_logical(array: np.ndarray) -> bool:
    """Whether an array consists of booleans, or of numbers that are all 0 or 1."""
    return array.dtype.kind == "b" or (array.dtype.kind in REAL_KINDS and bool(np.isin(array, (0, 1)).all()))


def _array(values: object, where: str, name: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise ForgefieldError(f"{where}: {name} are not an array of numbers ({error})") from None


def _kind(array: np.ndarray) -> str:
    names = {"b": "bool", "c": "complex", "O": "object", "U": "text", "S": "text", "V": "structure"}
    return names.get(array.dtype.kind, str(array.dtype))


BLOCK_BYTES = 1 << 20
"""Approximate size of the positions of a block; small, because a frame in use keeps all of its block in memory."""


@dataclass(slots=True)
class RawBlock:
    """Frames with equally many atoms, as readers of array formats return them.

    Labels are selected, converted and checked for the whole block, which takes a few microseconds per frame; where anything is
    unusual, its frames are handled one by one.
    """

    positions: np.ndarray
    """(n_frames, n_atoms, 3)."""
    numbers: np.ndarray
    """(n_atoms,), or (n_frames, n_atoms)."""
    cell: np.ndarray
    """(n_frames, 3, 3)."""
    pbc: np.ndarray
    """(3,), or (n_frames, 3)."""
    source: str
    start: int
    """Index of the first frame in its source."""
    info: Mapping[str, np.ndarray] = field(default_factory=dict)
    """(n_frames, ...) each."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """(n_frames, n_atoms, ...) each."""
    extra_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.positions)

    def frames(self) -> Iterator[RawFrame]:
        """The same frames one by one."""
        info, arrays = dict(self.info), dict(self.arrays)
        for i in range(len(self)):
            yield RawFrame(
                positions=self.positions[i],
                numbers=self.numbers if self.numbers.ndim == 1 else self.numbers[i],
                cell=self.cell[i],
                pbc=self.pbc if self.pbc.ndim == 1 else self.pbc[i],
                source=self.source,
                index=self.start + i,
                info={key: value[i] for key, value in info.items()},
                arrays={key: value[i] for key, value in arrays.items()},
                extra_names=self.extra_names,
            )


class LazyColumns(Mapping[str, np.ndarray]):
    """Columns that are read from the disk when they are looked up."""

    def __init__(self, readers: Mapping[str, Callable[[], np.ndarray]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def block_ranges(start: int, stop: int, n_atoms: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, stop) of frames for blocks of about `BLOCK_BYTES`."""
    step = max(1, min(256, BLOCK_BYTES // max(24 * n_atoms, 1)))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def even_ranges(n: int, size: int) -> list[tuple[int, int | None]]:
    """`n` frames in ranges of about `size`, equal to within one frame; the last is open."""
    parts = max(1, round(n / max(size, 1)))
    bounds = [n * i // parts for i in range(parts + 1)]
    ranges: list[tuple[int, int | None]] = list(itertools.pairwise(bounds))
    ranges[-1] = (ranges[-1][0], None)
    return ranges


def within(start: int, stop: int | None, first: int, count: int) -> tuple[int, int]:
    """The range of frames first ... first + count - 1 that is within start ... stop - 1, counted from `first`."""
    end = first + count if stop is None else min(stop, first + count)
    return max(start - first, 0), max(end - first, 0)


def matrices(values: object) -> np.ndarray:
    """(n_frames, 3, 3) float64 from values of that shape or (n_frames, 9)."""
    return np.asarray(values, dtype=np.float64).reshape(-1, 3, 3)
