"""DeePMD-kit's LMDB files, as dpdata writes them (tests/fixtures/deepmd/make_lmdb.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import numpy as np
import pytest

from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError
from forgefield.untrusted.msgpack import unpack

FRAMES = Path(__file__).parents[2] / "fixtures" / "deepmd" / "frames.lmdb"
NAMED = {"path": str(FRAMES), "type_map": {"OW": "O", "HW": "H"}}


def changed(folder: Path, key: bytes, change) -> str:
    """A copy in which the record of one key is another."""
    path = shutil.copytree(FRAMES, folder / "changed.lmdb")
    with lmdb.open(str(path), map_size=2**20) as environment, environment.begin(write=True) as transaction:
        transaction.put(key, change(transaction.get(key)))
    return str(path)


def test_frames_are_those_that_were_written():
    water, cluster = np.random.default_rng(0), np.random.default_rng(1)
    frames = read_frames(NAMED)
    assert [frame.numbers.tolist() for frame in frames] == [[8, 1, 1], [8, 1, 1], [1, 8, 1, 1]]
    positions, energies = water.uniform(0, 6, (2, 3, 3)), water.normal(size=2)
    forces, virials = water.normal(size=(2, 3, 3)), water.normal(size=(2, 3, 3))
    for i, frame in enumerate(frames[:2]):
        assert frame.pbc.all()
        assert np.array_equal(frame.cell, 6 * np.eye(3))
        assert np.array_equal(frame.positions, positions[i])
        assert np.array_equal(frame.forces, forces[i])
        assert frame.energy == energies[i]
        np.testing.assert_allclose(frame.stress, -virials[i] / 216, rtol=0, atol=1e-14)
    assert not frames[2].pbc.any()
    assert np.array_equal(frames[2].positions, cluster.uniform(0, 6, (1, 4, 3))[0])
    assert frames[2].energy == cluster.normal(size=1)[0]
    assert frames[2].stress is None


def test_elements_are_asked_for_and_damage_is_named(tmp_path):
    with pytest.raises(
        ForgefieldError, match=r"frame 0: 'OW' in its type map is not a chemical element.*type_map: {OW: O}"
    ):
        read_frames(str(FRAMES))
    damaged = changed(tmp_path, b"000000000001", lambda record: record[:-1])
    with pytest.raises(ForgefieldError, match="frame 1: it is not a MessagePack record .it ends too early"):
        read_frames({**NAMED, "path": damaged})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x91" * 100 + b"\x00", "nested deeper"),
        (b"\xdd\xff\xff\xff\xff", "ends too early"),
        (b"\xc7\x01\x05\x00", "an extension"),
        (b"\x01\x02", "1 bytes follow"),
        (b"\xcb\x00", "ends too early"),
        (b"\x81\x90\x00", "has the key"),
    ],
)
def test_records_that_are_not_valid_are_refused(data, problem):
    with pytest.raises(ValueError, match=problem):
        unpack(data)


def test_a_record_is_what_was_packed():
    msgpack = pytest.importorskip("msgpack")
    value = {
        "a": [1, -1, -200, 2**40, -(2**40), 1.5, None, True, "é" * 40],
        "b": {"data": bytes(300), "x": list(range(70000))},
    }
    assert unpack(msgpack.packb(value)) == value
