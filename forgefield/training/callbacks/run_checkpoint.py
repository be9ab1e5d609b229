"""Saves a run so that it can be continued exactly, and stops it cleanly on a signal or when time is up.

Contract. A checkpoint is taken at the start of a batch, before anything of that batch has happened: everything before it
(optimiser step, average, schedulers, validation, rows of metrics) is complete, nothing after it has begun. A resume therefore
repeats nothing and leaves nothing out. At the end of training one more is written in the same canonical form, as if the next
epoch were about to start. With gradient accumulation, checkpoints wait for the end of an accumulation.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from safetensors.torch import save as safetensors_bytes

from forgefield.errors import ForgefieldError
from forgefield.files import write_whole
from forgefield.training.checkpoint import (
    DamagedCheckpoint,
    checkpoint_path,
    load_checkpoint,
    prune_checkpoints,
)


class StopRequested(Exception):
    """Training was asked to stop; everything is saved. `reason` is a plain phrase, `signal_number` the signal if any."""

    def __init__(self, reason: str, signal_number: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number


class RunCheckpoint(Checkpoint):
    """folder: where checkpoints go. options: the config's `training.checkpoint`. max_seconds: wall-clock limit."""

    def __init__(
        self, folder: Path, options: Any, *, monitor: str, max_seconds: float | None, say: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.options = options
        self.monitor = monitor
        self.say = say
        self.best: float | None = None
        self._deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self._stop: tuple[str, int | None] | None = None
        self._random_state: dict[str, Any] | None = None
        self._last_saved = -1
        self._handlers: dict[int, Any] = {}
        self._finished = False
        self._verified = False

    # ---- when

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # After Lightning has put its own handlers in place: those would stop before the state is at a clean boundary.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._random_state is not None:
            self._go_on(trainer)
            return
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._stop = self._stop or ("trainer.max_time is over", None)
        if self._stop is not None:
            self._save(trainer)
            raise StopRequested(*self._stop)
        if self._due(trainer, batch_idx):
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking and not _quick(trainer)
        if fitting and not self.monitor.startswith("train/"):
            self._keep_best(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor.startswith("train/") and not _quick(trainer):
            self._keep_best(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._restore_handlers()
        if _quick(trainer):
            return
        self._save(trainer, finished=True)
        self._write_weights("last", trainer, pl_module)
        if not (self.folder / "best.safetensors").exists():
            self._write_weights("best", trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _due(self, trainer: L.Trainer, batch_idx: int) -> bool:
        step = trainer.global_step
        if _quick(trainer) or step == 0 or step == self._last_saved:
            return False
        every_steps, every_epochs = self.options.every_steps, self.options.every_epochs
        if every_steps and step % every_steps == 0:
            return True
        return bool(every_epochs) and batch_idx == 0 and trainer.current_epoch % every_epochs == 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for the step to end
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._stop = (f"{name} was received", number)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    # ---- what

    def _save(self, trainer: L.Trainer, finished: bool = False) -> None:
        if _quick(trainer):
            return
        module: Any = trainer.lightning_module
        module.finite_train_loss()
        self._finished = finished
        path = checkpoint_path(self.folder, trainer.global_step)
        trainer.save_checkpoint(path)
        if not self._verified:
            self._verify(path)
        self._last_saved = trainer.global_step
        prune_checkpoints(self.folder, self.options.keep)

    def _verify(self, path: Path) -> None:
        """Read the first checkpoint back: a state that cannot be loaded must be known now, not at the resume."""
        try:
            load_checkpoint(path)
        except DamagedCheckpoint as error:
            path.unlink()
            raise ForgefieldError(
                f"The state of this run cannot be stored safely: {error}. A callback, scheduler or model of your own keeps "
                "something other than tensors, numbers, strings, lists and dictionaries in its state_dict."
            ) from error
        self._verified = True

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["forgefield_random"] = _random_state()
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
        if self._finished:
            _as_if_next_batch_were_about_to_start(checkpoint["loops"]["fit_loop"], int(trainer.num_training_batches))

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._random_state = checkpoint["forgefield_random"]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def _go_on(self, trainer: L.Trainer) -> None:
        """The first batch after a resume: put back the random state, at the very point where it was taken."""
        assert self._random_state is not None
        _set_random_state(self._random_state)
        self._random_state = None
        self._last_saved = trainer.global_step
        # Lightning holds the whole first epoch for a restart and would leave out its plateau scheduler.
        trainer.fit_loop._restarting = False

    def _keep_best(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor not in trainer.callback_metrics:
            return
        value = float(trainer.callback_metrics[self.monitor])
        if self.best is None or value < self.best:
            self.best = value
            self._write_weights("best", trainer, pl_module)

    def _write_weights(self, which: str, trainer: L.Trainer, pl_module: Any) -> None:
        about = {"step": trainer.global_step, "epoch": trainer.current_epoch, self.monitor: self.best}
        # One entry: with several, safetensors writes them in random order, and equal runs would differ in bytes.
        content = safetensors_bytes(pl_module.averaged_state(), metadata={"about": json.dumps(about)})
        write_whole(self.folder / f"{which}.safetensors", content)


def _quick(trainer: L.Trainer) -> bool:
    """Whether this is a `fast_dev_run`, which leaves nothing behind."""
    return bool(getattr(trainer, "fast_dev_run", False))


def _random_state() -> dict[str, Any]:
    state: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = state
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _as_if_next_batch_were_about_to_start(fit: dict[str, Any], n_batches: int) -> None:
    """Rewrite Lightning's counters at the end of training to what they are when a batch is about to start."""
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    done = batches["current"]["completed"]
    inside_epoch = 0 < done < n_batches
    finished_epochs = epochs["current"]["processed"] - (1 if inside_epoch else 0)
    done = done if inside_epoch else 0
    for scope in ("total", "current"):
        epochs[scope].update(
            ready=finished_epochs + 1, started=finished_epochs + 1, processed=finished_epochs, completed=finished_epochs
        )
    total = batches["total"]["completed"]
    batches["total"].update(ready=total + 1, started=total, processed=total, completed=total)
    batches["current"].update(ready=done + 1, started=done, processed=done, completed=done)
