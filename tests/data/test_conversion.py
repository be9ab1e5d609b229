"""The functions behind `forgefield data` and `forgefield init`, as Python users call them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgefield import api
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.options import UnitOptions
from forgefield.data.store.store import open_store
from forgefield.errors import ForgefieldError
from tests.support.helpers import write_emt


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_emt(tmp_path / "cu.extxyz", 12)


def test_data_is_converted_to_a_store_and_to_a_file(source):
    written = api.convert_data("cu.extxyz", "store", graph=GraphOptions(3.0), workers=1)
    assert (written.path, written.n_frames) == (Path("store"), 12)
    assert written.n_bytes == open_store(Path("store")).n_bytes
    copied = api.convert_data(["store"], "copy.extxyz")
    assert (copied.n_frames, copied.n_atoms) == (12, written.n_atoms)
    assert str(copied).startswith(f"copy.extxyz: 12 frames, {written.n_atoms} atoms, ")


def test_options_that_would_be_ignored_are_errors(source):
    api.convert_data("cu.extxyz", "store", workers=1)
    with pytest.raises(ForgefieldError, match=r"data\.units\.energy=Ha does not apply to a store"):
        api.convert_data("store", "other", units=UnitOptions(energy="Ha"))
    with pytest.raises(ForgefieldError, match="only a store can"):
        api.sample_data("store", 3, "some.extxyz", graph=GraphOptions(3.0))
    with pytest.raises(ForgefieldError, match="workers applies to stores"):
        api.convert_data("store", "other.extxyz", workers=2)
    assert not Path("other").exists()


def test_a_sample_lists_its_frames(source):
    sample = api.sample_data("cu.extxyz", 3, "three.extxyz")
    assert len(sample.frames) == sample.written.n_frames == 3
    assert str(sample).splitlines()[0] == "3 of 12 frames"
    assert api.inspect_data("three.extxyz").inspection.n_frames == 3


def test_a_config_is_proposed_for_data(source):
    path, facts = api.propose_config(["cu.extxyz"], ["training.lr=0.002"])
    assert (path, facts.n_frames) == (Path("cu.yaml"), 12)
    assert "lr: 0.002" in path.read_text()
    with pytest.raises(ForgefieldError, match=r"cu\.yaml exists already"):
        api.propose_config(["cu.extxyz"])
