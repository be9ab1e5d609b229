"""Options that a config leaves out are those that `forgefield init` writes; a run keeps those with which it began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgefield.data.sampling.batching import default_frames
from forgefield.data.starter import propose_config
from forgefield.formats import VERSION
from tests.support.helpers import tiny_config
from tests.support.snapshots import point_config
from tests.support.train_many import train_only


def without_batch_and_task(config: dict[str, Any]) -> dict[str, Any]:
    short = {key: value for key, value in config.items() if key != "task"}
    return {**short, "data": {key: value for key, value in config["data"].items() if key != "batch"}}


def test_left_out_options_are_those_that_init_writes(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, trainer={"max_epochs": 1})
    path, _ = propose_config([config["data"]["train"]], out=tmp_path / "starter.yaml")
    written = yaml.safe_load(path.read_text())
    config["data"]["val"] = written["data"]["val"]
    explicit = {**config, "name": "explicit", "task": written["task"]}
    explicit["data"] = {**config["data"], "batch": written["data"]["batch"]}
    short = train_only({**without_batch_and_task(config), "name": "short"})
    assert short.info["defaults"] == {"frames": written["data"]["batch"]["frames"], "stress": True}
    assert short.metrics() == train_only(explicit).metrics()
    assert "data.batch is not set" in (short.path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("mean_atoms", "n_train", "frames"), [(9, 1000, 14), (192, 70, 1), (2, 1000, 32), (9, 10, 3), (1, 1, 1)]
)
def test_a_batch_has_about_128_atoms(mean_atoms: float, n_train: int, frames: int) -> None:
    assert default_frames(mean_atoms, n_train) == frames


def test_a_run_of_an_earlier_version_keeps_the_defaults_that_it_began_with(tmp_path: Path) -> None:
    """They were batches of 8 frames, energy and forces with weight 1, and no stress."""
    config = tiny_config(tmp_path, data={"batch": {"frames": 8}})
    reference = train_only({**config, "name": "reference"}).metrics()
    run = train_only({**config, "trainer": {**config["trainer"], "max_epochs": 2}})
    stored = yaml.safe_load((run.path / "config.yaml").read_text())
    stored["task"], stored["data"]["batch"]["frames"] = None, None
    (run.path / "config.yaml").write_text(yaml.safe_dump(stored))
    info = json.loads((run.path / "run.json").read_text())
    del info["defaults"]
    (run.path / "run.json").write_text(json.dumps({**info, VERSION: 2}))  # as it was written before

    resumed = train_only(without_batch_and_task(config))
    assert resumed.info["defaults"] == {"frames": 8, "stress": False}
    assert resumed.metrics() == reference


@pytest.mark.parametrize(("activation", "kind"), [(None, "feature-wise-standard"), ("relu", "minmax")])
def test_targets_are_scaled_per_level_unless_outputs_may_not_be_negative(
    tmp_path: Path, activation: str | None, kind: str
) -> None:
    config = point_config(tmp_path, trainer={"max_epochs": 1})
    run = train_only({**config, "model": {**config["model"], "output_activation": activation}})
    assert run.info["model"]["points"]["outputs"]["kind"] == kind


def test_a_run_that_began_with_another_default_keeps_its_scaling(tmp_path: Path) -> None:
    config = point_config(tmp_path)
    earlier = {**config["data"]["points"], "scaling": {"outputs": "minmax"}}
    run = train_only(point_config(tmp_path, data={"points": earlier}, trainer={"max_epochs": 1}))
    resumed = train_only(point_config(tmp_path, trainer={"max_epochs": 2}))
    assert resumed.path == run.path
    assert resumed.info["model"]["points"]["outputs"]["kind"] == "minmax"
    straight = train_only(point_config(tmp_path, name="straight", data={"points": earlier}, trainer={"max_epochs": 2}))
    assert resumed.metrics() == straight.metrics()
