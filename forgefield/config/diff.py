"""What differs between two configs, and whether a run that continues under the new one would still mean the same.

Only settings of the length, the location and the output of a run may change on resume; everything else would make the
second half of a run a different experiment.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forgefield.ldos.options import PointsOptions, PointTaskOptions
from forgefield.settings import Config, as_dict, has_points
from forgefield.tasks.options import DENOISE, TARGETS, DenoiseOptions, FieldTargetOptions, TargetOptions, TaskOptions
from forgefield.training.options import EarlyStoppingOptions, LoraOptions

HARMLESS = (
    "name",
    "out",
    "tune",
    "data.test",
    "data.cache",
    "data.lazy",
    "data.keep",
    "data.workers",
    "data.prefetch",
    "training.checkpoint",
    "training.early_stopping",
    "training.tensorboard",
    # How a step is executed: the same up to rounding.
    "training.engine",
    "training.derivative",
    "training.kernels",
    "training.compile",
    "training.graphs",
    "training.memory",
    "training.block",
    "data.fast",
    # How long.
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.min_epochs",
    "trainer.min_steps",
    # Where.
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.plugins",
    "trainer.default_root_dir",
    # Output and checkpoints.
    "trainer.logger",
    "trainer.log_every_n_steps",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.enable_checkpointing",
    "trainer.profiler",
    "trainer.num_sanity_val_steps",
)


class _Absent:
    def __repr__(self) -> str:
        return "(not given)"


ABSENT = _Absent()


@dataclass(frozen=True)
class Change:
    key: str
    """Dotted key."""
    old: Any
    new: Any
    meaning: bool
    """Whether a run that is continued with the new value would mean something else."""


def config_diff(old: Config, new: Config) -> list[Change]:
    """All settings that differ, in the order of the new config. A setting left out counts as its default."""
    values = as_dict(new)
    defaults = _all_defaults(points=has_points(values))
    return [
        Change(key, before, after, meaning=not _harmless(key))
        for key, before, after in _differences(as_dict(old), values, defaults, "")
    ]


def format_diff(changes: Sequence[Change]) -> str:
    """One line per change, `!` in front of those that change the meaning of the run."""
    width = max((len(change.key) for change in changes), default=0)
    return "\n".join(
        f"{'!' if change.meaning else ' '} {change.key:<{width}}  {_shown(change.old)} -> {_shown(change.new)}"
        for change in changes
    )


def _all_defaults(*, points: bool = False) -> dict[str, Any]:
    """Defaults of every setting, optional sections included. points: whether samples are grid points."""
    options = Config()
    targets: dict[str, Any] = {name: TargetOptions() for name in TARGETS}
    options.task = TaskOptions(**targets)
    if points:
        options.data.points = PointsOptions()
        kinds = typing.get_type_hints(PointTaskOptions)
        made: dict[str, Any] = {name: typing.get_args(kind)[0]() for name, kind in kinds.items()}
        options.task = TaskOptions(points=PointTaskOptions(**made))
    options.training.early_stopping = EarlyStoppingOptions()
    options.training.lora = LoraOptions()
    return {key: value for key, value in as_dict(options).items() if key != "model"}


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, object, object]]:
    for name in [*new, *(name for name in old if name not in new)]:
        key = f"{prefix}{name}"
        default = _default(defaults, key)
        before, after = old.get(name, default), new.get(name, default)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, defaults, f"{key}.")
        elif before != after or isinstance(before, bool) != isinstance(after, bool):
            yield key, before, after


def _default(defaults: Mapping[str, Any], key: str) -> Any:
    """Default of a setting inside a section that is there. Optional sections that are not there are off."""
    if key in ("task", "training.early_stopping", "training.lora", "data.points"):
        return None
    section, _, rest = key.removeprefix("task.").partition(".")
    if key.startswith("task.") and not rest:
        return None
    if key.startswith("task.branches."):
        _, _, setting = rest.partition(".")[2].partition(".")
        if not setting:
            return None
        key, defaults = setting, asdict(TargetOptions())
    elif key.startswith("task.") and (section not in defaults["task"] or defaults["task"][section] is None):
        kind = DenoiseOptions if section == DENOISE else FieldTargetOptions
        key, defaults = rest, asdict(kind())
    value: object = defaults
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _harmless(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in HARMLESS)


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
