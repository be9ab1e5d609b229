"""Builds `lightning.Trainer` from the config: its options are passed on, and options that are set in two sections must agree.

Also sets the number of batches of each epoch: with batches limited by atoms or edges, it depends on the order of the frames,
but Lightning reads it only once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

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
_PRECISIONS = {
    **dict.fromkeys(("64", "64-true"), "float64"),
    **dict.fromkeys(("16", "16-mixed", "16-true"), "fp16-mixed"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), "bf16-mixed"),
}
"""For precisions of Lightning the closest value of `training.precision`."""
_CLASSES: dict[str, tuple[type, ...]] = {
    "logger": (Logger,),
    "callbacks": (Callback,),
    "strategy": (Strategy,),
    "plugins": (PrecisionPlugin, ClusterEnvironment, CheckpointIO, LayerSync),
    "profiler": (Profiler,),
}
"""Base classes of objects that settings of `trainer` describe."""
assert set(_CLASSES) == set(TRAINER_OBJECTS)


class Loader(Protocol):
    """Batches of this rank, epoch by epoch. Positions inside an epoch are counted in samples, over all ranks."""

    @property
    def epoch(self) -> int: ...

    @property
    def draws(self) -> int:
        """Samples of an epoch, over all ranks."""
        ...

    @property
    def epochs_are_alike(self) -> bool:
        """Whether every epoch has the same number of batches."""
        ...

    def __len__(self) -> int:
        """Batches of the present epoch, those before the position of `start_at` included."""
        ...

    def __iter__(self) -> Iterator[Any]: ...

    def batches_in(self, epoch: int) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...

    def start_at(self, sample: int) -> int:
        """Start the next iteration after this many samples of its epoch; returns the number of its first batch."""
        ...

    def position(self, batch: int) -> int:
        """Samples of the present epoch before this batch."""
        ...


def is_quick(trainer: L.Trainer) -> bool:
    """Whether `trainer.fast_dev_run` is set."""
    return bool(vars(trainer).get("fast_dev_run"))


def training_loader(trainer: L.Trainer) -> Loader:
    """Forgefield's loader of training batches."""
    return cast("Loader", trainer.train_dataloader)


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """All callbacks of a trainer."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return callbacks


def pop_max_seconds(trainer: dict[str, Any]) -> float | None:
    """Remove `max_time`, in any form that Lightning accepts, from the options, and return it in seconds.

    It is not passed to Lightning, because runs that its timer stops cannot be resumed exactly.
    """
    limit = trainer.pop("max_time", None)
    if limit is None:
        return None
    try:
        return Timer(duration=limit)._duration
    except Exception as error:
        raise ForgefieldError(
            f"trainer.max_time: '{limit}' is not a duration; use DD:HH:MM:SS or {{hours: 2}}."
        ) from error


def requested_processes(config: Config) -> int:
    """Number of processes on this machine that `trainer.devices` requests; by default one for each GPU, one on a CPU."""
    options = config.trainer
    devices, accelerator = options.get("devices"), options.get("accelerator", "auto")
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([index for index in devices.split(",") if index.strip()])
    if devices in (None, "auto", -1, "-1"):
        return max(device_count(accelerator), 1)
    try:
        return max(int(devices), 1)
    except (TypeError, ValueError):
        return 1  # Lightning raises an error later


def merge_training_options(options: dict[str, Any], training: TrainingOptions) -> None:
    """Set options of the trainer that `training` has as well. Raises ForgefieldError if they contradict each other."""
    _merge(options, "gradient_clip_val", training.clip_norm, "training.clip_norm")
    accumulate = training.accumulate if training.accumulate != 1 else None
    _merge(options, "accumulate_grad_batches", accumulate, "training.accumulate")


def build_trainer(
    options: dict[str, Any],
    *,
    folder: Path,
    first: Callback,
    callbacks: list[Callback],
    ranks: Ranks,
) -> L.Trainer:
    """The trainer.

    options: the config's `trainer` section without `max_time`.
    folder: of the run.
    first: the callback that runs before all others.
    ranks: the processes that train together, which exist already.
    """
    register_strategies()
    resolve_accelerator(options, world_size=ranks.world_size)
    options = {key: _build(value, f"trainer.{key}") if key in _CLASSES else value for key, value in options.items()}
    if options.get("max_epochs") is None and options.get("max_steps", -1) == -1:
        options["max_epochs"] = DEFAULT_EPOCHS
    _check_options(options)
    all_callbacks = [first, *callbacks, *_as_list(options.pop("callbacks", None))]
    _refuse_averages(all_callbacks)
    defaults = {
        "default_root_dir": str(folder),
        "logger": False,
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "log_every_n_steps": 10,
        "inference_mode": False,
        # Forgefield's checkpoints do not use Lightning's callback; a user's ModelCheckpoint can be used in addition.
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in all_callbacks),
    }
    plugins = _as_list(options.pop("plugins", None))
    environment = _launch_environment(options, ranks.launch)
    plugins = [AtomicCheckpointIO(ranks), environment, *plugins]
    with lightning_errors("trainer", TypeError, ValueError, AssertionError):
        trainer = L.Trainer(**{**defaults, **options}, callbacks=all_callbacks, plugins=plugins)
    # Lightning's signal handlers communicate, at any time; Forgefield's only store the request.
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None
    if ranks.world_size > 1:
        _require_gradient_averaging(trainer, ranks)
    return trainer


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _require_gradient_averaging(trainer: L.Trainer, ranks: Ranks) -> None:
    """Raise ForgefieldError for strategies that do not average gradients over ranks."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy):
        raise ForgefieldError(
            f"trainer.strategy: {type(strategy).__name__} does not average gradients over the {ranks.world_size} processes "
            "that were started; use simple_ddp (the default), ddp or a strategy derived from Lightning's DDPStrategy."
        )
    backend = strategy.process_group_backend
    if backend is not None and backend not in ranks.backend:
        raise ForgefieldError(
            f"trainer.strategy: process_group_backend={backend} is not available, because the processes are connected by "
            f"{ranks.backend}; leave it out. In your own Lightning script the strategy can choose the backend."
        )


