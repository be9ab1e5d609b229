"""Whole trainings with engines other than eager: the same course, taken over by one another, on one rank and on several."""

from __future__ import annotations

import pytest
import torch

from forgefield.api import load_run
from forgefield.errors import ForgefieldError
from forgefield.ops.execution import C_CONVOLUTIONS, C_LATEST, C_NONE
from forgefield.training.engines import step
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only

LOSS = "val/loss"


def config(folder, name: str, engine: str | None, **training):
    settings = tiny_config(folder, name=name, model={"num_layers": 1, "l_max": 0})  # soon traced
    settings["training"] = {**settings["training"], "precision": "float64", "engine": engine, **training}
    return settings


def course(run) -> list[float]:
    return [row[LOSS] for row in load_run(run.path).metrics()]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return train_only(config(tmp_path_factory.mktemp("eager"), "eager", "eager", clip_norm=1.0))


def test_the_tangent_form_takes_the_same_course(eager, tmp_path):
    tangent = train_only(config(tmp_path, "tangent", None, derivative="tangent", clip_norm=1.0))
    assert course(tangent) == pytest.approx(course(eager), rel=1e-8)


def test_batches_in_parts_take_the_same_course(eager, tmp_path):
    parts = train_only(config(tmp_path, "parts", "eager", memory={"parts": 2}, clip_norm=1.0))
    assert course(parts) == pytest.approx(course(eager), rel=1e-9)


def test_a_run_started_eager_resumes_scripted(eager, tmp_path):
    settings = config(tmp_path, "taken-over", "eager", clip_norm=1.0)
    settings["trainer"] = {**settings["trainer"], "max_epochs": 2}
    train_only(settings)
    settings["trainer"]["max_epochs"] = 3
    settings["training"]["engine"] = "script"
    assert course(train_only(settings)) == pytest.approx(course(eager), rel=1e-9)


def test_what_auto_has_chosen_is_kept_for_the_resume(tmp_path, capsys):
    settings = config(tmp_path, "auto", "auto")
    settings["trainer"] = {**settings["trainer"], "max_epochs": 1}
    first = train_only(settings)
    assert load_run(first.path).info["engine"]["name"] == "eager"
    assert "Engine auto: eager" in (first.path / "log.txt").read_text()
    settings["trainer"]["max_epochs"] = 2
    again = train_only(settings)
    assert (again.path / "log.txt").read_text().count("Engine auto: eager") == 1


def test_a_run_started_without_c_code_is_resumed_without(tmp_path):
    """As runs of versions that had none: another rounding would not be the same training."""
    settings = config(tmp_path, "resumed", "eager")
    settings["trainer"] = {**settings["trainer"], "max_epochs": 1}
    run = load_run(train_only(settings).path)
    assert run.info["engine"]["c_code"] == C_LATEST
    run.write_info(engine={"name": "eager", "derivative": "double", "captured": None})
    settings["trainer"]["max_epochs"] = 2
    train_only(settings)
    assert load_run(run.path).info["engine"]["c_code"] == C_NONE
    assert (run.path / "log.txt").read_text().count("C code") == 1


def test_a_run_of_a_version_that_compiled_convolutions_alone_is_resumed_with_these(tmp_path):
    settings = config(tmp_path, "earlier", "eager")
    settings["trainer"] = {**settings["trainer"], "max_epochs": 1}
    run = load_run(train_only(settings).path)
    run.write_info(engine={"name": "eager", "derivative": "double", "captured": None, "c_code": True})
    settings["trainer"]["max_epochs"] = 2
    train_only(settings)
    assert load_run(run.path).info["engine"]["c_code"] == C_CONVOLUTIONS
    assert (run.path / "log.txt").read_text().count("convolutions in C") == 1


def test_a_run_started_with_c_code_needs_a_compiler_to_be_resumed(tmp_path, monkeypatch):
    settings = config(tmp_path, "compiled", "eager")
    settings["trainer"] = {**settings["trainer"], "max_epochs": 1}
    train_only(settings)
    monkeypatch.setattr(step, "can_use_c", lambda: False)
    settings["trainer"]["max_epochs"] = 2
    with pytest.raises(
        ForgefieldError, match="started with convolutions compiled from C, and .* no working C compiler"
    ):
        train_only(settings)
    settings["training"]["kernels"] = {"edges": False}
    assert len(course(train_only(settings))) == 2


def test_graphs_on_a_cpu_are_refused_and_leave_nothing(tmp_path):
    with pytest.raises(ForgefieldError, match="CUDA graphs need an NVIDIA GPU"):
        train_only(config(tmp_path, "graphs", "graphs"))
    assert not (tmp_path / "runs" / "graphs").exists()


def test_a_scripted_training_takes_the_course_of_an_eager_one(tmp_path):
    """With accumulated batches, whose given gradients have to add up."""
    eager, scripted = (train_only(config(tmp_path, name, name, accumulate=2)) for name in ("eager", "script"))
    assert course(scripted) == pytest.approx(course(eager), rel=1e-9)
    assert torch.isfinite(torch.tensor(course(eager))).all()
    stored = {"name": "script", "derivative": "double", "captured": None, "c_code": C_NONE}
    assert load_run(scripted.path).info["engine"] == stored
