"""Neighbour lists made on the accelerator are those of the host to the last edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.test_graph_batched import as_tensors, assert_same_edges, random_frame

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
    from forgefield.ops.neighbours import batched_neighbours

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
