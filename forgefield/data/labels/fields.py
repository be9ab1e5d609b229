"""Fields: named values of frames or atoms in addition to the labels that potentials are trained on (`data.labels.fields`).

A `Field` states whether frames or atoms have the value, and its shape; it accompanies the frames from the source to the batch.
`frame_field` and `block_field` look up the values in raw frames and blocks. A value of another shape, or one that is not a
number, is an error that names the frame, the field and what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from ase.data import atomic_numbers

from forgefield.config.nearest import did_you_mean
from forgefield.data.field_options import FIELDS, FieldOptions
from forgefield.data.frame import Frame, RawBlock, RawFrame
from forgefield.data.labels.texts import SPACE_GROUPS, number_of
from forgefield.errors import ForgefieldError


class FieldEntry(TypedDict):
    """Description of a column in the manifest of a store."""

    per: str
    dtype: str
    shape: list[int]
    unit: str


@dataclass(frozen=True)
class Field:
    """A column: one value of `shape` per frame, per atom, or per species in a frame (component)."""

    per: str
    shape: tuple[int, ...]
    dtype: str = "float64"
    unit: str = ""

    def describe(self) -> str:
        return f"per {self.per}, of shape {list(self.shape)}"

    def is_like(self, other: Field) -> bool:
        """Whether both have the same kind of values. Units are for display only and are not compared."""
        return (self.per, self.shape, self.dtype) == (other.per, other.shape, other.dtype)


Fields = Mapping[str, Field]


def fields_from(options: Mapping[str, FieldOptions]) -> dict[str, Field]:
    """The columns of these settings."""
    return {name: Field(field.per, tuple(field.shape), unit=field.unit) for name, field in options.items()}


def fields_of(frames: Iterable[Frame]) -> dict[str, Field]:
    """All fields that occur in these frames."""
    fields: dict[str, Field] = {}
    for frame in frames:
        for name, value in frame.fields.items():
            if name not in fields:
                per_atom = name in frame.per_atom
                fields[name] = Field("atom" if per_atom else "frame", value.shape[1:] if per_atom else value.shape)
    return fields


def field_values(frames: Sequence[Frame], name: str, field: Field) -> np.ndarray:
    """(n_frames, *shape) or (n_atoms, *shape), NaN for frames without the field."""
    values = []
    for frame in frames:
        shape = (len(frame), *field.shape) if field.per == "atom" else field.shape
        value = frame.fields.get(name)
        if value is not None and (value.shape != shape or (name in frame.per_atom) != (field.per == "atom")):
            raise ForgefieldError(
                f"{frame.where}: the field {name} has shape {value.shape}; in other frames it is {field.describe()}"
            )
        values.append(np.full(shape, np.nan) if value is None else value)
    return np.concatenate(values, dtype=np.float64) if field.per == "atom" else np.array(values, dtype=np.float64)


def merge_fields(*groups: tuple[str, Fields]) -> dict[str, Field]:
    """The union of several (source, fields); fields that contradict each other are an error that names the sources."""
    union: dict[str, tuple[str, Field]] = {}
    for source, fields in groups:
        for name, field in fields.items():
            first_source, first = union.setdefault(name, (source, field))
            if not first.is_like(field):
                raise ForgefieldError(
                    f"the field '{name}' is {first.describe()} in {first_source}, but {field.describe()} in {source}; give "
                    "one of them another name"
                )
    return {name: field for name, (_, field) in union.items()}


def select_fields(
    path: Path | str, stored: Fields, requested: Fields | None, *, required: bool = True
) -> dict[str, Field]:
    """The requested fields of a store; all, if `requested` is None.

    required: a requested field that the store does not have is an error; otherwise it is missing in all frames.
    """
    if requested is None:
        return dict(stored)
    for name, field in requested.items():
        if name not in stored and required:
            available = f"its fields: {', '.join(stored)}" if stored else "it has no fields"
            raise ForgefieldError(
                f"{path}: this store has no field '{name}' ({available}); convert the data again with that field, or leave "
                f"data.labels.fields.{name} out"
            )
        if name in stored and not stored[name].is_like(field):
            raise ForgefieldError(
                f"{path}: the field '{name}' of this store is {stored[name].describe()}, but data.labels.fields.{name} is "
                f"{field.describe()}; change the setting, or convert the data again"
            )
    return dict(requested)


def field_from_manifest(name: str, entry: FieldEntry) -> Field:
    """A field from its entry in the manifest of a store; ValueError if the entry is not valid."""
    field = Field(entry["per"], tuple(entry["shape"]), entry["dtype"], entry["unit"])
    sizes = all(isinstance(size, int) and size > 0 for size in field.shape)
    # The name becomes part of a path.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or field.per not in ("frame", "atom") or not sizes:
        raise ValueError(f"{name} is not a field")
    if field.dtype != "float64":
        raise ValueError(f"{name} is of type {field.dtype}")
    return field


_LOGICAL = {"t": 1.0, "true": 1.0, "f": 0.0, "false": 0.0}


def frame_field(raw: RawFrame, name: str, options: FieldOptions) -> np.ndarray | None:
    """shape, or (n_atoms, *shape) with NaN for atoms of species without a value; None if the frame does not have it."""
    candidates = [_numbers(raw, name, value, options) for value in _candidates(raw, name, options)]
    if not candidates:
        return None
    shape, n = tuple(options.shape), len(raw.numbers)
    if options.species is None:
        expected = (n, *shape) if options.per == "atom" else shape
        return _transformed(_finite(raw, name, _matching(raw, name, candidates, [expected])), options)
    has_value = np.isin(raw.numbers, species_numbers(name, options.species))
    if not has_value.any():
        return None
    values = _matching(raw, name, candidates, [(n, *shape), (int(has_value.sum()), *shape)])
    values = _finite(raw, name, values[has_value] if len(values) == n else values)
    result = np.full((n, *shape), np.nan)
    result[has_value] = _transformed(values, options)
    return result


def block_field(block: RawBlock, options: FieldOptions, key: str) -> tuple[bool, np.ndarray | None]:
    """Whether the field is unambiguous, and if so its values, (n_frames, ...), or None if the block does not have it."""
    columns = block.arrays if options.per == "atom" else block.info
    if key not in columns:
        return key not in block.info and key not in block.arrays, None
    if options.species is not None:
        return False, None
    values, (n_frames, n_atoms) = np.asarray(columns[key]), block.positions.shape[:2]
    shape = (n_atoms, *options.shape) if options.per == "atom" else tuple(options.shape)
    if values.dtype.kind not in "fiub" or values.shape[:1] != (n_frames,) or not fits(values.shape[1:], shape):
        return False, None
    values = _transformed(values.reshape(n_frames, *shape), options)
    return (True, values) if np.isfinite(values).all() else (False, None)


def _transformed(values: np.ndarray, options: FieldOptions) -> np.ndarray:
    """Values, (..., *shape), multiplied by the factor and accumulated, as the options request."""
    values = values * np.float64(options.factor)
    return np.cumsum(values, axis=-1) if options.cumulative else values


def species_numbers(name: str, symbols: list[str]) -> list[int]:
    """Atomic numbers of the species whose atoms have a value."""
    for symbol in symbols:
        if atomic_numbers.get(symbol, 0) == 0:
            raise ForgefieldError(f"{FIELDS}.{name}.species has {symbol!r}, which is not a chemical element")
    return [atomic_numbers[symbol] for symbol in symbols]


def fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether an array can be reshaped to `expected` unambiguously: the shapes differ only by axes of size one, or all axes
    after the first are flattened."""
    if math.prod(shape) != math.prod(expected):
        return False
    flattened = (expected[0], math.prod(expected[1:])) if expected else ()
    return len(_squeezed(shape)) <= 1 or _squeezed(shape) in (_squeezed(expected), _squeezed(flattened))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _candidates(raw: RawFrame, name: str, options: FieldOptions) -> list[object]:
    """Values under the key of a field, the most likely first."""
    key = options.key or name
    groups = (raw.arrays, raw.results, raw.info) if options.per == "atom" else (raw.info, raw.results)
    candidates = [group[key] for group in groups if group.get(key) is not None]
    if not candidates and raw.arrays.get(key) is not None:
        raise ForgefieldError(
            f"{raw.where}: {key} is a value per atom, but {FIELDS}.{name} is per frame; set {FIELDS}.{name}.per=atom"
        )
    return candidates


