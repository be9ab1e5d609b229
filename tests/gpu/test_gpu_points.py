"""Points on a GPU: the same order, the same batches as on the CPU, from device memory and through the pinned ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.ldos.data import PointLoader, PointTable, StreamLoader, find_snapshots, load_points, split_points
from forgefield.ldos.data.permutation import Permutation
from tests.support.numbered_snapshots import write_snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def table(tmp_path) -> PointTable:
    first = 0
    for number, shape in enumerate([(14, 15, 16), (13, 17, 15), (18, 14, 14)]):
        write_snapshot(tmp_path, f"snap{number}", shape, first)
        first += int(np.prod(shape))
    return PointTable(find_snapshots(str(tmp_path)))


def assert_same(on_gpu, on_cpu):
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert all(one[name].is_cuda for name in one)
        assert all(torch.equal(one[name].cpu(), other[name]) for name in other)


@pytest.mark.parametrize("n", [1, 1000, 99_999, 8_000_000, 2**49 + 7])
def test_permutations_and_splits_agree_to_the_last_bit(n):
    places = torch.randint(0, n, (50_000,), generator=torch.Generator().manual_seed(n % 1000))
    permutation, stream = Permutation(n, 5, 3), places % 77
    assert torch.equal(permutation(places.cuda()).cpu(), permutation(places))
    assert torch.equal(permutation(places.cuda(), stream.cuda()).cpu(), permutation(places, stream))
    assert torch.equal(permutation.inverse(places.cuda()).cpu(), permutation.inverse(places))
    if 1 < n < 2**40:
        for part in split_points(n, {"val": 0.1}, 1).values():
            some = places % part.n
            assert torch.equal(part.rows(some.cuda()).cpu(), part.rows(some))


@pytest.mark.parametrize("share", [False, True])
def test_batches_from_the_device_are_those_of_the_host(table, share):
    chosen = split_points(len(table), {"val": 0.1}, 2)["train"] if share else None
    common = {"selection": chosen, "shuffle": True, "seed": 3, "pad": True, "rank": 1, "world_size": 3}
    loaders = [PointLoader(load_points(table, device=device), 100, **common) for device in ("cuda", "cpu")]
    for loader in loaders:
        loader.set_epoch(2)
        loader.start_at(450)
    assert_same(*loaders)


@pytest.mark.parametrize("share", [False, True])
def test_streamed_batches_are_those_of_the_host(table, share):
    chosen = split_points(len(table), {"val": 0.1}, 2)["train"] if share else None
    common = {"selection": chosen, "shuffle": True, "seed": 3, "window": 900, "blocks": 30, "workers": 3}
    loaders = [StreamLoader(table, 64, device=device, **common) for device in ("cuda", "cpu")]
    for epoch in range(3):
        for loader in loaders:
            loader.set_epoch(epoch)
        assert_same(*loaders)


def test_windows_are_not_overwritten_while_they_are_used(table):
    """The device is kept busy so that it lags behind the reading threads; every batch must still be intact."""
    loader = StreamLoader(table, 64, device="cuda", shuffle=True, window=300, blocks=10, workers=4)
    weights, sums = torch.randn(2000, 2000, device="cuda"), []
    for batch in loader:
        for _ in range(4):
            weights = torch.tanh(weights @ weights)
        sums.append((batch["inputs"][:, 0] - batch["targets"][:, 0]).abs().sum() + 0 * weights.sum())
    assert torch.stack(sums).sum().item() == 0


def test_batches_of_the_host_are_pinned_when_asked(table):
    loaders = [
        PointLoader(load_points(table), 100, shuffle=True, pin=True, workers=2),
        PointLoader(load_points(table), 100, pin=True),
        StreamLoader(table, 100, shuffle=True, pin=True, window=900, blocks=30),
    ]
    for loader in loaders:
        assert all(tensor.is_pinned() for batch in loader for tensor in batch.values())
