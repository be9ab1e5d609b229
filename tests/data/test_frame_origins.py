"""Frames keep the file they came from and their index in it, through splits, sums of tables and stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ase import Atoms
from ase.io import write

from forgefield.data.options import DataOptions
from forgefield.data.reading import read_table
from forgefield.data.splits import resolve_splits
from forgefield.data.store.convert import convert
from forgefield.data.store.table import FrameTable


def _write(path, first, count):
    images = []
    for number in range(first, first + count):
        atoms = Atoms("Cu2", [[0, 0, 0], [0, 0, 2.2 + 0.01 * number]])
        atoms.info["energy"] = float(number)
        images.append(atoms)
    write(path, images, format="extxyz")


def _check(table: FrameTable, folder) -> None:
    """The energy of each frame says which frame of which file it is."""
    for row, energy in enumerate(table.column("energy").astype(int).tolist()):
        name, index = ("a.xyz", energy) if energy < 100 else ("b.xyz", energy - 100)
        assert table.origin(row) == (str(folder / name), index)
    assert table.origins(np.arange(len(table))) == [table.origin(row) for row in range(len(table))]


def test_origin_survives_splits_and_selections(tmp_path):
    _write(tmp_path / "a.xyz", 0, 7)
    _write(tmp_path / "b.xyz", 100, 6)
    splits = resolve_splits(DataOptions(train=str(tmp_path), val=0.3, test=2), seed=3)
    for part in (splits.train, splits.val, splits.test, splits.train + splits.val):
        _check(part, tmp_path)
    _check(splits.train.select(np.array([4, 0, 2])), tmp_path)


def test_a_store_remembers_the_files_it_was_made_from(tmp_path):
    _write(tmp_path / "a.xyz", 0, 7)
    _write(tmp_path / "b.xyz", 100, 6)
    convert([str(tmp_path / "a.xyz"), str(tmp_path / "b.xyz")], tmp_path / "store")
    _check(read_table(str(tmp_path / "store"))[::2], tmp_path)


def test_frames_made_in_memory_have_no_file(tmp_path):
    _write(tmp_path / "a.xyz", 0, 3)
    frame = read_table(str(tmp_path / "a.xyz"))[2]
    assert FrameTable.from_frames([replace(frame, source="", index=0)]).origin(0) == ("", 0)
