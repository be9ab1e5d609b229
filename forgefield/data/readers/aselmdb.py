"""Reader of ASE-LMDB databases (`*.aselmdb`, as fairchem's sets are): rows of compressed JSON, decoded here.

Rows come by ascending id; ids the database has deleted are left out. Nothing but numbers, text and containers is made
of the JSON, whatever classes it names.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ase.calculators.calculator import all_properties

from forgefield.data.frame import RawFrame
from forgefield.data.readers.lmdb_files import frame_keys, open_lmdb
from forgefield.errors import ForgefieldError

_NUMBER_TYPE = re.compile(r"(bool|u?int\d+|float\d+|complex\d+|[<>|=]?[biufc]\d+)")


def read_aselmdb(path: Path, start: int = 0, stop: int | None = None) -> Iterator[RawFrame]:
    """Frames start to stop; key-value pairs and data of a row count as its info, calculator results as results."""
    with open_lmdb(path) as transaction:
        for index, row_id in list(enumerate(_ids(transaction, path)))[start:stop]:
            where = f"{path}, frame {index} (id {row_id})"
            row = _decode(transaction.get(str(row_id).encode()), where)
            try:
                yield _frame(row, str(path), index)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                raise ForgefieldError(f"{where}: it is not a row of an ASE database ({reason})") from error


def count_aselmdb(path: Path) -> int:
    """Number of rows that are not deleted."""
    with open_lmdb(path) as transaction:
        return len(_ids(transaction, path))


def _ids(transaction: Any, path: Path) -> list[int]:
    present = {int(key) for key in frame_keys(transaction)}
    deleted, following = transaction.get(b"deleted_ids"), transaction.get(b"nextid")
    gone = set(_decode(deleted, f"{path}, deleted_ids")) if deleted is not None else set()
    if following is None:
        return sorted(present - gone)
    ids = [i for i in range(1, int(_decode(following, f"{path}, nextid"))) if i not in gone]
    missing = [i for i in ids if i not in present]
    if missing:
        raise ForgefieldError(f"{path}: row {missing[0]} is neither there nor marked as deleted; the file is damaged")
    return ids


def _decode(data: bytes, where: str) -> Any:
    try:
        return json.loads(zlib.decompress(data).decode("utf-8"), object_hook=_plain)
    except (zlib.error, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        raise ForgefieldError(f"{where}: it is not compressed JSON as ASE-LMDB holds it ({error})") from error


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


def _frame(row: dict[str, Any], source: str, index: int) -> RawFrame:
    numbers = np.asarray(row["numbers"]).astype(np.int64)
    cell = np.asarray(row.get("cell", np.zeros((3, 3))), dtype=np.float64)
    return RawFrame(
        positions=np.asarray(row["positions"], dtype=np.float64),
        numbers=numbers,
        cell=np.diag(cell) if cell.shape == (3,) else cell.reshape(3, 3),
        pbc=np.asarray(row.get("pbc", np.zeros(3))).astype(bool),
        source=source,
        index=index,
        info={**(row.get("data") or {}), **(row.get("key_value_pairs") or {})},
        results={key: row[key] for key in all_properties if row.get(key) is not None},
    )
