"""The run folder at the start of a training: created and locked, and its settings compared with the present config."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forgefield.config.diff import Change, config_diff, format_diff
from forgefield.config.loading import load_config, override_keys
from forgefield.data.options import DEFAULT_POINTS
from forgefield.errors import ForgefieldError
from forgefield.files import remove_leftovers
from forgefield.parallel.ranks import Ranks
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.run.journal import Journal
from forgefield.training.run.owner import OWNER, training_process

KEPT = ("data.points.scaling.outputs",)
"""Settings whose default has changed: where a config leaves them out, a run keeps the value with which it began."""
LOCK = ".lock"
"""Name of the file that is locked while a run is trained."""


@contextmanager
def run_folder(
    config: Config, *, fresh: bool, quick: bool, journal: Journal, ranks: Ranks, hears_signals: bool = False
) -> Iterator[Run]:
    """The folder of the run, created and locked by rank 0; the others wait until it is ready.

    hears_signals: whether this process handles the signals of `training.run.signals`, so that others may send them.
    """
    if ranks.is_rank_zero:
        with (
            _locked_folder(config, fresh=fresh, quick=quick, journal=journal) as run,
            training_process(run.path, hears_signals=hears_signals),
        ):
            ranks.broadcast(str(run.path))
            yield run
    else:
        yield Run(Path(ranks.broadcast(None)))


@contextmanager
def _locked_folder(config: Config, *, fresh: bool, quick: bool, journal: Journal) -> Iterator[Run]:
    """The folder of the run, locked by this process.

    fresh: rename an existing run first.
    quick: use a hidden folder instead, for `trainer.fast_dev_run`.
    """
    path = config.folder.with_name(f".{config.name}-quick") if quick else config.folder
    is_new = not path.exists()
    try:
        if fresh and (path / "run.json").exists():
            with _locked(path):
                renamed = _unused_name(path)
                os.rename(path, renamed)
            journal.notify(f"Starting over; the previous run was renamed to {renamed}.")
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        with open(path / "log.txt", "a"):
            pass
    except OSError as error:
        raise ForgefieldError(
            f"Cannot write to the run folder {path}: {error.strerror}; choose another folder with out=FOLDER."
        ) from error
    with _locked(path):
        if quick:
            journal.notify(
                f"trainer.fast_dev_run is set: a quick test in {path}; the run {config.name} is not changed."
            )
            for item in path.iterdir():
                if item.name not in (LOCK, OWNER):
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
        for folder in (path, path / "checkpoints", path / "predictions"):
            remove_leftovers(folder)
        try:
            yield Run(path)
        except ForgefieldError:
            if is_new and not _was_started(Run(path)):
                shutil.rmtree(path, ignore_errors=True)
            raise


def config_of_run(run: Run, overrides: Sequence[str] = (), *, trust_code: bool = False) -> Config:
    """The config of a run with `overrides`, checked like a config file; for resuming it.

    trust_code: whether code that the run names may be imported.
    """
    if run.info.get("status") == "imported":
        raise ForgefieldError(
            f"Run {run.name} was imported and has no training to resume; to train its model, use forgefield train CONFIG "
            f"--init-model {run.path} --name NAME."
        )
    for key in override_keys(overrides):
        if key in ("name", "out"):
            raise ForgefieldError(
                f"'{key}' cannot be changed when run {run.path} is resumed; to train another run with its settings, use "
                f"forgefield train {run.path / 'config.yaml'} --name NAME."
            )
    config = load_config(run.path / "config.yaml", overrides, trust_code=trust_code)
    config.out, config.name = str(run.path.parent), run.name
    return config


def _was_started(run: Run) -> bool:
    """Whether the training of the run has been started; from then on, nothing in its folder is removed."""
    return run.exists and run.info.get("status") not in (None, "new")


def has_begun(run: Run) -> bool:
    """Whether the run has a checkpoint; without one its settings can still be changed."""
    return any(run.checkpoints.glob("step-*"))


def compare_with_stored_config(
    run: Run, config: Config, journal: Journal, *, world_sizes: tuple[int, int] = (1, 1)
) -> list[Change]:
    """Settings that have changed since the run was started. Raises ForgefieldError if a change makes it another training.

    world_sizes: numbers of ranks before and now. A batch size per rank that has changed in inverse proportion is not a change.
    """
    if run.exists and run.info.get("status") == "imported":
        raise ForgefieldError(
            f"Run {run.name} was imported and cannot be trained; to train its model in a new run, use "
            f"forgefield train CONFIG --init-model {run.path} --name NAME."
        )
    if run.exists and run.members:
        raise ForgefieldError(
            f"Run {run.name} is an ensemble (training.ensemble), and the config is that of a single model; name another run "
            "with name=NAME, or start over with --fresh."
        )
    if not has_begun(run):
        return []
    changes = [change for change in config_diff(run.config, config) if change.key not in KEPT or change.new is not None]
    before, now = world_sizes
    frames = run.info.get("defaults", {}).get("frames")
    defaults = {"data.batch.frames": frames, "data.batch.points": DEFAULT_POINTS}
    refused = [
        change
        for change in changes
        if change.meaning
        and not (
            change.key in defaults
            and int(change.old or defaults[change.key]) * before == int(change.new or defaults[change.key]) * now
            and config.training.scale_lr == "none"
            and not config.data.batch.by_source
        )
    ]
    if refused:
        raise ForgefieldError(
            f"Run {run.name} was started with other settings, with which it cannot be resumed:\n"
            f"{format_diff(refused)}\n"
            "Undo the change, start over with --fresh, or start another run with name=NAME."
        )
    if changes:
        journal.notify(f"Settings changed since run {run.name} was started:\n{format_diff(changes)}")
    return changes


def _unused_name(path: Path) -> Path:
    number = 1
    while (unused := path.with_name(f"{path.name}.before-{number}")).exists():
        number += 1
    return unused


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a folder against other trainings. The lock is released when the process ends."""
    with open(path / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ForgefieldError(
                f"Another process is training in {path}; wait for it, or give this run another name with name=NAME."
            ) from error
        yield
