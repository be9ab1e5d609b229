"""Writes `metrics.csv`, `metrics.jsonl` and `timing.csv`: one row per validation, or per epoch without validation.

Wall-clock times are in `timing.csv` only, so that the metrics of a resumed run are identical to those of an uninterrupted one.
A checkpoint contains the number of rows written so far; rows after it are removed when a run is resumed. Lightning's loggers
get the same rows.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.tasks.units import UNITS
from forgefield.training.callbacks.monitor import epoch_is_complete
from forgefield.training.module import training_module
from forgefield.training.optim.schedules import current_learning_rate
from forgefield.training.run.summary import digits
from forgefield.training.step_loop import ObservesSteps
from forgefield.training.trainer import callbacks_of, is_quick

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WRITTEN_EVERY_S = 1.0
"""Time after which the losses of steps are written to TensorBoard."""
WRITTEN_AFTER = 5
"""Batches of an epoch after which events of the epoch before are written."""
_TIMING = ("seconds", "frames", "atoms", "frames_per_second", "atoms_per_second")


class MetricsLog(Callback):
    """Writes rows of metrics and times. All ranks count the rows; rank 0 writes them.

    folder: of the run.
    columns: all metrics that a row may contain, in order.
    timing: columns of `timing.csv`.
    note: called with a description of each row, for the log.
    units: of additional quantities.
    """

    state_key = "metrics_log"

    def __init__(
        self,
        folder: Path,
        columns: list[str],
        timing: Sequence[str] = _TIMING,
        *,
        note: Callable[[str], None] = lambda text: None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.note, self.units = note, UNITS | dict(units or {})
        self.timing = ["epoch", "step", *timing]
        self.columns = ["epoch", "step", "lr", *columns]
        self._rows = 0
        self._row_step = -1

    def start(self, rows: int) -> None:
        """Create the files, with the first `rows` rows of existing ones."""
        for name, header in (("metrics.csv", self.columns), ("timing.csv", self.timing)):
            lines = complete_lines(self.folder / name)[1 : rows + 1]
            write_atomically(self.folder / name, _csv_line(header) + "".join(line + "\n" for line in lines))
        path = self.folder / "metrics.jsonl"
        write_atomically(path, "".join(line + "\n" for line in complete_lines(path)[:rows]))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows, "row_step": self._row_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows, self._row_step = state_dict["rows"], state_dict["row_step"]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _ = trainer.callback_metrics  # reading reduces metrics that a user logs over ranks, so all ranks read them
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _ = trainer.callback_metrics
        if trainer.global_step != self._row_step and epoch_is_complete(trainer):
            training_module(pl_module).finish_row()
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        module = training_module(trainer.lightning_module)
        timing = {"epoch": trainer.current_epoch, "step": trainer.global_step, **module.take_throughput()}
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "lr": current_learning_rate(trainer.optimizers[0]),
            **module.latest,
        }
        if trainer.is_global_zero:
            self._write_row(trainer, row, timing)
        self._rows += 1
        self._row_step = trainer.global_step
        module.latest.clear()

    def _write_row(self, trainer: L.Trainer, row: dict[str, Any], timing: dict[str, Any]) -> None:
        append_text(self.folder / "metrics.csv", _csv_line([row.get(name) for name in self.columns]))
        append_text(self.folder / "metrics.jsonl", json.dumps({k: row[k] for k in self.columns if k in row}) + "\n")
        append_text(self.folder / "timing.csv", _csv_line([timing[name] for name in self.timing]))
        self.note(describe_row(row, self.units))
        for logger in trainer.loggers:
            logger.log_metrics({key: float(value) for key, value in row.items()}, step=trainer.global_step)
            logger.save()


def describe_row(row: Mapping[str, Any], units: Mapping[str, str]) -> str:
    """A line of the log for a row of metrics: losses, MAE and RMSE with units, accuracies. Epochs are counted from one."""
    sections = [f"epoch {int(row['epoch']) + 1}  step {row['step']}  lr {float(row['lr']):.3g}"]
    named = dict.fromkeys(key.partition("/")[0] for key in row if key.startswith("val-"))
    titles = {"train": "train", "val": "validation", **{split: split.replace("-", " ", 1) for split in named}}
    for split, title in titles.items():
        values = [f"loss {digits(float(row[f'{split}/loss']))}"] if f"{split}/loss" in row else []
        for key, value in row.items():
            name, _, kind = key.removeprefix(f"{split}/").rpartition("_")
            if not key.startswith(f"{split}/") or "/" in name or "/" in kind or value is None:
                continue
            if kind in ("mae", "rmse"):
                values.append(f"{name} {kind.upper()} {digits(float(value))} {units.get(name, '')}".rstrip())
            elif kind == "accuracy":
                values.append(f"{name} accuracy {digits(float(value))}")
        if values:
            sections.append(f"{title}: {', '.join(values)}")
    return "  ".join(sections)


def append_text(path: Path, text: str) -> None:
    """Append text to a file of the run. Raises ForgefieldError with advice if that fails."""
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError as error:
        raise ForgefieldError(
            f"Could not write {path}: {error.strerror}; the checkpoints are intact. Free some space, then run the same command "
            "to resume."
        ) from error


def _csv_line(values: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(["" if value is None else value for value in values])
    return line.getvalue()


def complete_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that is incomplete because of a crash."""
    if not path.exists():
        return []
    text = path.read_text()
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]


