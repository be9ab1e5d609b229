"""What `forgefield init` proposes for data without energies and forces: every other value becomes a target.

Whole numbers with few different values are taken for classes. A config may name too much: what it should not learn is deleted
more easily than it is found.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forgefield.data.field_options import RESERVED, field_options
from forgefield.data.options import DataOptions
from forgefield.data.readers import read_frames

Candidates = Mapping[str, tuple[str, int]]
"""Name of a value -> `frame` or `atom`, and how many numbers each has."""
BOOKKEEPING = re.compile(
    "(unique_)?id|ind?e?x|frame|step|time|iteration|timestep|number|n_?atoms|tags|mass(es)?|moment(a|um)|velo(cities)?|"
    "initial_(magmoms|charges)|move_mask|spacegroup_kinds|occupancy"
)
"""Names of values that describe the calculation and not the material."""
MOST_CLASSES = 20
FRAMES_PER_CLASS = 3
"""Whole numbers are classes if there are at most that many values, and on average at least that many frames of each."""


@dataclass(frozen=True)
class Property:
    """options: of the field, as in `data.labels.fields`. n_frames: how many have it. classes: labels, None for a number."""

    options: dict[str, Any]
    n_frames: int
    classes: list[int] | None


def properties_of(
    spec: str | list[str], data: DataOptions, candidates: Candidates
) -> tuple[dict[str, Property], list[str]]:
    """The properties of data, and remarks on values that are not proposed.

    spec: files to read. data: with the fields that the user has named, if any; otherwise all candidates are looked at.
    """
    named = data.labels.fields is not None
    proposed = dict(_field(name, size) for name, size in candidates.items() if not BOOKKEEPING.fullmatch(name.lower()))
    fields: dict[str, Any] = dict(data.labels.fields or {}) if named else {k: v for k, v in proposed.items() if k}
    if not fields:
        return {}, []
    labels = copy.copy(data.labels)
    labels.fields = fields
    columns: dict[str, list[np.ndarray]] = {name: [] for name in fields}
    for frame in read_frames(spec, labels, data.units):
        for name in fields.keys() & frame.fields.keys():
            columns[name].append(np.asarray(frame.fields[name], dtype=float))
    properties: dict[str, Property] = {}
    constant: list[str] = []
    for name, options in field_options(fields).items():
        if not columns[name]:
            continue
        known = np.concatenate([value.ravel() for value in columns[name]])
        known = known[np.isfinite(known)]
        if len(known) == 0 or (not named and np.ptp(known) == 0):
            constant.append(name)
            continue
        written = fields[name] if isinstance(fields[name], Mapping) else {"per": options.per}
        classes = _classes(known) if options.per == "frame" and not options.shape else None
        properties[name] = Property(dict(written), len(columns[name]), classes)
    return properties, [f"{', '.join(constant)} has the same value everywhere and is left out"] if constant else []


def _field(name: str, size: tuple[str, int]) -> tuple[str, dict[str, Any]]:
    """Name and options of a field for a value; an empty name where none can be made from that of the value."""
    per, count = size
    valid = re.sub(r"\W", "_", name).strip("_")
    if not valid or valid[0].isdigit():
        return "", {}
    valid = f"{valid}_value" if valid.lower() in RESERVED else valid
    options: dict[str, Any] = {"key": name} if valid != name else {}
    options |= {"per": "atom"} if per == "atom" else {}
    options |= {"shape": [count]} if count > 1 else {}
    return valid, options


def _classes(values: np.ndarray) -> list[int] | None:
    """Labels of the classes, if the values look like classes."""
    distinct = np.unique(values)
    few = len(distinct) <= min(MOST_CLASSES, len(values) // FRAMES_PER_CLASS)
    return distinct.astype(int).tolist() if few and np.array_equal(distinct, np.round(distinct)) else None


def add_properties(properties: Mapping[str, Property], values: dict[str, Any], notes: dict[str, str]) -> None:
    """Make the properties the targets of a proposed config. values, notes: its settings and comments, changed in place."""
    data = values["data"]
    for name in ("reference_energies", "units"):
        data.pop(name)
        notes.pop(f"data.{name}", None)
    data["labels"] = {"fields": {name: dict(shown.options) for name, shown in properties.items()}}
    notes["data.labels.fields"] = "Values to read; add their units, as in {unit: eV}."
    values["task"] = {
        name: {"classes": shown.classes} if shown.classes is not None else {"loss": "mae"}
        for name, shown in properties.items()
    }
    notes["task"] = "Remove targets that should not be learnt."
    for name, shown in properties.items():
        if shown.classes is not None:
            notes[f"task.{name}"] = (
                f"{len(shown.classes)} different whole numbers: classes. {{loss: mae}} if it is a quantity."
            )
