"""Saves a run so that it can be continued exactly, and stops it cleanly when it is asked to.

Contract. A checkpoint is taken at the start of a batch, before anything of that batch has happened: everything before it
(optimiser step, average, schedulers, validation, rows of metrics) is complete, nothing after it has begun. A resume therefore
repeats nothing and leaves nothing out. At the end of training one more is written in the same form, as if the next batch were
about to start. All ranks come here at the same batch: whether to stop is a question they answered together one batch before.
Rank 0 writes; what each rank holds for itself (random state, sums) is gathered into the file. With gradient accumulation,
checkpoints wait for the end of an accumulation. The callback must be the first one: what other callbacks do at the start of a
batch belongs behind the checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from forgefield.errors import ForgefieldError
from forgefield.parallel.accelerators import accelerator_random_state, set_accelerator_random_state
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.parallel.reductions import StepExchange
from forgefield.parallel.session import announce_failure
from forgefield.parallel.strategies import first_differing_rank
from forgefield.training.options import CheckpointOptions
from forgefield.training.run.checkpoint import (
    POSITION,
    RANDOM,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    checkpoint_path,
    load_checkpoint,
    prune_checkpoints,
)
from forgefield.training.run.signals import StopControl, StopNow, StopRequested


class RunCheckpoint(Callback):
    """folder: where checkpoints go. options: the config's `training.checkpoint`. stop: whether to stop. enabled: whether
    anything is written at all. limits: the settings that say when training ends, stored when it has ended under them.
    is_done: the training that is loaded has ended; it is only restored. first_batch: number of the batch that a resumed epoch
    begins with.
    """

    def __init__(
        self,
        folder: Path,
        options: CheckpointOptions,
        stop: StopControl,
        *,
        ranks: Ranks | None = None,
        exchange: StepExchange | None = None,
        enabled: bool = True,
        limits: str = "",
        is_done: bool = False,
    ) -> None:
        self.enabled = enabled
        self.limits, self.is_done = limits, is_done
        self.ranks = ranks if ranks is not None else single_process()
        self.exchange = exchange
        self.first_batch = 0
        self.folder = folder
        self.options = options
        self._every = options.every_steps, options.every_epochs
        self.stop = stop
        self._resumed: dict[str, Any] | None = None
        self._last_saved = -1
        self._seen = 0
        """Step at the start of the batch before."""
        self._finished = False
        self._verified = False

    # ---- when

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.is_done

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop.on_training_start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.stop.on_first_batch()
        if self._resumed is not None:
            self._go_on(trainer, self._resumed)
            self._resumed = None
        if batch_idx % trainer.accumulate_grad_batches:
            return
        wish = self.stop.look() if self.exchange is None else self.stop.combined_request(self.exchange.flags())
        if self._due(trainer, batch_idx) or (wish is not None and trainer.global_step != self._last_saved):
            self._save(trainer)
        if wish is not None:
            raise wish

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        # Before any other callback acts on it: one that saves something would wait for ranks that know of nothing.
        if not isinstance(exception, (StopRequested, StopNow, KeyboardInterrupt)):
            announce_failure(self.ranks, exception)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._finished = True
        self._save(trainer)

    def _due(self, trainer: L.Trainer, batch_idx: int) -> bool:
        step, before = trainer.global_step, self._seen
        self._seen = step
        if step == 0 or step == self._last_saved:
            return False
        every_steps, every_epochs = self._every
        if every_steps and step // every_steps > before // every_steps:  # a batch may be many steps
            return True
        return every_epochs is not None and batch_idx == 0 and trainer.current_epoch % every_epochs == 0

    # ---- what

    def _save(self, trainer: L.Trainer) -> None:
        if not self.enabled:
            return
        module: Any = trainer.lightning_module
        module.finite_train_loss()
        self._require_agreement(module)
        path = checkpoint_path(self.folder, trainer.global_step)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero and not self._verified:
            self._verify(path)
        self._last_saved = trainer.global_step
        if trainer.is_global_zero:
            prune_checkpoints(self.folder, self.options.keep)

    def _require_agreement(self, module: Any) -> None:
        """Weights are never sent again after the start: if ranks computed different ones, that must not go on."""
        differs = first_differing_rank(module.trained)
        if differs is not None:
            raise ForgefieldError(
                f"{self.ranks.describe(differs)} has other weights or buffers than rank 0 at step "
                f"{module.trainer.global_step}; the "
                "checkpoints before it are good. A callback or a model of your own may act differently on different ranks."
            )

    def _verify(self, path: Path) -> None:
        """Read the first checkpoint back: a state that cannot be loaded must be known now, not at the resume."""
        try:
            load_checkpoint(path)
        except (DamagedCheckpoint, UnreadableCheckpoint) as error:
            path.unlink()
            raise ForgefieldError(
                f"The state of this run cannot be stored safely: {error}. A callback, scheduler or model of your own keeps "
                "something other than tensors, numbers, strings, lists and dictionaries in its state_dict."
            ) from error
        self._verified = True

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[RANDOM] = self.ranks.gather(_random_state())
        loops = checkpoint["loops"]["fit_loop"]
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False
        if self._finished:
            _as_if_next_batch_were_about_to_start(loops, int(trainer.num_training_batches))
        batch = loops["epoch_loop.batch_progress"]["current"]["completed"]
        loader: Any = trainer.train_dataloader
        checkpoint[POSITION] = {
            "sample": loader.position(batch) if batch else 0,
            "world_size": self.ranks.world_size,
            "finished": self.limits if self._finished else None,
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        loops = checkpoint["loops"]["fit_loop"]
        done = self.first_batch
        if checkpoint[POSITION]["world_size"] != self.ranks.world_size or done != _completed(loops):
            loops["epoch_loop.batch_progress"]["current"].update(
                ready=done + 1, started=done, processed=done, completed=done
            )
        states = checkpoint[RANDOM]
        own = states[self.ranks.rank] if self.ranks.rank < len(states) else None
        self._resumed = {"random": own, "loops": loops}

    def _go_on(self, trainer: L.Trainer, resumed: dict[str, Any]) -> None:
        """The first batch after a resume: all as it was at this very point when the checkpoint was taken."""
        if resumed["random"] is not None:
            _set_random_state(resumed["random"])
        self._last_saved = self._seen = trainer.global_step
        # Lightning counts the batch it is about to run a second time, takes the whole first epoch for a restart, and would
        # leave out its plateau scheduler.
        loop, stored = trainer.fit_loop.epoch_loop, resumed["loops"]
        loop.batch_progress.total.ready = stored["epoch_loop.batch_progress"]["total"]["ready"]
        loop._batches_that_stepped = stored["epoch_loop.state_dict"]["_batches_that_stepped"]
        trainer.fit_loop._restarting = False


def _completed(loops: dict[str, Any]) -> int:
    return int(loops["epoch_loop.batch_progress"]["current"]["completed"])


def _random_state() -> dict[str, Any]:
    state: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = state
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": accelerator_random_state(),
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    set_accelerator_random_state(state.get("accelerator", {"cuda": state.get("cuda")}))
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
    if not inside_epoch:
        optimiser = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for counted in optimiser.values():
            counted["current"] = dict.fromkeys(counted["current"], 0)
