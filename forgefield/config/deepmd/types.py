"""Atom types of an input, which have any names, as chemical elements, one for each type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from forgefield.errors import ForgefieldError


def elements_of_types(file: str, key: str, names: Sequence[str], given: Sequence[str] | None) -> list[str]:
    """The element of each type. given: those that the user named, in the order of the types; None: from the names."""
    if given is not None and len(given) != len(names):
        raise ForgefieldError(
            f"data.species lists {len(given)} elements, but '{key}' in {file} has {len(names)} types: {', '.join(names)}."
        )
    elements = [element_of_type(name) for name in names] if given is None else list(given)
    how = "give one for each type, in this order, with data.species=[...] (convert-config, import: --species)"
    for name, element in zip(names, elements):
        if element is None:
            raise ForgefieldError(
                f"{file}: '{key}' has the type '{name}', whose element is unclear, and types are elements here; {how}."
            )
    found = [element for element in elements if element is not None]
    twice = next((element for element in found if found.count(element) > 1), None)
    if twice is not None:
        same = ", ".join(name for name, element in zip(names, found) if element == twice)
        raise ForgefieldError(
            f"{file}: '{key}' has several types of the element {twice} ({same}), and a model has one species for each element. "
            f"An element that does not occur may stand for one of them: {how}."
        )
    return found


def element_of_type(name: str) -> str | None:
    """The element that the name of a type begins with (OW: O, H1: H, mCl: Cl, ZN: Zn); None where that is ambiguous."""
    from ase.data import atomic_numbers

    def is_element(symbol: str) -> bool:
        return bool(atomic_numbers.get(symbol))

    if is_element(name):
        return name
    match = re.match(r"[a-z]*([A-Z])([a-z]?)", name)
    if match is None:
        return None
    if is_element(match[1] + match[2]):
        first: str | None = match[1] + match[2]
    else:
        first = match[1] if is_element(match[1]) else None
    letters = re.match(r"[A-Z]{2}(?![A-Za-z])", name)
    capitalised = letters[0].capitalize() if letters else ""
    if not is_element(capitalised):
        return first
    return capitalised if first is None else None


def renamed(names: Sequence[str], elements: Sequence[str]) -> dict[str, str]:
    """The element of each type that has another name."""
    return {name: element for name, element in zip(names, elements) if name != element}


def with_names(source: Any, type_names: dict[str, str]) -> Any:
    """A source with the elements of types that have other names."""
    if not type_names:
        return source
    entry = source if isinstance(source, dict) else {"path": source}
    return entry if "type_map" in entry else {**entry, "type_map": dict(type_names)}
