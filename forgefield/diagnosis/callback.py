"""What all diagnosis callbacks share: findings in plain words, each once; a record in the run folder; figures for loggers.

They work in any Lightning script. Their state goes into checkpoints, so that a resumed run finds what an uninterrupted one
finds. Records are written whenever a checkpoint is, at the end, and when a training fails. Rank 0 alone speaks and writes.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.diagnosis.figures import FIGURES, image_of
from forgefield.diagnosis.record import FOLDER, Finding, as_rows, write_record
from forgefield.training.callbacks.tensorboard import tensorboard_writers

FIRST_FIGURE = 600.0
"""Seconds after which a figure is drawn for the first time; at the end of a training it is drawn always."""
FIGURE_PAUSE = 1000.0
"""Between two drawings passes this many times the time that the last one took."""


class Diagnosis(Callback):
    """name: of the record. Subclasses keep their numbers in `numbers` (part of the record) and `memory` (the rest of their
    state): tensors, numbers, strings, lists and dictionaries of them."""

    name = "diagnosis"
    has_clock = False
    """Whether its numbers are times; they are then no part of a checkpoint."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.numbers: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self._next_figure: float | None = None

    # ---- findings

    def find(
        self, trainer: L.Trainer, pl_module: Any, kind: str, what: str, advice: str, step: int | None = None
    ) -> Finding | None:
        """Say it and keep it, unless this kind was found before. what, advice: sentences. step: if not that of now."""
        if any(finding.kind == kind for finding in self.findings):
            return None
        finding = Finding(kind, trainer.global_step if step is None else step, what, advice)
        self.findings.append(finding)
        notify(trainer, pl_module, f"{type(self).__name__}: {finding.sentence()}")
        return finding

    def record(self) -> dict[str, Any]:
        return {"findings": as_rows(self.findings), **self.numbers}

    # ---- state

    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints."""
        return self.name

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"findings": as_rows(self.findings), "memory": self.memory}
        return state if self.has_clock else {**state, "numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.findings = [Finding(**row) for row in state_dict["findings"]]
        self.memory = state_dict["memory"]
        self.numbers = state_dict.get("numbers", self.numbers)

    # ---- when it is written

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.write(trainer)
        self.draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.write(trainer)
        self.draw(trainer, now=True)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.write(trainer)

    def write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            write_record(Path(trainer.default_root_dir) / FOLDER, self.name, self.record())

    def draw(self, trainer: L.Trainer, *, now: bool = False) -> None:
        """The figure of the present record to TensorBoard and wandb, where there are such loggers; not too often."""
        begin = time.perf_counter()
        if self._next_figure is None:
            self._next_figure = begin + FIRST_FIGURE
        if self.name not in FIGURES or not trainer.is_global_zero or not (now or begin > self._next_figure):
            return
        if not any(True for _ in _image_sinks(trainer)):
            return
        figure = FIGURES[self.name][1](self.record())
        if figure is not None:
            pixels = image_of(figure)
            for sink in _image_sinks(trainer):
                sink(f"diagnosis/{self.name}", pixels, trainer.global_step)
        took = time.perf_counter() - begin
        self._next_figure = begin + FIGURE_PAUSE * took

    def scalar(self, trainer: L.Trainer, name: str, value: float) -> None:
        """A number for TensorBoard and Lightning's loggers."""
        if not trainer.is_global_zero:
            return
        for writer in tensorboard_writers(trainer):
            writer.add_scalar(f"diagnosis/{name}", value, trainer.global_step)
        for logger in trainer.loggers:
            logger.log_metrics({f"diagnosis/{name}": value}, step=trainer.global_step)


def notify(trainer: L.Trainer, pl_module: Any, text: str) -> None:
    """One sentence for the user, once for all ranks."""
    if not trainer.is_global_zero:
        return
    voice = getattr(pl_module, "notify", None)
    if callable(voice):
        voice(text)
    else:
        logging.getLogger("lightning.pytorch").warning(text)


def worth_saying(count: int) -> bool:
    """Whether the message of an event of which there have been so many is printed: the first ones, then ever more rarely."""
    return count <= 5 or count & (count - 1) == 0


def _image_sinks(trainer: L.Trainer) -> Any:
    """Everything that takes pictures: called with a name, pixels (height, width, 3) and the step."""
    for writer in tensorboard_writers(trainer):
        yield _to_tensorboard(writer)
    for logger in trainer.loggers:
        experiment = logger.experiment if hasattr(logger, "experiment") else None
        if hasattr(experiment, "add_image"):
            yield _to_tensorboard(experiment)
        elif hasattr(logger, "log_image"):  # wandb
            yield lambda name, pixels, step, logger=logger: logger.log_image(key=name, images=[pixels], step=step)


def _to_tensorboard(writer: Any) -> Any:
    return lambda name, pixels, step: writer.add_image(name, pixels, step, dataformats="HWC")
