"""Batches of frames that stay on a device are, bit for bit, those that are assembled on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.data.dataset import GraphDataset
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.plan import Budget
from forgefield.data.sampling.resident import ResidentFrames, memory_bytes, resident_frames
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from tests.support.mixed_frames import DATASET, SIZES, frames

CPU = torch.device("cpu")


def assert_same_batches(expected: FrameLoader, loader: FrameLoader) -> None:
    first, second = list(expected), list(loader)
    assert len(first) == len(second)
    for batch, other in zip(first, second):
        assert list(batch) == list(other)
        for key, tensor in batch.items():
            assert tensor.dtype == other[key].dtype, key
            assert other[key].is_contiguous(), key
            assert torch.equal(tensor.nan_to_num(nan=-7.0), other[key].nan_to_num(nan=-7.0)), key


@given(
    budget=st.one_of(
        st.integers(1, 20).map(lambda n: Budget("frames", n)),
        st.integers(9, 60).map(lambda n: Budget("atoms", n)),
        st.integers(1, 300).map(lambda n: Budget("edges", n, "alone")),
    ),
    ranks=st.integers(1, 5),
    epoch=st.integers(0, 3),
    window=st.sampled_from([1, 20_000, 2**30]),
    start=st.integers(0, len(SIZES)),
    keys=st.sampled_from([None, 3]),
)
@settings(max_examples=60, deadline=None)
def test_batches_equal_those_of_the_host(budget, ranks, epoch, window, start, keys):
    resident = ResidentFrames(DATASET, CPU, window_bytes=window)
    for rank in range(ranks):
        settings = {"shuffle": True, "seed": 5, "rank": rank, "world_size": ranks, "keys": keys}
        plain, kept = (FrameLoader(DATASET, budget, **settings) for _ in range(2))
        kept.resident = resident
        for loader in (plain, kept):
            loader.set_epoch(epoch)
            loader.start_at(start)
        assert_same_batches(plain, kept)
        for later in (1, 2, 5):  # the following epoch is arranged ahead, which must not matter for any other
            for loader in (plain, kept):
                loader.set_epoch(epoch + later)
                if later == 2:
                    loader.start_at(start)
            assert_same_batches(plain, kept)


def test_batches_that_are_the_same_in_every_epoch_are_arranged_once():
    plain, kept = FrameLoader(DATASET, 4), FrameLoader(DATASET, 4)
    kept.resident = ResidentFrames(DATASET, CPU)
    assert all(first["positions"] is again["positions"] for first, again in zip(list(kept), list(kept)))
    for loader in (plain, kept):
        loader.set_budget(Budget("frames", 6))
    assert_same_batches(plain, kept)


def test_lists_without_reverse_edges():
    from forgefield.data.neighbours.graph import GraphOptions

    dataset = GraphDataset(frames(SIZES), SpeciesTable(["Cu", "Au"]), GraphOptions(3.0, max_neighbours=2))
    plain, kept = FrameLoader(dataset, 4), FrameLoader(dataset, 4)
    kept.resident = ResidentFrames(dataset, CPU)
    assert "edge_reverse" not in next(iter(kept))
    assert_same_batches(plain, kept)


def test_memory_is_that_of_the_columns_and_of_the_batches():
    resident = ResidentFrames(DATASET, CPU)
    kept, arranged = memory_bytes(DATASET)
    assert kept == resident.n_bytes == sum(column.nbytes for column in resident._columns.values())
    assert arranged == sum(tensor.nbytes for tensor in DATASET.batch(np.arange(len(DATASET))).values())


def test_noise_is_added_on_the_host():
    from forgefield.data.batch import Noise

    loader = FrameLoader(DATASET, 4, noise=Noise(0.1, seed=1))
    loader.resident = ResidentFrames(DATASET, CPU)
    with pytest.raises(ValueError, match="noise"):
        next(iter(loader))


def test_where_frames_are_kept_and_why():
    assert isinstance(resident_frames(DATASET, CPU, "device", noisy=False), ResidentFrames)
    for keep in ("auto", "memory"):
        assert resident_frames(DATASET, CPU, keep, noisy=False) == "assembled on the host"
    with pytest.raises(ForgefieldError, match="data.keep=device: .* displaced at random"):
        resident_frames(DATASET, CPU, "device", noisy=True)
    built = GraphDataset(frames(SIZES), SpeciesTable(["Cu", "Au"]), 3.0, on_device=True)
    with pytest.raises(ForgefieldError, match="data.keep=device: .* neighbour lists are built for each batch"):
        resident_frames(built, CPU, "device", noisy=False)
