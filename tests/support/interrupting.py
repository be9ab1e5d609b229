"""Callbacks that end a training at a chosen step, named by import path in test configs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from forgefield.training.step_loop import ObservesSteps


class Interrupted(Exception):
    """The stand-in for a crash inside one process: nothing gets a chance to save."""


class EndAt(ObservesSteps):
    """At the end of the batch that makes optimiser step $END_AT: $END_HOW is raise, kill (-9), term, usr1 or memory; or usr2,
    which requests a checkpoint and does not end it.

    With several processes on the ranks in $END_RANKS only, and with $END_ONCE, the name of a file, only the first time.
    """

    def on_train_start(self, trainer, pl_module) -> None:
        if os.environ.get("END_HOW") == "term at start":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        ranks = os.environ.get("END_RANKS")
        if ranks is not None and str(trainer.global_rank) not in ranks.split(","):
            return
        if trainer.global_step == int(os.environ.get("END_AT", "-1")) and _first_time():
            how = os.environ["END_HOW"]
            if how == "raise":
                raise Interrupted("a crash that a test asked for")
            if how == "memory":
                torch.empty(2**55)
            numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "usr1": signal.SIGUSR1, "usr2": signal.SIGUSR2}
            os.kill(os.getpid(), numbers[how])


class KilledWhileWriting(Callback):
    """Kills its process (-9) while the first checkpoint of step $KILL_STEP or later is written in the background.

    $KILL_WHEN: `half` when half of the temporary file is written, `whole` before it is renamed, `renamed` after that. Nothing
    happens without $KILL_STEP.
    """

    def on_train_start(self, trainer, pl_module) -> None:
        if "KILL_STEP" not in os.environ or trainer.global_rank != 0:
            return
        when = os.environ["KILL_WHEN"]
        write_bytes, replace = Path.write_bytes, os.replace

        def is_due(path) -> bool:
            step = re.search(r"step-(\d+)", path.name)
            return step is not None and int(step[1]) >= int(os.environ["KILL_STEP"])

        def kill() -> None:
            assert threading.current_thread() is not threading.main_thread(), (
                "checkpoints are written in the background"
            )
            os.kill(os.getpid(), signal.SIGKILL)

        def half_written(path, content):
            if when == "half" and is_due(path):
                write_bytes(path, content[: len(content) // 2])
                kill()
            return write_bytes(path, content)

        def replaced(source, target):
            if when == "whole" and is_due(target):
                kill()
            replace(source, target)
            if when == "renamed" and is_due(target):
                kill()

        Path.write_bytes, os.replace = half_written, replaced


class RecordsFrames(Callback):
    """Appends a line `epoch step frame frame ...` to a file of its own for every batch that was trained on."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        with open(f"frames-{os.getpid()}-{trainer.global_rank}.txt", "a") as file:
            frames = " ".join(str(i) for i in batch["frame_id"].tolist() if i >= 0)
            file.write(f"{trainer.current_epoch} {trainer.global_step} {frames}\n")


def _first_time() -> bool:
    marker = os.environ.get("END_ONCE")
    if marker is None:
        return True
    if os.path.exists(marker):
        return False
    open(marker, "w").close()
    return True


class CountsBatchStarts(ObservesSteps):
    """A callback with a state of its own that changes at the start of every batch."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.count += 1

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict) -> None:
        self.count = state_dict["count"]


class Slow(Callback):
    """Sleeps $SLOW seconds in every batch, on the ranks in $SLOW_RANKS (default: all)."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        ranks = os.environ.get("SLOW_RANKS")
        if ranks is None or str(trainer.global_rank) in ranks.split(","):
            time.sleep(float(os.environ.get("SLOW", "0")))


class LogsTogether(Callback):
    """A metric of the user's own that Lightning averages over ranks when it is read."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        pl_module.log("mine", float(trainer.global_rank), on_step=False, on_epoch=True, sync_dist=True)
