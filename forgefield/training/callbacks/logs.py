"""Writes `metrics.csv`, `metrics.jsonl` and `timing.csv`: one row per validation, or per epoch where there is none.

Metrics hold no wall-clock value, so that a resumed run writes the same bytes as an uninterrupted one; how long things took is
in `timing.csv`. A checkpoint knows how many rows had been written; on a resume, rows behind it are cut off. Lightning's own
loggers, if the user has any, get the same rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.tasks.metrics import UNITS
from forgefield.training.callbacks.monitor import epoch_is_whole
from forgefield.training.optim.schedules import current_learning_rate
from forgefield.training.run.summary import digits

_TIMING = ("seconds", "frames", "atoms", "frames_per_second", "atoms_per_second")


class MetricsLog(Callback):
    """folder: the run. columns: every metric a row may hold, in order. timing: of `timing.csv`. note: called with a line about
    each row, for the log. units: of further quantities. All ranks keep count of the rows; rank 0 writes them."""

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
        """Begin new files, or keep of the old ones the rows that had been written when the checkpoint was taken."""
        for name, header in (("metrics.csv", self.columns), ("timing.csv", self.timing)):
            kept = _lines(self.folder / name)[1 : rows + 1]
            write_atomically(self.folder / name, _csv_line(header) + "".join(line + "\n" for line in kept))
        path = self.folder / "metrics.jsonl"
        write_atomically(path, "".join(line + "\n" for line in _lines(path)[:rows]))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows, "row_step": self._row_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows, self._row_step = state_dict["rows"], state_dict["row_step"]

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        _ = (
            trainer.callback_metrics
        )  # reading reduces a user's own metrics over ranks, so all ranks read at the same time
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        _ = trainer.callback_metrics
        if trainer.global_step != self._row_step and epoch_is_whole(trainer):
            pl_module.finish_row()
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: Any) -> None:
        timing = {"epoch": trainer.current_epoch, "step": trainer.global_step, **pl_module.take_throughput()}
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "lr": current_learning_rate(trainer.optimizers[0]),
            **pl_module.latest,
        }
        if trainer.is_global_zero:
            self._write_row(trainer, row, timing)
        self._rows += 1
        self._row_step = trainer.global_step
        pl_module.latest.clear()

    def _write_row(self, trainer: L.Trainer, row: dict[str, Any], timing: dict[str, Any]) -> None:
        _append(self.folder / "metrics.csv", _csv_line([row.get(name) for name in self.columns]))
        _append(self.folder / "metrics.jsonl", json.dumps({k: row[k] for k in self.columns if k in row}) + "\n")
        _append(self.folder / "timing.csv", _csv_line([timing[name] for name in self.timing]))
        self.note(row_in_words(row, self.units))
        for logger in trainer.loggers:
            logger.log_metrics({key: float(value) for key, value in row.items()}, step=trainer.global_step)
            logger.save()


def row_in_words(row: Mapping[str, Any], units: Mapping[str, str]) -> str:
    """A row of metrics as a line of the log: losses, errors with their kind and unit, accuracies. Epochs count from one."""
    parts = [f"epoch {int(row['epoch']) + 1}  step {row['step']}  lr {float(row['lr']):.3g}"]
    for split, title in (("train", "train"), ("val", "validation")):
        words = [f"loss {digits(float(row[f'{split}/loss']))}"] if f"{split}/loss" in row else []
        for key, value in row.items():
            name, _, kind = key.removeprefix(f"{split}/").rpartition("_")
            if not key.startswith(f"{split}/") or "/" in name or "/" in kind or value is None:
                continue
            if kind in ("mae", "rmse"):
                words.append(f"{name} {kind.upper()} {digits(float(value))} {units.get(name, '')}".rstrip())
            elif kind == "accuracy":
                words.append(f"{name} accuracy {digits(float(value))}")
        if words:
            parts.append(f"{title}: {', '.join(words)}")
    return "  ".join(parts)


def _append(path: Path, text: str) -> None:
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError as error:
        raise ForgefieldError(
            f"Could not write {path}: {error.strerror}; the checkpoints are untouched. Make room, then run the same command "
            "to go on."
        ) from error


def _csv_line(values: list[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(["" if value is None else value for value in values])
    return line.getvalue()


def _lines(path: Path) -> list[str]:
    """Complete lines of a file; a last one that was cut off by a crash does not count."""
    if not path.exists():
        return []
    text = path.read_text()
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]


class TensorBoardLog(Callback):
    """folder: where event files go. from_step: events behind this step, left by a crash, are hidden. Rank 0 alone writes."""

    def __init__(self, folder: Path, level: int, from_step: int) -> None:
        self.folder = folder
        self.level = level
        self.from_step = from_step
        self._writer: Any = None
        self._gradients: dict[str, torch.Tensor] = {}

    @property
    def writer(self) -> Any:
        """TensorBoard's writer while a training runs, else None; diagnosis callbacks write there too."""
        return self._writer

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=self.from_step + 1 if self.from_step else None)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.automatic_optimization:  # the gradients of the last step are still there
            self.on_before_optimizer_step(trainer, pl_module, None)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        last_of_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._writer is not None and self.level >= 2 and last_of_epoch:
            self._gradients = {
                name: parameter.grad.detach().clone()
                for name, parameter in pl_module.trained.named_parameters()
                if parameter.grad is not None
            }

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        metrics = dict(trainer.callback_metrics)
        if self._writer is None:
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), trainer.global_step)
        if self.level >= 2:
            for name, parameter in pl_module.trained.named_parameters():
                self._writer.add_histogram(f"weights/{name}", parameter.detach(), trainer.global_step)
            for name, gradient in self._gradients.items():
                self._writer.add_histogram(f"gradients/{name}", gradient, trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def tensorboard_writers(trainer: L.Trainer) -> list[Any]:
    """The writers of the run's TensorBoard events: one on rank 0 while it trains, else none."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [c.writer for c in callbacks if isinstance(c, TensorBoardLog) and c.writer is not None]


class StepLog(Callback):
    """settings: the resolved config, which loggers are given as hyperparameters. tensorboard: whether the run writes events of
    TensorBoard; the same on all ranks. from_step: where a resumed run begins."""

    def __init__(self, settings: Mapping[str, Any], *, tensorboard: bool, from_step: int) -> None:
        self.settings, self.tensorboard = settings, tensorboard
        self._seen = from_step

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            for logger in trainer.loggers:
                logger.log_hyperparams(dict(self.settings))
                logger.save()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 0)
        before, self._seen = self._seen, step
        if not (self.tensorboard or trainer.loggers) or not every or outputs is None:
            return
        if step // every == before // every:  # a batch may be many steps
            return
        # Lightning gives the share of this batch in an accumulation, and each rank has its share of the whole.
        loss = trainer.strategy.reduce(outputs["loss"] * trainer.accumulate_grad_batches, reduce_op="mean")
        if not trainer.is_global_zero:
            return
        values = {"step/loss": float(loss), "step/lr": current_learning_rate(trainer.optimizers[0])}
        for writer in tensorboard_writers(trainer):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": float(trainer.current_epoch), **values}, step=step)
