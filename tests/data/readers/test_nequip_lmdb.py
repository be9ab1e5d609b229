"""LMDB data sets of NequIP, written by NequIP 0.19.1 (tests/fixtures/nequip/make_lmdb.py)."""

import lzma
from pathlib import Path

import numpy as np
import pytest

from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers.matsciml import read_matsciml

FOLDER = Path(__file__).parents[2] / "fixtures/nequip"


@pytest.mark.parametrize("name", ["frames", "with_lists"])
def test_frames_are_those_that_nequip_wrote(name, tmp_path):
    path = tmp_path / f"{name}.lmdb"
    path.write_bytes(lzma.decompress((FOLDER / f"{name}.nequip.lmdb.xz").read_bytes()))
    reader = LabelReader(LabelOptions(), UnitOptions())
    frames = [reader.frame(raw) for raw in read_matsciml(path)]
    with np.load(FOLDER / "frames.npz") as expected:
        assert [frame.energy for frame in frames] == pytest.approx(list(expected["energy"]), abs=1e-14)
        assert [len(frame.numbers) for frame in frames] == list(expected["n_atoms"]) == [4, 4, 4, 3, 1]
        for key in ("positions", "forces"):
            np.testing.assert_allclose(
                np.concatenate([getattr(frame, key) for frame in frames]), expected[key], atol=1e-14
            )
        np.testing.assert_allclose([frame.stress for frame in frames[:3]], expected["stress"], atol=1e-14)
    assert all(frame.stress is None for frame in frames[3:])
    assert [bool(frame.pbc.all()) for frame in frames] == [True, True, True, False, False]
    assert not any(frame.pbc.any() for frame in frames[3:])
