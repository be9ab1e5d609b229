"""Batches hold exactly their frames, whoever their batch mates are; loaders repeat, resume and clean up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgefield.data.batch import batch_from_frames, repeated, to_device
from forgefield.data.dataset import GraphDataset
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.order import epoch_permutation
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from tests.support.collating import collate

SPECIES = SpeciesTable(["H", "O", "Cu"])


@pytest.fixture
def dataset(make_frame):
    rng = np.random.default_rng(0)
    frames = [
        make_frame([8, 1, 1], energy=1.0, forces=rng.normal(size=(3, 3))),
        make_frame([1], energy=None, forces=None),  # no neighbours, no labels
        make_frame([29, 29], energy=2.0, forces=None, stress=np.eye(3), cell=3 * np.eye(3), pbc=True, weight=2.5),
        make_frame([8, 8, 1, 29], energy=4.0),
        make_frame([1, 1], energy=5.0),
    ]
    return GraphDataset(frames, SPECIES, 4.0)


def edge_lengths(batch):
    j, i = batch["edge_index"]
    images = torch.einsum("es,esd->ed", batch["edge_shift"], batch["cell"][batch["frame"][i]])
    return (batch["positions"][j] + images - batch["positions"][i]).norm(dim=1)


def assert_same(one, other):
    assert set(one) == set(other)
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=0, atol=0, equal_nan=True)
        assert other[key].dtype == value.dtype


@given(rows=st.lists(st.integers(0, 4), min_size=1, max_size=9))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_from_columns_equals_the_frames_put_together_one_by_one(dataset, rows):
    assert_same(dataset.batch(rows), collate([dataset[i] for i in rows]))


def test_a_batch_is_its_frames_one_after_the_other(dataset):
    batch = dataset.batch(range(5))
    assert batch["n_atoms"].tolist() == [3, 1, 2, 4, 2]
    assert batch["frame"].tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 4]
    assert batch["species"].tolist() == [1, 0, 0, 0, 2, 2, 1, 1, 0, 2, 0, 0]
    assert batch["frame_id"].tolist() == [0, 1, 2, 3, 4]
    assert batch["weight"].tolist() == [1.0, 1.0, 2.5, 1.0, 1.0]
    j, i = batch["edge_index"]
    assert (i.diff() >= 0).all()
    assert (batch["frame"][i] == batch["frame"][j]).all()
    expected = torch.cat([edge_lengths(dataset[k]) for k in range(5)])
    torch.testing.assert_close(edge_lengths(batch), expected, rtol=0, atol=1e-14)
    assert (expected <= 4.0).all()
    assert len(expected) == dataset.n_edges.sum()
    assert {k: v.dtype for k, v in batch.items() if not v.is_floating_point()} == dict.fromkeys(
        ("species", "frame", "n_atoms", "edge_index", "edge_reverse", "frame_id"), torch.int64
    ) | {"pbc": torch.bool}
    assert all(v.dtype == torch.float64 for v in batch.values() if v.is_floating_point())


def test_a_repeated_batch_is_that_of_repeated_frames(dataset):
    assert_same(repeated(dataset.batch([2, 0]), 3), dataset.batch([2, 0, 2, 0, 2, 0]))


def test_a_missing_label_is_nan_and_never_zero(dataset):
    batch = dataset.batch(range(5))
    assert torch.isnan(batch["energy"]).tolist() == [False, True, False, False, False]
    assert torch.isnan(batch["forces"]).all(1).tolist() == [False] * 3 + [True] * 3 + [False] * 6
    assert torch.isnan(batch["stress"]).flatten(1).all(1).tolist() == [True, True, False, True, True]


def test_changing_a_batch_leaves_the_data_alone(dataset):
    before = [{k: v.clone() for k, v in dataset[i].items()} for i in range(5)]
    for rows in ([4, 0, 4], [2]):
        for value in dataset.batch(rows).values():
            value.zero_()
    for i, sample in enumerate(before):
        assert_same(sample, dataset[i])


def test_frames_straight_to_a_batch_equal_the_dataset(dataset):
    assert_same(to_device(batch_from_frames(list(dataset.frames), SPECIES, 4.0), "cpu"), dataset.batch(range(5)))


def test_neighbour_lists_are_built_once_and_progress_is_reported(dataset):
    calls = []
    many = dataset.frames.select(np.arange(200) % 5)
    GraphDataset(many, SPECIES, 4.0, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (200, 200)
    assert len(calls) > 1
    assert calls == sorted(calls)


def test_unknown_elements_and_coinciding_atoms_name_the_frame(make_frame):
    gold = make_frame([79, 1], source="gold.xyz", index=3)
    with pytest.raises(ForgefieldError, match=r"gold\.xyz, frame 3: it contains Au.*\(H, O, Cu\)"):
        GraphDataset([gold], SPECIES, 4.0)
    twice = make_frame([1, 1, 8], positions=[[0, 0, 0], [0, 0, 1], [0, 0, 1]], source="a.xyz", index=1)
    with pytest.raises(ForgefieldError, match=r"a\.xyz, frame 1: atoms 1 and 2 are at the same place"):
        GraphDataset([twice], SPECIES, 4.0)


def test_species_tables_refuse_nonsense():
    with pytest.raises(ForgefieldError, match=r"'Xx'.*not a chemical element"):
        SpeciesTable(["Xx"])
    with pytest.raises(ForgefieldError, match="twice"):
        SpeciesTable(["H", "H"])
    assert SPECIES.index(np.array([29, 1, 8])).tolist() == [2, 0, 1]


@given(n=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
def test_an_epoch_holds_every_frame_once_in_an_order_of_its_own(n, seed, epoch):
    order = epoch_permutation(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    np.testing.assert_array_equal(order, epoch_permutation(n, seed, epoch))
    if n > 30:
        assert (order != epoch_permutation(n, seed, epoch + 1)).any()
        assert (order != epoch_permutation(n, seed + 1, epoch)).any()


def test_the_order_never_changes_between_versions():
    assert epoch_permutation(8, 1, 2).tolist() == [7, 1, 3, 0, 4, 2, 6, 5]


def ids(loader):
    return [batch["frame_id"].tolist() for batch in loader]


def test_loader_serves_the_permutation_in_batches(dataset):
    loader = FrameLoader(dataset, 2, shuffle=True, seed=4)
    loader.set_epoch(3)
    order = epoch_permutation(5, 4, 3).tolist()
    assert ids(loader) == [order[:2], order[2:4], order[4:]]
    assert len(loader) == 3
    assert ids(FrameLoader(dataset, 5)) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_starting_inside_an_epoch_gives_the_rest_of_it_once(dataset, start):
    loader = FrameLoader(dataset, 2, shuffle=True, seed=4)
    whole = ids(loader)
    assert loader.start_at(min(2 * start, 5)) == start
    assert ids(loader) == whole[start:]
    assert ids(loader) == whole
    with pytest.raises(ValueError, match="cannot start after frame 6"):
        loader.start_at(6)


def frames_of(batches) -> list[int]:
    return [i for batch in batches for i in batch if i >= 0]


@given(frames=st.integers(1, 3), world_size=st.integers(1, 7), epoch=st.integers(0, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranks_together_see_what_one_rank_with_the_larger_batch_sees(dataset, frames, world_size, epoch):
    alone = FrameLoader(dataset, frames * world_size, shuffle=True, seed=4)
    loaders = [
        FrameLoader(dataset, frames, shuffle=True, seed=4, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for loader in (alone, *loaders):
        loader.set_epoch(epoch)
    shares = [ids(loader) for loader in loaders]
    assert {len(share) for share in shares} == {len(alone)} == {len(loader) for loader in loaders}
    for step, expected in enumerate(ids(alone)):
        assert sorted(frames_of(share[step] for share in shares)) == sorted(expected)
        counts = [len(frames_of([share[step]])) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert counts == [loader.own_frames(step) for loader in loaders]


@given(before=st.integers(1, 4), after=st.integers(1, 4), frames=st.integers(1, 2), stop=st.integers(0, 5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_epoch_begun_on_some_ranks_and_finished_on_others_sees_every_frame_once(
    dataset, before, after, frames, stop
):
    def loaders(world_size):
        return [
            FrameLoader(dataset, frames, shuffle=True, seed=4, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]

    first, second = loaders(before), loaders(after)
    stop = min(stop, len(first[0]))
    seen = [i for loader in first for i in frames_of(ids(loader)[:stop])]
    sample = first[0].position(stop)
    assert sample == len(seen)
    begins = {loader.start_at(sample) for loader in second}
    assert len(begins) == 1
    rest = [ids(loader) for loader in second]
    assert begins.pop() + len(rest[0]) == len(second[0])
    assert sorted(seen + [i for share in rest for i in frames_of(share)]) == list(range(len(dataset)))
    again = len(second[0]) - len(rest[0]) + min(1, len(rest[0]))
    assert second[0].position(again) == min(sample + frames * after * min(1, len(rest[0])), len(dataset))


def test_a_rank_without_a_frame_gets_one_that_counts_for_nothing(dataset):
    loader = FrameLoader(dataset, 1, rank=6, world_size=7)
    (batch,) = loader
    assert batch["frame_id"].tolist() == [-1]
    assert batch["weight"].tolist() == [0.0]
    for label in ("energy", "forces", "stress"):
        assert batch[label].isnan().all()
    assert not dataset[0]["energy"].isnan().any()  # the data set itself is as before


def test_a_batch_of_nothing_is_refused(dataset):
    with pytest.raises(ForgefieldError, match=r"data\.batch\.frames"):
        FrameLoader(dataset, 0)


def test_every_edge_knows_the_edge_that_leads_back(dataset):
    batch = dataset.batch(range(len(dataset)))
    reverse = batch["edge_reverse"]
    assert torch.equal(batch["edge_index"][:, reverse], batch["edge_index"].flip(0))
    assert torch.equal(batch["edge_shift"][reverse], -batch["edge_shift"])
