"""One training from config to trained weights: open or continue the run folder, prepare data and model, run Lightning.

Read top to bottom, `fit` is the whole story. Whether a run is new, continued or already complete is decided here, and said.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig

from forgefield.config.diff import config_diff, format_diff
from forgefield.config.template import commented_yaml
from forgefield.data.module import DataModule
from forgefield.data.readers import plain
from forgefield.data.statistics import content_hash
from forgefield.errors import ForgefieldError
from forgefield.models.potential import Potential
from forgefield.models.registry import build_model, resolve_model
from forgefield.runs import Run, versions
from forgefield.tasks.task import Task, default_task, require_labels
from forgefield.training.callbacks.metrics_log import MetricsLog
from forgefield.training.callbacks.progress import RunProgress
from forgefield.training.callbacks.run_checkpoint import RunCheckpoint, StopRequested
from forgefield.training.callbacks.tensorboard import TensorBoardLog
from forgefield.training.checkpoint import Restart, find_restart
from forgefield.training.journal import Journal
from forgefield.training.module import TrainingModule
from forgefield.training.summary import device_rows, model_rows, print_summary
from forgefield.training.trainer import build_trainer, early_stopping, take_max_seconds, user_callbacks

_LIMITS = ("trainer.max_epochs", "trainer.max_steps", "training.early_stopping")


@dataclass(frozen=True)
class Fitted:
    """run: the folder. data: what it was trained on. outcome: `finished`, `complete` (it was so before) or `stopped`."""

    run: Run
    data: DataModule
    outcome: str
    exit_code: int = 0


def fit(config: DictConfig, *, fresh: bool, journal: Journal) -> Fitted:
    """Train as `config` says. With `fresh` an existing run of that name is moved aside, else it is continued."""
    options: dict[str, Any] = plain(config.trainer)
    quick = bool(options.get("fast_dev_run"))
    run = _open_folder(config, fresh=fresh, quick=quick, journal=journal)
    with _only_process_in(run.path):
        journal.keep_in(run.path / "log.txt")
        limits_changed = _compare_with_stored_config(run, config, journal)
        data = DataModule(config.data, seed=config.seed)
        if options.get("overfit_batches"):
            journal.say("trainer.overfit_batches is set: the same frames are used every epoch, without shuffling.")
            config.data.shuffle = False
        data.prepare()
        L.seed_everything(config.seed, verbose=False)
        task, potential = _prepare_model(run, config, data, journal)
        restart = None if quick else find_restart(run.checkpoints, journal.say)
        if restart is not None and run.info["status"] == "finished" and not limits_changed:
            journal.say(f"Run {run.name} is complete ({restart.step} steps); start over with --fresh.")
            return Fitted(run, data, "complete")
        return _run_lightning(run, config, options, data, task, potential, restart, journal)


def _run_lightning(
    run: Run,
    config: DictConfig,
    options: dict[str, Any],
    data: DataModule,
    task: Task,
    potential: Potential,
    restart: Restart | None,
    journal: Journal,
) -> Fitted:
    training = config.training
    step = restart.step if restart else 0
    has_val = data.val is not None
    if not has_val and training.monitor == "val/loss":
        training.monitor = "train/loss"
        journal.say("There are no validation frames: the best model is the one with the lowest training loss.")
    module = TrainingModule(potential, task, training, data.species.symbols)
    max_seconds = take_max_seconds(options)
    metrics_log = MetricsLog(run.path, _columns(module, has_val))
    callbacks = [
        metrics_log,
        RunCheckpoint(
            run.checkpoints, training.checkpoint, monitor=training.monitor, max_seconds=max_seconds, say=journal.say
        ),
        *([TensorBoardLog(run.path / "tensorboard", training.tensorboard, step)] if training.tensorboard else []),
        *([stop] if (stop := early_stopping(training.early_stopping, training.monitor)) else []),
        *(
            [RunProgress(journal.console, monitor=training.monitor, max_seconds=max_seconds)]
            if options.get("enable_progress_bar", True)
            else []
        ),
        *user_callbacks(config.callbacks),
    ]
    trainer = build_trainer(config, options, folder=run.path, callbacks=callbacks, has_val=has_val)
    metrics_log.start(step)
    loader = data.train_dataloader()
    if restart is not None:
        loader.set_epoch(restart.epoch)
        loader.start_at(restart.batch)
        journal.say(
            f"Continuing run {run.name} after step {restart.step} (epoch {restart.epoch + 1}), {restart.path.name}."
        )
    _summarise(journal, run, config, data, task, potential, trainer)
    run.write_info(status="running")
    try:
        trainer.fit(
            module,
            train_dataloaders=loader,
            val_dataloaders=data.val_dataloader() if has_val else None,
            ckpt_path=str(restart.path) if restart else None,
            weights_only=True,
        )
    except StopRequested as stop:
        run.write_info(status="stopped")
        journal.say(f"Stopped after step {trainer.global_step}: {stop.reason}. Run the same command to go on.")
        return Fitted(run, data, "stopped", exit_code=_exit_code(stop))
    run.write_info(status="finished", steps=trainer.global_step, epochs=trainer.current_epoch)
    return Fitted(run, data, "finished")


# ---- the run folder


def _open_folder(config: DictConfig, *, fresh: bool, quick: bool, journal: Journal) -> Run:
    path = Path(config.out) / (f"{config.name}-dev" if quick else config.name)
    if quick:
        shutil.rmtree(path, ignore_errors=True)
        journal.say(f"trainer.fast_dev_run is set: a quick pass in {path}, without checkpoints.")
    try:
        if fresh and (path / "run.json").exists():
            aside = _unused_name(path)
            os.rename(path, aside)
            journal.say(f"Starting over; the run before is kept as {aside}.")
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        with open(path / "log.txt", "a"):
            pass
    except OSError as error:
        raise ForgefieldError(
            f"Cannot write to the run folder {path}: {error.strerror}; choose another place with out=FOLDER."
        ) from error
    return Run(path)


def _unused_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.before-{number}")).exists():
        number += 1
    return aside


@contextmanager
def _only_process_in(path: Path) -> Iterator[None]:
    """Two trainings in one folder would overwrite each other. The lock ends with the process, however it ends."""
    with open(path / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ForgefieldError(
                f"Another process is training in {path}; wait for it, or give this run another name with name=NAME."
            ) from error
        yield


def _compare_with_stored_config(run: Run, config: DictConfig, journal: Journal) -> bool:
    """Refuse to continue a run with settings that change its meaning. True when its limits were changed."""
    if not (run.path / "run.json").exists():
        return False
    changes = config_diff(run.config, config)
    refused = [change for change in changes if change.meaning]
    if refused:
        raise ForgefieldError(
            f"Run {run.name} was made with other settings, so continuing it would not be the same training:\n"
            f"{format_diff(refused)}\n"
            "Undo the change, start over with --fresh, or give the new run its own name with name=NAME."
        )
    if changes:
        journal.say(f"Settings changed since run {run.name} was started:\n{format_diff(changes)}")
    return any(change.key.startswith(_LIMITS) for change in changes)


def _prepare_model(run: Run, config: DictConfig, data: DataModule, journal: Journal) -> tuple[Task, Potential]:
    """Task and model for this data; on a new run also its `config.yaml` and `run.json`."""
    statistics, species = data.statistics, data.species.symbols
    task_options = config.task if config.task is not None else default_task(statistics.labels)
    task = Task(task_options, species)
    require_labels(task, statistics.labels, "training")
    resolved = resolve_model(plain(config.model), species=species, cutoff=config.data.cutoff, statistics=statistics)
    fingerprint = content_hash([*data.train.frames, *(data.val.frames if data.val is not None else [])])
    if (run.path / "run.json").exists():
        if run.info["data_fingerprint"] != fingerprint:
            raise ForgefieldError(
                f"The data of run {run.name} is not the data it was started with (a file or the split changed); "
                "restore it, or start over with --fresh."
            )
        resolved = run.info["model"]
    potential = build_model(resolved, precision=config.training.precision, seed=config.seed)
    (run.path / "config.yaml").write_text(commented_yaml(config))
    run.write_info(
        name=run.name,
        status=run.info["status"] if (run.path / "run.json").exists() else "new",
        versions=versions(),
        species=list(species),
        cutoff=float(config.data.cutoff),
        precision=config.training.precision,
        seed=config.seed,
        model=resolved,
        parameters=sum(p.numel() for p in potential.parameters()),
        task=dict(task.describe()),
        statistics=asdict(statistics),
        data=[list(row) for row in data.describe()],
        data_fingerprint=fingerprint,
    )
    return task, potential


def _columns(module: TrainingModule, has_val: bool) -> list[str]:
    names = ["loss", *module.train_errors.names()]
    return [f"{split}/{name}" for split in (("train", "val") if has_val else ("train",)) for name in names]


def _summarise(
    journal: Journal,
    run: Run,
    config: DictConfig,
    data: DataModule,
    task: Task,
    potential: Potential,
    trainer: L.Trainer,
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
        ("best by", training.monitor),
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


def _exit_code(stop: StopRequested) -> int:
    """As a shell reports it: 128 + signal; a time limit the user set is a success."""
    if stop.signal_number is None:
        return 0
    return 128 + int(signal.Signals(stop.signal_number))
