"""Writes the learning curve as DeePMD-kit does (`lcurve.out`), for the scripts and eyes that are used to it.

One row per validation; where there is none, one every so many steps. The numbers are those of all ranks: training columns are
over all frames since the row before, validation columns over all validation frames. A checkpoint knows how many rows had been
written; on a resume, rows behind it are cut off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.tasks.metrics import unit_of
from forgefield.training.optim.schedules import current_learning_rate

LETTERS = {"energy": "e", "forces": "f", "virial": "v", "stress": "s"}
"""How the columns of a target are called there."""
ERRORS = ("rmse", "mae")


class LearningCurve(Callback):
    """file: a name lies in the run folder, a path with a folder from the working directory. every: steps between two rows where
    nothing is validated. errors: rmse or mae, what is written for each target. columns: in place of these, the name of each
    column and its metric, such as {rmse_global_dipole: dipole_per_atom_rmse}.
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
            raise ForgefieldError(
                f"callbacks: the errors of a learning curve are {' or '.join(ERRORS)}, not {errors!r}."
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ForgefieldError(f"callbacks: a learning curve has a row every so many steps, not {every!r}.")
        if columns is not None and (not isinstance(columns, Mapping) or not columns):
            raise ForgefieldError(f"callbacks: columns of a learning curve are {{name: metric}}, not {columns!r}.")
        self.file, self.every, self.errors = file, every, errors
        self.columns = None if columns is None else {str(name): str(metric) for name, metric in columns.items()}
        self._rows = 0
        self._row_step = -1
        self._lr = math.nan
        self._values: dict[str, float] = {}
        # Training sums over all ranks. They begin anew with every epoch and every row of metrics.
        self._before: Tensor | None = None
        """Since the last row, but of epochs that are over."""
        self._taken: Tensor | None = None
        """What is in the present sums but was counted already."""
        self._epoch_is_over = False

    def state_dict(self) -> dict[str, Any]:
        sums = {"before": self._before, "taken": self._taken, "epoch_is_over": self._epoch_is_over}
        return {"rows": self._rows, "row_step": self._row_step, **sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows, self._row_step = state_dict["rows"], state_dict["row_step"]
        self._before, self._taken = state_dict["before"], state_dict["taken"]
        self._epoch_is_over = state_dict["epoch_is_over"]

    # ---- when

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begin a new file, or keep of the old one the rows that had been written when the checkpoint was taken."""
        if not self._writes(trainer):
            return
        path = self._path(trainer)
        kept = [line for line in _lines(path) if not line.startswith("#")][: self._rows]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self._header(trainer, pl_module) + "".join(line + "\n" for line in kept))
        except OSError as error:
            raise ForgefieldError(f"The learning curve {path} cannot be written: {error.strerror}.") from error

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # The schedule moves on at the end of a step; a row tells with which rate its step was taken.
        self._lr = current_learning_rate(trainer.optimizers[0])
        if self._epoch_is_over:
            self._taken, self._epoch_is_over = None, False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        is_due = step > 0 and step % self.every == 0 and step != self._row_step  # several batches may be one step
        if not trainer.enable_validation and is_due:
            self._write(trainer, _values(self._take(pl_module), pl_module))
        if trainer.is_last_batch:
            self._before, self._epoch_is_over = self._take(pl_module), True

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._counts(trainer):  # at its end the sums begin anew
            self._values = _values(self._take(pl_module), pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        measured = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if self._counts(trainer):
            self._taken = None
            losses = _losses(_over_ranks(pl_module, pl_module.val_loss.sums), pl_module)
            self._write(trainer, {**measured, **{f"val/{k}": v for k, v in losses.items()}, **self._values})

    # ---- what

    def _counts(self, trainer: L.Trainer) -> bool:
        return trainer.state.fn == "fit" and not trainer.sanity_checking

    def _take(self, pl_module: Any) -> Tensor:
        """Sums over all ranks since the last row; the next row begins here."""
        total = _over_ranks(pl_module, pl_module.train_loss.sums, pl_module.train_errors.sums)
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
        for metric in self._metrics(trainer.lightning_module):
            found = [_in_units(f"{split}/{metric}", values) for split in _splits(trainer)]
            line += "   " + " ".join(f"{value:11.2e}" for value in found)
        path = self._path(trainer)
        try:
            with open(path, "a") as file:
                file.write(f"{line}   {float(self._lr):8.1e}\n")
        except OSError as error:
            raise ForgefieldError(
                f"Could not write {path}: {error.strerror}; the checkpoints are untouched. Make room, then run the same "
                "command to go on."
            ) from error

    def _header(self, trainer: L.Trainer, pl_module: Any) -> str:
        short = {"val": "val", "train": "trn"}
        line = "# step "
        for metric in self._metrics(pl_module):
            branch, dot, own = metric.rpartition(".")
            names = [f"{self._column(own)}_{short[split]}{'_' if dot else ''}{branch}" for split in _splits(trainer)]
            line += "   " + " ".join(f"{name:>11s}" for name in names)
        return f"{line}   {'lr':8s}\n# nan where no frame carries the label\n"

    def _metrics(self, pl_module: Any) -> list[str]:
        """Names of the values in a row, in the order of their columns."""
        if self.columns is not None:
            self._require_known(pl_module)
            return [self.columns[name] for name in sorted(self.columns)]
        task = pl_module.task
        if any("." in name for name in task.names):  # branches one after the other
            return [f"{branch}.{name}" for branch in task.branches for name in self._of(task.names, f"{branch}.")]
        return self._of(task.names, "")

    def _of(self, targets: Sequence[str], prefix: str) -> list[str]:
        """Values of the targets whose names have this prefix, without it."""
        own = [name.removeprefix(prefix) for name in targets if name.startswith(prefix)]
        return sorted(["loss", *(f"{name}_{self.errors}" for name in own)], key=self._column)

    def _require_known(self, pl_module: Any) -> None:
        known = ["loss", *pl_module.train_errors.names()]
        known += [f"{name.removesuffix('_rmse')}_mse" for name in known if name.endswith("_rmse")]
        for name, metric in (self.columns or {}).items():
            if metric not in known:
                raise ForgefieldError(
                    f"callbacks: column {name} of the learning curve is {metric}, which is not a metric of this run."
                    f"{did_you_mean(metric, known)}"
                )

    def _column(self, metric: str) -> str:
        """`rmse` (of the loss, its root), `rmse_e`, ..."""
        if self.columns is not None:
            return next(name for name, known in self.columns.items() if known == metric)
        target = metric.removesuffix(f"_{self.errors}")
        return "rmse" if metric == "loss" else f"{self.errors}_{LETTERS.get(target, target)}"

    def _writes(self, trainer: L.Trainer) -> bool:
        return trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False)

    def _path(self, trainer: L.Trainer) -> Path:
        inside = "/" not in self.file
        return Path(trainer.default_root_dir) / self.file if inside else Path(self.file).expanduser()


def _splits(trainer: L.Trainer) -> tuple[str, ...]:
    return ("val", "train") if trainer.enable_validation else ("train",)


def _over_ranks(pl_module: Any, *parts: Tensor) -> Tensor:
    """Accumulators one after the other, added up over ranks."""
    return pl_module.ranks.all_reduce(torch.cat([part.reshape(-1).to(pl_module.device) for part in parts])).cpu()


def _values(sums: Tensor, pl_module: Any) -> dict[str, float]:
    """Values of a row from the sums of training: loss, then errors."""
    errors = pl_module.train_errors
    first, second = sums.split([pl_module.train_loss.sums.numel(), errors.sums.numel()])
    found = {**_losses(first, pl_module), **errors.compute(second.reshape(errors.sums.shape))}
    return {f"train/{name}": value for name, value in found.items()}


def _losses(sums: Tensor, pl_module: Any) -> dict[str, float]:
    """The loss with the weights of this moment, and that of each branch of the model; NaN where there was no label."""
    task, (numerators, counts) = pl_module.task, sums.reshape(2, -1)
    weights = task.weights_on(numerators.device)

    def loss(chosen: Tensor) -> float:
        found = task.combine(numerators, counts * chosen, weights * chosen)
        return float(found) if bool((counts * chosen > 0).any()) else math.nan

    branches = [name.partition(".")[0] if "." in name else "" for name in task.names]
    of_branch = {b: torch.tensor([float(b == other) for other in branches]).double() for b in branches if b}
    return {"loss": loss(torch.ones_like(counts))} | {f"{b}.loss": loss(chosen) for b, chosen in of_branch.items()}


def _in_units(name: str, values: dict[str, float]) -> float:
    """A value in the units of DeePMD-kit: eV and A; of a loss, its root."""
    if name.endswith("_mse"):
        return values.get(f"{name.removesuffix('_mse')}_rmse", math.nan) ** 2
    value = values.get(name, math.nan)
    if name.endswith(("/loss", ".loss")):
        return math.sqrt(value)
    return value / 1000 if unit_of(name).startswith("meV") else value


def _lines(path: Path) -> list[str]:
    """Complete lines of a file; a last one that was cut off by a crash does not count."""
    if not path.exists():
        return []
    text = path.read_text()
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]
