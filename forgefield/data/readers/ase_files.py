"""Readers of everything ASE reads: its file formats and its databases.

Values are those that ASE reads; nothing is computed: only results stored with a frame are its labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from forgefield.data.frame import RawFrame
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.errors import ForgefieldError

EXECUTABLE_FORMATS = ("bundletrajectory", "trj")
"""ASE formats that may hold pickles: reading them could run code from the file."""


class AseReader(Reader):
    """Files in one of ASE's formats. format_name: as ASE calls it; None: ASE looks at the content."""

    name = "ase"

    def __init__(self, format_name: str | None) -> None:
        self.format_name = format_name

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame]:
        return islice(read_ase_file(source.path, self.format_name), start, stop)


class AseDatabaseReader(Reader):
    name = "db"
    suffixes = (".db",)

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame]:
        return islice(read_ase_database(source.path), start, stop)


def read_ase_file(path: Path, format_name: str | None) -> Iterator[RawFrame]:
    """Every frame of `path` through `ase.io`; `format_name` None lets ASE look at the content."""
    from ase.io import iread
    from ase.io.formats import UnknownFileTypeError, filetype

    try:
        format_name = format_name or filetype(str(path), guess=False)
    except (UnknownFileTypeError, UnicodeDecodeError):
        raise ForgefieldError(
            f"{path}: its format is not known; Forgefield reads extxyz, npz, ASE databases and what ASE reads"
        ) from None
    if format_name in EXECUTABLE_FORMATS:
        raise ForgefieldError(
            f"{path}: the format {format_name} may run code when it is read; convert it to extxyz first"
        )
    frames = iread(str(path), index=":", format=format_name)
    yield from _frames(frames, path, f"the format {format_name}")


def read_ase_database(path: Path) -> Iterator[RawFrame]:
    """Every row of an ASE database, by id; key-value pairs and data of a row count as its info."""
    from ase.db import connect

    def rows() -> Iterator[Atoms]:
        for row in connect(str(path)).select(sort="id"):
            atoms = row.toatoms()
            atoms.info = {**row.data, **row.key_value_pairs}
            yield atoms

    yield from _frames(rows(), path, "an ASE database")


def raw_from_atoms(atoms: Atoms, source: str, index: int) -> RawFrame:
    """An ASE structure as a raw frame; results that its calculator has are kept, and none are computed."""
    results: dict[str, Any] = dict(getattr(atoms.calc, "results", {}) or {})
    arrays = {key: value for key, value in atoms.arrays.items() if key not in ("numbers", "positions")}
    return RawFrame(
        positions=atoms.positions.copy(),
        numbers=atoms.numbers.astype(np.int64),
        cell=np.array(atoms.cell[:], dtype=np.float64),
        pbc=np.array(atoms.pbc, dtype=bool),
        source=source,
        index=index,
        info=dict(atoms.info),
        arrays=arrays,
        results={key: value for key, value in results.items() if value is not None},
        constraints=list(atoms.constraints),
    )


def _frames(frames: Iterator[Atoms], path: Path, kind: str) -> Iterator[RawFrame]:
    index = 0
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                atoms = next(frames)
        except StopIteration:
            return
        except PermissionError:
            raise
        except Exception as error:  # ASE's readers raise errors of all types
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            raise ForgefieldError(
                f"{path}, frame {index}: it could not be read as {kind}; the file is damaged or truncated ({reason})"
            ) from error
        yield raw_from_atoms(atoms, str(path), index)
        index += 1
