"""LMDB files that are truncated or damaged: every one is refused with a sentence or read exactly; no process ever crashes."""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from pathlib import Path

import lmdb
import numpy as np
import pytest

from forgefield.data.readers import frame_count, read_frames, source_files
from forgefield.data.readers.lmdb_files import open_lmdb
from forgefield.errors import ForgefieldError

N = 40


def sample(i: int) -> bytes:
    n = 5 if i % 2 else 300  # values within leaf pages and on pages of their own
    rng = np.random.default_rng(i)
    return pickle.dumps(
        {"pos": 9 * rng.random((n, 3)), "atomic_numbers": np.full(n, 6), "energy": float(i), "cell": 20 * np.eye(3)}
    )


def row(i: int) -> bytes:
    content = {
        "numbers": {"__ndarray__": [[1], "int64", [6]]},
        "positions": {"__ndarray__": [[1, 3], "float64", [0.1 * i, 0, 0]]},
        "cell": {"__ndarray__": [[3, 3], "float64", list(np.eye(3).reshape(-1) * 9)]},
        "pbc": {"__ndarray__": [[3], "bool", [True] * 3]},
        "energy": float(i),
        "data": {"padding": np.random.default_rng(i).random(100 if i % 2 else 600).tolist()},
    }
    return zlib.compress(json.dumps(content).encode())


def write(path: Path, values: dict[bytes, bytes], *, subdir: bool = False) -> Path:
    environment = lmdb.open(str(path), subdir=subdir, map_size=2**26, lock=False)
    with environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)
    environment.close()
    return path


def written(path: Path) -> Path:
    if path.suffix == ".aselmdb":
        rows = {str(i + 1).encode(): row(i) for i in range(N)}
        return write(path, {**rows, b"nextid": zlib.compress(str(N + 1).encode())})
    return write(path, {str(i).encode(): sample(i) for i in range(N)})


def outcome(path: Path) -> list[float | None] | str:
    """Energies of all frames, or the message of the error."""
    try:
        (file,) = source_files(path)
        frames = read_frames(path)
        assert frame_count(file) == len(frames)
        return [frame.energy for frame in frames]
    except ForgefieldError as error:
        return str(error)


@pytest.mark.parametrize("name", ["a.lmdb", "a.aselmdb"])
def test_truncated_files_are_refused_at_every_length(tmp_path, name):
    content = written(tmp_path / name).read_bytes()
    assert outcome(tmp_path / name) == [float(i) for i in range(N)]
    cut = tmp_path / f"cut{Path(name).suffix}"
    lengths = [*range(1, len(content), len(content) // 100), *(len(content) - n for n in (1, 4095, 4096, 4097))]
    for length in lengths:
        cut.write_bytes(content[:length])
        assert f"{cut.name}: " in str(outcome(cut)), length


@pytest.mark.parametrize("name", ["a.lmdb", "a.aselmdb"])
def test_damaged_pages_are_refused_or_read_exactly(tmp_path, name):
    """LMDB has no checksums: a changed number in a value cannot be noticed, but no frame may be lost or moved."""
    content = written(tmp_path / name).read_bytes()
    rng = np.random.default_rng(7)
    bad, refused = tmp_path / f"bad{Path(name).suffix}", 0
    for _ in range(300):
        damaged = bytearray(content)
        page = int(rng.integers(len(content) // 4096)) * 4096
        for offset in rng.integers(0, 48, size=2):  # headers, lists of nodes, descriptions of trees
            damaged[page + offset] ^= 1 << int(rng.integers(8))
        bad.write_bytes(damaged)
        found = outcome(bad)
        refused += isinstance(found, str)
        assert isinstance(found, str) or len(found) == N
    assert refused > 50


def test_pages_that_refer_to_themselves_end(tmp_path):
    path = write(tmp_path / "a.lmdb", {str(i).encode(): sample(1) for i in range(200)})
    data = bytearray(path.read_bytes())
    branches = [page for page in range(2, len(data) // 4096) if data[page * 4096 + 10] & 1]
    assert branches
    (node,) = struct.unpack_from("<H", data, branches[-1] * 4096 + 16)
    struct.pack_into("<H", data, branches[-1] * 4096 + node, branches[-1])
    path.write_bytes(data)
    with pytest.raises(ForgefieldError, match=r"a\.lmdb: the LMDB file is damaged"):
        read_frames(path)


@pytest.mark.parametrize("subdir", [False, True])
def test_every_value_is_that_of_the_lmdb_library(tmp_path, subdir):
    rng = np.random.default_rng(3)
    values = {str(i).encode(): rng.bytes(int(size)) for i, size in enumerate(rng.integers(0, 9000, size=500))}
    path = write(tmp_path / "a.lmdb", {**values, b"length": b"500"}, subdir=subdir)
    environment = lmdb.open(str(path), subdir=subdir, map_size=2**26, lock=False)
    with environment.begin(write=True) as transaction:  # leaves free pages and a second state behind
        for i in range(0, 500, 3):
            transaction.delete(str(i).encode())
            del values[str(i).encode()]
        transaction.put(b"7", b"new")
    environment.close()
    values[b"7"] = b"new"
    with open_lmdb(path) as file:
        assert {key: file.value(i) for i, key in enumerate(file.keys.tolist())} == values
        assert file.keys.tolist() == sorted(values, key=int)
        assert file.other(b"length") == b"500"
        assert file.other(b"metadata") is None


def test_nothing_is_written_next_to_the_file(tmp_path):
    path = written(tmp_path / "a.lmdb")
    path.chmod(0o444)
    read_frames(path)
    assert [item.name for item in tmp_path.iterdir()] == ["a.lmdb"]
