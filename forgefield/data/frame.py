"""A frame: one structure with whatever labels it carries, in eV and A.

Readers hand over a `RawFrame` (names and numbers as they stand in the source); `labels.LabelReader` turns it into a
`Frame`. `check_frame` is the one place that says what a well-formed frame is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Further values by name, float64: of the frame, or (n_atoms, ...) for those in `per_atom`. A missing one is not there."""
    per_atom: frozenset[str] = frozenset()
    """Which fields are values of atoms; a row of NaN: that atom has none."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def volume(self) -> float:
        """Volume of the cell, A^3; 0 where there is none."""
        return float(abs(np.linalg.det(self.cell)))

    @property
    def where(self) -> str:
        """How messages name this frame."""
        return f"{self.source or 'frames'}, frame {self.index}"


@dataclass(slots=True)
class RawFrame:
    """What a reader found: values in the source's own units and under its own names."""

    positions: np.ndarray
    numbers: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    source: str
    index: int
    info: Mapping[str, Any] = field(default_factory=dict)
    """Values of the whole frame."""
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """Values of each atom."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """Results of an ASE calculator attached to the frame."""
    extra_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further names, label -> keys, under which this kind of source usually holds a label."""
    comment: str = ""
    """The comment line of an xyz file."""
    constraints: Sequence[Any] = ()
    """ASE's constraints of the structure."""

    @property
    def where(self) -> str:
        return f"{self.source}, frame {self.index}"


def check_frame(frame: Frame) -> Frame:
    """Return `frame` if shapes fit, numbers are finite and periodic axes span a volume; else say what is wrong."""
    n = len(frame.numbers)
    if n == 0:
        raise ForgefieldError(f"{frame.where}: it has no atoms")
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
        raise ForgefieldError(f"{frame.where}: its weight is {frame.weight}; weights are not negative")
    _check_cell(frame)
    return frame


def _check_array(frame: Frame, name: str, value: np.ndarray, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ForgefieldError(
            f"{frame.where}: {name} have shape {value.shape}; with {len(frame)} atoms it should be {shape}"
        )
    finite = np.isfinite(value)
    if not finite.all():
        place = f" of atom {int(np.argwhere(~finite)[0][0])}" if name in ("positions", "forces") else ""
        raise ForgefieldError(
            f"{frame.where}: {name}{place} contain NaN or infinity; remove the frame, or leave the label out of it"
        )


def _check_field(frame: Frame, name: str, value: np.ndarray) -> None:
    missing = np.zeros(1, dtype=bool)
    if name in frame.per_atom:
        if value.shape[:1] != (len(frame),):
            raise ForgefieldError(
                f"{frame.where}: the field {name} has shape {value.shape}; its first axis should be the {len(frame)} atoms"
            )
        missing = np.isnan(value).reshape(len(frame), -1).all(axis=1)
        value = value[~missing]
    if missing.all() or not np.isfinite(value).all():
        raise ForgefieldError(
            f"{frame.where}: the field {name} contains NaN or infinity; remove the frame, or leave the value out of it"
        )


def _check_cell(frame: Frame) -> None:
    if frame.pbc.any():
        rows = frame.cell[frame.pbc]
        lengths = np.linalg.norm(rows, axis=1)
        spanned = np.sqrt(max(np.linalg.det(rows @ rows.T), 0.0))
        if lengths.min() < FLATTEST_CELL or spanned < FLATTEST_CELL * lengths.prod():
            axes = "".join(axis for axis, periodic in zip("xyz", frame.pbc) if periodic)
            raise ForgefieldError(
                f"{frame.where}: it is periodic along {axes} but its cell {frame.cell.tolist()} has no volume there; "
                "give the lattice vectors or mark the axis as not periodic"
            )
    if frame.stress is not None and not frame.volume > 0:
        raise ForgefieldError(
            f"{frame.where}: it carries a stress but its cell has no volume, so the stress has no meaning; "
            "remove it, or set data.labels.stress=none (and data.labels.virial=none)"
        )


REAL_KINDS = "fiu"
"""Kinds of numpy types that are real numbers; truth values, complex numbers, text and objects are not."""


def real_numbers(values: object, where: str, name: str) -> np.ndarray:
    """`values` as float64.

    where: the frame, for messages. name: what the values are called there.
    """
    array = _array(values, where, name)
    if array.dtype.kind not in REAL_KINDS and array.size:
        raise ForgefieldError(f"{where}: {name} should be real numbers, not values of type {_kind(array)}")
    return array.astype(np.float64)


def atomic_numbers_of(values: object, where: str) -> np.ndarray:
    """(n_atoms,) `values` as int64, refused where one of them is not a whole number."""
    array = _array(values, where, "atomic numbers")
    if array.ndim != 1:
        raise ForgefieldError(f"{where}: atomic numbers have shape {array.shape}; it should be (atoms,)")
    if array.dtype.kind not in REAL_KINDS and array.size:
        raise ForgefieldError(f"{where}: atomic numbers should be whole numbers, not values of type {_kind(array)}")
    wrong = np.zeros(array.shape, dtype=bool)
    if array.dtype.kind == "f":
        wrong = ~(np.abs(array) < 2**31) | (array != np.round(array))  # NaN is not below anything
    elif array.dtype.kind == "u":
        wrong = array >= 2**31
    if wrong.any():
        atom = int(np.flatnonzero(wrong)[0])
        raise ForgefieldError(
            f"{where}: the atomic number of atom {atom} is {array[atom]}, which is not a whole number"
        )
    return array.astype(np.int64)


def periodicity(values: object, where: str) -> np.ndarray:
    """(3,) bool from three truth values, written as such or as 0 and 1."""
    array = _array(values, where, "pbc")
    if array.shape != (3,):
        raise ForgefieldError(f"{where}: pbc has shape {array.shape}; it should be (3,)")
    if not is_logical(array):
        raise ForgefieldError(f"{where}: pbc is {array.tolist()!r:.60}; it should be three truth values (or 0 and 1)")
    return array.astype(bool)


def is_logical(array: np.ndarray) -> bool:
    """Whether an array holds truth values, or numbers that are all 0 or 1."""
    return array.dtype.kind == "b" or (array.dtype.kind in REAL_KINDS and bool(np.isin(array, (0, 1)).all()))


def _array(values: object, where: str, name: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise ForgefieldError(f"{where}: {name} are not an array of numbers ({error})") from None


def _kind(array: np.ndarray) -> str:
    names = {"b": "bool", "c": "complex", "O": "object", "U": "text", "S": "text", "V": "structure"}
    return names.get(array.dtype.kind, str(array.dtype))
