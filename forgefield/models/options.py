"""Checks that options of several models share: names and types, bounds and choices, numbers by species, ZBL."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ase.data import atomic_numbers

from forgefield.config.nearest import did_you_mean
from forgefield.config.peer_terms import KEYS
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
ACTIVATIONS = ("silu", "mish", "gelu", "ssp", "tanh")
"""Names of activation functions of perceptrons."""


def option(default: T, *, at_least: float | None = None, choices: Sequence[object] | None = None) -> T:
    """A field of a dataclass of options. at_least: smallest value, if it is not None. choices: allowed values."""
    metadata = {"at_least": at_least, "choices": choices}
    made: T = field(default=default, metadata=metadata)
    return made


def check_values(options: DataclassInstance) -> None:
    """Raise for a value outside of the bounds or choices that its field declares (`option`)."""
    for entry in fields(options):
        value, least, choices = getattr(options, entry.name), *map(entry.metadata.get, ("at_least", "choices"))
        if least is not None and value is not None and value < least:
            raise ForgefieldError(f"model.{entry.name} is {value}; it must be at least {least}.")
        if choices is not None and value not in choices:
            allowed = ", ".join("null" if choice is None else str(choice) for choice in choices)
            raise ForgefieldError(f"model.{entry.name} is '{value}'; choose one of {allowed}.")


def check_keys(
    options: type[DataclassInstance], given: Mapping[str, Any], *, where: str, what: str, also: Sequence[str] = ()
) -> None:
    """Raise for a key that the dataclass `options` does not have, or a value that is not of its kind.

    where: section of the keys. what: whose options they are, for the message. also: other valid keys, for the hint.
    """
    known = [field.name for field in fields(options)]
    hints = typing.get_type_hints(options)
    for key, value in given.items():
        if key not in known:
            hint = f" Did you mean '{KEYS[key]}'?" if key in KEYS else did_you_mean(key, [*known, *also])
            raise ForgefieldError(f"{where}.{key} is not an option of {what}.{hint}")
        if not _matches(value, hints[key]):
            raise ForgefieldError(f"{where}.{key} is {value!r}; it must be {_in_words(hints[key])}.")


def _matches(value: object, hint: Any) -> bool:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_matches(value, part) for part in typing.get_args(hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(item, args[1]) for item in value.values())
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_in_words(part) for part in typing.get_args(hint))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", type(None): "null"}
    names |= {list[int]: "a list of whole numbers", dict[str, float]: "a number for each name"}
    names |= {list[float]: "a list of numbers", list[bool]: "a list of true and false"}
    names |= {list[list[int]]: "a list of pairs of whole numbers"}
    others = {dict: "a mapping", list: "a list"}
    return names.get(hint) or others.get(typing.get_origin(hint)) or str(hint)


def from_statistics(statistics: Mapping[str, Any], fact: str, key: str) -> Any:
    """A number of the statistics, for the option `key`; raises where there are none."""
    if statistics.get(fact) is None:
        raise ForgefieldError(f"model.{key} is not given and there is no training data to take it from.")
    return statistics[fact]


def check_per_species(
    key: str, value: float | Mapping[str, float] | None, species: tuple[str, ...], *, positive: bool
) -> None:
    """Raise unless `value` is None, a number, or one number for each species."""
    if isinstance(value, Mapping) and set(value) != set(species):
        raise ForgefieldError(
            f"{key} names {', '.join(value)}; the species are {', '.join(species)}, give one number each."
        )
    numbers = list(value.values()) if isinstance(value, Mapping) else [] if value is None else [value]
    if positive and any(not number > 0 for number in numbers):
        raise ForgefieldError(f"{key} is {value}; it must be positive.")


def check_pair_cutoffs(table: Mapping[str, Any] | None, species: tuple[str, ...], cutoff: float) -> None:
    """Raise for cutoffs of pairs that name unknown species or are above the model's cutoff, A."""
    for centre, entry in (table or {}).items():
        for neighbour, value in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            where = ".".join(filter(None, ("model.per_edge_type_cutoff", centre, neighbour)))
            for symbol in filter(None, (centre, neighbour)):
                if symbol not in species:
                    raise ForgefieldError(f"{where}: {symbol} is not one of the species {', '.join(species)}.")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= cutoff:
                raise ForgefieldError(
                    f"{where} is {value}; it must be a number above 0 and at most data.cutoff={cutoff:g}."
                )


def check_zbl(zbl: bool | Mapping[str, float], species: tuple[str, ...]) -> None:
    """Raise for options of the ZBL repulsion that are wrong."""
    for key, value in zbl.items() if isinstance(zbl, Mapping) else []:
        if key != "polynomial_cutoff_p":
            raise ForgefieldError(f"model.zbl.{key} is not an option; ZBL has polynomial_cutoff_p.")
        if value < 2:
            raise ForgefieldError(f"model.zbl.polynomial_cutoff_p is {value}; it must be at least 2.")
    for symbol in species:
        if not atomic_numbers.get(symbol):
            raise ForgefieldError(f"model.zbl needs chemical elements; {symbol} is not one.")


def pair_cutoff(table: Mapping[str, Any], centre: str, neighbour: str, cutoff: float) -> float:
    """Cutoff of an edge from `centre` to `neighbour`, A; pairs that are not in the table have the model's."""
    entry = table.get(centre, cutoff)
    return float(entry.get(neighbour, cutoff) if isinstance(entry, Mapping) else entry)


class TermOptions(typing.Protocol):
    """Options of the terms that models of `models.terms` share."""

    per_edge_type_cutoff: dict[str, Any] | None
    avg_num_neighbours: float | dict[str, float] | None
    energy_scales: float | dict[str, float] | None
    energy_shifts: float | dict[str, float] | None
    energy_scales_trainable: bool
    energy_shifts_trainable: bool
    zbl: bool | dict[str, float]


def complete_terms(
    options: TermOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> dict[str, Any]:
    """Values for the options that the config leaves to the data; raises for options of the shared terms that are wrong."""
    check_per_species("model.avg_num_neighbours", options.avg_num_neighbours, species, positive=True)
    check_per_species("model.energy_scales", options.energy_scales, species, positive=True)
    check_per_species("model.energy_shifts", options.energy_shifts, species, positive=False)
    check_pair_cutoffs(options.per_edge_type_cutoff, species, cutoff)
    if options.zbl:
        check_zbl(options.zbl, species)
    filled: dict[str, Any] = {}
    if options.avg_num_neighbours is None:
        mean = from_statistics(statistics, "mean_neighbours", "avg_num_neighbours")
        filled["avg_num_neighbours"] = mean if mean > 0 else 1.0
    if options.energy_scales is None:
        filled["energy_scales"] = default_scale(statistics)
    if options.energy_shifts is None:
        filled["energy_shifts"] = from_statistics(statistics, "reference_energies", "energy_shifts")
    return filled


def default_scale(statistics: Mapping[str, Any]) -> float:
    """Energy unit of a network, eV: root mean square of the forces, times A; without forces, spread of the energies."""
    return statistics.get("forces_rms") or statistics.get("energy_residual_std") or 1.0
