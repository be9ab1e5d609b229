"""Reader of (extended) xyz files: about twice as fast as ASE's, with errors that name file, frame and line.

Values are exactly those `ase.io.read` gives; the tests hold it to that. Unlike ASE it takes a stress of six numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import atomic_numbers

from forgefield.data.frame import RawFrame
from forgefield.data.readers.xyz_index import text_lines, xyz_index
from forgefield.errors import ForgefieldError

_ITEM = re.compile(
    r"""(?P<key>[^\s="']+)(?:\s*=\s*(?:
        "(?P<double>(?:\\.|[^"\\])*)" | '(?P<single>(?:\\.|[^'\\])*)' | \{(?P<braces>[^}]*)\}
        | (?P<list>\[(?:[^\[\]]|\[[^\]]*\])*\]) | (?P<bare>\S+) ))?""",
    re.VERBOSE,
)
_PLAIN = "species:S:1:pos:R:3"
_LOGICAL = {"t": True, "true": True, "1": True, "f": False, "false": False, "0": False}
_KINDS = {"R": np.float64, "I": np.int64}


def read_extxyz(path: Path, start: int = 0, stop: int | None = None) -> Iterator[RawFrame]:
    """Frames start to stop of `path`, in order; one frame at a time is in memory."""
    index, offset, number = 0, 0, 0
    if start:
        known = xyz_index(path)
        if known is not None:
            if start >= len(known.offsets):
                return
            index, offset, number = start, int(known.offsets[start]), int(known.lines[start])
    lines = text_lines(path, offset)
    while stop is None or index < stop:
        count_line = next(lines, None)
        if count_line is None or (not count_line.strip() and not any(line.strip() for line in lines)):
            return
        where = f"{path}, frame {index}"
        n_atoms = _atom_count(count_line, where, number + 1)
        content = list(islice(lines, n_atoms + 1))
        if len(content) <= n_atoms or not content[-1].strip():
            _refuse_truncated(content, lines, n_atoms, where)
        if index >= start:
            yield _frame(content[0], content[1:], str(path), index, first_line=number + 3)
        number += n_atoms + 2
        index += 1


def count_extxyz(path: Path) -> int | None:
    """Number of frames, from one pass over the lines; None where they cannot be told apart."""
    index = xyz_index(path)
    return None if index is None else len(index.offsets)


def _refuse_truncated(content: list[str], rest: Iterator[str], n_atoms: int, where: str) -> None:
    """Blank lines at the end of the file are not atoms."""
    if any(line.strip() for line in rest):
        return
    there = len(content)
    while there and not content[there - 1].strip():
        there -= 1
    if there <= n_atoms:
        raise ForgefieldError(f"{where}: it is truncated: {n_atoms} atoms announced, {max(there - 1, 0)} there")


def _atom_count(line: str, where: str, number: int) -> int:
    try:
        count = int(line)
    except ValueError:
        count = 0
    if count < 1:
        raise ForgefieldError(
            f"{where}: line {number} should hold its number of atoms, not {line.strip()[:40]!r}; "
            "the file is damaged or not in xyz format"
        )
    return count


def _frame(header: str, body: list[str], source: str, index: int, *, first_line: int) -> RawFrame:
    where = f"{source}, frame {index}"
    info = parse_header(header)
    layout = info.pop("Properties", None)
    columns = _columns(_PLAIN if layout is None else str(layout), where)
    arrays = _table(body, columns, where, first_line, exact=layout is not None)
    cell, pbc = _cell(info, where)
    numbers = _numbers(arrays, where)
    if "pos" not in arrays:
        raise ForgefieldError(f"{where}: its Properties name no column 'pos', so it has no positions")
    positions = arrays.pop("pos")
    if positions.dtype != np.float64 or positions.shape != (len(body), 3):
        raise ForgefieldError(f"{where}: Properties should declare the positions as pos:R:3, not {layout!r}")
    return RawFrame(positions, numbers, cell, pbc, source, index, info=info, arrays=arrays)


def parse_header(header: str) -> dict[str, Any]:
    """Key-value pairs of a comment line; numbers become floats or arrays, a key alone becomes True."""
    info: dict[str, Any] = {}
    for match in _ITEM.finditer(header):
        kind = match.lastgroup or "key"
        info[match["key"]] = True if kind == "key" else _value(match[kind])
    return info


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        pass
    if text.startswith("_JSON "):
        text = text[6:]
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            return text
    words = text.replace(",", " ").split()
    if len(words) > 1:
        try:
            return np.array([float(word) for word in words])
        except ValueError:
            pass
    return text


def _columns(layout: str, where: str) -> list[tuple[str, str, int]]:
    parts = layout.split(":")
    triples = list(zip(parts[0::3], parts[1::3], parts[2::3]))
    good = len(parts) % 3 == 0 and all(kind in "SRIL" and len(kind) == 1 and n.isdigit() for _, kind, n in triples)
    if not good:
        raise ForgefieldError(f"{where}: Properties={layout!r} is not a list of name:kind:columns")
    return [(name, kind, int(n)) for name, kind, n in triples]


def _table(
    body: list[str], columns: list[tuple[str, str, int]], where: str, first_line: int, *, exact: bool
) -> dict[str, np.ndarray]:
    width = sum(n for _, _, n in columns)
    if exact and columns[0][1:] == ("S", 1) and all(kind == "R" for _, kind, _ in columns[1:]):
        fast = _fast_table(body, columns, width)
        if fast is not None:
            return fast
    rows = [line.split() for line in body]
    for offset, row in enumerate(rows):
        if len(row) != width and (exact or len(row) < width):
            raise ForgefieldError(f"{where}: line {first_line + offset} has {len(row)} columns instead of {width}")
    arrays, at = {}, 0
    for name, kind, n in columns:
        words = np.array([row[at : at + n] for row in rows])
        try:
            values = np.vectorize(lambda w: _LOGICAL[w.lower()])(words) if kind == "L" else words
            values = values.astype(_KINDS[kind]) if kind in _KINDS else values
        except (ValueError, KeyError):
            raise ForgefieldError(f"{where}: column {name!r} holds something that is not a number") from None
        arrays[name] = values[:, 0] if n == 1 else values
        at += n
    return arrays


def _fast_table(body: list[str], columns: list[tuple[str, str, int]], width: int) -> dict[str, np.ndarray] | None:
    """The usual layout, one symbol and then reals. None where a line does not fit: the slow way says which."""
    parts = [line.split(None, 1) for line in body]
    try:
        symbols = [part[0] for part in parts]
        words = " ".join([part[1] for part in parts]).split()
        if len(words) != len(body) * (width - 1):
            return None
        reals = np.fromiter(map(float, words), np.float64, len(words)).reshape(len(body), width - 1)
    except (IndexError, ValueError):
        return None
    arrays: dict[str, np.ndarray] = {columns[0][0]: np.array(symbols)}
    at = 0
    for name, _, n in columns[1:]:
        arrays[name] = reals[:, at] if n == 1 else reals[:, at : at + n].copy()
        at += n
    return arrays


def _cell(info: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    lattice = info.pop("Lattice", None)
    cell = np.zeros((3, 3))
    if lattice is not None:
        cell = np.asarray(lattice)
        if cell.dtype != np.float64 or cell.size != 9:
            raise ForgefieldError(
                f"{where}: Lattice={lattice!r:.60} should be nine numbers, the lattice vectors by rows"
            )
        cell = cell.reshape(3, 3)
    pbc = info.pop("pbc", None)
    if pbc is None:
        return cell, np.full(3, lattice is not None)
    words = [str(int(x)) for x in np.ravel(pbc)] if not isinstance(pbc, str) else pbc.replace(",", " ").split()
    try:
        periodic = np.array([_LOGICAL[word.lower()] for word in words])
    except KeyError:
        periodic = np.zeros(0, dtype=bool)
    if periodic.size == 1:
        periodic = np.repeat(periodic, 3)
    if periodic.size != 3:
        raise ForgefieldError(f'{where}: pbc={pbc!r} should be three of T and F, as in pbc="T T F"')
    return cell, periodic


def _numbers(arrays: dict[str, np.ndarray], where: str) -> np.ndarray:
    for name in ("Z", "numbers"):
        if name in arrays and "species" not in arrays:
            return arrays.pop(name).astype(np.int64)
    if "species" not in arrays:
        raise ForgefieldError(
            f"{where}: its Properties name no column 'species' and no 'Z', so its elements are unknown"
        )
    words = arrays.pop("species").tolist()
    number_of = {word: _atomic_number(str(word), where) for word in set(words)}
    return np.array([number_of[word] for word in words], dtype=np.int64)


def _atomic_number(word: str, where: str) -> int:
    number = int(word) if word.isdigit() else atomic_numbers.get(word.capitalize(), 0)
    if number == 0:
        raise ForgefieldError(f"{where}: {word!r} is not a chemical element")
    return number
