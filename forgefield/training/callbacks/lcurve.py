"""Writes the learning curve in the format of DeePMD-kit (`lcurve.out`).

One row per validation or, without validation, one every N steps. Training columns are errors over all frames of all ranks since
the previous row, validation columns over all validation frames. A checkpoint contains the number of rows written so far; rows
after it are removed when a run is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.tasks.units import unit_of
from forgefield.training.callbacks.logs import append_text, complete_lines
from forgefield.training.module import TrainingModule, training_module
from forgefield.training.optim.schedules import current_learning_rate
from forgefield.training.step_loop import ObservesSteps
from forgefield.training.trainer import is_quick

LETTERS = {"energy": "e", "forces": "f", "virial": "v", "stress": "s"}
"""Targets in the names of columns of DeePMD-kit."""
ERRORS = ("rmse", "mae")


class LearningCurve(ObservesSteps):
    """Writes the learning curve of a training on frames.

    file: a file name in the run folder, or a path relative to the working directory.
    every: number of steps between two rows without validation.
    errors: error of each target, rmse or mae.
    columns: instead of the default ones, names of columns and their metrics, such as
        {rmse_global_dipole: dipole_per_atom_rmse}.
    """

    state_key = "learning_curve"

    def __init__(
        self,
        file: str = "lcurve.out",
        every: int = 1000,
        errors: str = "rmse",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        if errors not in ERRORS:
            raise ForgefieldError(f"callbacks: errors of learning_curve must be {' or '.join(ERRORS)}, not {errors!r}.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ForgefieldError(f"callbacks: every of learning_curve must be a positive integer, not {every!r}.")
        if columns is not None and (not isinstance(columns, Mapping) or not columns):
            raise ForgefieldError(f"callbacks: columns of learning_curve must be {{name: metric}}, not {columns!r}.")
        self.file, self.every, self.errors = file, every, errors
        self.columns = None if columns is None else {str(name): str(metric) for name, metric in columns.items()}
        self._rows = 0
        self._row_step = -1
        self._lr = math.nan
        self._values: dict[str, float] = {}
        # Sums of the training over all ranks. Those of the module start from zero with every epoch and every row of metrics.
        self._before: Tensor | None = None
        """Sums since the last row, of completed epochs."""
        self._taken: Tensor | None = None
        """Part of the module's present sums that previous rows contain."""
        self._epoch_is_over = False

    def state_dict(self) -> dict[str, Any]:
        sums = {"before": self._before, "taken": self._taken, "epoch_is_over": self._epoch_is_over}
        return {"rows": self._rows, "row_step": self._row_step, **sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows, self._row_step = state_dict["rows"], state_dict["row_step"]
        self._before, self._taken = state_dict["before"], state_dict["taken"]
        self._epoch_is_over = state_dict["epoch_is_over"]

    # ---- hooks of Lightning

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create the file, with the rows of an existing one up to the checkpoint."""
        if not self._writes(trainer):
            return
        path = self._path(trainer)
        rows = [line for line in complete_lines(path) if not line.startswith("#")][: self._rows]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self._header(trainer) + "".join(line + "\n" for line in rows))
        except OSError as error:
            raise ForgefieldError(f"Could not write the learning curve {path}: {error.strerror}.") from error

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        # The schedule advances at the end of a step; a row contains the rate of its step.
        self._lr = current_learning_rate(trainer.optimizers[0])
        if self._epoch_is_over:
            self._taken, self._epoch_is_over = None, False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        step, module = trainer.global_step, training_module(pl_module)
        is_due = step > 0 and step % self.every == 0 and step != self._row_step  # several batches may be one step
        if not trainer.enable_validation and is_due:
            self._write(trainer, _values(self._take(module), module))
        if trainer.is_last_batch:
            self._before, self._epoch_is_over = self._take(module), True

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if _is_fitting(trainer):  # the sums of the module are reset at the end of a validation
            module = training_module(pl_module)
            self._values = _values(self._take(module), module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        measured = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if _is_fitting(trainer):
            self._taken, module = None, training_module(pl_module)
            losses = _losses(_over_ranks(module, module.val_loss.sums), module)
            self._write(trainer, {**measured, **{f"val/{k}": v for k, v in losses.items()}, **self._values})

    # ---- rows

    def _take(self, module: TrainingModule) -> Tensor:
        """Sums over all ranks since the last row, or since the last call."""
        total = _over_ranks(module, module.train_loss.sums, module.train_errors.sums)
        since = total if self._taken is None else total - self._taken
        since = since if self._before is None else since + self._before
        self._taken, self._before = total, None
        return since

    def _write(self, trainer: L.Trainer, values: dict[str, float]) -> None:
        step = trainer.global_step
        self._rows += 1
        self._row_step = step
        if not self._writes(trainer):
            return
        line = f"{step:7d}"
        for metric in self._metrics(training_module(trainer.lightning_module)):
            columns = [_in_units(f"{split}/{metric}", values) for split in _splits(trainer)]
            line += "   " + " ".join(f"{value:11.2e}" for value in columns)
        append_text(self._path(trainer), f"{line}   {float(self._lr):8.1e}\n")

    def _header(self, trainer: L.Trainer) -> str:
        short = {"val": "val", "train": "trn"}
        line = "# step "
        for metric in self._metrics(training_module(trainer.lightning_module)):
            branch, dot, name = metric.rpartition(".")
            names = [f"{self._column(name)}_{short[split]}{'_' if dot else ''}{branch}" for split in _splits(trainer)]
            line += "   " + " ".join(f"{name:>11s}" for name in names)
        return f"{line}   {'lr':8s}\n# nan where no frame carries the label\n"

    def _metrics(self, module: TrainingModule) -> list[str]:
        """Names of the values in a row, in the order of their columns."""
        if self.columns is not None:
            _require_metrics(self.columns, module)
            return [self.columns[name] for name in sorted(self.columns)]
        task = _frames_task(module)
        if any("." in name for name in task.names):  # branches one after the other
            return [f"{branch}.{name}" for branch in task.branches for name in self._of(task.names, f"{branch}.")]
        return self._of(task.names, "")

    def _of(self, targets: Sequence[str], prefix: str) -> list[str]:
        """Metrics of the targets whose names have this prefix, without it."""
        names = [name.removeprefix(prefix) for name in targets if name.startswith(prefix)]
        return sorted(["loss", *(f"{name}_{self.errors}" for name in names)], key=self._column)

    def _column(self, metric: str) -> str:
        """`rmse` (of the loss, its root), `rmse_e`, ..."""
        if self.columns is not None:
            return next(name for name, of_column in self.columns.items() if of_column == metric)
        target = metric.removesuffix(f"_{self.errors}")
        return "rmse" if metric == "loss" else f"{self.errors}_{LETTERS.get(target, target)}"

    def _writes(self, trainer: L.Trainer) -> bool:
        return trainer.is_global_zero and not is_quick(trainer)

    def _path(self, trainer: L.Trainer) -> Path:
        inside = "/" not in self.file
        return Path(trainer.default_root_dir) / self.file if inside else Path(self.file).expanduser()


def _splits(trainer: L.Trainer) -> tuple[str, ...]:
    return ("val", "train") if trainer.enable_validation else ("train",)


def _is_fitting(trainer: L.Trainer) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def _frames_task(module: TrainingModule) -> Task:
    assert isinstance(module.task, Task), "a learning curve is written for trainings on frames"
    return module.task


def _require_metrics(columns: Mapping[str, str], module: TrainingModule) -> None:
    """Raise ForgefieldError for a column whose metric this run does not have."""
    assert isinstance(module.train_errors, ErrorMetrics)
    available = ["loss", *module.train_errors.names()]
    available += [f"{name.removesuffix('_rmse')}_mse" for name in available if name.endswith("_rmse")]
    for name, metric in columns.items():
        if metric not in available:
            raise ForgefieldError(
                f"callbacks: column {name} of the learning curve is {metric}, which is not a metric of this run."
                f"{did_you_mean(metric, available)}"
            )


def _over_ranks(module: TrainingModule, *sums: Tensor) -> Tensor:
    """Accumulators as one vector, summed over ranks."""
    return module.ranks.all_reduce(torch.cat([part.reshape(-1).to(module.device) for part in sums])).cpu()


def _values(sums: Tensor, module: TrainingModule) -> dict[str, float]:
    """Values of a row from the sums of the training: losses and errors."""
    errors = module.train_errors
    loss_sums, error_sums = sums.split([module.train_loss.sums.numel(), errors.sums.numel()])
    values = {**_losses(loss_sums, module), **errors.compute(error_sums.reshape(errors.sums.shape))}
    return {f"train/{name}": value for name, value in values.items()}


def _losses(sums: Tensor, module: TrainingModule) -> dict[str, float]:
    """The loss with the present weights, and that of each branch of the model; NaN without labels."""
    task, (numerators, counts) = _frames_task(module), sums.reshape(2, -1)
    weights = task.weights_on(numerators.device)

    def loss(chosen: Tensor) -> float:
        value = task.combine(numerators, counts * chosen, weights * chosen)
        return float(value) if bool((counts * chosen > 0).any()) else math.nan

    branches = [name.partition(".")[0] if "." in name else "" for name in task.names]
    of_branch = {b: torch.tensor([float(b == other) for other in branches]).double() for b in branches if b}
    return {"loss": loss(torch.ones_like(counts))} | {f"{b}.loss": loss(chosen) for b, chosen in of_branch.items()}


def _in_units(name: str, values: dict[str, float]) -> float:
    """A value in the units of DeePMD-kit, eV and A; for a loss its square root."""
    if name.endswith("_mse"):
        return values.get(f"{name.removesuffix('_mse')}_rmse", math.nan) ** 2
    value = values.get(name, math.nan)
    if name.endswith(("/loss", ".loss")):
        return math.sqrt(value)
    return value / 1000 if unit_of(name).startswith("meV") else value