def _matching(raw: RawFrame, name: str, candidates: list[np.ndarray], shapes: list[tuple[int, ...]]) -> np.ndarray:
    """The first candidate that fits one of these shapes, in that shape."""
    for value in candidates:
        for shape in shapes:
            if fits(value.shape, shape):
                return value.reshape(shape)
    raise ForgefieldError(
        f"{raw.where}: {name} has shape {candidates[0].shape}; according to {FIELDS}.{name} it must be "
        f"{' or '.join(map(str, shapes))}"
    )


def _finite(raw: RawFrame, name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise ForgefieldError(
            f"{raw.where}: {name} contains NaN or infinity; remove the frame, or remove the value from it"
        )
    return values


def _numbers(raw: RawFrame, name: str, value: object, options: FieldOptions) -> np.ndarray:
    if options.values is not None and _is_text(value):
        return _from_text(raw, name, np.asarray(value), options.values)
    if isinstance(value, str) and value.lower() in _LOGICAL:
        value = _LOGICAL[value.lower()]
    try:
        array = np.asarray(value)
        if array.dtype.kind == "c":
            raise TypeError(name)
        return array.astype(np.float64)
    except (TypeError, ValueError):
        hint = "; for a class, list the texts in " if _is_text(value) else ""
        hint += f"{FIELDS}.{name}.values (or write {SPACE_GROUPS} there)" if hint else ""
        raise ForgefieldError(
            f"{raw.where}: {name}={value!r:.60} is not a number or an array of numbers{hint}"
        ) from None


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, np.ndarray)) and np.asarray(value).dtype.kind == "U")


def _from_text(raw: RawFrame, name: str, texts: np.ndarray, values: str | list[str]) -> np.ndarray:
    """Numbers in place of texts, of any shape."""
    numbers = [number_of(str(text), values) for text in texts.reshape(-1)]
    if None in numbers:
        text = str(texts.reshape(-1)[numbers.index(None)])
        hint = "" if isinstance(values, str) else did_you_mean(text, values)
        expected = "the symbol of a space group" if isinstance(values, str) else f"in {FIELDS}.{name}.values"
        raise ForgefieldError(f"{raw.where}: {name} is {text!r:.60}, which is not {expected}.{hint}")
    return np.array(numbers, dtype=np.float64).reshape(texts.shape)
