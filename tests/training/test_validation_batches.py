"""The size of the batches of a validation on a GPU: chosen by memory, the same for a resumed run, as configured if it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgefield.api import train
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.plan import Budget
from forgefield.training import validation_batches
from forgefield.training.validation_batches import enlarged_size
from tests.support.helpers import tiny_config
from tests.support.interrupting import Interrupted
from tests.support.mixed_frames import DATASET
from tests.support.resuming import END, assert_same_run
from tests.support.train_many import train_only


@given(size=st.integers(1, 9), ranks=st.integers(1, 3), factor=st.integers(1, 20))
def test_enlarged_batches_have_every_frame_once(size, ranks, factor):
    loaders = [FrameLoader(DATASET, Budget("frames", size, "alone"), rank=r, world_size=ranks) for r in range(ranks)]
    n_batches = len(loaders[0])
    frames = enlarged_size(loaders[0], factor)
    assert size <= frames or n_batches == 1
    assert frames <= size * factor
    for loader in loaders:
        loader.set_budget(Budget("frames", frames, "alone"))
    assert len(loaders[0]) <= n_batches
    served = [int(i) for loader in loaders for batch in loader for i in batch["frame_id"] if i >= 0]
    assert sorted(served) == list(range(len(DATASET)))
    assert factor < n_batches or len(loaders[0]) == 1


@given(size=st.integers(10, 60), factor=st.integers(1, 6))
def test_batches_limited_by_atoms_stay_within_their_factor(size, factor):
    loader = FrameLoader(DATASET, Budget("atoms", size, "alone"))
    assert size <= enlarged_size(loader, factor) <= size * factor


def test_a_run_keeps_the_size_that_memory_allowed_at_its_start(tmp_path, monkeypatch):
    """With another size, errors would be summed in another order."""
    config = tiny_config(tmp_path, callbacks=[END])
    config["data"] |= {"batch": {"frames": 1}, "val": 5}
    config["training"] |= {"checkpoint": {"every_steps": 2}}
    monkeypatch.setattr(validation_batches, "times_that_fit", lambda device: 100.0)
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"})
    assert straight.info["validation_batch"] == {"kind": "frames", "size": 5}
    assert "Validation in batches of 5 frames" in (straight.path / "log.txt").read_text()
    monkeypatch.setenv("END_AT", "7")
    monkeypatch.setenv("END_HOW", "raise")
    with pytest.raises(Interrupted):
        train({**config, "name": "again"})
    monkeypatch.setenv("END_AT", "-1")
    monkeypatch.setattr(validation_batches, "times_that_fit", lambda device: 0.0)
    assert_same_run(straight.path, train_only({**config, "name": "again"}).path)


@pytest.mark.parametrize("explicit", [{"data": {"eval_batch": 3}}, {"trainer": {"limit_val_batches": 2}}])
def test_a_configured_number_of_frames_or_batches_is_kept(tmp_path, monkeypatch, explicit):
    sizes: list[int] = []
    seen = FrameLoader.__iter__

    def iterate(loader: FrameLoader):
        for batch in seen(loader):
            sizes.append(len(batch["n_atoms"]))
            yield batch

    config = tiny_config(tmp_path)
    config["data"] |= {"batch": {"frames": 1}, "val": 6} | explicit.get("data", {})
    config["trainer"] |= {"max_epochs": 1} | explicit.get("trainer", {})
    monkeypatch.setattr(validation_batches, "times_that_fit", lambda device: 100.0)
    monkeypatch.setattr(FrameLoader, "__iter__", iterate)
    run = train_only(config)
    validated = [3, 3] if "data" in explicit else [2, 2]
    assert sizes[-2:] == validated
    assert "validation_batch" not in run.info
