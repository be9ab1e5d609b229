"""Fields: further named values of frames or atoms, beyond the labels every potential is trained on.

What a field is (`Field`: what has a value, of which shape) goes with the frames from the source to the batch. This file knows
how fields of frames become columns, and which of those that a store holds a setting asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.config.schema import FieldOptions
from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError


@dataclass(frozen=True)
class Field:
    """What a column holds: one value of `shape` per frame, per atom, or per species that occurs in a frame (component)."""

    per: str
    shape: tuple[int, ...]
    dtype: str = "float64"
    unit: str = ""

    def describe(self) -> str:
        return f"per {self.per}, of shape {list(self.shape)}"

    def is_like(self, other: Field) -> bool:
        """Whether both hold the same kind of values; units are words."""
        return (self.per, self.shape, self.dtype) == (other.per, other.shape, other.dtype)


Fields = Mapping[str, Field]


def fields_from(options: Mapping[str, FieldOptions]) -> dict[str, Field]:
    """What the settings say, as columns."""
    return {name: Field(said.per, tuple(said.shape), unit=said.unit) for name, said in options.items()}


def fields_of(frames: Iterable[Frame]) -> dict[str, Field]:
    """The fields that any of these frames carries."""
    found: dict[str, Field] = {}
    for frame in frames:
        for name, value in frame.fields.items():
            if name not in found:
                per_atom = name in frame.per_atom
                found[name] = Field("atom" if per_atom else "frame", value.shape[1:] if per_atom else value.shape)
    return found


def field_values(frames: Sequence[Frame], name: str, field: Field) -> np.ndarray:
    """(n_frames, *shape) or (n_atoms, *shape), NaN where a frame does not carry it."""
    values = []
    for frame in frames:
        shape = (len(frame), *field.shape) if field.per == "atom" else field.shape
        value = frame.fields.get(name)
        if value is not None and (value.shape != shape or (name in frame.per_atom) != (field.per == "atom")):
            raise ForgefieldError(
                f"{frame.where}: its field {name} has shape {value.shape}; the other frames have it {field.describe()}"
            )
        values.append(np.full(shape, np.nan) if value is None else value)
    return np.concatenate(values, dtype=np.float64) if field.per == "atom" else np.array(values, dtype=np.float64)


def merged(*groups: tuple[str, Fields]) -> dict[str, Field]:
    """All fields of several (name, fields) that go together; where two contradict each other it says which."""
    found: dict[str, tuple[str, Field]] = {}
    for place, fields in groups:
        for name, field in fields.items():
            first, known = found.setdefault(name, (place, field))
            if not known.is_like(field):
                raise ForgefieldError(
                    f"the field '{name}' is {known.describe()} in {first}, but {field.describe()} in {place}; give one of "
                    "them another name"
                )
    return {name: field for name, (_, field) in found.items()}


def chosen_fields(path: Path | str, held: Fields, asked: Fields | None, *, required: bool = True) -> dict[str, Field]:
    """Those of the fields that a store holds which the settings ask for: all, if they say nothing.

    required: a field that is asked for and not there is an error; else no frame carries it.
    """
    if asked is None:
        return dict(held)
    for name, field in asked.items():
        if name not in held and required:
            inside = f"it holds {', '.join(held)}" if held else "it holds none"
            raise ForgefieldError(
                f"{path}: this store holds no field '{name}' ({inside}); convert the data again with that field, or leave "
                f"data.labels.fields.{name} out"
            )
        if name in held and not held[name].is_like(field):
            raise ForgefieldError(
                f"{path}: this store holds the field '{name}' {held[name].describe()}, but data.labels.fields.{name} says "
                f"{field.describe()}; say the same, or convert the data again"
            )
    return dict(asked)


def field_from_manifest(name: str, about: Mapping[str, Any]) -> Field:
    """A field as the manifest of a store describes it. Raises ValueError where that is no field."""
    field = Field(about["per"], tuple(about["shape"]), about["dtype"], about["unit"])
    sizes = all(isinstance(size, int) and size > 0 for size in field.shape)
    # The name becomes part of a path.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or field.per not in ("frame", "atom") or not sizes:
        raise ValueError(f"{name} is not a field")
    if field.dtype != "float64":
        raise ValueError(f"{name} is of type {field.dtype}")
    return field
