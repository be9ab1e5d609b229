"""One training from config to trained weights: open or continue the run folder, prepare data and model, run Lightning.

Read top to bottom, `fit` is the whole story. Whether a run is new, continued or already complete is decided here, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig
from torch import nn

from forgefield.config.nearest import did_you_mean
from forgefield.config.template import commented_yaml
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import DataModule
from forgefield.data.readers import plain
from forgefield.data.statistics import content_hash
from forgefield.errors import ForgefieldError
from forgefield.files import write_whole
from forgefield.models.potential import Potential
from forgefield.models.registry import build_model, check_model, resolve_model
from forgefield.runs import Run, versions
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import TARGETS, Task, default_task, require_labels
from forgefield.training.callbacks.best_model import BestModel
from forgefield.training.callbacks.metrics_log import MetricsLog
from forgefield.training.callbacks.progress import RunProgress
from forgefield.training.callbacks.run_checkpoint import RunCheckpoint
from forgefield.training.callbacks.tensorboard import TensorBoardLog
from forgefield.training.checkpoint import Restart, find_restart
from forgefield.training.folder import compare_with_stored_config, has_begun, run_folder
from forgefield.training.journal import Journal
from forgefield.training.module import TrainingModule
from forgefield.training.optimisers import build_optimiser
from forgefield.training.signals import StopRequested, StopWish
from forgefield.training.summary import device_rows, model_rows, print_summary
from forgefield.training.trainer import (
    build_trainer,
    early_stopping,
    lightning_errors,
    take_max_seconds,
    user_callbacks,
)

_LIMITS = ("trainer.max_epochs", "trainer.max_steps", "training.early_stopping")


@dataclass(frozen=True)
class Fitted:
    """run: the folder. data: what it was trained on. outcome: `finished`, `complete` (it was so before), `stopped`, `quick`.

    changed: settings that differ from when the run was started.
    """

    run: Run
    data: DataModule
    outcome: str
    exit_code: int = 0
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Record:
    """What `run.json` says about a run beside its settings."""

    task: Task
    model: dict[str, Any]
    fingerprint: str
    parameters: int

    def write(self, run: Run, config: DictConfig, data: DataModule) -> None:
        """Store settings and record, when it is certain that they will be used."""
        status = run.info["status"] if has_begun(run) else "new"
        write_whole(run.path / "config.yaml", commented_yaml(config))
        run.write_info(
            name=run.name,
            status=status,
            versions=versions(),
            species=list(data.species.symbols),
            cutoff=float(config.data.cutoff),
            precision=config.training.precision,
            seed=config.seed,
            model=self.model,
            parameters=self.parameters,
            task=dict(self.task.describe()),
            statistics=asdict(data.statistics),
            data=[list(row) for row in data.describe()],
            data_fingerprint=self.fingerprint,
        )


def fit(config: DictConfig, *, fresh: bool, journal: Journal) -> Fitted:
    """Train as `config` says. With `fresh` an existing run of that name is moved aside, else it is continued."""
    options: dict[str, Any] = plain(config.trainer)
    quick = bool(options.get("fast_dev_run"))
    check_model(plain(config.model))
    build_optimiser(
        config.training.optimizer, [nn.Parameter(torch.zeros(2, 2))], lr=config.training.lr
    )  # built here only so that a typo shows before any work is done
    with run_folder(config, fresh=fresh, quick=quick, journal=journal) as run:
        journal.keep_in(run.path / "log.txt")
        changed = [change.key for change in compare_with_stored_config(run, config, journal)]
        data = DataModule(config.data, seed=config.seed)
        data.prepare()
        L.seed_everything(config.seed, verbose=False)
        task, resolved, fingerprint = _prepare_model(run, config, data)
        potential = build_model(resolved, precision=config.training.precision, seed=config.seed)
        record = _Record(task, resolved, fingerprint, sum(p.numel() for p in potential.parameters()))
        restart = find_restart(run.checkpoints, journal.say)
        limits_changed = any(key.startswith(_LIMITS) for key in changed)
        if restart is not None and run.info["status"] == "finished" and not limits_changed:
            journal.say(f"Run {run.name} is complete ({restart.step} steps); start over with --fresh.")
            record.write(run, config, data)
            return Fitted(run, data, "complete", changed=changed)
        return _run_lightning(run, config, options, data, record, potential, restart, journal)


def _run_lightning(
    run: Run,
    config: DictConfig,
    options: dict[str, Any],
    data: DataModule,
    record: _Record,
    potential: Potential,
    restart: Restart | None,
    journal: Journal,
) -> Fitted:
    task = record.task
    training, quick = config.training, bool(options.get("fast_dev_run"))
    has_val = data.val is not None and options.get("limit_val_batches") != 0
    columns = _columns(task, data.species.symbols, has_val)
    monitor = _monitor(training, columns, has_val, journal)
    module = TrainingModule(potential, task, training, data.species.symbols, monitor=monitor)
    max_seconds = take_max_seconds(options)
    metrics_log = MetricsLog(run.path, columns)
    stop = StopWish(max_seconds)
    step = restart.step if restart else 0
    kept = [] if quick else [BestModel(run.checkpoints, monitor)]
    callbacks = [
        metrics_log,
        *kept,
        *([TensorBoardLog(run.path / "tensorboard", training.tensorboard, step)] if training.tensorboard else []),
        *([early] if (early := early_stopping(training.early_stopping, monitor)) else []),
        *(
            [RunProgress(journal.console, monitor=monitor, max_seconds=max_seconds)]
            if options.get("enable_progress_bar", True)
            else []
        ),
        *user_callbacks(config.callbacks),
    ]
    first = RunCheckpoint(run.checkpoints, training.checkpoint, stop, enabled=not quick)
    trainer = build_trainer(config, options, folder=run.path, first=first, callbacks=callbacks)
    if restart is not None and trainer.max_epochs not in (None, -1) and restart.epoch > trainer.max_epochs:
        raise ForgefieldError(
            f"Run {run.name} has {restart.epoch} epochs behind it already, more than trainer.max_epochs={trainer.max_epochs}."
        )
    record.write(run, config, data)
    metrics_log.start(restart.checkpoint if restart else None)
    loader = data.train_dataloader()
    if options.get("overfit_batches"):
        journal.say("trainer.overfit_batches is set: the same frames are used every epoch, without shuffling.")
        loader.shuffle = False
    if restart is not None:
        loader.set_epoch(restart.epoch)
        loader.start_at(restart.batch)
        journal.say(
            f"Continuing run {run.name} after step {restart.step} (epoch {restart.epoch + 1}), {restart.path.name}."
        )
    _summarise(journal, run, config, data, task, potential, trainer, monitor)
    run.write_info(status="running")
    try:
        with stop, lightning_errors("trainer or training"):
            trainer.fit(
                module,
                train_dataloaders=loader,
                val_dataloaders=data.val_dataloader() if has_val else None,
                ckpt_path=str(restart.path) if restart else None,
                weights_only=True,
            )
    except StopRequested as stopped:
        run.write_info(status="stopped")
        journal.say(f"Stopped after step {trainer.global_step}: {stopped.reason}. Run the same command to go on.")
        return Fitted(run, data, "stopped", exit_code=stopped.exit_code)
    if quick:
        return Fitted(run, data, "quick")
    run.write_info(status="finished", steps=trainer.global_step, epochs=trainer.current_epoch)
    return Fitted(run, data, "finished")


def _monitor(training: Any, columns: list[str], has_val: bool, journal: Journal) -> str:
    """What picks the best model; every value that is to be watched must be one that will exist."""
    monitor = training.monitor
    if not has_val and monitor == "val/loss":
        monitor = "train/loss"
        journal.say("There is no validation: the best model is the one with the lowest training loss.")
    watched = {"training.monitor": monitor}
    if training.early_stopping is not None and training.early_stopping.monitor:
        watched["training.early_stopping.monitor"] = training.early_stopping.monitor
    for setting, name in watched.items():
        if name not in columns:
            reason = "; without validation only train/... can be watched" if not has_val else ""
            raise ForgefieldError(f"{setting}={name} is not a value of this run{reason}.{did_you_mean(name, columns)}")
    return monitor


def _prepare_model(run: Run, config: DictConfig, data: DataModule) -> tuple[Task, dict[str, Any], str]:
    """Task, model options in full and fingerprint of the data. A run that has begun keeps the options it has."""
    statistics, species = data.statistics, data.species.symbols
    task_options = config.task if config.task is not None else default_task(statistics.labels)
    task = Task(task_options, species)
    require_labels(task, statistics.labels, "training")
    for name, dataset in (("val", data.val), ("test", data.test)):
        _require_any_label(task, name, dataset)
    resolved = resolve_model(plain(config.model), species=species, cutoff=config.data.cutoff, statistics=statistics)
    fingerprint = content_hash([*data.train.frames, *(data.val.frames if data.val is not None else [])])
    if has_begun(run):
        if run.info["data_fingerprint"] != fingerprint:
            raise ForgefieldError(
                f"The data of run {run.name} is not the data it was started with (a file or the split changed); "
                "restore it, or start over with --fresh."
            )
        resolved = run.info["model"]
    return task, resolved, fingerprint


def _require_any_label(task: Task, split: str, dataset: GraphDataset | None) -> None:
    """Refuse frames that are meant to measure the model and carry nothing to measure it with."""
    names = task.names if split == "val" else TARGETS
    if dataset is not None and not any(getattr(frame, name) is not None for frame in dataset.frames for name in names):
        raise ForgefieldError(
            f"None of the frames of data.{split} carries {', '.join(names)}, so nothing could be measured on them; "
            f"give labelled frames or data.{split}=0."
        )


def _columns(task: Task, species: tuple[str, ...], has_val: bool) -> list[str]:
    """Every metric a row may hold."""
    names = ["loss", *ErrorMetrics(task.names, species).names()]
    return [f"{split}/{name}" for split in (("train", "val") if has_val else ("train",)) for name in names]


def _summarise(
    journal: Journal,
    run: Run,
    config: DictConfig,
    data: DataModule,
    task: Task,
    potential: Potential,
    trainer: L.Trainer,
    monitor: str,
) -> None:
    training = config.training
    epochs = f"{trainer.max_epochs} epochs" if trainer.max_epochs not in (None, -1) else ""
    steps = f"{trainer.max_steps} steps" if trainer.max_steps != -1 else ""
    optimiser = training.optimizer if isinstance(training.optimizer, str) else training.optimizer["name"]
    rows = [
        ("run folder", str(run.path)),
        ("length", " or ".join(text for text in (epochs, steps) if text)),
        (
            "batch",
            f"{config.data.batch.frames} frames" + (f" x {training.accumulate}" if training.accumulate > 1 else ""),
        ),
        (
            "optimiser",
            f"{optimiser}, lr {training.lr:g}" + (f", clip {training.clip_norm:g}" if training.clip_norm else ""),
        ),
        ("average", f"EMA {training.ema:g}" if training.ema else "none"),
        ("best by", monitor),
        ("engine", training.engine),
    ]
    sections: dict[str, Sequence[tuple[str, str]]] = {
        "Data": list(data.describe()),
        "Model": [("name", str(config.model.name)), *model_rows(potential)],
        "Task": list(task.describe()),
        "Training": rows,
        "Devices": device_rows(trainer),
    }
    journal.show(lambda console: print_summary(console, sections))
