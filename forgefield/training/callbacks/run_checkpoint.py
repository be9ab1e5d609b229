"""Saves checkpoints from which a run resumes exactly, regularly and on request, and stops it on request.

Contract. A checkpoint is taken at the start of a batch: everything before it (optimiser step, average, schedulers, validation,
rows of metrics) is complete, and nothing of the batch has been computed, so that a resumed run repeats and omits nothing. At
the end of the training one more is written in the same form, as if another batch were about to start. All ranks save and stop
at the same batch, because they have exchanged their stop requests one batch earlier; the clock of rank 0, which decides when
the next checkpoint is due, is sent in the same message. Rank 0 copies the state and writes it while the training continues
(`run/writer.py`); the state of single ranks (random state, sums) is gathered into the file. With gradient accumulation,
checkpoints are taken only at the start of an accumulation. This callback must be the first one, because actions of other
callbacks at the start of a batch come after the checkpoint.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from forgefield.errors import ForgefieldError
from forgefield.parallel.accelerators import accelerator_random_state, set_accelerator_random_state
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.parallel.reductions import StepExchange
from forgefield.parallel.session import announce_failure
from forgefield.parallel.strategies import first_differing_rank
from forgefield.training.module import TrainingModule, training_module
from forgefield.training.options import CheckpointOptions
from forgefield.training.run.checkpoint import (
    POSITION,
    RANDOM,
    AtomicCheckpointIO,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    checkpoint_path,
    load_checkpoint,
    prune_checkpoints,
)
from forgefield.training.run.signals import StopControl, StopNow, StopRequested
from forgefield.training.run.writer import BackgroundWriter
from forgefield.training.step_loop import ObservesSteps
from forgefield.training.trainer import training_loader


class RunCheckpoint(ObservesSteps):
    """Saves checkpoints.

    folder: of the checkpoints.
    options: the config's `training.checkpoint`.
    stop: requests to stop.
    writer: writes the checkpoints.
    enabled: whether checkpoints are written.
    notify: shows a message.
    limits: the settings that decide when the training ends; stored in the last checkpoint.
    is_done: whether the training has ended already and is only restored.
    first_batch: index of the first batch of a resumed epoch.
    """

    def __init__(
        self,
        folder: Path,
        options: CheckpointOptions,
        stop: StopControl,
        writer: BackgroundWriter,
        *,
        ranks: Ranks | None = None,
        enabled: bool = True,
        notify: Callable[[str], None] = lambda text: None,
        limits: str = "",
        is_done: bool = False,
    ) -> None:
        self.enabled = enabled
        self.notify = notify
        self.limits, self.is_done = limits, is_done
        self.ranks = ranks if ranks is not None else single_process()
        self.exchange: StepExchange | None = None
        self.first_batch = 0
        self.folder = folder
        self.options = options
        self.stop, self.writer = stop, writer
        self._saved_at = time.monotonic()
        self._resumed: dict[str, Any] | None = None
        self._last_saved = -1
        self._previous_step = 0
        """Step at the start of the previous batch."""
        self._finished = False
        self._verified = False

    def flags(self) -> tuple[float, ...]:
        """What ranks exchange in every batch: the requests to stop of this one, and whether a checkpoint is due by time."""
        return *self.stop.flags(), float(self.ranks.is_rank_zero and self._is_due_by_time())

    # ---- hooks of Lightning

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.is_done

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop.on_training_start()
        self._saved_at = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self.stop.on_first_batch()
        self.writer.raise_error()
        if self._resumed is not None:
            self._restore(trainer, self._resumed)
            self._resumed = None
        if batch_idx % trainer.accumulate_grad_batches:
            return
        flags = None if self.exchange is None else self.exchange.flags()
        request = self.stop.request() if flags is None else self.stop.combined_request(flags)
        wanted = self.stop.wants_checkpoint(flags) and trainer.global_step > 0
        by_time = self._is_due_by_time() if flags is None else bool(flags and flags[-1])
        if self._is_due(trainer, batch_idx, by_time) or (
            (wanted or request is not None) and trainer.global_step != self._last_saved
        ):
            self._save(trainer)
        if wanted:
            self.stop.checkpoint_is_saved()
            self.notify(f"A checkpoint was requested: step {trainer.global_step} is saved.")
        if request is not None:
            raise request

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Before other callbacks: one that saves something would wait for the other ranks.
        if not isinstance(exception, (StopRequested, StopNow, KeyboardInterrupt)):
            announce_failure(self.ranks, exception)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finished = True
        self._save(trainer)

    def _is_due_by_time(self) -> bool:
        """Whether enough time has passed since the last checkpoint, which has been written."""
        seconds = self.options.seconds
        return seconds is not None and time.monotonic() - self._saved_at >= seconds and not self.writer.is_busy

    def _is_due(self, trainer: L.Trainer, batch_idx: int, by_time: bool) -> bool:
        step, previous = trainer.global_step, self._previous_step
        self._previous_step = step
        if step == 0 or step == self._last_saved:
            return False
        if by_time:
            return True
        every_steps, every_epochs = self.options.every_steps, self.options.every_epochs
        if every_steps and step // every_steps > previous // every_steps:  # a batch may contain many steps
            return True
        return every_epochs is not None and batch_idx == 0 and trainer.current_epoch % every_epochs == 0

    # ---- checkpoints

    def _save(self, trainer: L.Trainer) -> None:
        if not self.enabled:
            return
        module = training_module(trainer.lightning_module)
        module.finite_train_loss()
        self._require_equal_weights(module)
        path = checkpoint_path(self.folder, trainer.global_step)
        disk = trainer.strategy.checkpoint_io
        if trainer.is_global_zero:
            self.writer.wait()  # at most one copy of the state exists at a time
        with disk.in_background(self.writer) if isinstance(disk, AtomicCheckpointIO) else nullcontext():
            trainer.save_checkpoint(path)
        self._last_saved, self._saved_at = trainer.global_step, time.monotonic()
        if trainer.is_global_zero:
            self.writer.submit(f"after {path.name}", lambda: self._after_writing(path))

    def _after_writing(self, path: Path) -> None:
        """Verify the first checkpoint, and delete those that are no longer needed; called by the writer."""
        if not self._verified:
            self._verify(path)
        prune_checkpoints(self.folder, self.options.keep)

    def _require_equal_weights(self, module: TrainingModule) -> None:
        """Raise ForgefieldError if ranks have different weights, which are exchanged only at the start of a training."""
        rank = first_differing_rank(module.trained)
        if rank is not None:
            raise ForgefieldError(
                f"{self.ranks.describe(rank)} has other weights or buffers than rank 0 at step {module.trainer.global_step}; "
                "earlier checkpoints are not affected. A user-defined callback or model may act differently on different "
                "ranks."
            )

    def _verify(self, path: Path) -> None:
        """Load the first checkpoint, so that a state that cannot be loaded is noticed now and not when the run is resumed."""
        try:
            load_checkpoint(path)
        except (DamagedCheckpoint, UnreadableCheckpoint) as error:
            path.unlink()
            raise ForgefieldError(
                f"The state of this run cannot be stored safely: {error}. The state_dict of a user-defined callback, scheduler "
                "or model contains something other than tensors, numbers, strings, lists and dictionaries."
            ) from error
        self._verified = True

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[RANDOM] = self.ranks.gather(_random_state())
        loops = checkpoint["loops"]["fit_loop"]
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False
        if self._finished:
            _set_counters_to_next_batch(loops, int(trainer.num_training_batches))
        batch = loops["epoch_loop.batch_progress"]["current"]["completed"]
        loader = training_loader(trainer)
        checkpoint[POSITION] = {
            "sample": loader.position(batch) if batch else 0,
            "world_size": self.ranks.world_size,
            "finished": self.limits if self._finished else None,
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        loops = checkpoint["loops"]["fit_loop"]
        done = self.first_batch
        if checkpoint[POSITION]["world_size"] != self.ranks.world_size or done != _completed(loops):
            loops["epoch_loop.batch_progress"]["current"].update(
                ready=done + 1, started=done, processed=done, completed=done
            )
        states = checkpoint[RANDOM]
        state = states[self.ranks.rank] if self.ranks.rank < len(states) else None
        self._resumed = {"random": state, "loops": loops}

    def _restore(self, trainer: L.Trainer, resumed: dict[str, Any]) -> None:
        """At the first batch after a resume: restore the random state and Lightning's counters of the checkpoint."""
        if resumed["random"] is not None:
            _set_random_state(resumed["random"])
        self._last_saved = self._previous_step = trainer.global_step
        # Lightning counts the batch it is about to run twice, treats the complete first epoch as a restart, and would not
        # step its plateau scheduler.
        loop, stored = trainer.fit_loop.epoch_loop, resumed["loops"]
        loop.batch_progress.total.ready = stored["epoch_loop.batch_progress"]["total"]["ready"]
        loop._batches_that_stepped = stored["epoch_loop.state_dict"]["_batches_that_stepped"]
        trainer.fit_loop._restarting = False


def _completed(loops: dict[str, Any]) -> int:
    return int(loops["epoch_loop.batch_progress"]["current"]["completed"])


def _random_state() -> dict[str, Any]:
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    kind, state = legacy["bit_generator"], legacy["state"]
    keys = torch.from_numpy(state["key"].astype(np.int64))
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": accelerator_random_state(),
        "numpy": [str(kind), keys, int(state["pos"]), int(legacy["has_gauss"]), float(legacy["gauss"])],
        "python": [version, list(internal), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    set_accelerator_random_state(state.get("accelerator", {"cuda": state.get("cuda")}))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _set_counters_to_next_batch(fit: dict[str, Any], n_batches: int) -> None:
    """Change Lightning's counters at the end of a training to their values at the start of another batch."""
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
    if not inside_epoch:
        optimiser = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for counted in optimiser.values():
            counted["current"] = dict.fromkeys(counted["current"], 0)
