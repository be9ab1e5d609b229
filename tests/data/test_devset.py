"""A development set has every species, every composition if there is room, and the whole range of energies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.data.frame import Frame
from forgefield.data.options import DataOptions
from forgefield.data.splits import representative_rows, resolve_splits
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from tests.support.helpers import write_emt


def table(compositions: list[list[int]], energies: list[float | None]) -> FrameTable:
    return FrameTable.from_frames(
        Frame(np.arange(3.0 * len(z)).reshape(-1, 3), np.array(z), np.zeros((3, 3)), np.zeros(3, bool), energy, index=i)
        for i, (z, energy) in enumerate(zip(compositions, energies))
    )


COMPOSITIONS = st.lists(st.lists(st.sampled_from([1, 6, 8]), min_size=1, max_size=4), min_size=1, max_size=40)


@given(compositions=COMPOSITIONS, n=st.integers(1, 45), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_as_many_as_requested_and_every_kind_if_there_is_room(compositions, n, seed):
    energies = np.random.default_rng(seed).normal(size=len(compositions)).tolist()
    rows = representative_rows(table(compositions, energies), n)
    assert len(rows) == len(set(rows.tolist())) == min(n, len(compositions))
    assert (np.diff(rows) > 0).all()
    kinds = {tuple(sorted(z)) for z in compositions}
    chosen = {tuple(sorted(compositions[row])) for row in rows}
    if n >= len(kinds):
        assert chosen == kinds
    elif n >= 3:
        assert {z for kind in chosen for z in kind} == {z for kind in kinds for z in kind}


def test_frames_are_taken_over_the_whole_range_of_energies():
    energies = np.random.default_rng(0).permutation(100).astype(float)
    rows = representative_rows(table([[1, 1]] * 100, energies.tolist()), 10)
    assert sorted(energies[rows]) == [5.0 + 10 * i for i in range(10)]


def test_places_go_by_the_number_of_frames():
    rows = representative_rows(table([[1]] * 60 + [[8]] * 30 + [[6]] * 10, [0.0] * 100), 10)
    assert [int((rows < 60).sum()), int(((rows >= 60) & (rows < 90)).sum()), int((rows >= 90).sum())] == [6, 3, 1]


def test_data_without_energies_and_a_number_that_makes_no_sense():
    assert len(representative_rows(table([[1]] * 9, [None] * 9), 4)) == 4
    with pytest.raises(ForgefieldError, match="at least 1"):
        representative_rows(table([[1]], [0.0]), 0)


def test_training_on_a_development_set(tmp_path):
    write_emt(tmp_path / "frames.extxyz", 14)
    splits = resolve_splits(DataOptions(train=str(tmp_path / "frames.extxyz"), val=4, devset=5), seed=0)
    assert len(splits.train) == 5
    assert splits.description.startswith("5 of 10 (data.devset) to train")
    assert len(splits.val) == 4
