"""Callbacks that end a training at a chosen step, named by import path in test configs."""

from __future__ import annotations

import os
import signal

from lightning.pytorch.callbacks import Callback


class Interrupted(Exception):
    """The stand-in for a crash inside one process: nothing gets a chance to save."""


class EndAt(Callback):
    """At the end of the batch that makes optimiser step $END_AT: $END_HOW is raise, kill (-9), term or sleep."""

    def on_train_start(self, trainer, pl_module) -> None:
        if os.environ.get("END_HOW") == "term at start":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == int(os.environ.get("END_AT", "-1")):
            how = os.environ["END_HOW"]
            if how == "raise":
                raise Interrupted
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[how])


class CountsBatchStarts(Callback):
    """A callback with a state of its own that changes at the start of every batch."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.count += 1

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict) -> None:
        self.count = state_dict["count"]
