"""Neighbour lists made on the accelerator are those of the host to the last edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.data.batch import to_device, with_edges
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.species import SpeciesTable
from tests.support.batched_edges import as_tensors, assert_same_edges, random_frame

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PERIODICITIES = [(bool(k & 4), bool(k & 2), bool(k & 1)) for k in range(8)]


@pytest.mark.parametrize("seed", range(8))
def test_mixed_batches_have_the_edges_of_the_host(seed):
    rng = np.random.default_rng(seed)
    frames = [
        random_frame(rng, int(rng.integers(1, 40)), pbc, skew, size, bool(rng.integers(2)), spread)
        for pbc in PERIODICITIES
        for skew, size, spread in ((0.0, 3.0, 0.0), (0.5, 5.0, 1.0), (0.2, 12.0, 30.0))
    ]
    for cutoff, candidates in ((3.0, 2**22), (4.5, 1000)):
        assert assert_same_edges(frames, cutoff, "cuda", candidates=candidates) > 1000


def test_pairs_at_the_very_cutoff_are_in_or_out_as_on_the_host():
    """Simple cubic lattices: every shell is at a distance that the cutoff is set to, in cells that round differently."""
    grid = np.stack(np.meshgrid(*[np.arange(4.0)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    rng = np.random.default_rng(0)
    for constant in rng.uniform(1.5, 3.5, 20):
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        frame = constant * grid @ turn, 4 * constant * turn, np.full(3, True)
        for shell in (1.0, 2.0, 3.0, 4.0):
            assert_same_edges([frame], float(constant * shell**0.5), "cuda")


def test_memory_is_bounded_by_the_number_of_candidates_at_a_time():
    from forgefield.ops.neighbour_lists import batched_neighbours

    rng = np.random.default_rng(1)
    arguments = as_tensors([(rng.uniform(0, 40, (6400, 3)), 40 * np.eye(3), np.full(3, True))], "cuda")
    peaks = []
    for candidates in (2**18, 2**24):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        edges = batched_neighbours(*arguments, 5.0, candidates=candidates)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert edges[0].shape[1] > 200_000
        del edges
    assert peaks[0] < 0.5 * peaks[1]


@pytest.mark.parametrize("neighbours", ["auto", "device"])
def test_batches_arrive_whole_whoever_prepares_them(neighbours, tmp_path):
    """Prepared ahead by threads, through pinned memory, edges from the host or made here: the numbers of a plain loader."""
    frames = [
        Frame(
            *random_frame(np.random.default_rng(i), 5 + i % 7, (True, True, i % 2 == 0), 0.2, 6.0, False, 0.0)[:1],
            np.full(5 + i % 7, 29),
            6.0 * np.eye(3),
            np.array([True, True, i % 2 == 0]),
            float(i),
        )
        for i in range(40)
    ]
    species = SpeciesTable(["Cu"])
    plain = FrameLoader(GraphDataset(frames, species, 4.0), 6, shuffle=True)
    dataset = GraphDataset(frames, species, 4.0, on_device=neighbours == "device")
    ahead = FrameLoader(dataset, 6, shuffle=True, workers=3, pin=True)
    for expected, batch in zip(plain, ahead, strict=True):
        assert all(tensor.is_pinned() for tensor in batch.values())
        here = with_edges(to_device(batch, "cuda"), 4.0)
        for key, value in expected.items():
            torch.testing.assert_close(here[key].cpu(), value, rtol=0, atol=0, equal_nan=True)
