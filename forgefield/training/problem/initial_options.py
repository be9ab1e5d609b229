"""Whether a `model` section that stands beside `model.from` describes the model of that run.

Options left out are the run's. One that is named has to have the value that the run was made with, or that was made of it:
weights belong to their options, so another value could only be ignored, and no option is. Options that number species are
compared by symbol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forgefield.config.diff import ABSENT, Change, format_diff
from forgefield.config.trust import NO_CODE, Trust
from forgefield.data.starter import MODEL
from forgefield.errors import ForgefieldError
from forgefield.models.interface import RegisteredModel
from forgefield.models.registry import ARCHITECTURES, registered_class
from forgefield.models.resolving import HEADS, MODULE_FOLDER, PREDICTS, check_model, hooks_of

STARTING = ("from", "which", "shifts")
"""Keys of the section that are no options of the model."""


@dataclass(frozen=True)
class SourceModel:
    """whose: the run, in words. section: the `model` section it was made with. resolved: its options in full."""

    whose: str
    section: Mapping[str, Any]
    resolved: Mapping[str, Any]
    trust: Trust = NO_CODE
    """Whether they may name code that is not Forgefield's."""

    @property
    def species(self) -> list[str]:
        return list(self.resolved["species"])

    @property
    def hooks(self) -> type[RegisteredModel[Any]]:
        """What the architecture of the model declares."""
        return hooks_of(self.resolved)


def is_proposed(model: Mapping[str, Any], known: SourceModel) -> bool:
    """Whether the section `model` is what `forgefield init` writes: a proposal for a new model."""
    return _own_options(model, known) == MODEL


def _own_options(model: Mapping[str, Any], known: SourceModel) -> dict[str, Any]:
    """The options of the model itself, without where it comes from."""
    ours = STARTING if HEADS in known.resolved else (*STARTING, HEADS)  # heads follow the task, see `transfer.py`
    return _plain({key: value for key, value in model.items() if key not in ours})


def require_same_options(model: Mapping[str, Any], known: SourceModel, species: Sequence[str] | None) -> None:
    """Raise where the section `model` names another value than the run has. What `forgefield init` writes there is a
    proposal for a new model and contradicts nothing. species: what its numbers mean, if not the same
    as in the run."""
    if is_proposed(model, known):
        return
    given = _own_options(model, known)
    name = known.resolved["name"]
    if given.setdefault("name", name) != name:
        raise ForgefieldError(
            f"model.name is {given['name']}, and {known.whose} holds a {name}: weights of the one are none of the other."
        )
    if name in ARCHITECTURES:
        check_model(_with_kinds(given, known.resolved), trust=known.trust)
    options = _with_preset(given)
    made_with = [_with_preset(_plain(known.section)), _plain(known.resolved)]
    changes = [
        Change(f"model.{key}", old, new, meaning=True)
        for key, old, new in _differences(
            options, made_with, _Symbols(known.species, species, known.hooks), known.hooks
        )
    ]
    if changes:
        raise ForgefieldError(
            f"The model is that of {known.whose}, and the config asks for another one:\n{format_diff(changes)}\n"
            "Leave these options out, or train a new model."
        )


def section_of(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved options as a `model` section, for a run that knows no other."""
    told = ("species", "cutoff", "adaptive_cutoff", "max_neighbours", "statistics", MODULE_FOLDER, PREDICTS)
    return {key: value for key, value in resolved.items() if key not in told}


@dataclass(frozen=True)
class _Symbols:
    """What numbers of species mean in the run's options (`ours`) and in the config's (`theirs`)."""

    ours: Sequence[str]
    theirs: Sequence[str] | None
    hooks: type[RegisteredModel[Any]]

    def of_run(self, key: str, value: Any) -> Any:
        """Only what concerns species that the config knows."""
        named = _by_symbol(self.hooks.species_options.get(key), value, self.ours)
        if self.theirs is None or named is value:
            return named
        known = frozenset(self.theirs)
        if isinstance(named, dict):
            return {symbol: entry for symbol, entry in named.items() if symbol in known}
        return {group for group in named if group <= known}

    def of_config(self, key: str, value: Any) -> Any:
        """Likewise of species that the run knows; others are new to it."""
        named = _by_symbol(
            self.hooks.species_options.get(key), value, self.ours if self.theirs is None else self.theirs
        )
        known = frozenset(self.ours)
        if isinstance(named, dict) and named is not value:
            return {symbol: entry for symbol, entry in named.items() if symbol in known}
        return {group for group in named if group <= known} if isinstance(named, set) else named


def _by_symbol(form: str | None, value: Any, species: Sequence[str]) -> Any:
    """Indices of species replaced by their symbols; the value itself where it has none (or makes no sense).

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
    given: Mapping[str, Any],
    made_with: Sequence[Mapping[str, Any]],
    symbols: _Symbols,
    hooks: type[RegisteredModel[Any]],
    prefix: str = "",
) -> Iterator[tuple[str, Any, Any]]:
    """Of each named option that is not as in one of `made_with`: key, the run's value, the config's."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        known = [options[name] for options in made_with if name in options]
        ignored = key in hooks.seed_options or key in hooks.training_options
        if ignored or (value is None and name not in made_with[0]):  # null: left to the data
            continue
        if isinstance(value, Mapping) and known and all(isinstance(one, Mapping) for one in known):
            parts = [options.get(name, {}) for options in made_with]
            yield from _differences(value, parts, symbols, hooks, f"{key}.")
            continue
        same = any(_same(symbols.of_config(key, value), symbols.of_run(key, one)) for one in known)
        if not same and not any(hooks.equivalent(key, value, one, made_with[-1]) for one in known):
            yield key, known[-1] if known else ABSENT, value


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _with_preset(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the options that its preset stands for."""
    options = dict(section)
    preset = options.pop("preset", None)
    if preset is None or options.get("name") not in ARCHITECTURES:
        return options
    return registered_class(options["name"]).preset_options(str(preset).upper(), options) | options


def _with_kinds(given: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the type of each part, and the module of an adapter, which decide what its options are."""
    result = {key: resolved[key] for key in ("module",) if key in resolved} | dict(given)
    for name, part in given.items():
        if isinstance(part, Mapping) and "type" not in part:
            known = resolved.get(name)
            result[name] = {"type": known["type"], **part} if isinstance(known, Mapping) and "type" in known else part
    return result


def _plain(value: Any) -> Any:
    """As it would be read from JSON: no tuples, keys are strings."""
    return json.loads(json.dumps(value))
