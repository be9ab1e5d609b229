"""Checks of the structure in a raw frame: what a source calls positions, atomic numbers, cell or pbc must be exactly that.

Nothing is rounded or reinterpreted: a fractional atomic number, a complex coordinate or a periodicity of 0.5 is an error
that names the frame, never a number that happens to be close.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError

REAL_KINDS = "fiu"
"""Kinds of numpy types that are real numbers; truth values, complex numbers, text and objects are not."""


def real_numbers(values: Any, where: str, name: str) -> np.ndarray:
    """`values` as float64.

    where: the frame, for messages. name: what the values are called there.
    """
    array = _array(values, where, name)
    if array.dtype.kind not in REAL_KINDS and array.size:
        raise ForgefieldError(f"{where}: {name} should be real numbers, not values of type {_kind(array)}")
    return array.astype(np.float64)


def atomic_numbers_of(values: Any, where: str) -> np.ndarray:
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


def periodicity(values: Any, where: str) -> np.ndarray:
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


def _array(values: Any, where: str, name: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise ForgefieldError(f"{where}: {name} are not an array of numbers ({error})") from None


def _kind(array: np.ndarray) -> str:
    names = {"b": "bool", "c": "complex", "O": "object", "U": "text", "S": "text", "V": "structure"}
    return names.get(array.dtype.kind, str(array.dtype))
