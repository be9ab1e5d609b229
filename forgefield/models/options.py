"""Options that several models share, and their checks: names and types, bounds and choices, numbers by species, ZBL."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ase.data import atomic_numbers

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import limits_of, option
from forgefield.config.peer_terms import KEYS
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ACTIVATIONS = ("silu", "mish", "gelu", "ssp", "tanh")
"""Names of activation functions of perceptrons."""


def check_values(options: DataclassInstance, where: str = "model") -> None:
    """Raise for a value outside of the bounds or choices that its field declares (`forgefield.config.option`).

    where: section of the options, for the message.
    """
    for entry in fields(options):
        value, limits = getattr(options, entry.name), limits_of(entry)
        if limits.choices and value not in limits.choices:
            allowed = ", ".join("null" if choice is None else str(choice) for choice in limits.choices)
            raise ForgefieldError(f"{where}.{entry.name} is '{value}'; choose one of {allowed}.")
        if limits.has_bounds and isinstance(value, (int, float)) and not limits.allows(value):
            raise ForgefieldError(f"{where}.{entry.name} must be {limits.describe()}, not {value}.")


def check_keys(
    options: type[DataclassInstance], section: Mapping[str, object], *, where: str, what: str, also: Sequence[str] = ()
) -> None:
    """Raise for a key that the dataclass `options` does not have, or a value that is not of the type of its field.

    where: section of the keys. what: whose options they are, for the message. also: other valid keys, for the hint.
    """
    names = [field.name for field in fields(options)]
    hints = typing.get_type_hints(options)
    for key, value in section.items():
        if key not in names:
            elsewhere = KEYS.get(key)
            if elsewhere is not None and elsewhere.startswith("model."):
                elsewhere = elsewhere if elsewhere.removeprefix("model.") in names else None
            hint = did_you_mean(key, [*names, *also]) if elsewhere is None else f" Did you mean '{elsewhere}'?"
            raise ForgefieldError(f"{where}.{key} is not an option of {what}.{hint}")
        if not _matches(value, hints[key]):
            raise ForgefieldError(f"{where}.{key} is {value!r}; it must be {_describe_type(hints[key])}.")


SectionT = TypeVar("SectionT", bound="DataclassInstance")


def options_of_section(options: type[SectionT], section: SectionT | Mapping[str, Any], *, where: str) -> SectionT:
    """Options of a section within the options of a model, its keys checked; options are returned as they are."""
    if isinstance(section, options):
        return section
    assert isinstance(section, Mapping)
    check_keys(options, section, where=where, what=where.rpartition(".")[2])
    return options(**section)


def _matches(value: object, hint: object) -> bool:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_matches(value, part) for part in typing.get_args(hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if is_dataclass(hint):
        return isinstance(value, (hint if isinstance(hint, type) else type(hint), Mapping))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(item, args[1]) for item in value.values())
    return isinstance(hint, type) and isinstance(value, hint)


def _describe_type(hint: object) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_describe_type(part) for part in typing.get_args(hint))
    names: dict[object, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a word",
        type(None): "null",
    }
    names |= {list[int]: "a list of whole numbers", dict[str, float]: "a number for each name"}
    names |= {list[float]: "a list of numbers", list[bool]: "a list of true and false"}
    names |= {list[list[int]]: "a list of pairs of whole numbers"}
    if is_dataclass(hint):
        return "a section"
    others: dict[object, str] = {dict: "a mapping", list: "a list"}
    return names.get(hint) or others.get(typing.get_origin(hint)) or str(hint)


def from_statistics(statistics: Mapping[str, Any], name: str, key: str) -> Any:
    """A statistic of the training data, for the option `key`; raises if there is none."""
    if statistics.get(name) is None:
        raise ForgefieldError(f"model.{key} is not set and there is no training data to compute it from.")
    return statistics[name]


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


@dataclass
class TermOptions:
    """Options of the terms that models derived from `models.terms.SpeciesTerms` share."""

    per_edge_type_cutoff: dict[str, Any] | None = None
    """Shorter cutoffs by species of centre and neighbour, A: {H: 3.0, O: {H: 3.5, O: 4.0}}; other pairs have the cutoff."""
    avg_num_neighbours: float | dict[str, float] | None = None
    """Mean number of neighbours, one or per species of the centre; sums over edges are divided by its square root."""
    energy_scales: float | dict[str, float] | None = None
    """Energy unit of the network's output, eV, one or per species. Default: root mean square of the forces, times A."""
    energy_shifts: float | dict[str, float] | None = None
    """Energy of the isolated atom, eV, one or per species. Default: the reference energies."""
    avg_num_neighbours_by_species: bool = False
    """Use the mean number of neighbours of each species in the training data instead of one mean for all atoms."""
    energy_scales_by_species: bool = False
    """Use the root mean square of the forces on each species in the training data instead of one for all atoms."""
    energy_scales_trainable: bool = False
    """Train the scales."""
    energy_shifts_trainable: bool = False
    """Train the shifts."""
    adaptive_radius: str | None = option(None, choices=(None, "nearest", "limit"))
    """With data.adaptive_cutoff, how far the cutoff of an isolated atom grows: until its nearest neighbours count fully
    (nearest, the default) or to the limit. Runs whose record does not contain this option use the limit."""
    zbl: bool | dict[str, float] = False
    """Add the ZBL repulsion of nuclei; {polynomial_cutoff_p: 6} sets its envelope."""


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
    if options.avg_num_neighbours_by_species:
        _refuse_numbers("avg_num_neighbours", options.avg_num_neighbours)
        means = from_statistics(statistics, "mean_neighbours_by_species", "avg_num_neighbours")
        values = {symbol: float(means.get(symbol, 0.0)) for symbol in species}
        filled["avg_num_neighbours"] = {symbol: value if value > 0 else 1.0 for symbol, value in values.items()}
        filled["avg_num_neighbours_by_species"] = False
    elif options.avg_num_neighbours is None:
        mean = from_statistics(statistics, "mean_neighbours", "avg_num_neighbours")
        filled["avg_num_neighbours"] = mean if mean > 0 else 1.0
    if options.energy_scales_by_species:
        _refuse_numbers("energy_scales", options.energy_scales)
        scales = from_statistics(statistics, "forces_rms_by_species", "energy_scales")
        filled["energy_scales"] = {symbol: scales.get(symbol) or default_scale(statistics) for symbol in species}
        filled["energy_scales_by_species"] = False
    elif options.energy_scales is None:
        filled["energy_scales"] = default_scale(statistics)
    if options.energy_shifts is None:
        filled["energy_shifts"] = from_statistics(statistics, "reference_energies", "energy_shifts")
    return filled


def _refuse_numbers(key: str, value: object) -> None:
    if value is not None:
        raise ForgefieldError(f"model.{key} gives numbers and model.{key}_by_species asks the data for them; keep one.")


def default_scale(statistics: Mapping[str, Any]) -> float:
    """Energy unit of a network, eV: root mean square of the forces, times A; without forces, spread of the energies."""
    return statistics.get("forces_rms") or statistics.get("energy_residual_std") or 1.0
