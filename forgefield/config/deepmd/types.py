"""Atom types of an input, which have any names, as chemical elements, one for each type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from forgefield.errors import ForgefieldError

STAND_INS = "He Ne Ar Kr Xe Rn Og Fr Ra Ac Pa Np Pu Am Cm Bk Cf Es Fm Md No Lr"
"""Elements that stand for types which have none of their own, in this order."""


def elements_of_types(file: str, key: str, names: Sequence[str], given: Sequence[str] | None) -> list[str]:
    """The element of each type, all different.

    given: those that the user named, in the order of the types; None: from the names. Types whose element is unclear, or the
    element of an earlier type, get an element that does not occur, a stand-in.
    """
    if given is not None and len(given) != len(names):
        raise ForgefieldError(
            f"data.species lists {len(given)} elements, but '{key}' in {file} has {len(names)} types: {', '.join(names)}."
        )
    elements = [element_of_type(name) for name in names] if given is None else list(given)
    found = [element for element in elements if element is not None]
    if given is not None:
        twice = next((element for element in found if found.count(element) > 1), None)
        if twice is not None:
            same = ", ".join(name for name, element in zip(names, found) if element == twice)
            raise ForgefieldError(
                f"data.species gives the element {twice} to several types of '{key}' in {file} ({same}), and a model has one "
                "species for each element; leave data.species out, or give another element that does not occur."
            )
        return found
    free = [element for element in STAND_INS.split() if element not in found]
    exact = set(names) & set(found)  # a type that is called O is O, wherever it stands
    result: list[str] = []
    for name, element in zip(names, elements):
        taken = element is None or element in result or (element in exact and name != element)
        if taken and not free:
            raise ForgefieldError(
                f"{file}: '{key}' has more types without an element of their own than elements that may stand for them "
                f"({len(STAND_INS.split())}); give one for each with data.species=[...] (convert-config, import: --species)."
            )
        result.append(free.pop(0) if taken or element is None else element)
    return result


def describe_types(type_names: dict[str, str]) -> str:
    """What the types with other names are in structures. type_names: their elements."""
    parts = []
    for name, element in type_names.items():
        of_name = element_of_type(name)
        why = "" if of_name == element else f" (a stand-in: {_reason(of_name)})"
        parts.append(f"{name} is {element}{why}")
    return ", ".join(parts)


def is_stand_in(name: str, element: str) -> bool:
    """Whether an element stands for a type of this name, and is not what the name says."""
    of_name = element_of_type(name)
    return of_name != element if of_name is not None else element in STAND_INS.split()


def _reason(element: str | None) -> str:
    return "its element is unclear" if element is None else f"another type is {element}"


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
