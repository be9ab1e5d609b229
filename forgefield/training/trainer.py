"""Builds `lightning.Trainer` from the config: everything it takes is passed on; what is set in two places must agree.

Also tells Lightning how many batches an epoch has where that differs from epoch to epoch: batches counted in atoms or edges
pack the frames of an epoch in their order, so one epoch may need one batch more than another. Lightning asks only once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, LayerSync
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from forgefield.config.components import builtin_class, check_signature, import_class
from forgefield.config.nearest import did_you_mean
from forgefield.config.trust import CONFIG, TRAINER_OBJECTS
from forgefield.errors import ForgefieldError, missing_package
from forgefield.parallel.accelerators import device_count, resolve_accelerator
from forgefield.parallel.environment import LaunchedEnvironment
from forgefield.parallel.launch import Launch
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.rendezvous import gpu_index
from forgefield.parallel.spawn import free_port
from forgefield.parallel.strategies import DEFAULT, register_strategies
from forgefield.settings import Config
from forgefield.training.options import PRECISIONS, TrainingOptions
from forgefield.training.run.checkpoint import AtomicCheckpointIO

DEFAULT_EPOCHS = 100
_OUR_PRECISIONS = {
    **dict.fromkeys(("64", "64-true"), "float64"),
    **dict.fromkeys(("16", "16-mixed", "16-true"), "fp16-mixed"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), "bf16-mixed"),
}
"""Of what Lightning calls a precision, the nearest of ours."""
_KINDS: dict[str, tuple[type, ...]] = {
    "logger": (Logger,),
    "callbacks": (Callback,),
    "strategy": (Strategy,),
    "plugins": (PrecisionPlugin, ClusterEnvironment, CheckpointIO, LayerSync),
    "profiler": (Profiler,),
}
"""What an object that a setting of `trainer` describes has to be."""
assert set(_KINDS) == set(TRAINER_OBJECTS)


def is_quick(trainer: L.Trainer) -> bool:
    """Whether `trainer.fast_dev_run` is set."""
    return bool(vars(trainer).get("fast_dev_run"))


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """All callbacks of a trainer."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return callbacks


def pop_max_seconds(trainer: dict[str, Any]) -> float | None:
    """Remove `max_time` from the options, in any form Lightning takes, and give it in seconds.

    Lightning's own timer ends an epoch in its middle; ours saves at a step and stops, so that the resume is exact.
    """
    limit = trainer.pop("max_time", None)
    if limit is None:
        return None
    try:
        return Timer(duration=limit)._duration
    except Exception as error:
        raise ForgefieldError(
            f"trainer.max_time: '{limit}' is not a time; write DD:HH:MM:SS or {{hours: 2}}."
        ) from error


def requested_processes(config: Config) -> int:
    """How many processes `trainer.devices` asks for on this machine: all GPUs where it is not given, one on a CPU."""
    options = config.trainer
    devices, accelerator = options.get("devices"), options.get("accelerator", "auto")
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if devices in (None, "auto", -1, "-1"):
        return max(device_count(accelerator), 1)
    try:
        return max(int(devices), 1)
    except (TypeError, ValueError):
        return 1  # Lightning will say what is wrong with it


def merge_training_options(options: dict[str, Any], training: TrainingOptions) -> None:
    """Take over what `training` says of settings that Lightning has, too; they must not contradict each other."""
    _agree(options, "gradient_clip_val", training.clip_norm, "training.clip_norm")
    accumulate = training.accumulate if training.accumulate != 1 else None
    _agree(options, "accumulate_grad_batches", accumulate, "training.accumulate")


def build_trainer(
    options: dict[str, Any],
    *,
    folder: Path,
    first: Callback,
    callbacks: list[Callback],
    ranks: Ranks,
) -> L.Trainer:
    """options: the config's `trainer` section as a plain dict, `max_time` already taken out. first: runs before all others.
    ranks: who trains; they exist already, and Lightning is told so.
    """
    register_strategies()
    resolve_accelerator(options, world_size=ranks.world_size)
    options = {key: _build(value, f"trainer.{key}") if key in _KINDS else value for key, value in options.items()}
    if options.get("max_epochs") is None and options.get("max_steps", -1) == -1:
        options["max_epochs"] = DEFAULT_EPOCHS
    _refuse(options)
    own = options.pop("callbacks", None) or []
    plugins = options.pop("plugins", None) or []
    all_gather = [first, *callbacks, *(own if isinstance(own, list) else [own])]
    _refuse_averages(all_gather)
    defaults = {
        "default_root_dir": str(folder),
        "logger": False,
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "log_every_n_steps": 10,
        "inference_mode": False,
        # Our own checkpoints do not go through Lightning's callback; a user's ModelCheckpoint works beside them.
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in all_gather),
    }
    plugins = plugins if isinstance(plugins, list) else [plugins]
    environment = _launch_environment(options, ranks.launch)
    plugins = [AtomicCheckpointIO(ranks), environment, *plugins]
    with lightning_errors("trainer", TypeError, ValueError, AssertionError):
        trainer = L.Trainer(**{**defaults, **options}, callbacks=all_gather, plugins=plugins)
    # Lightning asks rank 0 before every batch whether it got SIGTERM, and has all ranks wait for the answer, the GPU included.
    # Here a wish to stop, of any rank, travels with the message that every batch sends anyway.
    # Its signal handlers send messages too, wherever the process happens to be; ours only take note.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    if ranks.world_size > 1:
        _require_gradient_averaging(trainer, ranks)
    return trainer


