"""Loaders of points: every point once, ranks together as one, resumed anywhere, in memory and from disk alike."""

from __future__ import annotations

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.ldos.data import PointLoader, StreamLoader, choose_location, load_points, split_points

BATCH = 20


@pytest.fixture(params=["memory", "disk", "memory, a share", "disk, a share"])
def make(request, table):
    """Makes a loader of the same points in the same way, whatever its further settings."""
    selection = split_points(len(table), {"val": 0.1}, 3)["train"] if "share" in request.param else None
    if "memory" in request.param:
        points = load_points(table)
        return lambda **more: PointLoader(points, BATCH, **{"selection": selection, "shuffle": True, "seed": 4, **more})
    return lambda **more: StreamLoader(
        table, BATCH, **{"selection": selection, "shuffle": True, "seed": 4, "window": 90, "blocks": 12, **more}
    )


def real(batch):
    """Rows of a batch that count; the inputs, targets and snapshots belong together."""
    assert torch.equal(batch["inputs"][:, 0], batch["targets"][:, 0])
    rows = batch["inputs"][:, 0].long()
    assert torch.equal(batch["snapshot"], torch.bucketize(rows, torch.tensor([120, 225, 353]), right=True))
    assert batch["inputs"].shape[1:] == (4,)
    assert batch["targets"].shape[1:] == (3,)
    assert all(batch[name].isfinite().all() for name in ("inputs", "targets"))
    return rows[batch["weight"] > 0]


def epoch_rows(loader, epoch):
    loader.set_epoch(epoch)
    return torch.cat([real(batch) for batch in loader])


def test_every_point_comes_once_in_an_order_fixed_by_seed_and_epoch(make):
    loader = make()
    first, second = epoch_rows(loader, 0), epoch_rows(loader, 1)
    assert len(first) == loader.draws
    assert torch.equal(first.sort().values, second.sort().values)
    assert len(first.unique()) == len(first)
    assert (first == second).float().mean() < 0.1
    assert torch.equal(epoch_rows(make(workers=2), 1), second)
    assert torch.equal(second, loader.order(0, loader.draws))
    assert not torch.equal(epoch_rows(make(seed=5), 1), second)


@pytest.mark.parametrize(("ranks", "sample"), [(2, 97), (3, 0), (4, 60)])
def test_ranks_together_see_what_one_rank_would_and_resume_anywhere(make, ranks, sample):
    order = make().order(0, make().draws, epoch=2)
    loaders = [make(rank=rank, world_size=ranks, pad=True) for rank in range(ranks)]
    for loader in loaders:
        loader.set_epoch(2)
        first = loader.start_at(sample)
    batches = [list(loader) for loader in loaders]
    assert {len(own) for own in batches} == {len(loaders[0]) - first}
    at = sample
    for number, step in enumerate(zip(*batches), start=first):
        stop = min(at + BATCH * ranks, len(order))
        assert (loaders[0].position(number), loaders[0].position(number + 1)) == (at, stop)
        assert all(len(batch["weight"]) == BATCH for batch in step)
        together = torch.cat([real(batch) for batch in step])
        assert torch.equal(together.sort().values, order[at:stop].sort().values)
        at = stop
    assert at == len(order)
    assert len(list(loaders[0])) == loaders[0].batches_in(2)  # only one iteration begins there


def test_a_resumed_epoch_is_the_rest_of_it_bit_for_bit(make):
    whole, resumed = make(), make()
    for loader in (whole, resumed):
        loader.set_epoch(1)
    iter(resumed)  # one that nobody asks takes nothing
    first = resumed.start_at(whole.position(7))
    assert first == 7
    assert len(resumed) == len(whole)
    for one, other in zip(list(whole)[7:], resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_short_batch_is_padded_only_on_request(make):
    short, padded = list(make())[-1], list(make(pad=True))[-1]
    n = len(short["weight"])
    assert 0 < n < BATCH
    assert len(padded["weight"]) == BATCH
    assert padded["weight"].sum() == n
    assert all(torch.equal(short[name], padded[name][:n]) for name in short)


def test_a_rank_without_a_point_keeps_step(make):
    loader = make(world_size=400, rank=399)
    (batch,) = list(loader)
    assert batch["weight"].tolist() == [0.0]


def test_points_come_as_they_lie_when_nothing_is_shuffled(make):
    loader = make(shuffle=False)
    rows = epoch_rows(loader, 3)
    assert (rows.diff() > 0).all()
    assert torch.equal(epoch_rows(loader, 5), rows)
    shared = [epoch_rows(make(shuffle=False, rank=rank, world_size=2), 0) for rank in range(2)]
    assert torch.equal(torch.stack([shared[0][:150], shared[1][:150]], dim=1).reshape(-1), rows[:300])


def test_ranks_read_their_own_blocks_only(table, monkeypatch):
    read = []
    whole = type(table).read_into

    def counted(self, start, inputs, targets):
        read.append(len(inputs))
        whole(self, start, inputs, targets)

    monkeypatch.setattr(type(table), "read_into", counted)
    loaders = [
        StreamLoader(table, BATCH, shuffle=True, window=90, blocks=12, rank=rank, world_size=4) for rank in range(4)
    ]
    rows = torch.cat([epoch_rows(loader, 0) for loader in loaders])
    assert sum(read) == len(rows) == len(table)
    read.clear()
    loaders[0].start_at(200)
    list(loaders[0])
    assert sum(read) < len(table) / 4 * 0.6  # what lies before the window is not read


def test_an_error_in_a_reading_thread_is_reported(table, folder):
    loader = StreamLoader(table, BATCH, shuffle=True)
    with (folder / "snap2.in.npy").open("r+b") as file:
        file.truncate(500)
    with pytest.raises(ForgefieldError, match=r"snap2\.in\.npy became shorter"):
        list(loader)


def test_the_fastest_place_that_holds_the_data_is_chosen(table):
    size = table.n_bytes()
    assert size == 353 * 7 * 4
    assert choose_location([table], torch.float32, on_device=2 * size, on_host=10 * size) == "device"
    assert choose_location([table, table], torch.float32, on_device=2 * size, on_host=10 * size) == "memory"
    assert choose_location([table], torch.float64, on_device=None, on_host=2 * size) == "disk"
    with pytest.raises(ForgefieldError, match=r"data\.batch\.points is 0"):
        PointLoader(load_points(table), 0)