def _launch_environment(options: dict[str, Any], launch: Launch) -> LaunchedEnvironment:
    """Lightning's description of the launch. Devices, nodes and strategy are set in `options`."""
    devices = options.get("devices")
    if isinstance(devices, str) and "," in devices:
        options["devices"] = [int(index) for index in devices.split(",") if index.strip()]
    if launch.world_size == 1:
        if launch.launcher != "none" and devices in (None, "auto", -1, "-1"):
            options["devices"] = 1  # the launcher has started one process
        port = free_port() if launch.launcher == "none" else launch.master_port
        return LaunchedEnvironment(replace(launch, master_port=port))
    if options.get("strategy") in (None, "auto"):
        options["strategy"] = DEFAULT
    options["num_nodes"] = launch.n_nodes
    if isinstance(options.get("devices"), list):
        return LaunchedEnvironment(launch)
    gpus = device_count(options.get("accelerator"))
    if (
        0 < gpus < launch.local_size
    ):  # the launcher makes one GPU visible to each process, or several processes share one
        options["devices"] = gpus
        return LaunchedEnvironment(launch, device_index=gpu_index(launch))
    options["devices"] = launch.local_size
    return LaunchedEnvironment(launch)


@contextmanager
def lightning_errors(where: str, *also: type[Exception]) -> Iterator[None]:
    """Convert errors that Lightning raises for its settings to ForgefieldError.

    where: for the message.
    also: additional exceptions that only settings can cause. Not to be used for a training: a `TypeError` may come from the
        user's model, and then the traceback is needed.
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
                f"callbacks: {type(callback).__name__} exchanges weights without storing it in checkpoints, so a resumed run "
                "would not be exact; use training.swa={start: 0.75} or training.ema=0.999."
            )


def _check_options(options: dict[str, Any]) -> None:
    """Raise ForgefieldError for options of Lightning that are not supported."""
    for key in ("max_epochs", "max_steps", "min_epochs", "min_steps"):
        if not isinstance(options.get(key, 0), (int, type(None))):
            raise ForgefieldError(f"trainer.{key} must be an integer, not {options[key]!r}.")
        if key.startswith("max") and options.get(key) == 0:
            raise ForgefieldError(f"trainer.{key}=0 trains nothing; use -1 for no limit.")
    if options.get("precision") not in (None, 32, "32", "32-true"):
        raise ForgefieldError(
            f"trainer.precision={options['precision']} is not supported; use training.precision="
            f"{_PRECISIONS.get(str(options['precision']), ', '.join(PRECISIONS))}, with which geometry and energy sums are "
            "float64."
        )
    if options.get("inference_mode"):
        raise ForgefieldError(
            "trainer.inference_mode=true is not supported, because forces are derivatives, also in validation."
        )
    if options.get("enable_checkpointing") is False:
        raise ForgefieldError(
            "trainer.enable_checkpointing=false is not supported, because a run needs checkpoints; set their frequency with "
            "training.checkpoint, or use trainer.fast_dev_run, which writes none."
        )
    if options.get("limit_train_batches") == 0:
        raise ForgefieldError("trainer.limit_train_batches=0 leaves nothing to train on.")
    if options.get("barebones"):
        raise ForgefieldError(
            "trainer.barebones=true is not supported, because a run needs metrics and checkpoints; leave it out."
        )


def build_callbacks(specs: Sequence[str | dict[str, Any]]) -> list[Callback]:
    """The config's `callbacks`: names of Forgefield's callbacks, import paths, or {name: name or path, argument: value}."""
    built = [_build(spec, "callbacks") for spec in specs]
    for item in built:
        if not isinstance(item, Callback):
            raise ForgefieldError(f"callbacks: {item!r} is not a name, an import path or {{name: import.path}}.")
    keys = [item.state_key for item in built if is_overridden("state_dict", item, Callback)]
    for key in keys:
        if keys.count(key) > 1:
            raise ForgefieldError(
                f"callbacks: {key} is listed twice, but its state can be stored only once; leave one out."
            )
    return built


def _build(value: Any, where: str) -> Any:
    """The object that {name: import.path, argument: value} or, in `callbacks`, an import path describes; any other value as it
    is. The class is checked before it is called."""
    if isinstance(value, list):
        return [_build(item, where) for item in value]
    if isinstance(value, str) and where.endswith("callbacks"):
        value = {"name": value}
    if not isinstance(value, dict):
        return value
    if "name" not in value:
        raise ForgefieldError(
            f"{where}: an object is written as {{name: import.path, argument: value}}; name is missing."
        )
    arguments = {key: item for key, item in value.items() if key != "name"}
    kind, name = where.rpartition(".")[2], str(value["name"])
    if kind == "callbacks" and "." not in name:
        cls = builtin_callback(name)
    else:
        cls = import_class(name, _CLASSES[kind], where=where, trust=CONFIG)
    check_signature(cls, arguments, where=where)
    try:
        return cls(**arguments)
    except ImportError as error:
        if (sentence := missing_package(error)) is None:
            raise
        raise ForgefieldError(f"{where}={name}: {sentence}") from error


def _merge(options: dict[str, Any], key: str, value: float | None, name: str) -> None:
    """Set an option of the trainer to the value of the setting `name`, if it has one."""
    if value is None:
        return
    if options.get(key) is not None and options[key] != value:
        raise ForgefieldError(f"{name}={value} and trainer.{key}={options[key]} contradict each other; set only one.")
    options[key] = value


def set_epoch_length(trainer: L.Trainer, loader: Loader) -> None:
    """Set Lightning's number of batches of the present epoch; called at its start."""
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


