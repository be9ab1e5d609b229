"""The fields of `data.labels.fields`: their names and options, and the checks of both.

A field is an additional value of frames or atoms. It is a column of the data and a key of the batch under its name, so it
cannot be called like one that is there already.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import option
from forgefield.data.labels.texts import SPACE_GROUPS
from forgefield.errors import ForgefieldError

FIELDS = "data.labels.fields"
LABELS = ("energy", "forces", "stress", "virial", "weight")
_BATCH = "positions species frame n_atoms cell pbc edge_index edge_shift edge_reverse frame_id frame_key denoise branch"
_COLUMNS = (
    "numbers digest source index max_force element element_count force_squares first_atom first_component degree "
    "edge_source neighbours closest first_edge"
)
_FILES = "pos z lattice properties config_weight"
RESERVED = frozenset([*LABELS, *f"{_BATCH} {_COLUMNS} {_FILES}".split()])
"""Names that no field can have, however they are capitalised."""
PER = ("frame", "atom")
"""What can have a value."""


@dataclass
class FieldOptions:
    """A value of frames or atoms other than the usual labels: a target, such as a band gap, or an input of the model, such as a
    charge."""

    key: str | None = None
    """Name in the source. Default: the name of the field."""
    per: str = option("frame", choices=PER)
    """Whether there is one value per frame or per atom."""
    shape: list[int] = field(default_factory=list)
    """Shape of one value: [] for a number, [3] for a vector."""
    species: list[str] | None = None
    """Values per atom only: the species that have a value. The source may omit the other atoms."""
    factor: float = 1.0
    """Factor by which values are multiplied."""
    unit: str = ""
    """Unit of the values after multiplication, for display."""
    values: str | list[str] | None = None
    """For text: the texts, which become their positions in this list (0, 1, ...), or space_groups for symbols such as `Fm-3m`,
    which become their numbers (1 to 230)."""
    cumulative: bool = False
    """Replace values by their cumulative sums along the last axis, for example a density of states by the number of states."""


def field_options(values: object, where: Callable[[str], str] = lambda key: "") -> dict[str, FieldOptions]:
    """Options of each field by name, from a mapping {name: {...}, name: frame|atom}; empty for None.

    where: returns the beginning of messages about a dotted key.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise _wrong(where, FIELDS, values, "a mapping such as {band_gap: {key: gap}, charge: atom}")
    fields: dict[str, FieldOptions] = {}
    for name, value in values.items():
        _check_name(name, where)
        fields[name] = _field(f"{FIELDS}.{name}", value, where)
    return fields


def _check_name(name: object, where: Callable[[str], str]) -> None:
    key = f"{FIELDS}.{name}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ForgefieldError(
            f"{where(key)}'{key}': the name of a field is made of letters, digits and underscores; what the source calls it "
            "goes into 'key'."
        )
    if name.lower() in LABELS:
        raise ForgefieldError(
            f"{where(key)}'{key}': '{name}' is a label of its own, named by data.labels.{name.lower()}; call the field "
            "something else."
        )
    if name.lower() in RESERVED:
        raise ForgefieldError(
            f"{where(key)}'{key}': the name '{name}' is taken; call the field something else and give {{key: {name}}}."
        )


def _field(key: str, written: object, where: Callable[[str], str]) -> FieldOptions:
    declared = {field.name: field for field in dataclasses.fields(FieldOptions)}
    values = {"per": written} if isinstance(written, str) else {} if written is None else written
    if not isinstance(values, Mapping):
        raise _wrong(where, key, written, f"frame, atom, or a mapping with the keys {', '.join(declared)}")
    for name in values:
        if name not in declared:
            hint = did_you_mean(str(name), list(declared)) or f" It has: {', '.join(declared)}."
            raise ForgefieldError(f"{where(f'{key}.{name}')}unknown key '{key}.{name}'.{hint}")
    options = FieldOptions(**values)
    for name, (is_right, expected) in _RULES.items():
        value = getattr(options, name)
        if not is_right(value):
            hint = did_you_mean(str(value), PER) if name == "per" else ""
            raise _wrong(where, key if isinstance(written, str) else f"{key}.{name}", value, expected, hint)
    options.shape, options.factor = list(options.shape), float(options.factor)
    if options.values is not None and not isinstance(options.values, str):
        options.values = list(options.values)
    if options.cumulative and not options.shape:
        raise ForgefieldError(
            f"{where(f'{key}.cumulative')}'{key}.cumulative' is for values with several components; this one is a number."
        )
    if options.species is not None and options.per != "atom":
        raise ForgefieldError(
            f"{where(f'{key}.species')}'{key}.species' is for values of atoms; this one is per frame."
        )
    return options


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_texts(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value in (None, SPACE_GROUPS)
    return all(map(_is_name, value)) and 1 < len(value) == len(set(value))


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_factor(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value != 0


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "key": (lambda value: value is None or _is_name(value), "the name of the value in the source"),
    "per": (lambda value: value in PER, "frame or atom"),
    "shape": (
        lambda value: _is_list(value) and all(map(_is_positive_integer, value)),
        "a list of sizes, such as [] or [3]",
    ),
    "species": (
        lambda value: value is None or (_is_list(value) and len(value) > 0 and all(map(_is_name, value))),
        "a list of chemical symbols",
    ),
    "factor": (_is_factor, "a number other than zero"),
    "values": (_is_texts, f"a list of different texts, or {SPACE_GROUPS}"),
    "cumulative": (lambda value: isinstance(value, bool), "true or false"),
    "unit": (lambda value: isinstance(value, str), "text"),
}


def _wrong(where: Callable[[str], str], key: str, value: object, expected: str, hint: str = "") -> ForgefieldError:
    shown = "null" if value is None else repr(value)
    return ForgefieldError(f"{where(key)}'{key}' must be {expected}, not {shown}.{hint}")
