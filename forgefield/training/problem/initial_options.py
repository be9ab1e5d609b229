"""Comparison of a `model` section that contains `model.from` with the model of that run.

Options that are left out are those of the run. Options that are set must have the value of the run, before or after it was
resolved, because other values could only be ignored. Options that contain indices of species are compared by symbol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from forgefield.config.diff import ABSENT, Change, format_diff
from forgefield.config.trust import NO_CODE, Trust
from forgefield.data.starter import MODEL
from forgefield.errors import ForgefieldError
from forgefield.models.interface import RegisteredModel
from forgefield.models.registry import ARCHITECTURES, registered_class
from forgefield.models.resolved import HEADS, MODULE_FOLDER, PREDICTS
from forgefield.models.resolving import check_model, hooks_of

STARTING = ("from", "which", "shifts")
"""Keys of the section that are not options of the model."""


@dataclass(frozen=True)
class SourceModel:
    """The model of a run.

    name: of the run, for messages.
    section: the `model` section of the run.
    resolved: its resolved options.
    trust: whether they may name code that is not Forgefield's.
    """

    name: str
    section: Mapping[str, Any]
    resolved: Mapping[str, Any]
    trust: Trust = NO_CODE

    @property
    def species(self) -> list[str]:
        return list(self.resolved["species"])

    @property
    def hooks(self) -> type[RegisteredModel[Any]]:
        """The class of the architecture."""
        return hooks_of(self.resolved)


def is_proposed(model: Mapping[str, Any], source: SourceModel) -> bool:
    """Whether the section `model` is that of `forgefield init`, a proposal for a new model."""
    return _model_options(model, source) == MODEL


def _model_options(model: Mapping[str, Any], source: SourceModel) -> dict[str, Any]:
    """The section without `model.from` and its options, as it would be read from JSON."""
    excluded = STARTING if HEADS in source.resolved else (*STARTING, HEADS)  # heads follow the task, see `transfer.py`
    return _as_json({key: value for key, value in model.items() if key not in excluded})


def require_same_options(model: Mapping[str, Any], source: SourceModel, species: Sequence[str] | None) -> None:
    """Raise ForgefieldError if the section `model` contradicts the model of the run. That of `forgefield init`, a proposal for
    a new model, is ignored.

    species: to which indices in the section refer, if not those of the run.
    """
    if is_proposed(model, source):
        return
    section = _model_options(model, source)
    name = source.resolved["name"]
    if section.setdefault("name", name) != name:
        raise ForgefieldError(f"model.name is {section['name']}, but {source.name} has a model of the type {name}.")
    if name in ARCHITECTURES:
        check_model(_with_types(section, source.resolved), trust=source.trust)
    stored = [_with_preset(_as_json(source.section)), _as_json(source.resolved)]
    symbols = _Symbols(source.species, species, source.hooks)
    changes = [
        Change(f"model.{key}", old, new, meaning=True)
        for key, old, new in _differences(_with_preset(section), stored, symbols, source.hooks)
    ]
    if changes:
        raise ForgefieldError(
            f"The model is that of {source.name}, but the config describes another one:\n{format_diff(changes)}\n"
            "Leave these options out, or train a new model."
        )


def section_of(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved options as a `model` section, for a run without one."""
    from_data = ("species", "cutoff", "adaptive_cutoff", "max_neighbours", "statistics", MODULE_FOLDER, PREDICTS)
    return {key: value for key, value in resolved.items() if key not in from_data}


@dataclass(frozen=True)
class _Symbols:
    """Species of the run, and those of the config (None: the same), to which indices in options refer."""

    run: Sequence[str]
    config: Sequence[str] | None
    hooks: type[RegisteredModel[Any]]

    def of_run(self, key: str, value: object) -> object:
        """An option of the run by symbol, restricted to species of the config."""
        by_symbol = _by_symbol(self.hooks.species_options.get(key), value, self.run)
        return by_symbol if self.config is None or by_symbol is value else _restricted(by_symbol, self.config)

    def of_config(self, key: str, value: object) -> object:
        """An option of the config by symbol, restricted to species of the run; others are new."""
        species = self.run if self.config is None else self.config
        by_symbol = _by_symbol(self.hooks.species_options.get(key), value, species)
        return by_symbol if by_symbol is value else _restricted(by_symbol, self.run)


def _restricted(by_symbol: object, species: Sequence[str]) -> object:
    """Entries of an option by symbol that refer to these species only."""
    if isinstance(by_symbol, dict):
        return {symbol: entry for symbol, entry in by_symbol.items() if symbol in species}
    assert isinstance(by_symbol, set)
    return {group for group in by_symbol if group <= frozenset(species)}


def _by_symbol(form: str | None, value: object, species: Sequence[str]) -> object:
    """An option with indices of species replaced by symbols, as a dictionary or set; other values as they are.

    form: see `RegisteredModel.species_options`.
    """
    if not isinstance(value, list):
        return value
    try:
        if form == "pairs":
            return {frozenset(species[number] for number in pair) for pair in value}
        if form == "indices":
            return {frozenset([species[number]]) for number in value}
        if form == "rows" and value:
            return dict(zip(species, value, strict=True))
    except (IndexError, TypeError, ValueError):
        pass
    return value


def _differences(
    section: Mapping[str, Any],
    stored: Sequence[Mapping[str, Any]],
    symbols: _Symbols,
    hooks: type[RegisteredModel[Any]],
    prefix: str = "",
) -> Iterator[tuple[str, object, object]]:
    """Key, stored value and value of the config, for options that differ from all stored ones."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        values = [options[name] for options in stored if name in options]
        option = re.sub(r"\[\d+\]", "", key)
        ignored = option in hooks.seed_options or option in hooks.training_options
        if ignored or (value is None and name not in stored[0]):  # null: from the data
            continue
        if _are_sections(value) and values and all(_are_sections(one) and len(one) == len(value) for one in values):
            for number, item in enumerate(value):
                subsections = [options[name][number] if name in options else {} for options in stored]
                yield from _differences(item, subsections, symbols, hooks, f"{key}[{number}].")
            continue
        if isinstance(value, Mapping) and values and all(isinstance(one, Mapping) for one in values):
            subsections = [options.get(name, {}) for options in stored]
            yield from _differences(value, subsections, symbols, hooks, f"{key}.")
            continue
        same = any(_same(symbols.of_config(option, value), symbols.of_run(option, one)) for one in values)
        if not same and not any(hooks.equivalent(option, value, one, stored[-1]) for one in values):
            yield key, values[-1] if values else ABSENT, value


def _are_sections(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _with_preset(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the options of its preset."""
    options = dict(section)
    preset = options.pop("preset", None)
    if preset is None or options.get("name") not in ARCHITECTURES:
        return options
    return registered_class(options["name"]).preset_options(str(preset).upper(), options) | options


def _with_types(section: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the types of subsections and the module of an adapter, on which its valid options depend."""
    result = {key: resolved[key] for key in ("module",) if key in resolved} | dict(section)
    for name, subsection in section.items():
        stored = resolved.get(name)
        if isinstance(subsection, Mapping) and isinstance(stored, Mapping) and "type" in stored:
            result[name] = {"type": stored["type"], **subsection}
    return result


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it would be read from JSON: without tuples, and with strings as keys."""
    result: dict[str, Any] = json.loads(json.dumps(value))
    return result
