"""Splits are disjoint, fixed by the seed, and refuse to leak."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgefield.data.options import DataOptions
from forgefield.data.splits import parse_indices, resolve_splits, split_frames
from forgefield.errors import ForgefieldError


@pytest.fixture
def source(tmp_path):
    """20 frames of H2, frame i has energy i; and another file of 3."""
    for name, n in (("all.xyz", 20), ("other.xyz", 3)):
        (tmp_path / name).write_text("".join(f"2\nenergy={i}\nH 0 0 0\nH 0 0 {1 + i / 100}\n" for i in range(n)))
    return tmp_path / "all.xyz"


def energies(frames):
    return [int(frame.energy) for frame in frames]


@given(n=st.integers(3, 200), seed=st.integers(0, 2**31), val=st.floats(0.01, 0.4), test=st.integers(0, 1))
def test_random_parts_are_disjoint_complete_and_repeatable(n, seed, val, test):
    parts = split_frames(n, val, test, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert len(parts[1]) == max(1, round(val * n))
    assert len(parts[2]) == test
    for a, b in zip(parts, split_frames(n, val, test, seed)):
        np.testing.assert_array_equal(a, b)


def test_asking_for_a_test_set_does_not_change_validation():
    np.testing.assert_array_equal(split_frames(100, 10, 0, 5)[1], split_frames(100, 10, 20, 5)[1])


def test_the_seed_matters_and_split_seed_overrides_it(source):
    def val(seed, split_seed=None):
        return energies(resolve_splits(DataOptions(train=str(source), val=5, split_seed=split_seed), seed).val)

    assert val(0) != val(1)
    assert val(0, split_seed=1) == val(1)


def test_an_index_file_that_is_damaged_or_cannot_be_read_is_refused(source, tmp_path, monkeypatch):
    path = tmp_path / "rows.npy"
    np.save(path, np.array([3, 4]))
    options = DataOptions(train=str(source), val={"indices": str(path)})
    assert energies(resolve_splits(options, 0).val) == [3, 4]
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 8)
    with pytest.raises(ForgefieldError, match=r"data\.val\.indices: .*rows\.npy is longer than its header says"):
        resolve_splits(options, 0)
    path.write_bytes(content)

    def failing(*words):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(np, "memmap", failing)
    with pytest.raises(ForgefieldError, match=r"rows\.npy could not be read \(Input/output error\)"):
        resolve_splits(options, 0)


def test_index_lists_count_in_the_numbering_of_the_file(source, tmp_path):
    (tmp_path / "test.txt").write_text("15, 16\n3")
    options = DataOptions(
        train=str(source), indices="0:10", val={"indices": "-5:"}, test={"indices": str(tmp_path / "test.txt")}
    )
    with pytest.raises(ForgefieldError, match="frames in common"):
        resolve_splits(options, 0)
    options.val = {"indices": [19, 18]}
    splits = resolve_splits(options, 0)
    assert energies(splits.train) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert energies(splits.val) == [19, 18]
    assert energies(splits.test) == [15, 16, 3]


def test_shares_are_drawn_from_the_selected_pool(source):
    splits = resolve_splits(DataOptions(train=str(source), indices=[0, 2, 4, 6, 8], val=0.4, test=1), 3)
    assert sorted(energies(splits.train + splits.val + splits.test)) == [0, 2, 4, 6, 8]
    assert (len(splits.train), len(splits.val), len(splits.test)) == (2, 2, 1)


def test_validation_from_a_file(source):
    splits = resolve_splits(DataOptions(train=str(source), val=str(source.parent / "other.xyz")), 0)
    assert len(splits.train) == 20
    assert energies(splits.val) == [0, 1, 2]
    assert splits.description == "20 to train, 3 to val (files)"


def test_the_same_file_in_two_parts_is_a_leak(source):
    for val in (str(source), [str(source)], str(source.parent / "*.xyz"), {"path": str(source)}):
        with pytest.raises(ForgefieldError, match=r"is in data\.train and in data\.val"):
            resolve_splits(DataOptions(train=str(source), val=val), 0)


def test_the_same_file_in_two_parts_is_allowed_on_request(source):
    splits = resolve_splits(DataOptions(train=str(source), val=str(source), overlap="allow"), 0)
    assert energies(splits.train) == energies(splits.val) == list(range(20))


def test_single_atoms_stay_in_training(tmp_path):
    path = tmp_path / "a.xyz"
    pairs = "2\nenergy=0\nH 0 0 0\nO 0 0 1\n" * 4
    path.write_text("1\nenergy=1\nH 0 0 0\n1\nenergy=2\nO 0 0 0\n" + pairs)
    for seed in range(10):
        splits = resolve_splits(DataOptions(train=str(path), val=3), seed)
        assert [len(frame) for frame in splits.train] == [1, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val": 20}, "none is left to train on"),
        ({"val": 0.5, "test": 12}, "ask for 10 \\+ 12 of 20 frames"),
        ({"val": 1.5}, "neither a share below 1 nor a number of frames"),
        ({"val": -1}, "neither a share"),
        ({"val": True}, "must be a share below 1"),
        ({"val": {"indexes": [1]}}, r"data\.val\.indexes: .* data\.val: \{indices: \.\.\.\} selects"),
        ({"val": {"indices": [20]}}, r"data\.val\.indices names frame 20, but there are 20 frames"),
        ({"val": {"indices": [1, 1]}}, "names a frame twice"),
        ({"val": {"indices": "nowhere.txt"}}, r"data\.val\.indices: there is no file nowhere\.txt"),
        ({"indices": "5:x"}, "should read 'start:stop'"),
        ({"indices": "30:40"}, "selects none of the 20 frames"),
        ({"indices": [0.5]}, "must be a list of integers"),
        ({"val": {"indices": "0:20"}}, "no frame is left to train on"),
        ({"train": None}, r"data\.train is not set"),
    ],
)
def test_impossible_requests_are_refused(source, options, message):
    with pytest.raises(ForgefieldError, match=message):
        resolve_splits(DataOptions(**{"train": str(source), **options}), 0)


def test_index_files_of_numpy(tmp_path):
    np.save(tmp_path / "rows.npy", np.array([4, 2]))
    assert parse_indices(str(tmp_path / "rows.npy"), 5, "data.indices").tolist() == [4, 2]
    np.save(tmp_path / "rows.npy", np.array([0.5]))
    with pytest.raises(ForgefieldError, match="should hold one row of integers"):
        parse_indices(str(tmp_path / "rows.npy"), 5, "data.indices")
