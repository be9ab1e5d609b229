"""Reader of (extended) xyz files: about twice as fast as ASE's, with errors that name file, frame and line.

Values are exactly those of `ase.io.read`, as the tests check. Unlike ASE it takes a stress of six numbers, and
refuses what ASE would guess at: lines of another width, numbers such as `1_0`, atomic numbers that are not whole,
columns and keys that occur twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import atomic_numbers

from forgefield.data.frame import RawFrame
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.data.readers.text import is_plain, parse_header, real_number, text_lines, whole_number, xyz_index
from forgefield.errors import ForgefieldError

_PLAIN = "species:S:1:pos:R:3"
_LOGICAL = {"t": True, "true": True, "1": True, "f": False, "false": False, "0": False}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "R": real_number,
    "I": whole_number,
    "L": lambda word: _LOGICAL[word.lower()],
    "S": str,
}
_TYPES = {"R": np.float64, "I": np.int64, "L": np.bool_}
_COUNT = re.compile(r"[ \t]*\+?[0-9]{1,18}[ \t]*", re.ASCII)
_WIDTH = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
_NUMBER_COLUMNS = ("Z", "numbers")
_SHORTEST_LINE = 2
"""Bytes that the line of an atom takes at least."""


class ExtxyzReader(Reader):
    name = "extxyz"
    suffixes = (".xyz", ".extxyz")

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame]:
        return read_extxyz(source.path, start, stop)

    def count(self, source: SourceFile) -> int | None:
        return count_extxyz(source.path)


def read_extxyz(path: Path, start: int = 0, stop: int | None = None) -> Iterator[RawFrame]:
    """Frames start to stop of `path`, in order; one frame at a time is in memory."""
    index, offset, number = 0, 0, 0
    if start:
        frame_index = xyz_index(path)
        if frame_index is not None:
            if start >= len(frame_index.offsets):
                return
            index, offset, number = start, int(frame_index.offsets[start]), int(frame_index.lines[start])
    lines, size = text_lines(path, offset), os.stat(path).st_size
    while stop is None or index < stop:
        count_line = next(lines, None)
        if count_line is None or (not count_line.strip() and not any(line.strip() for line in lines)):
            return
        where = f"{path}, frame {index}"
        n_atoms = _atom_count(count_line, where, number + 1, size)
        content = list(islice(lines, n_atoms + 1))
        if len(content) <= n_atoms or not content[-1].strip():
            _refuse_truncated(content, lines, n_atoms, where)
        if index >= start:
            yield _frame(content[0], content[1:], str(path), index, first_line=number + 3)
        number += n_atoms + 2
        index += 1


def count_extxyz(path: Path) -> int | None:
    """Number of frames, from one pass over the lines; None if they cannot be distinguished."""
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


def _atom_count(line: str, where: str, number: int, size: int) -> int:
    """The number of atoms that a line states. size: of the file, in bytes."""
    count = int(line) if _COUNT.fullmatch(line) else 0
    if count < 1:
        mark = "; the file starts with a byte order mark: save it as UTF-8 without one" if line[:1] == "\ufeff" else ""
        raise ForgefieldError(
            f"{where}: line {number} should hold its number of atoms, not {line.strip()[:40]!r}; "
            f"the file is damaged or not in xyz format{mark}"
        )
    if count * _SHORTEST_LINE > size:
        raise ForgefieldError(
            f"{where}: it is truncated: line {number} announces {count} atoms, and the file has only {size} bytes"
        )
    return count


def _frame(header: str, body: list[str], source: str, index: int, *, first_line: int) -> RawFrame:
    where = f"{source}, frame {index}"
    text = " ".join(body)
    if _is_odd(header) or _is_odd(text):
        _refuse_odd_bytes([header, *body], where, first_line - 1)
    info = parse_header(header, f"{where}: line {first_line - 1}")
    layout = info.pop("Properties", None)
    columns = _columns(_PLAIN if layout is None else str(layout), where)
    fast = _fast_table(body, columns) if layout is not None and is_plain(text) else None
    arrays = fast or _table(body, columns, where, first_line, exact=layout is not None)
    cell, pbc = _cell(info, where)
    numbers = _numbers(arrays, where)
    if "pos" not in arrays:
        raise ForgefieldError(f"{where}: its Properties name no column 'pos', so it has no positions")
    positions = arrays.pop("pos")
    if positions.dtype != np.float64 or positions.shape != (len(body), 3):
        raise ForgefieldError(f"{where}: Properties should declare the positions as pos:R:3, not {layout!r}")
    return RawFrame(positions, numbers, cell, pbc, source, index, info=info, arrays=arrays, comment=header)


def _is_odd(text: str) -> bool:
    """Whether there may be something in it that `_refuse_odd_bytes` refuses."""
    return not text.isascii() or "\0" in text or "\r" in text


def _refuse_odd_bytes(lines: list[str], where: str, first_line: int) -> None:
    """Refuse what is not text: other encodings than UTF-8, NUL bytes, carriage returns within a line."""
    for number, line in enumerate(lines, first_line):
        if any("\udc80" <= character <= "\udcff" for character in line):  # what `surrogateescape` makes of other bytes
            raise ForgefieldError(f"{where}: line {number} is not UTF-8 text; save the file as UTF-8")
        for character, name in (("\0", "NUL byte"), ("\r", "carriage return")):
            if character in line:
                raise ForgefieldError(f"{where}: line {number} contains a {name}; the file is damaged or not text")


def _columns(layout: str, where: str) -> list[tuple[str, str, int]]:
    parts = layout.split(":")
    triples = list(zip(parts[0::3], parts[1::3], parts[2::3]))
    good = len(parts) % 3 == 0 and all(name and kind in _PARSERS and _WIDTH.fullmatch(n) for name, kind, n in triples)
    if not good:
        raise ForgefieldError(f"{where}: Properties={layout!r} is not a list of name:kind:columns")
    names = [name for name, _, _ in triples]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ForgefieldError(f"{where}: Properties={layout!r} names the column {repeated!r} twice; rename one of them")
    return [(name, kind, int(n)) for name, kind, n in triples]


def _table(
    body: list[str], columns: list[tuple[str, str, int]], where: str, first_line: int, *, exact: bool
) -> dict[str, Any]:
    """Values by column name: arrays of numbers or logicals, (n_atoms,) or (n_atoms, n), and lists of words."""
    width = sum(n for _, _, n in columns)
    rows = [line.split() for line in body]
    for number, row in enumerate(rows, first_line):
        if len(row) != width and (exact or len(row) < width):
            raise ForgefieldError(f"{where}: line {number} has {len(row)} columns instead of {width}")
    arrays: dict[str, Any] = {}
    at = 0
    for name, kind, n in columns:
        words = [row[at : at + n] for row in rows]
        values = [[_parsed(word, kind, name, where, first_line + i) for word in row] for i, row in enumerate(words)]
        if kind == "S":
            arrays[name] = [row[0] for row in values] if n == 1 else values
        else:
            array: np.ndarray = np.array(values, dtype=_TYPES[kind])
            arrays[name] = array[:, 0] if n == 1 else array
        at += n
    return arrays


def _parsed(word: str, kind: str, name: str, where: str, line: int) -> Any:
    try:
        value = _PARSERS[kind](word)
        if kind != "I" or abs(value) < 2**63:
            return value
    except (ValueError, KeyError):
        pass
    expected = {"R": "a number", "I": "an integer", "L": "T or F"}[kind]
    raise ForgefieldError(f"{where}: line {line}: {word!r:.40} in column {name!r} is not {expected}")


def _fast_table(body: list[str], columns: list[tuple[str, str, int]]) -> dict[str, Any] | None:
    """The same for the usual layout, one word and then reals. None if anything does not fit, which `_table` reports."""
    if columns[0][1:] != ("S", 1) or any(kind != "R" for _, kind, _ in columns[1:]):
        return None
    width = sum(n for _, _, n in columns)
    try:
        words = list(zip(*map(str.split, body), strict=True))  # every line has as many columns as the first
        if len(words) != width:
            return None
        flat = chain.from_iterable(words[1:])
        reals = np.fromiter(map(float, flat), np.float64, len(body) * (width - 1)).reshape(width - 1, len(body)).T
    except ValueError:
        return None
    arrays: dict[str, Any] = {columns[0][0]: list(words[0])}
    at = 0
    for name, _, n in columns[1:]:
        arrays[name] = reals[:, at] if n == 1 else np.ascontiguousarray(reals[:, at : at + n])
        at += n
    return arrays


def _cell(info: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    lattice = info.pop("Lattice", None)
    cell = np.zeros((3, 3))
    if lattice is not None:
        cell = np.asarray(lattice)
        if cell.dtype != np.float64 or cell.size != 9:
            raise ForgefieldError(
                f"{where}: Lattice must be nine numbers, the lattice vectors by rows, not {lattice!r:.60}"
            )
        cell = cell.reshape(3, 3)
    pbc = info.pop("pbc", None)
    if pbc is None:
        return cell, np.full(3, lattice is not None)
    words = pbc.replace(",", " ").split() if isinstance(pbc, str) else [f"{x:g}" for x in _flat_numbers(pbc)]
    periodic = np.array([_LOGICAL[word.lower()] for word in words if word.lower() in _LOGICAL], dtype=bool)
    if len(periodic) != len(words):
        periodic = np.zeros(0, dtype=bool)
    if periodic.size == 1:
        periodic = np.repeat(periodic, 3)
    if periodic.size != 3:
        raise ForgefieldError(f'{where}: pbc must be three of T and F, as in pbc="T T F", not {pbc!r}')
    return cell, periodic


def _flat_numbers(values: object) -> list[float]:
    """Numbers of an array or a list of them; empty for anything else."""
    array = np.ravel(np.asarray(values, dtype=object))
    return [float(x) for x in array] if all(isinstance(x, (int, float)) for x in array) else []


def _numbers(arrays: dict[str, Any], where: str) -> np.ndarray:
    """Atomic numbers from the column of symbols or that of numbers. Where there are both, they must agree."""
    candidates = [_integers(arrays.pop(name), name, where) for name in _NUMBER_COLUMNS if name in arrays]
    if "species" in arrays:
        words = arrays.pop("species")
        words = list(map(str, words.tolist())) if isinstance(words, np.ndarray) else words
        number_of = {word: _atomic_number(word, where) for word in set(words)}
        candidates.append(np.array([number_of[word] for word in words], dtype=np.int64))
    if not candidates:
        raise ForgefieldError(
            f"{where}: its Properties name no column 'species' and no 'Z', so its elements are unknown"
        )
    for other in candidates[1:]:
        if not np.array_equal(candidates[0], other):
            atom = int(np.flatnonzero(candidates[0] != other)[0])
            raise ForgefieldError(
                f"{where}: its columns of elements disagree: atom {atom} is {candidates[0][atom]} in one and {other[atom]} in "
                "another; keep one column"
            )
    return candidates[0]


def _integers(values: object, name: str, where: str) -> np.ndarray:
    """A column of atomic numbers, (n_atoms,)."""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "fi":
        raise ForgefieldError(f"{where}: Properties should declare the atomic numbers as {name}:I:1")
    wrong = np.flatnonzero(~((array >= 1) & (array <= 118) & (array == np.floor(array))))
    if wrong.size:
        raise ForgefieldError(
            f"{where}: {array[wrong[0]]} in column {name!r} (atom {wrong[0]}) is not an atomic number (1 to 118)"
        )
    return array.astype(np.int64)


def _atomic_number(word: str, where: str) -> int:
    if not word.isascii():
        number = 0
    elif word.isdecimal():
        number = int(word) if len(word) < 4 else 0
    else:
        number = atomic_numbers.get(word.capitalize(), 0)
    if not 1 <= number <= 118:
        raise ForgefieldError(f"{where}: {word!r:.40} is not a chemical element")
    return number
