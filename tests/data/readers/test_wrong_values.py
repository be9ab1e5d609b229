"""Numbers that are not what they are called: refused with file, frame and reason, never rounded into something plausible."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest

from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError

GOOD: dict[str, Any] = {
    "numbers": np.array([29, 6]),
    "positions": np.array([[0.0, 0, 0], [0, 0, 1.5]]),
    "cell": 9 * np.eye(3),
    "pbc": np.array([True, True, True]),
    "energy": np.array(-1.5),
    "forces": np.zeros((2, 3)),
}


def write_npz(path: Path, values: dict[str, Any]) -> Path:
    per_frame = {name: np.asarray(value)[None] for name, value in values.items()}
    np.savez(path.with_suffix(".npz"), **{**per_frame, "numbers": values["numbers"]})
    return path.with_suffix(".npz")


def write_matsciml(path: Path, values: dict[str, Any]) -> Path:
    names = {"numbers": "atomic_numbers", "positions": "pos"}
    return _lmdb(path.with_suffix(".lmdb"), pickle.dumps({names.get(key, key): value for key, value in values.items()}))


def write_aselmdb(path: Path, values: dict[str, Any]) -> Path:
    def encoded(value: Any) -> Any:
        array = np.asarray(value)
        if array.dtype.kind == "c":
            return [{"__complex__": [x.real, x.imag]} for x in array.reshape(-1)]
        return {"__ndarray__": [array.shape, array.dtype.name, array.reshape(-1).tolist()]}

    row = {key: encoded(value) for key, value in values.items()}
    return _lmdb(path.with_suffix(".aselmdb"), zlib.compress(json.dumps(row).encode()), b"1")


def write_hdf5(path: Path, values: dict[str, Any]) -> Path:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for name, value in values.items():
            file[f"system/{name}"] = value
    return path.with_suffix(".h5")


def _lmdb(path: Path, value: bytes, key: bytes = b"0") -> Path:
    environment = lmdb.open(str(path), subdir=False, map_size=2**20, lock=False)
    with environment.begin(write=True) as transaction:
        transaction.put(key, value)
    environment.close()
    return path


WRITERS = {"npz": write_npz, "lmdb": write_matsciml, "aselmdb": write_aselmdb, "hdf5": write_hdf5}
BAD = {
    "fractional number": ("numbers", np.array([29.7, 6.0])),
    "number NaN": ("numbers", np.array([np.nan, 6.0])),
    "truth values as numbers": ("numbers", np.array([True, True])),
    "complex numbers": ("numbers", np.array([29 + 1j, 6])),
    "one number for all atoms": ("numbers", np.array(29)),
    "huge number": ("numbers", np.array([1e300, 6.0])),
    "complex positions": ("positions", GOOD["positions"] + 1j),
    "positions NaN": ("positions", GOOD["positions"] * np.nan),
    "truth values as positions": ("positions", GOOD["positions"] > 0),
    "positions of one atom": ("positions", np.zeros((1, 3))),
    "complex cell": ("cell", GOOD["cell"] + 1j),
    "cell of other shape": ("cell", np.ones((2, 3))),
    "half periodic": ("pbc", np.array([0.5, 1.0, 1.0])),
    "periodic NaN": ("pbc", np.array([np.nan, 1.0, 1.0])),
    "complex energy": ("energy", np.array(-1.5 + 1j)),
    "complex forces": ("forces", np.zeros((2, 3)) + 1j),
    "forces of one atom": ("forces", np.zeros((1, 3))),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_good_values_are_read_as_they_are(tmp_path, kind):
    (frame,) = read_frames(WRITERS[kind](tmp_path / "a", {**GOOD, "numbers": np.array([29.0, 6.0])}))
    assert frame.numbers.tolist() == [29, 6]
    assert frame.energy == -1.5
    assert np.array_equal(frame.positions, GOOD["positions"])
    assert frame.pbc.all()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("case", BAD)
def test_wrong_values_are_refused_by_name(tmp_path, kind, case):
    name, value = BAD[case]
    path = WRITERS[kind](tmp_path / "a", {**GOOD, name: value})
    with pytest.raises(ForgefieldError) as error:
        read_frames(path)
    assert path.name in str(error.value)


def test_the_message_names_frame_atom_and_value(tmp_path):
    path = write_npz(tmp_path / "a", {**GOOD, "numbers": np.array([29.0, 6.3])})
    with pytest.raises(
        ForgefieldError, match=r"a\.npz, frame 0: the atomic number of atom 1 is 6\.3, which is not an integer"
    ):
        read_frames(path)


@pytest.mark.parametrize("where", ["header", "values", "end"])
def test_bytes_inserted_into_an_array_file_are_noticed(tmp_path, where):
    folder = tmp_path / "system" / "set.000"
    folder.mkdir(parents=True)
    (tmp_path / "system" / "type.raw").write_text("0 0\n")
    (tmp_path / "system" / "type_map.raw").write_text("Cu\n")
    (tmp_path / "system" / "nopbc").touch()
    np.save(folder / "coord.npy", np.array([[0.0, 0, 0, 0, 0, 2.5]]))
    assert len(read_frames(tmp_path / "system")) == 1
    content = (folder / "coord.npy").read_bytes()
    place = {"header": 100, "values": 130, "end": len(content)}[where]
    (folder / "coord.npy").write_bytes(content[:place] + b" " * 8 + content[place:])
    with pytest.raises(ForgefieldError, match=r"coord\.npy is longer than its header says"):
        read_frames(tmp_path / "system")
