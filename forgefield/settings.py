"""The config of a training: its sections, each declared in the package that it configures, and the settings at its top.

`model` is checked against the options of the model it names, `trainer` against the signature of `lightning.Trainer`. Neither
this module nor the options modules import PyTorch, so that a config is read and checked at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgefield.config.option import seed_option
from forgefield.config.sources import Located, Sources, check_choice, wrong
from forgefield.config.typed import select
from forgefield.data.options import DataOptions, check_data
from forgefield.errors import ForgefieldError
from forgefield.ldos.options import PointsOptions, check_frames_only, check_points
from forgefield.tasks.options import POINTS, TaskOptions, as_written, check_task
from forgefield.training.options import TrainingOptions, check_training
from forgefield.tuning.options import TuneOptions, check_tune


@dataclass
class Config(Located):
    """A config: its sections, and the settings at its top."""

    name: str | None = None
    """Name of the run and of its folder. Default: the name of the config file."""
    out: str = "runs"
    """Folder of all runs."""
    seed: int = seed_option(0)
    """Seed of everything random: initial weights, split, order of the samples."""
    data: DataOptions = field(default_factory=DataOptions)
    """Training data, and how it is split, read and batched."""
    model: dict[str, Any] = field(default_factory=lambda: {"name": "nequip", "preset": "S"})
    """The model: a built-in name or an import path, and its options; a preset (S, M, L or XL; of mace SMALL, MEDIUM or
    LARGE) sets options that are not given. {from: RUN, which: best, shifts: keep} starts from the model of a run; shifts: fit
    adapts its energy shifts to the new data."""
    task: TaskOptions | None = None
    """Targets of the training. Default (null): those of energy, forces and stress that the data has; with stress, their weights
    are 1, 10 and 100."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    """How the model is trained."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Any argument of `lightning.Trainer`. Without `max_epochs` and `max_steps`, a training has 100 epochs."""
    callbacks: list[Any] = field(default_factory=list)
    """Callbacks: Forgefield's by name (gradient_check, training_helper, ...), any Lightning callback by its import path; with
    arguments: {name: gradient_check, policy: skip}."""
    tune: TuneOptions | None = None
    """Hyperparameter search with `forgefield tune`; not used by a training."""

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        if self.name is None:
            raise ForgefieldError("'name' is missing: a run needs a name, which is also that of its folder.")
        return Path(self.out) / self.name

    @property
    def cutoff(self) -> float:
        """Radius of the neighbour list, A, where the config has one: that of `model.from` is filled in before it is used."""
        if self.data.cutoff is None:
            raise ForgefieldError("'data.cutoff' is missing: give the radius of the neighbour list in A.")
        return self.data.cutoff

    @property
    def points(self) -> PointsOptions:
        """The section `data.points` of a config whose samples are grid points."""
        if self.data.points is None:
            raise ForgefieldError("'data.points' is missing: the samples of this config are not grid points.")
        return self.data.points

    def check(self, sources: Sources) -> None:
        """Refuse settings that contradict each other or do not apply. sources: where each setting was written."""
        check_training(self.training, sources, new_model="from" not in self.model)
        _check_name(self, sources)
        check_data(self.data, sources)
        if self.data.points is not None:
            check_points(self, sources)
        else:
            check_frames_only(self, sources)
            if self.task is not None:
                check_task(self.task, sources)
        _check_components(self, sources)
        if self.tune is not None:
            check_tune(self.tune, sources)


def default_weights(labels: Mapping[str, int]) -> dict[str, float]:
    """Weights of the targets of a config without `task`, for the labels that the data has.

    Stress in eV/A^3 is a small number, so its weight is large; forces then need more weight than without stress
    (docs/guides/choose-settings.md). labels: number of frames with each label.
    """
    weights = {"energy": 1.0, "forces": 10.0 if labels.get("stress") else 1.0, "stress": 100.0}
    return {label: weight for label, weight in weights.items() if labels.get(label)}


def has_points(values: object) -> bool:
    """Whether samples are grid points, of a plain config."""
    data = values.get("data") if isinstance(values, Mapping) else None
    return isinstance(data, Mapping) and data.get(POINTS) is not None


def as_dict(config: Config) -> dict[str, Any]:
    """A config as plain values, in the form in which files have it."""
    return {key: as_written(value) if key == "task" else value for key, value in dataclasses.asdict(config).items()}


def _check_name(config: Config, sources: Sources) -> None:
    name = config.name
    if name is not None and (name.strip() in ("", ".", "..") or re.search(r"[/\\\0]", name)):
        raise wrong(
            sources, "name", name, "the name of a folder, without slashes ('out' is the folder that contains it)"
        )
    if not config.out.strip():
        raise wrong(sources, "out", config.out, "a folder")


def _check_components(config: Config, sources: Sources) -> None:
    model = config.model
    if isinstance(model, str):
        raise ForgefieldError(
            f"{sources.where('model')}: 'model' must be a section, not '{model}'. Did you mean 'model.name={model}'?"
        )
    if isinstance(model, Mapping) and "from" in model:
        _check_initial_model(model, sources)
    elif not isinstance(model, Mapping) or not isinstance(model.get("name"), str) or not model["name"]:
        where = sources.where("model")
        raise ForgefieldError(f"{where}: 'model' needs a name, for example model: {{name: nequip, preset: S}}.")
    elif config.data.cutoff is None and config.data.points is None:
        raise wrong(sources, "data.cutoff", None, "a number")
    for key, optional in (("training.optimizer", False), ("training.scheduler", True)):
        spec = select(config, key)
        if not (_is_component(spec) or (optional and spec is None)):
            raise wrong(sources, key, spec, "a name, or a mapping such as {name: adamw, weight_decay: 1e-3}")
    if not isinstance(config.trainer, Mapping):
        raise wrong(sources, "trainer", config.trainer, "a section with arguments of lightning.Trainer")
    callbacks = config.callbacks
    if isinstance(callbacks, (str, Mapping)) or not isinstance(callbacks, Sequence):
        raise wrong(sources, "callbacks", callbacks, "a list")
    for position, spec in enumerate(callbacks):
        if not _is_component(spec):
            raise wrong(
                sources, f"callbacks.{position}", spec, "an import path, or {name: import.path, argument: value}"
            )


def _check_initial_model(model: Mapping[Any, Any], sources: Sources) -> None:
    if not isinstance(model["from"], str) or not model["from"].strip():
        raise wrong(sources, "model.from", model["from"], "the name or the folder of a run")
    check_choice(model.get("which"), ("best", "last"), "model.which", sources)
    check_choice(model.get("shifts"), ("keep", "fit"), "model.shifts", sources)


def _is_component(spec: object) -> bool:
    if isinstance(spec, Mapping):
        spec = spec.get("name")
    return isinstance(spec, str) and bool(spec)
