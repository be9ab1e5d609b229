"""Every epoch serves each frame exactly once, whatever the budget, the ranks, the threads and the place it was taken up at."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.config.checking import typed_config
from forgefield.config.sources import Sources
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.options import BatchOptions, DataOptions
from forgefield.data.sampling.batching import batch_threads, evaluation_budget, training_budget, training_order
from forgefield.data.sampling.loader import FrameLoader, prepared_ahead
from forgefield.data.sampling.plan import Budget
from forgefield.data.species import SpeciesTable
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError

SPECIES = SpeciesTable(["Cu"])


def frames(sizes: list[int], source: str = "a.xyz") -> list[Frame]:
    rng = np.random.default_rng(len(sizes))
    cell, pbc = np.zeros((3, 3)), np.zeros(3, dtype=bool)
    return [
        Frame(
            rng.uniform(0, 4, (n, 3)),
            np.full(n, 29),
            cell,
            pbc,
            float(n),
            rng.normal(size=(n, 3)),
            source=source,
            index=i,
        )
        for i, n in enumerate(sizes)
    ]


DATASET = GraphDataset(frames([1, 2, 9, 3, 3, 5, 1, 1, 7, 2, 2, 4, 6, 1, 3, 8, 2]), SPECIES, 3.0)


def served(loaders: list[FrameLoader]) -> Counter[int]:
    batches = [list(loader) for loader in loaders]
    assert len({len(of_rank) for of_rank in batches}) == 1
    return Counter(int(i) for of_rank in batches for batch in of_rank for i in batch["frame_id"] if i >= 0)


BUDGETS = st.one_of(
    st.integers(1, 20).map(lambda n: Budget("frames", n)),
    st.integers(9, 60).map(lambda n: Budget("atoms", n)),
    st.integers(1, 60).map(lambda n: Budget("atoms", n, "alone")),
    st.integers(1, 300).map(lambda n: Budget("edges", n, "alone")),
)


@given(
    budget=BUDGETS,
    ranks=st.integers(1, 5),
    later_ranks=st.integers(1, 5),
    workers=st.sampled_from([0, 1, 3]),
    epoch=st.integers(0, 4),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_every_frame_once_also_when_the_epoch_is_taken_up_by_others(budget, ranks, later_ranks, workers, epoch, data):
    def loaders(world_size: int) -> list[FrameLoader]:
        made = [
            FrameLoader(DATASET, budget, shuffle=True, seed=5, rank=rank, world_size=world_size, workers=workers)
            for rank in range(world_size)
        ]
        for loader in made:
            loader.set_epoch(epoch)
        return made

    every = Counter(range(len(DATASET)))
    first = loaders(ranks)
    assert served(first) == every
    stop = data.draw(st.integers(0, len(first[0])))
    begun = Counter(int(i) for loader in first for batch in list(loader)[:stop] for i in batch["frame_id"] if i >= 0)
    assert begun.total() == first[0].position(stop)
    rest = loaders(later_ranks)
    first_batches = {loader.start_at(first[0].position(stop)) for loader in rest}
    assert len(first_batches) == 1
    assert begun + served(rest) == every
    for loader in rest:
        loader.set_epoch(epoch + 1)
    assert served(rest) == every


@given(size=st.integers(9, 60), ranks=st.integers(1, 4), kind=st.sampled_from(["atoms", "edges"]))
@settings(max_examples=40, deadline=None)
def test_no_batch_exceeds_its_budget(size, ranks, kind):
    size = size if kind == "atoms" else int(DATASET.n_edges.max()) + size
    for rank in range(ranks):
        for batch in FrameLoader(DATASET, Budget(kind, size), shuffle=True, rank=rank, world_size=ranks):
            taken = len(batch["species"]) if kind == "atoms" else batch["edge_index"].shape[1]
            assert taken <= size or (batch["frame_id"] < 0).all()


def test_threads_change_nothing_but_who_does_the_work():
    alone = list(FrameLoader(DATASET, 3, shuffle=True, seed=1))
    ahead = list(FrameLoader(DATASET, 3, shuffle=True, seed=1, workers=4, prefetch=3))
    for one, other in zip(alone, ahead, strict=True):
        for key, value in one.items():
            assert torch.equal(value, other[key]) or value.isnan().any()


def test_no_more_batches_are_prepared_ahead_than_requested():
    begun = []
    batches = prepared_ahead(lambda step: begun.append(step) or step, 100, workers=1, ahead=3)
    assert next(batches) == 0
    batches.close()
    assert len(begun) <= 5


def test_an_error_in_a_thread_reaches_the_training():
    def prepare(step: int) -> int:
        if step == 2:
            raise ForgefieldError("frame 7 is broken")
        return step

    batches = prepared_ahead(prepare, 5, workers=2, ahead=2)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ForgefieldError, match="frame 7 is broken"):
        next(batches)


def test_oversized_frames_are_named_or_left_out_or_alone():
    with pytest.raises(
        ForgefieldError, match=r"2 of 17 frames have more atoms than data\.batch\.atoms=7.*a\.xyz, frame 2, has 9"
    ):
        len(FrameLoader(DATASET, Budget("atoms", 7)))
    skipping = FrameLoader(DATASET, Budget("atoms", 7, "skip"), shuffle=True)
    assert skipping.skipped == 2
    assert served([skipping]) == Counter(i for i in range(17) if DATASET.n_atoms[i] <= 7)
    alone = [batch for batch in FrameLoader(DATASET, Budget("atoms", 7, "alone")) if len(batch["species"]) > 7]
    assert [batch["frame_id"].tolist() for batch in alone] == [[2], [15]]
    with pytest.raises(ForgefieldError, match="every frame has more atoms"):
        FrameLoader(GraphDataset(frames([3, 4]), SPECIES, 3.0), Budget("atoms", 2, "skip"))


def options(**changes) -> DataOptions:
    return typed_config({"data": changes}, Sources()).data


def test_budgets_from_the_settings():
    assert training_budget(options()) == Budget("frames", 8)
    assert training_budget(options(batch={"atoms": 99, "oversized": "alone"})) == Budget("atoms", 99, "alone")
    assert training_budget(DataOptions(batch=BatchOptions(edges=5))) == Budget("edges", 5)
    assert evaluation_budget(options(batch={"atoms": 99})) == Budget("atoms", 2 * 99, "alone")
    assert evaluation_budget(options(eval_batch=3)) == Budget("frames", 3, "alone", "data.eval_batch")
    assert evaluation_budget(options(eval_batch={"edges": 70})) == Budget("edges", 70, "alone", "data.eval_batch")
    with pytest.raises(ForgefieldError, match="gives frames and atoms"):
        training_budget(options(batch={"frames": 2, "atoms": 99}))


def two_sources() -> FrameTable:
    return FrameTable.from_frames([*frames([2] * 30, "a.xyz"), *frames([3] * 10, "b.xyz")])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ("uniform", {"a": 20, "b": 20}),
        ("size", {"a": 30, "b": 10}),
        ([1, 3], {"a": 10, "b": 30}),
        ("prob_sys_size;0:1:0.9;1:2:0.1", {"a": 36, "b": 4}),
        ({"rule": "uniform", "frames": 100}, {"a": 50, "b": 50}),
        ({"rule": [0.25, -1]}, {"a": 10, "b": 30}),
    ],
)
def test_sources_are_drawn_by_the_rule(sampling, expected):
    table = two_sources()
    order = training_order(options(sampling=sampling), table, 0)(np.arange(40), table.n_atoms)
    for epoch in range(3):
        rows = order.rows(epoch)
        assert {"a": int((rows < 30).sum()), "b": int((rows >= 30).sum())} == expected
        counts = np.bincount(rows[rows >= 30] - 30, minlength=10)
        assert counts.max() - counts.min() <= 1  # none twice before all once


def test_a_source_that_was_left_without_frames_is_not_drawn():
    table = two_sources()
    order = training_order(options(sampling="uniform"), table, 0)(np.arange(30), table.n_atoms)
    assert set(order.rows(0)) == set(range(30))
    with pytest.raises(ForgefieldError, match=r"b\.xyz is to be drawn with probability 0\.5 but has no frame"):
        training_order(options(sampling=[1, 1]), table, 0)(np.arange(30), table.n_atoms)


def test_settings_of_batches_that_would_do_nothing_are_refused():
    with pytest.raises(ForgefieldError, match=r"data\.eval_batch\.oversized=skip"):
        evaluation_budget(options(eval_batch={"atoms": 9, "oversized": "skip"}))
    assert batch_threads(options(prefetch=3), on_gpu=False) == 1
    table = two_sources()
    order = training_order(options(sampling={"frames": 100, "rule": None}), table, 0)(np.arange(40), table.n_atoms)
    assert order.draws == 100


def test_weighted_draws_and_a_fixed_order_contradict_each_other():
    with pytest.raises(ForgefieldError, match=r"data\.shuffle=false and weighted sampling"):
        training_order(options(sampling="uniform", shuffle=False), two_sources(), 0)
    with pytest.raises(ForgefieldError, match=r"data\.sampling\.repeats is not known"):
        training_order(options(sampling={"rule": "size", "repeats": 3}), two_sources(), 0)


def test_threads_by_setting_by_variable_and_by_device(monkeypatch):
    monkeypatch.delenv("NUM_WORKERS", raising=False)
    assert (batch_threads(options(), on_gpu=False), batch_threads(options(), on_gpu=True)) == (0, 1)
    monkeypatch.setenv("NUM_WORKERS", "5")
    assert batch_threads(options(), on_gpu=False) == 5
    assert batch_threads(options(workers=1), on_gpu=True) == 1
    monkeypatch.setenv("NUM_WORKERS", "many")
    with pytest.raises(ForgefieldError, match="NUM_WORKERS must be a number of threads, not 'many'"):
        batch_threads(options(), on_gpu=True)
