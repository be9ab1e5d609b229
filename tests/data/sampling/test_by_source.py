"""Batches of one source each: every frame once on any number of ranks, or sources by probability, as DeePMD-kit draws them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.config.checking import typed_config
from forgefield.config.sources import Sources
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.module import read_data
from forgefield.data.options import DataOptions
from forgefield.data.sampling.batching import evaluation_budget, training_budget, training_order
from forgefield.data.sampling.by_source import SourceBatches, WholeBatches
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.order import system_probabilities
from forgefield.data.sampling.plan import Budget
from forgefield.data.species import SpeciesTable
from forgefield.data.store.export import write_frames
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError

SPECIES = SpeciesTable(["Cu"])


@st.composite
def cases(draw, least=0):
    """(source of each row, its cost): sources of some frames, alike or not, in any order of rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = draw(st.lists(st.integers(least, 9), min_size=1, max_size=6).filter(any))
    sources = np.repeat(np.arange(len(counts)), counts)
    kinds = [draw(st.sampled_from(["alike", "scattered"])) for _ in counts]
    alike = rng.integers(1, 20, len(counts))
    costs = np.array([alike[s] if kinds[s] == "alike" else rng.integers(1, 20) for s in sources], dtype=np.int64)
    order = rng.permutation(len(sources))
    return sources[order], costs[order], len(counts)


BUDGETS = st.one_of(
    st.integers(1, 12).map(lambda n: Budget("frames", n)),
    st.integers(20, 60).map(lambda n: Budget("atoms", n)),
    st.integers(1, 60).map(lambda n: Budget("atoms", n, "alone")),
    st.integers(1, 60).map(lambda n: Budget("atoms", n, bound="lower")),
)


def batches_of(order: SourceBatches, epoch: int) -> list[np.ndarray]:
    rows, bounds = order.rows(epoch), order.batches(epoch)
    assert bounds[0] == 0
    assert bounds[-1] == len(rows)
    return [rows[a:b] for a, b in pairwise(bounds)]


@given(case=cases(), budget=BUDGETS, seed=st.integers(0, 99), epoch=st.integers(0, 9), shuffle=st.booleans())
@settings(max_examples=150)
def test_every_row_comes_once_in_a_batch_of_its_source_filled_up_to_the_budget(case, budget, seed, epoch, shuffle):
    sources, costs, n = case
    order = SourceBatches(sources, costs, budget, seed=seed, shuffle=shuffle, names=[str(i) for i in range(n)])
    made = batches_of(order, epoch)
    assert sorted(np.concatenate(made).tolist()) == list(range(len(sources)))
    by_source: dict[int, list[np.ndarray]] = {}
    for batch in made:
        (source,) = set(sources[batch].tolist())
        by_source.setdefault(source, []).append(batch)
    for batches in by_source.values():
        sizes = [len(batch) if budget.kind == "frames" else int(costs[batch].sum()) for batch in batches]
        if budget.bound == "lower":
            assert sum(size < budget.size for size in sizes) <= 1
            assert all(size - costs[batch[-1]] < budget.size for size, batch in zip(sizes, batches))
        else:
            assert all(size <= budget.size or len(batch) == 1 for size, batch in zip(sizes, batches))
        if budget.kind == "frames":
            assert sorted(sizes)[1:] == [budget.size] * (len(sizes) - 1)
    if not shuffle:
        assert [sources[batch[0]] for batch in made] == sorted(sources[batch[0]] for batch in made)
        assert all((np.diff(batch) > 0).all() for batch in made)
    for one, other in zip(made, batches_of(order, epoch), strict=True):
        np.testing.assert_array_equal(one, other)