def set_validation_length(trainer: L.Trainer, loader: Loader) -> None:
    """Set Lightning's number of batches of a validation, if it has been determined already."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop._combined_loader is not None:
        loop._max_batches = [len(loader)]


MAX_COUNTED_FRAMES = 5_000_000
"""Steps are counted exactly if epochs have different lengths and the training has at most this many frames over all epochs."""


def steps_of_fit(trainer: L.Trainer) -> int:
    """Number of optimiser steps of the training; -1 without limit."""
    estimate = trainer.estimated_stepping_batches
    if not math.isfinite(estimate):
        return -1
    loader: Any = trainer.train_dataloader
    epochs = trainer.max_epochs
    same = getattr(loader, "epochs_are_alike", True) or trainer.limit_train_batches != 1.0 or trainer.max_steps != -1
    if same or epochs is None or epochs == -1 or epochs * loader.draws > MAX_COUNTED_FRAMES:
        return int(estimate)
    return sum(math.ceil(loader.batches_in(epoch) / trainer.accumulate_grad_batches) for epoch in range(epochs))


def epochs_of_fit(trainer: L.Trainer) -> int:
    """Number of epochs of the training, an incomplete last one included; -1 without limit."""
    epochs = -1 if trainer.max_epochs is None else int(trainer.max_epochs)
    if trainer.max_steps < 0:
        return epochs
    steps_per_epoch = max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
    by_steps = math.ceil(trainer.max_steps / steps_per_epoch)
    return by_steps if epochs < 0 else min(epochs, by_steps)


CALLBACKS: dict[str, str] = {
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


def builtin_callback(name: str) -> type[Callback]:
    """The class of one of Forgefield's callbacks."""
    if name not in CALLBACKS:
        raise ForgefieldError(
            f"callbacks: unknown name '{name}'; available are {', '.join(CALLBACKS)}, and import paths such as "
            f"my_callbacks.Announce.{did_you_mean(str(name), CALLBACKS)}"
        )
    cls: type[Callback] = builtin_class(CALLBACKS[name])
    return cls
