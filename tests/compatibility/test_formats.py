"""Files state the version of their format: earlier versions are upgraded, newer ones refused. Class names do not matter."""

from __future__ import annotations

import json
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

import forgefield
from forgefield.errors import ForgefieldError
from forgefield.formats import VERSION, Format, NewerFormat
from forgefield.runs import RUN_JSON, Run
from forgefield.training.callbacks.monitor import EarlyStop
from forgefield.training.run.checkpoint import (
    CHECKPOINT,
    checkpoint_path,
    find_resume_point,
    load_checkpoint,
    save_checkpoint,
)
from forgefield.weights import WEIGHTS_FILE, read_weights, write_weights

VERSION_1 = {
    "global_step": 3,
    "loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 1}}}},
    "callbacks": {
        "MetricsLog": {"rows": 2},
        "_Patience{'monitor': 'val/loss', 'mode': 'min'}": {"wait_count": 1},
        "EarlyStopping{'monitor': 'val/loss', 'mode': 'min'}": {"wait_count": 4},
        "GradientCheck": {"memory": {}},
        "MyCallback": {"count": 3},
    },
    "forgefield": {"own_kernels": {"float32": True}, "lr_factor": 1.0},
    "forgefield_place": {"sample": 5, "world_size": 2},
}


def test_migrations_are_applied_from_the_version_of_the_file_on() -> None:
    formed = Format("a list", (lambda old: {**old, "two": 2}, lambda old: {**old, "three": old["two"] + 1}))
    assert formed.upgrade({}, "file") == {"two": 2, "three": 3, VERSION: 3}
    assert formed.upgrade({VERSION: 2, "two": 5}, "file") == {"two": 5, "three": 6, VERSION: 3}
    assert formed.upgrade({VERSION: 3}, "file") == {VERSION: 3}


@pytest.mark.parametrize("version", [0, -1, 1.5, "2", True, None])
def test_a_version_that_is_not_a_positive_integer_is_damage(version: object) -> None:
    with pytest.raises(ForgefieldError, match=r"file is damaged: 'format_version' must be a positive integer"):
        RUN_JSON.upgrade({VERSION: version}, "file")


def test_a_checkpoint_of_version_1_gets_fixed_names(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 3)
    torch.save(VERSION_1, path)
    checkpoint = load_checkpoint(path)
    assert checkpoint[VERSION] == CHECKPOINT.version
    assert checkpoint["callbacks"] == {
        "metrics_log": {"rows": 2},
        "early_stopping:val/loss": {"wait_count": 1},
        "EarlyStopping{'monitor': 'val/loss', 'mode': 'min'}": {"wait_count": 4},  # Lightning's own, of the user
        "gradient_check": {"memory": {}},
        "MyCallback": {"count": 3},
    }
    assert checkpoint["forgefield"] == {"fused_kernels": {"float32": True}, "lr_factor": 1.0}
    point = find_resume_point(tmp_path, print)
    assert point is not None
    assert (point.sample, point.world_size, point.rows) == (5, 2, 2)


def test_what_is_written_states_its_version(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", {"global_step": 1})
    assert torch.load(tmp_path / "a.ckpt")[VERSION] == CHECKPOINT.version
    run = Run(tmp_path)
    run.write_info(status="new")
    assert json.loads((tmp_path / "run.json").read_text())[VERSION] == RUN_JSON.version
    write_weights(tmp_path / "w.safetensors", {"a": torch.ones(2)}, {"step": 1})
    assert read_weights(tmp_path / "w.safetensors").about[VERSION] == WEIGHTS_FILE.version


def test_files_of_a_newer_version_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    torch.save({VERSION: CHECKPOINT.version + 1}, path)
    with pytest.raises(
        NewerFormat, match=r"step-00000001\.ckpt is a checkpoint of format version .* Install a newer version"
    ):
        find_resume_point(tmp_path, print)
    assert path.exists()
    (tmp_path / "run.json").write_text(json.dumps({VERSION: RUN_JSON.version + 1}))
    with pytest.raises(NewerFormat, match=r"run\.json is the record of a run of format version"):
        _ = Run(tmp_path).info
    weights = tmp_path / "w.safetensors"
    write_weights(weights, {"a": torch.ones(2)}, {VERSION: WEIGHTS_FILE.version + 1})
    with pytest.raises(NewerFormat, match="is a file of weights of format version"):
        read_weights(weights)


def callbacks_with_state() -> list[type[Callback]]:
    """Classes of Forgefield's callbacks that store a state."""
    for package in ("training.callbacks", "diagnosis", "tuning", "training.optim"):
        folder = import_module(f"forgefield.{package}")
        for module in pkgutil.iter_modules(folder.__path__):
            import_module(f"forgefield.{package}.{module.name}")
    classes, rest = [], [Callback]
    while rest:
        subclasses = rest.pop().__subclasses__()
        rest += subclasses
        classes += [cls for cls in subclasses if cls.__module__.startswith("forgefield.")]
    return [cls for cls in classes if is_overridden("state_dict", cls.__new__(cls), Callback)]


def test_names_of_states_do_not_depend_on_names_of_classes() -> None:
    classes = callbacks_with_state()
    assert len(classes) > 10
    for cls in classes:
        renamed = type("Renamed", (cls,), {})
        keys = []
        for each in (cls, renamed):
            callback = each.__new__(each)
            callback.__dict__["monitor"] = "val/loss"
            keys.append(callback.state_key)
        assert keys[0] == keys[1], cls
        assert cls.__name__ not in keys[0]
        assert "Renamed" not in keys[0]


def test_a_run_resumes_after_its_callbacks_were_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.helpers import tiny_config

    config = tiny_config(tmp_path)
    config["training"]["early_stopping"] = {"patience": 50}
    config["callbacks"] = ["loss_spike"]
    forgefield.train(config)
    loaded = []
    names = {cls: cls.__qualname__ for cls in callbacks_with_state()}
    load = EarlyStop.load_state_dict
    monkeypatch.setattr(EarlyStop, "load_state_dict", lambda self, state: (loaded.append(state), load(self, state)))
    try:
        for cls, name in names.items():
            cls.__name__ = cls.__qualname__ = f"Renamed{name}"
        run = forgefield.train(config, "trainer.max_epochs=4")
    finally:
        for cls, name in names.items():
            cls.__name__ = cls.__qualname__ = name
    assert [row["epoch"] for row in run.metrics()] == [0, 1, 2, 3]
    assert loaded[0]["wait_count"] >= 0
