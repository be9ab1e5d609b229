"""What is found out about a source is found out once, not for each of its parts, and again as soon as the source changes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import lmdb
import numpy as np
import pytest

from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import SourceFile, aselmdb, chunks, frame_count, frames_of, source_files
from forgefield.data.readers import lmdb_files as lmdb_files
from forgefield.data.readers.text import TextRows
from forgefield.data.store.convert import convert
from forgefield.data.store.store import Store
from forgefield.errors import ForgefieldError, SourceUnreadable

N = 20


def write_lmdb(path: Path, energies: list[int], *, subdir: bool = False) -> Path:
    """One frame an energy, under keys from 1 on, as pickles or as rows of an ASE database."""
    environment = lmdb.open(str(path), subdir=subdir, map_size=2**24, lock=False)
    with environment.begin(write=True) as transaction:
        for i, energy in enumerate(energies):
            sample = {"positions": [[0.0, 0, 0]], "numbers": [1], "energy": float(energy)}
            packed = path.suffix == ".aselmdb"
            value = zlib.compress(json.dumps(sample).encode()) if packed else pickle.dumps(sample)
            transaction.put(str(i + 1).encode(), value)
    environment.close()
    return path


def write_text_system(path: Path, energies: list[int]) -> Path:
    path.mkdir(exist_ok=True)
    for name in ("type", "type_map", "nopbc"):
        (path / (name if name == "nopbc" else f"{name}.raw")).write_text("H" if name == "type_map" else "0")
    np.savetxt(path / "coord.raw", np.zeros((len(energies), 3)))
    np.savetxt(path / "energy.raw", energies)
    return path


def write_store(path: Path, energies: list[int]) -> Path:
    source = path.with_suffix(".xyz")
    source.write_text("".join(f"1\nenergy={energy}\nH 0 0 0\n" for energy in energies))
    convert(str(source), path)
    return path


def energies_in_parts(path: Path) -> list[float | None]:
    """Read one frame at a time."""
    (file,) = source_files(path)
    parts = chunks(file, 1)
    assert len(parts) > 1
    reader = LabelReader(LabelOptions(), UnitOptions())
    return [frame.energy for part in parts for frame in frames_of(file, reader, UnitOptions(), *part)]


@pytest.mark.parametrize(
    ("name", "module", "subdir"),
    [("a.lmdb", lmdb_files, False), ("a.lmdb", lmdb_files, True), ("a.aselmdb", aselmdb, False)],
)
def test_keys_of_an_lmdb_are_listed_once(tmp_path, name, module, subdir):
    path = write_lmdb(tmp_path / name, list(range(N)), subdir=subdir)
    before = module._listed.cache_info()
    assert energies_in_parts(path) == list(range(N))
    after = module._listed.cache_info()
    assert after.misses - before.misses == 1
    assert after.hits - before.hits >= N
    status = os.stat(path / "data.mdb" if subdir else path)
    write_lmdb(path, list(range(100, 100 + N + 5)), subdir=subdir)
    os.utime(path / "data.mdb" if subdir else path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a coarse clock
    assert energies_in_parts(path) == list(range(100, 100 + N + 5))


def counted(monkeypatch, owner: type, name: str) -> list[object]:
    """One entry for each call of a method, which goes on to do its work."""
    calls: list[object] = []
    method = getattr(owner, name)

    def counting(self, *args, **options):
        calls.append(self)
        return method(self, *args, **options)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_text_arrays_are_gone_through_once(tmp_path, monkeypatch):
    path = write_text_system(tmp_path / "old", list(range(N)))
    calls = counted(monkeypatch, TextRows, "__init__")
    assert energies_in_parts(path) == list(range(N))
    assert len(calls) == 2  # coord and energy
    write_text_system(path, list(range(7)))
    assert energies_in_parts(path) == list(range(7))
    assert len(calls) == 4


def test_a_store_is_verified_once(tmp_path, monkeypatch):
    path = write_store(tmp_path / "store", list(range(N)))
    calls = counted(monkeypatch, Store, "verify")
    assert energies_in_parts(path) == list(range(N))
    assert len(calls) == 1
    shutil.rmtree(path)
    write_store(path, list(range(50, 57)))
    calls.clear()
    assert energies_in_parts(path) == list(range(50, 57))
    assert len(calls) == 1


def test_a_store_that_is_kept_open_is_closed_quietly(tmp_path):
    path = write_store(tmp_path / "store", [1, 2])
    code = f"from forgefield.data.readers import read_frames; print(len(read_frames({str(path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.parametrize("name", ["gone.xyz", "gone.npz", "gone.h5", "gone.lmdb", "gone.aselmdb"])
def test_a_source_that_cannot_be_read_is_distinguished_from_one_that_is_wrong(tmp_path, name):
    file = SourceFile(tmp_path / name)
    reader = LabelReader(LabelOptions(), UnitOptions())
    with pytest.raises(SourceUnreadable, match=rf"{name}: it could not be read \(No such file or directory\)"):
        list(frames_of(file, reader, UnitOptions()))
    with pytest.raises(SourceUnreadable, match=rf"{name}: it could not be read \(No such file or directory\)"):
        frame_count(file)
    (tmp_path / name).write_bytes(b"rubbish\n" * 100)
    with pytest.raises(ForgefieldError) as error:
        list(frames_of(file, reader, UnitOptions()))
    assert not isinstance(error.value, SourceUnreadable)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
@pytest.mark.parametrize(
    "name", ["a.xyz", "a.npz", "a.h5", "a.lmdb", "a.aselmdb", "old/coord.raw", "new/set.0/coord.npy"]
)
def test_no_permission_is_a_source_that_cannot_be_read(name):
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    write_text_system(folder / "old", [1])
    write_text_system(folder / "new", [1])
    (folder / "new" / "set.0").mkdir()
    np.save(folder / "new" / "set.0" / "coord.npy", np.zeros((1, 3)))
    if not (folder / name).exists():
        (folder / name).write_bytes(b"x")
    file = SourceFile(folder / name.partition("/")[0])
    (folder / name).chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # the administrator may read anything
        with pytest.raises(SourceUnreadable, match="no permission to"):
            list(frames_of(file, LabelReader(LabelOptions(), UnitOptions()), UnitOptions()))
        with pytest.raises(SourceUnreadable, match="no permission to"):
            frame_count(file)
    finally:
        os.seteuid(user)
        shutil.rmtree(folder)
