"""Shuffled snapshot files: every point of some snapshots exactly once, in random order, in any number of files of equal size.

The order is a computed permutation that depends on the seed only, not on the memory. Source files are read once, front to back.
If everything fits into memory, it is sorted there and written once; otherwise rows are appended to chunks of the new files, and
each chunk is then sorted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.info import SnapshotInfo
from forgefield.ldos.data.permutation import Permutation, positions_tensor
from forgefield.ldos.data.table import PointTable
from forgefield.ldos.data.units import STANDARD

READ_ROWS = 16384
MEMORY = 4 << 30
"""Approximate memory in bytes."""
MAX_CHUNKS = 4096

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Chunk:
    """Rows of a new file that are sorted together. first: position in the new order; at: row in the file."""

    file: int
    first: int
    at: int
    n: int


def shuffle_snapshots(
    table: PointTable,
    folder: Path,
    *,
    files: int,
    seed: int = 0,
    name: str = "shuffled",
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> list[Path]:
    """Write `files` snapshots (NAME0.in.npy, NAME0.out.npy, NAME0.info.json, ...) to a new folder; returns their inputs.

    Values are written without coordinates, targets in the standard unit, in float64 if any file is.
    """
    _refuse(table, folder, files)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _Shuffle(table, partial, files, seed, name, memory).run(progress or (lambda done, total: None))
        os.replace(partial, folder)
    except OSError as error:
        raise ForgefieldError(f"Could not write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [folder / f"{name}{number}.in.npy" for number in range(files)]


def _refuse(table: PointTable, folder: Path, files: int) -> None:
    if folder.exists():
        raise ForgefieldError(f"{folder} exists already; delete it or choose another name")
    if not 1 <= files <= table.n_points:
        raise ForgefieldError(
            f"{files} files cannot be written from {table.n_points} points; use 1 to {table.n_points}"
        )
    if not (table.n_inputs and table.n_targets):
        raise ForgefieldError("shuffled files contain inputs and targets; these snapshots lack one of them")


class _Shuffle:
    def __init__(self, table: PointTable, folder: Path, files: int, seed: int, name: str, memory: int) -> None:
        self.table, self.folder, self.name, self.seed = table, folder, name, seed
        self.n = table.n_points
        self.source = Permutation(self.n, seed)
        """Source row at each position of the new order."""
        self.sizes = [self.n // files + (number < self.n % files) for number in range(files)]
        self.dtypes = [
            np.result_type(*(file.dtype for file in group if file is not None)).newbyteorder("=")
            for group in ([s.inputs for s in table.snapshots], [s.targets for s in table.snapshots])
        ]
        row_bytes = table.n_inputs * self.dtypes[0].itemsize + table.n_targets * self.dtypes[1].itemsize
        # Sorting a chunk needs memory for a second copy of it.
        self.in_memory = (self.n + max(self.sizes)) * row_bytes <= memory
        self.chunks = self._divide(max(self.sizes) if self.in_memory else max(1, memory // (2 * row_bytes)))
        if len(self.chunks) > max(MAX_CHUNKS, files):
            raise ForgefieldError(
                f"with {memory / 2**30:.3g} GB of memory the files would be written in {len(self.chunks)} chunks; allow more "
                "memory"
            )

    def _divide(self, most: int) -> list[_Chunk]:
        chunks, first = [], 0
        for file, size in enumerate(self.sizes):
            n_chunks = -(-size // most)
            bounds = [size * k // n_chunks for k in range(n_chunks + 1)]
            chunks += [_Chunk(file, first + low, low, high - low) for low, high in pairwise(bounds)]
            first += size
        return chunks

    def run(self, progress: Progress) -> None:
        arrays = self._memory() if self.in_memory else self._files()
        filled = np.zeros(len(self.chunks), dtype=np.int64)
        firsts = np.array([chunk.first for chunk in self.chunks])
        for start in range(0, self.n, READ_ROWS):
            stop = min(start + READ_ROWS, self.n)
            blocks = [
                np.empty((stop - start, columns), dtype)
                for columns, dtype in zip((self.table.n_inputs, self.table.n_targets), self.dtypes)
            ]
            self.table.read_into(start, *blocks)
            position = self.source.inverse(positions_tensor(start, stop)).numpy()
            chunk_of = np.searchsorted(firsts, position, side="right") - 1
            self._deal(blocks, chunk_of, arrays, filled)
            progress(stop, self.n)
        for number, chunk in enumerate(self.chunks):
            assert filled[number] == chunk.n
            self._put_in_order(chunk, arrays[chunk.file])
        self._write(arrays)

    def _deal(
        self, blocks: list[np.ndarray], chunk_of: np.ndarray, arrays: list[list[np.ndarray]], filled: np.ndarray
    ) -> None:
        """Append each row of a block to its chunk, in the order of reading."""
        order = np.argsort(chunk_of, kind="stable")
        counts = np.bincount(chunk_of, minlength=len(self.chunks))
        sorted_blocks = [block[order] for block in blocks]
        end = 0
        for number in np.flatnonzero(counts):
            chunk, begin, end = self.chunks[number], end, end + counts[number]
            at = chunk.at + filled[number]
            for array, rows in zip(arrays[chunk.file], sorted_blocks):
                array[at : at + end - begin] = rows[begin:end]
            filled[number] += end - begin

    def _put_in_order(self, chunk: _Chunk, arrays: list[np.ndarray]) -> None:
        """Sort the rows of a chunk, which were appended in ascending order of their source rows."""
        sources = self.source(positions_tensor(chunk.first, chunk.first + chunk.n))
        arrival = torch.empty_like(sources)
        arrival[sources.argsort()] = torch.arange(chunk.n)
        for array in arrays:
            rows = array[chunk.at : chunk.at + chunk.n]
            rows[...] = rows[arrival.numpy()]

    def _paths(self, file: int) -> list[Path]:
        return [self.folder / f"{self.name}{file}.{middle}.npy" for middle in ("in", "out")]

    def _shapes(self, file: int) -> list[tuple[int, int]]:
        return [(self.sizes[file], columns) for columns in (self.table.n_inputs, self.table.n_targets)]

    def _memory(self) -> list[list[np.ndarray]]:
        return [
            [np.empty(shape, dtype) for shape, dtype in zip(self._shapes(file), self.dtypes)]
            for file in range(len(self.sizes))
        ]

    def _files(self) -> list[list[np.ndarray]]:
        return [
            [
                np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
                for path, shape, dtype in zip(self._paths(file), self._shapes(file), self.dtypes)
            ]
            for file in range(len(self.sizes))
        ]

    def _write(self, arrays: list[list[np.ndarray]]) -> None:
        target = self.table.snapshots[0].target
        info = SnapshotInfo(coordinates=False, units=STANDARD[target]).to_json()
        info |= {"shuffled_from": [snapshot.name for snapshot in self.table.snapshots], "seed": self.seed}
        for file, of_file in enumerate(arrays):
            for path, array in zip(self._paths(file), of_file):
                if isinstance(array, np.memmap):
                    array.flush()
                else:
                    np.save(path, array)
            text = json.dumps({**info, "file": file, "files": len(arrays)}, indent=1)
            (self.folder / f"{self.name}{file}.info.json").write_text(text)