def _require_gradient_averaging(trainer: L.Trainer, ranks: Ranks) -> None:
    """Refuse what would let ranks go their own ways."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy):
        raise ForgefieldError(
            f"trainer.strategy: {type(strategy).__name__} does not average gradients over the {ranks.world_size} processes "
            "that were started; use simple_ddp (the default), ddp or a strategy derived from Lightning's DDPStrategy."
        )
    backend = strategy.process_group_backend
    if backend is not None and backend not in ranks.backend:
        raise ForgefieldError(
            f"trainer.strategy: process_group_backend={backend} cannot be had, the processes talk through {ranks.backend}; "
            "leave it out. In a Lightning script of your own the strategy can choose."
        )


def _launch_environment(options: dict[str, Any], launch: Launch) -> LaunchedEnvironment:
    """Tell Lightning which devices and nodes there are, and which of them is ours; `options` is completed in place."""
    devices = options.get("devices")
    if isinstance(devices, str) and "," in devices:
        options["devices"] = [int(part) for part in devices.split(",") if part.strip()]
    if launch.world_size == 1:
        if launch.launcher != "none" and devices in (None, "auto", -1, "-1"):
            options["devices"] = 1  # the launcher has started one process, so one device is used
        port = free_port() if launch.launcher == "none" else launch.master_port
        return LaunchedEnvironment(replace(launch, master_port=port))
    if options.get("strategy") in (None, "auto"):
        options["strategy"] = DEFAULT
    options["num_nodes"] = launch.n_nodes
    if isinstance(options.get("devices"), list):
        return LaunchedEnvironment(launch)
    gpus = device_count(options.get("accelerator"))
    if 0 < gpus < launch.local_size:  # the launcher shows each process its own, or several share one
        options["devices"] = gpus
        return LaunchedEnvironment(launch, device_index=gpu_index(launch))
    options["devices"] = launch.local_size
    return LaunchedEnvironment(launch)


@contextmanager
def lightning_errors(where: str, *also: type[Exception]) -> Iterator[None]:
    """What Lightning finds wrong with its settings becomes one sentence.

    also: further exceptions that can only come from settings. Around a training there are none: a `TypeError` in there may be a
    mistake in the user's own model, and its traceback is what the user needs.
    """
    expected: tuple[type[Exception], ...] = (MisconfigurationException, *also)
    try:
        yield
    except expected as error:
        reason = " ".join(str(error).split()) or f"a setting has a value of the wrong type ({type(error).__name__})"
        raise ForgefieldError(f"{where}: {reason}") from error


def _refuse_averages(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ForgefieldError(
                f"callbacks: {type(callback).__name__} exchanges weights where checkpoints of a run do not know of it, so a "
                "resume would not be exact; use training.swa={start: 0.75} or training.ema=0.999."
            )


def _refuse(options: dict[str, Any]) -> None:
    """Settings of Lightning that cannot mean here what they say, or that it would stumble over in the middle of a training."""
    for key in ("max_epochs", "max_steps", "min_epochs", "min_steps"):
        if not isinstance(options.get(key, 0), (int, type(None))):
            raise ForgefieldError(f"trainer.{key} is a whole number, not {options[key]!r}.")
        if key.startswith("max") and options.get(key) == 0:
            raise ForgefieldError(f"trainer.{key}=0 trains nothing; -1 is without a limit.")
    if options.get("precision") not in (None, 32, "32", "32-true"):
        raise ForgefieldError(
            f"trainer.precision={options['precision']} is not how precision is chosen here; use training.precision="
            f"{_OUR_PRECISIONS.get(str(options['precision']), ', '.join(PRECISIONS))}, which keeps geometry and energy sums in "
            "float64."
        )
    if options.get("inference_mode"):
        raise ForgefieldError("trainer.inference_mode=true cannot be: forces are derivatives, also in validation.")
    if options.get("enable_checkpointing") is False:
        raise ForgefieldError(
            "trainer.enable_checkpointing=false cannot be: a run is its checkpoints; how often they are written is "
            "training.checkpoint, and trainer.fast_dev_run leaves none."
        )
    if options.get("limit_train_batches") == 0:
        raise ForgefieldError("trainer.limit_train_batches=0 leaves nothing to train on.")
    if options.get("barebones"):
        raise ForgefieldError("trainer.barebones=true turns off what makes a run (metrics, checkpoints); leave it out.")


def build_callbacks(specs: Sequence[Any]) -> list[Callback]:
    """The config's `callbacks`: names of ours, import paths, or {name: name or path, argument: value}."""
    built = [_build(spec, "callbacks") for spec in specs]
    for item in built:
        if not isinstance(item, Callback):
            raise ForgefieldError(f"callbacks: {item!r} is not a name, an import path or {{name: import.path}}.")
    keys = [item.state_key for item in built if is_overridden("state_dict", item, Callback)]
    for key in keys:
        if keys.count(key) > 1:
            raise ForgefieldError(
                f"callbacks: {key} is there twice, and its state can be kept only once; leave one out."
            )
    return built