@given(case=cases(least=1), seed=st.integers(0, 99), budget=BUDGETS, data=st.data())
@settings(max_examples=100)
def test_sources_are_drawn_a_batch_at_a_time_to_within_one_of_their_share(case, seed, budget, data):
    sources, costs, n = case
    chances = np.array(data.draw(st.lists(st.floats(0, 5), min_size=n, max_size=n).filter(lambda x: sum(x) > 0.1)))
    names = [str(i) for i in range(n)]
    order = SourceBatches(sources, costs, budget, seed=seed, names=names, probabilities=lambda n_batches: chances)
    once = int(SourceBatches(sources, costs, budget, seed=seed, names=names).n_batches.sum())
    for epoch in range(3):
        made = batches_of(order, epoch)
        drawn = np.bincount([sources[batch[0]] for batch in made], minlength=n)
        assert len(made) == once
        assert (abs(drawn - once * chances / chances.sum()) < 1 + 1e-9).all()
        assert drawn.tolist() == order.counts(epoch).tolist()
        times = np.bincount(np.concatenate(made), minlength=len(sources))
        for source in range(n):
            own = times[sources == source]
            assert own.max() - own.min() <= 1  # none twice before all once


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    ranks=st.integers(1, 5),
    later=st.integers(1, 5),
    data=st.data(),
)
def test_steps_are_whole_batches_on_any_number_of_ranks(lengths, ranks, later, data):
    bounds = np.cumsum([0, *lengths])
    plan = WholeBatches(bounds, ranks)
    assert len(plan) == -(-len(lengths) // ranks)
    done = data.draw(st.integers(0, len(plan)))
    served = [plan.share(step, rank) for step in range(done) for rank in range(ranks)]
    rest = plan.from_position(int(plan.bounds[done]), later)
    served += [rest.share(step, rank) for step in range(len(rest)) for rank in range(later)]
    assert [share.tolist() for share in served if len(share)] == [list(range(a, b)) for a, b in pairwise(bounds)]
    inside = plan.from_position(data.draw(st.integers(0, int(bounds[-1]))))
    assert sum(inside.n_frames_of_rank(step, rank) for step in range(len(inside)) for rank in range(ranks)) == (
        bounds[-1] - inside.bounds[0]
    )
    with pytest.raises(IndexError, match="no step"):
        plan.share(len(plan), 0)
    with pytest.raises(ValueError, match="cannot start after"):
        plan.from_position(int(bounds[-1]) + 1)


def frames(sizes: list[int], source: str) -> list[Frame]:
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


DATASET = GraphDataset([*frames([2] * 11, "a"), *frames([9, 1, 4, 4, 7, 2], "b"), *frames([5] * 3, "c")], SPECIES, 3.0)
SOURCE = np.repeat([0, 1, 2], [11, 6, 3])


def options(**changes) -> DataOptions:
    return typed_config({"data": changes}, Sources()).data


def loaders(
    settings: DataOptions, world_size: int, epoch: int = 0, workers: int = 0, *, keep_order: bool = False
) -> list[FrameLoader]:
    order = training_order(settings, DATASET.frames, 3, keep_order=keep_order)
    made = [
        FrameLoader(DATASET, training_budget(settings), order=order, rank=rank, world_size=world_size, workers=workers)
        for rank in range(world_size)
    ]
    for loader in made:
        loader.set_epoch(epoch)
    return made


def served(made: list[FrameLoader]) -> list[list[int]]:
    """Frames of each batch; blank ones left out."""
    ids = [[batch["frame_id"].tolist() for batch in loader] for loader in made]
    assert len({len(of_rank) for of_rank in ids}) == 1
    return [[i for i in batch if i >= 0] for of_rank in ids for batch in of_rank]


RULES = [
    {"frames": 3, "by_source": True},
    {"atoms": 9, "by_source": True},
    {"atoms": 6, "bound": "lower", "by_source": True},
    {"edges": 30, "bound": "lower", "by_source": True},
    {"by_source": [4, 2, 1]},
]


@given(
    rule=st.sampled_from(RULES),
    ranks=st.integers(1, 4),
    later=st.integers(1, 4),
    epoch=st.integers(0, 3),
    workers=st.sampled_from([0, 2]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_by_source_taken_up_by_other_ranks_serves_every_frame_once(rule, ranks, later, epoch, workers, data):
    config, every = options(batch=rule), Counter(range(len(DATASET)))
    first = loaders(config, ranks, epoch, workers)
    assert Counter(i for batch in served(first) for i in batch) == every
    stop = data.draw(st.integers(0, len(first[0])))
    begun = Counter(
        i for loader in first for batch in list(loader)[:stop] for i in batch["frame_id"].tolist() if i >= 0
    )
    rest = loaders(config, later, epoch)
    assert len({loader.start_at(first[0].position(stop)) for loader in rest}) == 1
    after = served(rest)
    assert begun + Counter(i for batch in after for i in batch) == every
    assert all(len(set(SOURCE[batch])) <= 1 for batch in after)


def test_numbers_of_frames_for_each_source():
    config = options(batch={"by_source": [4, 2, 1]})
    (loader,) = loaders(config, 1)
    sizes = {source: sorted(len(b) for b in served([loader]) if SOURCE[b[0]] == source) for source in range(3)}
    assert sizes == {0: [3, 4, 4], 1: [2, 2, 2], 2: [1, 1, 1]}
    assert loader.epochs_are_alike
    assert len(loader) == loader.batches_in(5) == 9
    assert evaluation_budget(config) == Budget("frames", 2, "alone")
    with pytest.raises(ForgefieldError, match=r"data\.batch\.by_source gives 2 numbers of frames for 3 sources"):
        loaders(options(batch={"by_source": [4, 2]}), 1)


def test_oversized_frames_are_refused_left_out_or_alone_by_source_too():
    with pytest.raises(
        ForgefieldError, match=r"1 of 20 frames have more atoms than data\.batch\.atoms=8; the largest, b, frame 0"
    ):
        loaders(options(batch={"atoms": 8, "by_source": True}), 1)
    (loader,) = loaders(options(batch={"atoms": 8, "by_source": True, "oversized": "skip"}), 1)
    assert Counter(i for batch in served([loader]) for i in batch) == Counter(i for i in range(20) if i != 11)
    (loader,) = loaders(options(batch={"atoms": 8, "by_source": True, "oversized": "alone"}), 1)
    assert [11] in served([loader])


def test_draws_by_source_are_of_batches():
    config = options(batch={"frames": 4, "by_source": True}, sampling=[0.5, 0.5, 0])
    (loader,) = loaders(config, 1)
    drawn = Counter(int(SOURCE[batch[0]]) for batch in served([loader]))
    assert drawn == {0: 3, 1: 3}  # of 3 + 2 + 1 batches
    with pytest.raises(ForgefieldError, match=r"data\.sampling\.frames counts frames, but with data\.batch\.by_source"):
        loaders(options(batch={"frames": 4, "by_source": True}, sampling={"rule": "size", "frames": 10}), 1)


def test_overfitting_on_first_batches_keeps_them_of_one_source():
    (loader,) = loaders(options(batch={"frames": 4, "by_source": True}), 1, keep_order=True)
    assert served([loader])[:4] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]


def test_the_summary_shows_how_often_sources_are_drawn(tmp_path):
    for name in "ab":
        write_frames(frames([3] * 8, name), tmp_path / f"{name}.extxyz")
    data = read_data(
        options(train=str(tmp_path / "*.extxyz"), val=0, batch={"frames": 4, "by_source": True}, cutoff=3.0), 0
    )
    assert (
        dict(data.describe())["sampling"] == "4 batches of one source each per epoch: a.extxyz 50.0 %, b.extxyz 50.0 %"
    )


# ---- against deepmd-kit itself

SCRIPT = """
import json, sys
import numpy as np
from deepmd.utils.data_system import prob_sys_size_ext, process_sys_probs

answers = []
for rule, n_batches in json.load(sys.stdin):
    if isinstance(rule, str):
        answers.append(list(prob_sys_size_ext(rule, len(n_batches), n_batches)))
    else:
        answers.append(list(process_sys_probs(rule, np.array(n_batches))))
print(json.dumps(answers))
"""


def test_probabilities_are_those_of_deepmd_kit():
    named = os.environ.get("FORGEFIELD_DEEPMD_PYTHON")
    if named is None and find_spec("deepmd") is None:
        pytest.skip("deepmd-kit is not installed; FORGEFIELD_DEEPMD_PYTHON may name an interpreter that has it")
    rng = np.random.default_rng(0)
    cases: list[tuple[str | list[float], list[int]]] = []
    for _ in range(30):
        sizes, per_batch = rng.integers(1, 200, 6), rng.integers(1, 9, 6)
        sources = np.repeat(np.arange(6), sizes)
        order = SourceBatches(
            sources, np.ones_like(sources), Budget("frames", 9), sizes=per_batch.tolist(), names="abcdef"
        )
        n_batches = order.n_batches.tolist()
        assert n_batches == [-(-n // b) for n, b in zip(sizes.tolist(), per_batch.tolist())]
        given = (rng.dirichlet(np.ones(7))[:6]).tolist()
        given[int(rng.integers(6))] = -1.0
        given[int(rng.integers(6))] = -0.5
        weights = rng.uniform(0, 3, 3).tolist()
        cut = sorted(rng.choice(np.arange(1, 6), 2, replace=False).tolist())
        blocks = ";".join(f"{a}:{b}:{w}" for a, b, w in zip([0, *cut], [*cut, 6], weights))
        cases += [(given, n_batches), (f"prob_sys_size;{blocks}", n_batches), ("prob_sys_size;0:6:1.0", n_batches)]
    told = subprocess.run(
        [named or sys.executable, "-c", SCRIPT], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    for (rule, n_batches), expected in zip(cases, json.loads(told.stdout.strip().splitlines()[-1]), strict=True):
        np.testing.assert_allclose(system_probabilities(rule, n_batches), expected, rtol=1e-12)
    table = FrameTable.from_frames([*frames([2] * 10, "a"), *frames([3] * 4, "b")])
    order = training_order(options(batch={"by_source": [4, 1]}, sampling="prob_sys_size"), table, 0)(
        np.arange(14), table.n_atoms
    )
    assert isinstance(order, SourceBatches)
    assert order.n_batches.tolist() == [3, 4]
    assert order.counts(0).tolist() == [3, 4]
