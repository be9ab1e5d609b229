"""The base class of diagnosis callbacks: findings, each reported once; a record in the run folder; figures for loggers.

The callbacks work in any Lightning script. Their state is part of checkpoints, so that a resumed run reports what an
uninterrupted one does. Records are written with every checkpoint, at the end, and when a training fails. Only rank 0 prints
and writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback

from forgefield.diagnosis.records import FIGURES, FOLDER, Finding, Record, as_rows, image_of, write_record
from forgefield.training.callbacks.logs import tensorboard_writers
from forgefield.training.probing import probed

FIRST_FIGURE = 600.0
"""Seconds until a figure is drawn for the first time; at the end of a training it is always drawn."""
FIGURE_PAUSE = 1000.0
"""Time between two drawings, in units of the time that the last one took."""

ImageSink = Callable[[str, np.ndarray, int], None]
"""Takes the name of an image, its pixels (height, width, 3), and the step."""


@runtime_checkable
class _ImageWriter(Protocol):
    """TensorBoard's `SummaryWriter`, or an experiment with the same method."""

    def add_image(self, tag: str, img_tensor: np.ndarray, global_step: int, *, dataformats: str) -> None: ...


@runtime_checkable
class _ImageLogger(Protocol):
    """Lightning's logger for Weights & Biases."""

    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None: ...


class Diagnosis(Callback):
    """A callback that observes a training.

    Subclasses keep their numbers in `numbers` (part of the record) and the rest of their state in `memory`; both consist of
    tensors, numbers, strings, lists and dictionaries.
    """

    name = "diagnosis"
    """Name of the record, and of the state in checkpoints."""
    measures_time = False
    """Whether its numbers are times; these are not part of a checkpoint."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.numbers: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self._next_figure: float | None = None

    # ---- findings

    def find(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        kind: str,
        observation: str,
        advice: str,
        step: int | None = None,
    ) -> Finding | None:
        """Report and store a finding; returns None if one of this kind has been reported before.

        observation, advice: complete sentences. step: of the optimiser; default: the current one.
        """
        if any(finding.kind == kind for finding in self.findings):
            return None
        finding = Finding(kind, trainer.global_step if step is None else step, observation, advice)
        self.findings.append(finding)
        notify(trainer, pl_module, f"{type(self).__name__}: {finding.sentence()}")
        return finding

    def record(self) -> Record:
        """The content of the record file."""
        return {"findings": as_rows(self.findings), **self.numbers}

    # ---- state

    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints."""
        return self.name

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"findings": as_rows(self.findings), "memory": self.memory}
        return state if self.measures_time else {**state, "numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.findings = [Finding(**row) for row in state_dict["findings"]]
        self.memory = state_dict["memory"]
        self.numbers = state_dict.get("numbers", self.numbers)

    # ---- writing

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        self.write(trainer)
        self.draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.write(trainer)
        self.draw(trainer, now=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.write(trainer)

    def write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):  # not declared by Lightning
            write_record(Path(trainer.default_root_dir) / FOLDER, self.name, self.record())

    def draw(self, trainer: L.Trainer, *, now: bool = False) -> None:
        """Send the figure of the current record to TensorBoard and Weights & Biases, where such loggers are in use.

        now: draw even if the last drawing was a short time ago.
        """
        begin = time.perf_counter()
        if self._next_figure is None:
            self._next_figure = begin + FIRST_FIGURE
        if self.name not in FIGURES or not trainer.is_global_zero or not (now or begin > self._next_figure):
            return
        sinks = list(_image_sinks(trainer))
        if not sinks:
            return
        figure = FIGURES[self.name][1](self.record())
        if figure is not None:
            pixels = image_of(figure)
            for sink in sinks:
                sink(f"diagnosis/{self.name}", pixels, trainer.global_step)
        took = time.perf_counter() - begin
        self._next_figure = begin + FIGURE_PAUSE * took

    def scalar(self, trainer: L.Trainer, name: str, value: float) -> None:
        """Send a number to TensorBoard and Lightning's loggers."""
        if not trainer.is_global_zero:
            return
        for writer in tensorboard_writers(trainer):
            writer.add_scalar(f"diagnosis/{name}", value, trainer.global_step)
        for logger in trainer.loggers:
            logger.log_metrics({f"diagnosis/{name}": value}, step=trainer.global_step)


def notify(trainer: L.Trainer, pl_module: L.LightningModule, text: str) -> None:
    """Print a message, on rank 0 only."""
    if not trainer.is_global_zero:
        return
    if (inspected := probed(pl_module)) is not None:
        inspected.notify(text)
    else:
        logging.getLogger("lightning.pytorch").warning(text)


def is_worth_reporting(count: int) -> bool:
    """Whether to print the message of an event that has now happened `count` times: the first five, then at powers of two."""
    return count <= 5 or count & (count - 1) == 0


def _image_sinks(trainer: L.Trainer) -> Iterator[ImageSink]:
    for writer in tensorboard_writers(trainer):
        yield _to_tensorboard(writer)
    for logger in trainer.loggers:
        experiment = getattr(logger, "experiment", None)
        if isinstance(experiment, _ImageWriter):
            yield _to_tensorboard(experiment)
        elif isinstance(logger, _ImageLogger):
            yield _to_image_logger(logger)


def _to_tensorboard(writer: _ImageWriter) -> ImageSink:
    return lambda name, pixels, step: writer.add_image(name, pixels, step, dataformats="HWC")


def _to_image_logger(logger: _ImageLogger) -> ImageSink:
    return lambda name, pixels, step: logger.log_image(key=name, images=[pixels], step=step)
