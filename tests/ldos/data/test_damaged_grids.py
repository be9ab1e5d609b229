"""Cube files and .info.json files with headers that are wrong: refused with the name of the file, at once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.cube import read_grid_file
from forgefield.ldos.data.info import read_info
from forgefield.ldos.data.rows import open_rows

CUBE = ["a", "b", "1 0 0 0", "2 1 0 0", "1 0 1 0", "1 0 0 1", "4 0 0.1 0.2 0.3", "1.5 2.5"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (2, "99999999999 0 0 0"),
        (2, "-99999999999 0 0 0"),
        (3, "99999999999 1 0 0"),
        (3, "0 1 0 0"),
        (3, "2 nan 0 0"),
        (3, "2.5 1 0 0"),
        (6, "4 0 inf 0.2 0.3"),
        (6, "4.5 0 0.1 0.2 0.3"),
        (6, ""),
        (7, "1.5"),
    ],
)
def test_cube_headers(tmp_path, line, text):
    path = tmp_path / "a.cube"
    path.write_text("\n".join(CUBE) + "\n")
    assert read_grid_file(path).values.tolist() == [[[1.5]], [[2.5]]]
    path.write_text("\n".join([*CUBE[:line], text, *CUBE[line + 1 :]]) + "\n")
    with pytest.raises(ForgefieldError, match=r"a\.cube"):
        read_grid_file(path)


INFO = {
    "temperature": 300.0,
    "grid_dimensions": [4, 3, 5],
    "atoms": {"numbers": [4, 4], "positions": [[0, 0, 0], [1, 1, 1]], "cell": np.eye(3).tolist()},
}


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": float("nan")},
        {"temperature": "300"},
        {"temperature": True},
        {"grid_dimensions": [4.7, 3, 5]},
        {"grid_dimensions": [4, 3]},
        {"grid_dimensions": [-4, 3, 5]},
        {"grid_dimensions": 7},
        {"atoms": {**INFO["atoms"], "numbers": [4.7, 4]}},
        {"atoms": {**INFO["atoms"], "positions": [[0, 0, 0]]}},
        {"atoms": {**INFO["atoms"], "cell": [[1, 0, 0], [0, float("inf"), 0], [0, 0, 1]]}},
        {"atoms": []},
        {"pseudopotentials": 3},
    ],
)
def test_info_files(tmp_path, change):
    path = tmp_path / "a.info.json"
    path.write_text(json.dumps(INFO))
    assert read_info(path).grid_shape == (4, 3, 5)
    path.write_text(json.dumps({**INFO, **change}))
    with pytest.raises(ForgefieldError, match=r"a\.info\.json"):
        read_info(path)


@pytest.mark.parametrize("shape", [(10**12, 1, 1, 1), (-3, 4, 5, 2), (3, 4, 5, 1), (3, 4, 5, 3)])
def test_headers_of_arrays(tmp_path, shape):
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        file.write(bytes(8 * 3 * 4 * 5 * 2))
    with pytest.raises(ForgefieldError, match=r"a\.npy"):
        open_rows(tmp_path / "a.npy")
