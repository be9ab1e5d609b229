"""Values of fields in raw frames and blocks: looked up by their key, brought into shape, multiplied by their factor, added up.

A value that is there but has another shape, or is no number, is an error that names frame, field and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from ase.data import atomic_numbers

from forgefield.config.fields import FIELDS
from forgefield.config.schema import FieldOptions
from forgefield.data.frame import RawFrame
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.data.readers.blocks import RawBlock

_LOGICAL = {"t": 1.0, "true": 1.0, "f": 0.0, "false": 0.0}


def frame_field(raw: RawFrame, name: str, options: FieldOptions) -> np.ndarray | None:
    """shape, or (n_atoms, *shape) with NaN for atoms of species without a value; None where the frame does not carry it."""
    candidates = [_numbers(raw, name, value) for value in _candidates(raw, name, options)]
    if not candidates:
        return None
    shape, n = tuple(options.shape), len(raw.numbers)
    if options.species is None:
        expected = (n, *shape) if options.per == "atom" else shape
        return _changed(_finite(raw, name, _fitting(raw, name, candidates, [expected])), options)
    chosen = np.isin(raw.numbers, species_numbers(name, options.species))
    if not chosen.any():
        return None
    values = _fitting(raw, name, candidates, [(n, *shape), (int(chosen.sum()), *shape)])
    values = _finite(raw, name, values[chosen] if len(values) == n else values)
    result = np.full((n, *shape), np.nan)
    result[chosen] = _changed(values, options)
    return result


def block_field(block: RawBlock, options: FieldOptions, key: str) -> tuple[bool, np.ndarray | None]:
    """Whether there is nothing to decide, and then the values, (n_frames, ...); None where the block does not carry it."""
    place = block.arrays if options.per == "atom" else block.info
    if key not in place:
        return key not in block.info and key not in block.arrays, None
    if options.species is not None:
        return False, None
    values, (n_frames, n_atoms) = np.asarray(place[key]), block.positions.shape[:2]
    shape = (n_atoms, *options.shape) if options.per == "atom" else tuple(options.shape)
    if values.dtype.kind not in "fiub" or values.shape[:1] != (n_frames,) or not fits(values.shape[1:], shape):
        return False, None
    values = _changed(values.reshape(n_frames, *shape), options)
    return (True, values) if np.isfinite(values).all() else (False, None)


def _changed(values: np.ndarray, options: FieldOptions) -> np.ndarray:
    """What the settings say is done to values, (..., *shape)."""
    values = values * np.float64(options.factor)
    return np.cumsum(values, axis=-1) if options.cumulative else values


def species_numbers(name: str, symbols: list[str]) -> list[int]:
    """Atomic numbers of the species whose atoms have a value."""
    for symbol in symbols:
        if atomic_numbers.get(symbol, 0) == 0:
            raise ForgefieldError(f"{FIELDS}.{name}.species names {symbol!r}, which is not a chemical element")
    return [atomic_numbers[symbol] for symbol in symbols]


def fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether numbers of one shape are those of the other: the same but for axes of one, or its last axes as one row."""
    if math.prod(found) != math.prod(expected):
        return False
    rows = (expected[0], math.prod(expected[1:])) if expected else ()
    return len(_long(found)) <= 1 or _long(found) in (_long(expected), _long(rows))


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _candidates(raw: RawFrame, name: str, options: FieldOptions) -> Iterator[Any]:
    """Values under the key of a field, the likeliest place first."""
    key = options.key or name
    places = (raw.arrays, raw.results, raw.info) if options.per == "atom" else (raw.info, raw.results)
    found = [place[key] for place in places if place.get(key) is not None]
    if not found and raw.arrays.get(key) is not None:
        raise ForgefieldError(
            f"{raw.where}: {key} is a value of each atom here, and {FIELDS}.{name} is per frame; set "
            f"{FIELDS}.{name}.per=atom"
        )
    yield from found


def _fitting(raw: RawFrame, name: str, candidates: list[np.ndarray], shapes: list[tuple[int, ...]]) -> np.ndarray:
    """The first candidate that fits one of these shapes, in that shape."""
    for value in candidates:
        for shape in shapes:
            if fits(value.shape, shape):
                return value.reshape(shape)
    raise ForgefieldError(
        f"{raw.where}: {name} has shape {candidates[0].shape}; by {FIELDS}.{name} it should be "
        f"{' or '.join(map(str, shapes))}"
    )


def _finite(raw: RawFrame, name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise ForgefieldError(
            f"{raw.where}: {name} contains NaN or infinity; remove the frame, or leave the value out of it"
        )
    return values


def _numbers(raw: RawFrame, name: str, value: object) -> np.ndarray:
    if isinstance(value, str) and value.lower() in _LOGICAL:
        value = _LOGICAL[value.lower()]
    try:
        array = np.asarray(value)
        if array.dtype.kind == "c":
            raise TypeError(name)
        return array.astype(np.float64)
    except (TypeError, ValueError):
        raise ForgefieldError(f"{raw.where}: {name}={value!r:.60} is not a number or an array of numbers") from None
