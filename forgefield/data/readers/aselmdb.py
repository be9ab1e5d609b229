"""Reader of ASE-LMDB databases (`*.aselmdb`, used by fairchem): rows of compressed JSON, by ascending id, without deleted ids.

The JSON becomes numbers, text and containers only, whatever classes it names.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from ase.calculators.calculator import all_properties

from forgefield.data.frame import RawFrame
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.data.readers.lmdb_files import LmdbFile, open_lmdb
from forgefield.errors import ForgefieldError

LARGEST_VALUE = 256 * 2**20
"""Bytes of JSON that one row may have."""
_NUMBER_TYPE = re.compile(r"(bool|u?int\d+|float\d+|complex\d+|[<>|=]?[biufc]\d+)")


class AseLmdbReader(Reader):
    name = "aselmdb"
    suffixes = (".aselmdb",)

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame]:
        return read_aselmdb(source.path, start, stop)

    def count(self, source: SourceFile) -> int:
        return count_aselmdb(source.path)


def read_aselmdb(path: Path, start: int = 0, stop: int | None = None) -> Iterator[RawFrame]:
    """Frames start to stop; key-value pairs and data of a row count as its info, calculator results as results."""
    with open_lmdb(path) as file:
        for index, position in enumerate(_record_positions(file)[start:stop].tolist(), start):
            where = f"{path}, frame {index} (id {file.keys[position].decode()})"
            row = _decode(file.value(position), where)
            try:
                yield _frame_from_row(row, str(path), index)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                raise ForgefieldError(f"{where}: it is not a row of an ASE database ({reason})") from error


def count_aselmdb(path: Path) -> int:
    """Number of rows that are not deleted."""
    with open_lmdb(path) as file:
        return len(_record_positions(file))


def _record_positions(file: LmdbFile) -> np.ndarray:
    return _listed(file.path, *file.state)


@lru_cache(maxsize=4)
def _listed(path: Path, *_: str | int) -> np.ndarray:
    """(n_frames,) positions in the keys of the file, by ascending id, remembered while the file stays as it is."""
    with open_lmdb(path) as file:
        keys, deleted, following = file.keys, file.other(b"deleted_ids"), file.other(b"nextid")
    gone = set(
        _whole_numbers([] if deleted is None else _decode(deleted, f"{path}, deleted_ids"), f"{path}, deleted_ids")
    )
    ids = [int(key) for key in keys.tolist()]
    present = set(ids)
    if len(present) < len(ids):
        raise ForgefieldError(f"{path}: two rows have the same id; the file is damaged")
    if following is not None:
        (end,) = _whole_numbers([_decode(following, f"{path}, nextid")], f"{path}, nextid")
        _refuse_missing(path, present | gone, end)
        present = {i for i in present if 1 <= i < end}
    if ids and ids[-1] >= 2**63:
        raise ForgefieldError(f"{path}: the id of a row must be below 2**63; the file is damaged")
    return np.array([position for position, i in enumerate(ids) if i in present and i not in gone], dtype=np.int64)


def _refuse_missing(path: Path, ids: set[int], end: int) -> None:
    """Every id from 1 to end - 1 should be in `ids`. `end` may be huge, so no loop runs up to it."""
    ids = {i for i in ids if 1 <= i < end}
    if len(ids) < end - 1:
        missing = next(i for i in range(1, len(ids) + 2) if i not in ids)
        raise ForgefieldError(f"{path}: row {missing} is neither there nor marked as deleted; the file is damaged")


def _whole_numbers(values: object, where: str) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ForgefieldError(f"{where}: it should hold whole numbers; the file is damaged")
    return values


def _decode(data: bytes, where: str) -> Any:
    try:
        return json.loads(_unpacked(data, where).decode("utf-8"), object_hook=_plain)
    except (zlib.error, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ForgefieldError(f"{where}: it is not compressed JSON as ASE-LMDB holds it ({error})") from error


def _unpacked(data: bytes, where: str) -> bytes:
    """A few kB can unpack to many GB; nothing is unpacked beyond `LARGEST_VALUE`."""
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(data, LARGEST_VALUE + 1)
    if len(text) > LARGEST_VALUE:
        raise ForgefieldError(f"{where}: it unpacks to more than {LARGEST_VALUE} bytes, more than a row is allowed to")
    if not unpacker.eof:
        raise zlib.error("it ends too early")
    return text


def _plain(item: dict[str, Any]) -> Any:
    """Arrays and complex numbers out of what ASE writes for them; objects of its classes stay dictionaries."""
    if "__ndarray__" in item:
        shape, dtype, values = item["__ndarray__"]
        if not _NUMBER_TYPE.fullmatch(str(dtype)):
            raise ValueError(f"an array of {dtype!r}")
        return np.array(values, dtype=dtype).reshape(shape)
    if "__complex__" in item:
        return complex(*item["__complex__"])
    if "__ase_objtype__" in item and "array" in item:
        return item["array"]
    return item


def _frame_from_row(row: dict[str, Any], source: str, index: int) -> RawFrame:
    cell = np.asarray(row.get("cell", np.zeros((3, 3))))
    return RawFrame(
        positions=np.asarray(row["positions"]),
        numbers=np.asarray(row["numbers"]),
        cell=np.diag(cell) if cell.shape == (3,) else cell.reshape(3, 3),
        pbc=np.asarray(row.get("pbc", np.zeros(3))),
        source=source,
        index=index,
        info={**(row.get("data") or {}), **(row.get("key_value_pairs") or {})},
        results={key: row[key] for key in all_properties if row.get(key) is not None},
    )