class TensorBoardLog(ObservesSteps):
    """Writes TensorBoard events, on rank 0.

    folder: of the event files.
    level: the setting `training.tensorboard`.
    from_step: the step at which a run resumes; later events, written before a crash, are hidden.
    """

    def __init__(self, folder: Path, level: int, from_step: int) -> None:
        self.folder = folder
        self.level = level
        self.from_step = from_step
        self._writer: SummaryWriter | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._waiting: list[tuple[str, float, int, float]] = []
        """Name, value, step and time of scalars that are not written yet: at the end of an epoch a GPU would wait."""
        if level < 2:  # gradients are not read, so that updates may be captured together with them
            vars(self)["on_before_optimizer_step"] = None

    @property
    def writer(self) -> SummaryWriter | None:
        """TensorBoard's writer during a training, else None; also used by diagnosis callbacks."""
        return self._writer

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=self.from_step + 1 if self.from_step else None)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        if self._waiting and batch_idx >= WRITTEN_AFTER:
            self._write_waiting()
        if not pl_module.automatic_optimization:  # `grad` still contains the gradients of the last step
            self._copy_gradients(trainer)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._copy_gradients(trainer)

    def _copy_gradients(self, trainer: L.Trainer) -> None:
        last_of_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._writer is not None and self.level >= 2 and last_of_epoch:
            self._gradients = {
                name: parameter.grad.detach().clone()
                for name, parameter in training_module(trainer.lightning_module).trained.named_parameters()
                if parameter.grad is not None
            }

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = dict(trainer.callback_metrics)
        if self._writer is None:
            return
        self._write_waiting()
        step, now = trainer.global_step, time.time()
        self._waiting = [(name, float(value), step, now) for name, value in metrics.items()]
        if self.level >= 2:
            trained = training_module(pl_module).trained.named_parameters()
            values = {f"weights/{name}": parameter.detach() for name, parameter in trained}
            values |= {f"gradients/{name}": gradient for name, gradient in self._gradients.items()}
            for name, tensor in values.items():
                self._writer.add_histogram(name, tensor, trainer.global_step)
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    _send_histograms(logger, values, trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write_waiting()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._writer is not None:
            for scalar in waiting:
                self._writer.add_scalar(*scalar)

    def _close(self) -> None:
        self._write_waiting()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


BINS = 64
"""Of histograms that are sent to wandb."""


def _send_histograms(logger: WandbLogger, values: Mapping[str, torch.Tensor], step: int) -> None:
    """Send the distributions of the finite numbers in tensors."""
    import wandb

    histograms: dict[str, Any] = {}
    for name, tensor in values.items():
        numbers = tensor.double().flatten().cpu().numpy()
        counted = np.histogram(numbers[np.isfinite(numbers)], bins=BINS)
        histograms[name] = wandb.Histogram(np_histogram=counted)
    logger.log_metrics(histograms, step)


def tensorboard_writers(trainer: L.Trainer) -> list[SummaryWriter]:
    """The writers of the run's TensorBoard events: one on rank 0 during a training, else none."""
    return [c.writer for c in callbacks_of(trainer) if isinstance(c, TensorBoardLog) and c.writer is not None]


class StepLog(ObservesSteps):
    """Logs the loss and the learning rate of single steps.

    A loss is copied to the host without waiting for the device, and written when it has arrived: to TensorBoard once a second,
    because its thread takes Python's lock for every event.

    settings: the resolved config, which is logged as hyperparameters.
    tensorboard: whether the run writes TensorBoard events; the same on all ranks.
    from_step: the step at which a run resumes.
    """

    def __init__(self, settings: Mapping[str, Any], *, tensorboard: bool, from_step: int) -> None:
        self.settings, self.tensorboard = settings, tensorboard
        self._seen = from_step
        self._waiting: deque[_LoggedStep] = deque()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and not is_quick(trainer):
            for logger in trainer.loggers:
                logger.log_hyperparams(dict(self.settings))
                logger.save()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, int(vars(trainer)["log_every_n_steps"])
        before, self._seen = self._seen, step
        if self._waiting and (trainer.loggers or time.time() > self._waiting[0].time + WRITTEN_EVERY_S):
            self._write(trainer, only_arrived=True)
        if not (self.tensorboard or trainer.loggers) or not every or not isinstance(outputs, Mapping):
            return
        if step // every == before // every:  # a batch may contain many steps
            return
        # The loss of Lightning is divided by the number of accumulated batches, and it is that of one rank.
        loss = trainer.strategy.reduce(outputs["loss"] * trainer.accumulate_grad_batches, reduce_op="mean")
        if trainer.is_global_zero:
            rate, epoch = current_learning_rate(trainer.optimizers[0]), trainer.current_epoch
            self._waiting.append(_LoggedStep(step, epoch, rate, loss.detach()))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.loggers:  # they need steps in order
            self._write(trainer, only_arrived=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer, *, only_arrived: bool = False) -> None:
        """Write the steps that are waiting. only_arrived: without waiting for the device."""
        while self._waiting and not (only_arrived and not self._waiting[0].has_arrived):
            logged = self._waiting.popleft()
            values = {"step/loss": logged.loss, "step/lr": logged.rate}
            for writer in tensorboard_writers(trainer):
                for name, value in values.items():
                    writer.add_scalar(name, value, logged.step, logged.time)
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": float(logged.epoch), **values}, step=logged.step)


class _LoggedStep:
    """A step whose loss is on its way to the host."""

    def __init__(self, step: int, epoch: int, rate: float, loss: torch.Tensor) -> None:
        self.step, self.epoch, self.rate, self.time = step, epoch, rate, time.time()
        self._loss = loss
        self._arrived: torch.cuda.Event | None = None
        if loss.is_cuda:
            self._loss = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())

    @property
    def loss(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._loss)