def _build(value: Any, where: str) -> Any:
    """An object from {name: import.path, argument: value}; an import path in `callbacks`; anything else as it is. Its class is
    checked before it is called."""
    if isinstance(value, list):
        return [_build(item, where) for item in value]
    if isinstance(value, str) and where.endswith("callbacks"):
        value = {"name": value}
    if not isinstance(value, dict):
        return value
    if "name" not in value:
        raise ForgefieldError(
            f"{where}: an object is described by {{name: import.path, argument: value}}; name is missing."
        )
    arguments = {key: item for key, item in value.items() if key != "name"}
    kind, name = where.rpartition(".")[2], str(value["name"])
    if kind == "callbacks" and "." not in name:
        cls = builtin_callback(name)
    else:
        cls = import_class(name, _KINDS[kind], where=where, trust=CONFIG)
    check_signature(cls, arguments, where=where)
    try:
        return cls(**arguments)
    except ImportError as error:
        if (sentence := missing_package(error)) is None:
            raise
        raise ForgefieldError(f"{where}={name}: {sentence}") from error


def _agree(options: dict[str, Any], key: str, ours: Any, name: str) -> None:
    theirs = options.get(key)
    if ours is None:
        return
    if theirs is not None and theirs != ours:
        raise ForgefieldError(f"{name}={ours} and trainer.{key}={theirs} contradict each other; keep one.")
    options[key] = ours


def set_epoch_length(trainer: L.Trainer, loader: Any) -> None:
    """Called at the start of an epoch, when the loader knows which it is."""
    fit_loop = trainer.fit_loop
    combined, limit = fit_loop._combined_loader, trainer.limit_train_batches
    n_batches = len(loader)
    if combined is None or fit_loop.max_batches == n_batches:
        return
    if isinstance(limit, int):
        n_batches = min(n_batches, limit)
    elif limit != 1.0:
        n_batches = int(n_batches * limit)
    if n_batches == fit_loop.max_batches:
        return
    combined.limits = [n_batches]
    fit_loop.max_batches = n_batches
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(n_batches * trainer.val_check_interval))


PLANNED = 5_000_000
"""Frames over all epochs up to which every epoch of a fit is planned to count its steps."""


def steps_of_fit(trainer: L.Trainer) -> int:
    """Optimiser steps of the whole training, for schedules that are as long; -1 where there is no end."""
    estimate = trainer.estimated_stepping_batches
    if not math.isfinite(estimate):
        return -1
    loader: Any = trainer.train_dataloader
    epochs = trainer.max_epochs
    same = getattr(loader, "epochs_are_alike", True) or trainer.limit_train_batches != 1.0 or trainer.max_steps != -1
    if same or epochs in (None, -1) or epochs * loader.draws > PLANNED:
        return int(estimate)
    return sum(math.ceil(loader.batches_in(epoch) / trainer.accumulate_grad_batches) for epoch in range(epochs))


def epochs_of_fit(trainer: L.Trainer) -> int:
    """Epochs of the whole training, the last one perhaps cut short by `max_steps`; -1 where there is no end."""
    epochs = -1 if trainer.max_epochs is None else int(trainer.max_epochs)
    if trainer.max_steps < 0:
        return epochs
    of_epoch = max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
    by_steps = math.ceil(trainer.max_steps / of_epoch)
    return by_steps if epochs < 0 else min(epochs, by_steps)


CALLBACKS = {
    "gradient_check": "forgefield.diagnosis.gradient_check.GradientCheck",
    "forward_nan": "forgefield.diagnosis.forward_nan.ForwardNaNDetection",
    "training_helper": "forgefield.diagnosis.training_helper.TrainingHelper",
    "autocorrelation": "forgefield.diagnosis.autocorrelation.ModelAutocorrelation",
    "loss_spike": "forgefield.diagnosis.loss_spike.LossSpike",
    "throughput": "forgefield.diagnosis.throughput_meter.ThroughputMeter",
    "energy": "forgefield.diagnosis.energy.EnergyMeter",
    "sam": "forgefield.training.optim.sam.SAM",
    "learning_curve": "forgefield.training.callbacks.lcurve.LearningCurve",
}


def builtin_callback(name: str) -> Any:
    """The class of one of Forgefield's callbacks by its short name."""
    if name not in CALLBACKS:
        raise ForgefieldError(
            f"callbacks: there is no '{name}'; there are {', '.join(CALLBACKS)}, and import paths such as "
            f"my_callbacks.Announce.{did_you_mean(str(name), CALLBACKS)}"
        )
    return builtin_class(CALLBACKS[name])
