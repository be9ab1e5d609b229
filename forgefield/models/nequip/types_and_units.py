"""Models of the NequIP framework with elements as types and with energies in eV and lengths in A, whatever they had before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ase.data import atomic_numbers
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.nequip.architecture import Architecture
from forgefield.models.nequip.importer_checks import CUTOFF
from forgefield.models.nequip.modules import TERMS
from forgefield.models.nequip.saved import SavedModel
from forgefield.physics.units import energy_factor, length_factor

BY_TYPE = ("per_type_energy_scales", "per_type_energy_shifts", "avg_num_neighbors", "per_edge_type_cutoff")
"""Options whose keys are names of types."""
REAL = "kcal/mol"
"""Unit of energies in a model with a ZBL repulsion in LAMMPS' units `real`."""


@dataclass(frozen=True)
class ModelUnits:
    """energy, length: units of a model in a file; None where the user did not give them."""

    energy: str | None = None
    length: str | None = None


def with_elements(path: Path, saved: SavedModel, species: Sequence[str] | None) -> tuple[SavedModel, str]:
    """The model with chemical symbols as names of types, and a sentence for the user if that changed names.

    species: the symbols, in the order of the types; None: those that the file has.
    """
    if "type_names" not in saved.settings:
        raise ForgefieldError(f"{path}: the options do not contain type_names.")
    names = [str(name) for name in saved.settings["type_names"]]
    symbols = _symbols(path, saved, names, species)
    elements = dict(zip(names, symbols))
    if symbols == names:
        return saved, ""
    settings = saved.settings | {"type_names": symbols}
    settings |= {key: _renamed(settings[key], elements) for key in BY_TYPE if key in settings}
    shown = ", ".join(f"{name} is {symbol}" for name, symbol in elements.items() if name != symbol)
    return replace(saved, settings=settings), f"Types were renamed to elements: {shown}."


def _symbols(path: Path, saved: SavedModel, names: Sequence[str], species: Sequence[str] | None) -> list[str]:
    if species is not None:
        if len(species) != len(names):
            raise ForgefieldError(
                f"--species names {len(species)} elements, but {path} has {len(names)} types: {', '.join(names)}."
            )
        symbols = list(species)
    else:
        symbols = [name if _is_element(name) else saved.elements.get(name, "") for name in names]
    for name, symbol in zip(names, symbols):
        if not _is_element(symbol):
            raise ForgefieldError(
                f"{path}: atom type {name} is not a chemical symbol, and {symbol or 'nothing in the file'} does not tell its "
                f"element; give the elements of {', '.join(names)} in this order with --species."
            )
    if len(set(symbols)) != len(symbols):
        twice = next(symbol for symbol in symbols if symbols.count(symbol) > 1)
        raise ForgefieldError(
            f"{path}: several types ({', '.join(names)}) are the element {twice}, and a model has one type for each element."
        )
    return symbols


def _is_element(symbol: str) -> bool:
    return bool(atomic_numbers.get(symbol))


def _renamed(value: Any, elements: Mapping[str, str]) -> Any:
    """Values by type with the names of elements, also inside of values."""
    if not isinstance(value, Mapping):
        return value
    return {elements.get(str(name), str(name)): _renamed(item, elements) for name, item in value.items()}


def in_ev_and_angstrom(kind: Architecture, path: Path, saved: SavedModel, units: ModelUnits) -> tuple[SavedModel, str]:
    """The model with energies in eV and lengths in A, and a sentence for the user if they were others."""
    pair = saved.settings.get("pair_potential")
    real = isinstance(pair, Mapping) and pair.get("units") == "real"
    energy = units.energy or (REAL if real else "eV")
    length = units.length or "A"
    energy_scale, length_scale = energy_factor(energy), length_factor(length)
    if isinstance(pair, Mapping):
        if energy_scale != energy_factor(REAL if real else "eV") or length_scale != 1:
            stated = f"{REAL} and A (real)" if real else "eV and A (metal)"
            raise ForgefieldError(
                f"{path}: the ZBL repulsion of the model is in {stated}, not in {energy} and {length}."
            )
        saved = replace(saved, settings=saved.settings | {"pair_potential": {**pair, "units": "metal"}})
    if energy_scale != 1:
        saved = _times_energy(saved, energy_scale)
    if length_scale != 1:
        saved = _times_length(kind, saved, length_scale)
    if energy_scale == length_scale == 1:
        return saved, ""
    return saved, f"Energies and lengths of the model were in {energy} and {length}; they are in eV and A now."


def _times_energy(saved: SavedModel, factor: float) -> SavedModel:
    """The model with energies multiplied by `factor`: its scales and shifts are."""
    settings, tensors = dict(saved.settings), dict(saved.tensors)
    for term in TERMS:
        option, name = f"per_type_energy_{term}", f"per_type_energy_scale_shift.{term}"
        if settings.get(option) is None and term == "scales":
            settings[option] = 1.0
        settings[option] = _times(settings.get(option), factor)
        if name in tensors:
            tensors[name] = tensors[name].double() * factor
    return replace(saved, settings=settings, tensors=tensors)


def _times_length(kind: Architecture, saved: SavedModel, factor: float) -> SavedModel:
    """The model with lengths multiplied by `factor`. All functions of lengths are functions of length over cutoff, except the
    factor of NequIP's radial basis, which is proportional to one over the square of the cutoff."""
    settings, tensors = dict(saved.settings), dict(saved.tensors)
    settings |= {key: _times(settings.get(key), factor) for key in ("r_max", "per_edge_type_cutoff")}
    if CUTOFF in tensors:
        tensors[CUTOFF] = tensors[CUTOFF].double() / factor
    if kind.radial is not None:
        tensors = {
            name: _scaled(value, factor**2) if kind.radial.fullmatch(name) else value for name, value in tensors.items()
        }
    return replace(saved, settings=settings, tensors=tensors)


def _scaled(value: Tensor, factor: float) -> Tensor:
    return (value.double() * factor).to(value.dtype)


def _times(value: Any, factor: float) -> Any:
    """A number, or numbers by name, times a factor; other values as they are."""
    if isinstance(value, Mapping):
        return {name: _times(item, factor) for name, item in value.items()}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value * factor if is_number else value
