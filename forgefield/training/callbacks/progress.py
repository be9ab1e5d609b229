"""The progress of a training: a live display on a terminal or in a notebook, a few compact lines in a log.

Contract: a step costs one reading of the clock. Metrics, which may wait for the device, are read only when something is shown:
at most `per_second` times a second on a terminal, once per validation or epoch in a log. The terminal is restored however the
training ends.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.timer import Timer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from forgefield.tasks.units import UNITS
from forgefield.text import can_redraw
from forgefield.training.module import Throughput
from forgefield.training.optim.schedules import current_learning_rate
from forgefield.training.run.summary import digits
from forgefield.training.step_loop import ObservesSteps
from forgefield.training.trainer import callbacks_of

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

NOTEBOOK_WIDTH = 110
"""Characters in a line of the display in a notebook."""
FIRST_LINES = 20
"""Number of lines at the beginning of a log that are never skipped."""
_SHOWN = ("energy", "forces", "stress")


class RunProgress(ObservesSteps, ProgressBar):
    """Shows the progress of a training.

    console: that of all other output, so that it appears above the display.
    monitor: metric that selects the best values.
    per_second: maximum rate of updates on a terminal.
    max_lines: approximate number of lines in the log of a training.
    max_seconds: wall-clock limit of the training, for the remaining time.
    units: of additional quantities whose errors are shown.
    """

    state_key = "progress"

    def __init__(
        self,
        console: Console | None = None,
        *,
        monitor: str = "val/loss",
        per_second: float = 5.0,
        max_lines: int = 40,
        max_seconds: float | None = None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.console = console or Console(highlight=False)
        self.monitor = monitor
        self._shown = {name: UNITS[name] for name in _SHOWN} | dict(units or {})
        self.interval = 1.0 / per_second
        self.max_lines = max_lines
        self._deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self.best: dict[str, float] = {}
        self._enabled = True
        self._live: Live | NotebookDisplay | None = None
        self._next_refresh = 0.0
        self._values: dict[str, float] = {}
        self._speed: dict[str, float] = {}
        self._phase = ""
        self._epoch = 1
        self._batch, self._batches = 0, 0
        self._pace: tuple[float, int] | None = None
        self._done = 0
        self._occasions = 0
        """Number of validations and ends of epochs so far, each an occasion for a line."""
        self._due: tuple[str, str] | None = None
        self._printed_step = -1

    # ---- methods that Lightning calls

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: object, sep: str = " ", end: str = "\n", **options: object) -> None:
        self.console.print(Text(sep.join(str(item) for item in args)), soft_wrap=True, end=end)

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict["best"])

    # ---- training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pace, self._done, self._due = None, 0, None
        self._epoch = trainer.current_epoch + 1
        self._occasions = trainer.current_epoch * _validations_per_epoch(trainer)
        self._begin("train", _count(trainer.num_training_batches))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print_due(trainer)
        self._phase, self._batch, self._batches = "train", 0, _count(trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        self._epoch = trainer.current_epoch + 1
        self._batch = batch_idx + 1
        self._done += 1
        if self._pace is None:
            # The first step includes warming up and is not representative.
            self._pace = (time.monotonic(), self._done)
        if self._batch == self._batches:
            self._read_speed(trainer, pl_module)
        self._refresh(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Metrics of the epoch are final only after all hooks of its end, so its line is printed later; step and learning rate
        # are stored now.
        self._occasions += 1
        self._due = self._position(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print_due(trainer, last=True)
        self._refresh(trainer, now=True)
        self._finish()

    # ---- validation, test, prediction

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._read_speed(trainer, pl_module)
        self._begin("validate", _count(trainer.num_val_batches))

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batch += 1
        self._refresh(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._finish()
            return
        self._read_values(trainer)
        self._keep_best(trainer)
        self._begin("train", _count(trainer.num_training_batches))
        self._batch = trainer.fit_loop.batch_idx + 1
        if self._batch < self._batches:
            self._occasions += 1
            self._due = self._position(trainer)
            self._print_due(trainer)
        self._refresh(trainer, now=True)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("test", _count(trainer.num_test_batches))

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish()

    on_predict_end = on_test_end

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("predict", _count(trainer.num_predict_batches))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Metrics are not read, because they may be the cause of the exception.
        self._finish()
        if trainer.training:
            self._print_due(trainer, last=True, read=False)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._finish()

    # ---- values

    def _read_values(self, trainer: L.Trainer) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith(("train/", "val/", "val-", "test/")):
                self._values[name] = float(value)

    def _read_speed(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the throughput, whose counters are reset with every row of metrics, times the number of ranks."""
        throughput = getattr(pl_module, "throughput", None)
        if not isinstance(throughput, Throughput):
            return
        for name in ("atoms", "frames", "points"):
            value = throughput.per_second(name)
            if value is not None:
                self._speed[f"{name}_per_second"] = value * trainer.world_size

    def _keep_best(self, trainer: L.Trainer) -> None:
        value = self._values.get(self.monitor)
        if value is not None and value < self.best.get(self.monitor, math.inf):
            self.best = {key: item for key, item in self._values.items() if key.startswith("val/")}
            self.best[self.monitor] = value
            self.best["epoch"] = trainer.current_epoch + 1

    def seconds_left(self, trainer: L.Trainer) -> float | None:
        """Estimated time to the end of the training, validation included; None if it is unknown."""
        limits = [_seconds_on_timer(trainer)]
        if self._deadline is not None:
            limits.append(max(self._deadline - time.monotonic(), 0.0))
        total = _total_batches(trainer)
        if total is not None and self._pace is not None:
            since, done = self._pace
            elapsed = time.monotonic() - since
            if self._done > done and elapsed > 0:
                position = trainer.fit_loop.epoch_loop.total_batch_idx + 1
                limits.append(max(total - position, 0) * elapsed / (self._done - done))
        return min((limit for limit in limits if limit is not None), default=None)

    # ---- lines of a log

    def _position(self, trainer: L.Trainer) -> tuple[str, str]:
        """Epoch and step, and the learning rate, as text."""
        epochs = _total_epochs(trainer)
        of = f"/{epochs}" if epochs else ""
        epoch = f"{trainer.current_epoch + 1}".rjust(len(of) - 1 if of else 3)
        return f"epoch {epoch}{of}  step {trainer.global_step}", f"lr {_rate(trainer)}"

    def _print_due(self, trainer: L.Trainer, *, last: bool = False, read: bool = True) -> None:
        due, self._due = self._due, None
        if due is None or not self._enabled or self._is_live:
            return
        total = _total_epochs(trainer)
        total = total * _validations_per_epoch(trainer) if total else None
        if (
            not (last or line_is_due(self._occasions, total, self.max_lines))
            or trainer.global_step == self._printed_step
        ):
            return
        self._printed_step = trainer.global_step
        if read:
            self._read_values(trainer)
        position, rate = due
        texts = [position, *self._log_values(), rate, *self._log_speed(trainer)]
        self.console.print(Text("  ".join(texts)), soft_wrap=True)

    def _log_values(self) -> list[str]:
        texts = [f"loss {digits(self._values['train/loss'])}"] if "train/loss" in self._values else []
        split = "val" if any(key.startswith("val/") for key in self._values) else "train"
        for name, unit in self._shown.items():
            value = self._values.get(f"{split}/{name}_mae")
            if value is not None:
                texts.append(f"{split} {name} MAE {digits(value)} {unit}".rstrip())
        for key, value in self._values.items():
            if key.startswith(f"{split}/") and key.endswith("_accuracy"):
                name = key.removeprefix(f"{split}/").replace("_accuracy", " accuracy")
                texts.append(f"{split} {name} {digits(value)}")
        return texts

    def _log_speed(self, trainer: L.Trainer) -> list[str]:
        left = self.seconds_left(trainer)
        kinds = [kind for kind in ("atoms", "points") if f"{kind}_per_second" in self._speed]
        texts = [f"{short_number(self._speed[f'{kind}_per_second'])} {kind}/s" for kind in kinds]
        return [*texts, f"left {short_duration(left)}"] if left is not None else texts

    # ---- the display on a terminal

    def _begin(self, phase: str, batches: int) -> None:
        self._phase, self._batch, self._batches = phase, 0, batches
        if not self._enabled or not self._is_live or self._live is not None:
            return
        if self.console.is_jupyter:
            self._live = NotebookDisplay()
        else:
            self._live = Live(console=self.console, auto_refresh=False, transient=False, redirect_stderr=True)
            self._live.start()

    @property
    def _is_live(self) -> bool:
        return self.console.is_jupyter or can_redraw(self.console)

    def _refresh(self, trainer: L.Trainer, *, now: bool = False) -> None:
        if self._live is None:
            return
        moment = time.monotonic()
        if moment < self._next_refresh and not now:
            return
        self._next_refresh = moment + self.interval
        self._read_values(trainer)
        if self._phase == "train":
            self._read_speed(trainer, trainer.lightning_module)
        self._live.update(self.display(trainer), refresh=True)

    def _finish(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def display(self, trainer: L.Trainer) -> Group:
        """The display on a terminal: a progress bar, and errors in physical units."""
        fitting = trainer.state.fn == "fit"
        head = Table.grid(padding=(0, 2))
        epochs = _total_epochs(trainer)
        where = f"epoch {self._epoch}{f'/{epochs}' if epochs else ''}" if fitting else self._phase
        bar = Bar(total=max(self._batches, 1), completed=self._batch, width=32, pulse=self._batches == 0)
        phase = {"validate": "validating", "test": "testing", "predict": "predicting"}.get(self._phase, "")
        step = f"{self._batch}/{self._batches}" if self._batches else f"{self._batch}"
        speed = self._speed_texts(trainer, fitting)
        head.add_row(Text(where, style="bold"), bar, Text(f"{step} {phase}".strip()), *speed)
        if not fitting:
            return Group(head)
        body = Table.grid(padding=(0, 3))
        shown = {
            name: unit
            for name, unit in self._shown.items()
            if any(f"{split}/{name}_mae" in self._values for split in ("train", "val"))
        }
        best_note = f"epoch {self.best.get('epoch', 0):.0f}"
        for title, prefix, values, note in (
            ("train", "train/", self._values, f"lr {_rate(trainer)}"),
            ("val", "val/", self._values, ""),
            ("best", "val/", self.best, best_note),
        ):
            if any(key.startswith(prefix) for key in values):
                cells = _error_cells(values, prefix, shown)
                body.add_row(Text(f"  {title}", style="dim"), *cells, Text(note, style="dim"))
        return Group(head, body)

    def _speed_texts(self, trainer: L.Trainer, fitting: bool) -> list[Text]:
        kinds = [kind for kind in ("atoms", "frames", "points") if fitting and f"{kind}_per_second" in self._speed]
        texts = [Text(f"{short_number(self._speed[f'{kind}_per_second'])} {kind}/s", style="cyan") for kind in kinds]
        left = self.seconds_left(trainer) if fitting else None
        return [*texts, Text(f"left {short_duration(left)}", style="green")] if left is not None else texts


class NotebookDisplay:
    """One output of a notebook's cell, replaced by every update. rich would need ipywidgets for it, and redraw without them."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def update(self, content: Group, *, refresh: bool) -> None:
        text = io.StringIO()
        Console(file=text, width=NOTEBOOK_WIDTH, force_terminal=False, force_jupyter=False, no_color=True).print(
            content
        )
        data = {"text/plain": text.getvalue().rstrip("\n")}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def stop(self) -> None:
        """The last update stays."""


def line_is_due(occasion: int, total: int | None, max_lines: int) -> bool:
    """Whether the log gets a line at this one of `total` occasions, counted from 1.

    All of the first `FIRST_LINES`, then evenly spaced, at most `max_lines`; at increasing intervals if the total is unknown.
    """
    first = min(FIRST_LINES, max_lines)
    if occasion <= first or (total is not None and total <= max_lines):
        return True
    if total is None:
        growth = 1.2
        return math.floor(math.log(occasion / first, growth)) > math.floor(math.log((occasion - 1) / first, growth))
    remaining = max_lines - first
    if remaining == 0:
        return occasion == total
    return (occasion - first) * remaining // (total - first) > (occasion - first - 1) * remaining // (total - first)


def short_number(value: float) -> str:
    """`812`, `8.1k`, `1.3M`."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            scaled = value / limit
            return f"{scaled:.0f}{letter}" if scaled >= 100 else f"{scaled:.1f}{letter}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def short_duration(seconds: float | None) -> str:
    """`48s`, `1m20s`, `2h14m`, `3d04h`."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    n = round(seconds)
    if n < 60:
        return f"{n}s"
    if n < 3600:
        return f"{n // 60}m{n % 60:02d}s"
    if n < 86400:
        return f"{n // 3600}h{n % 3600 // 60:02d}m"
    return f"{n // 86400}d{n % 86400 // 3600:02d}h"


def _error_cells(values: dict[str, float], prefix: str, quantities: dict[str, str]) -> list[Text]:
    """The loss and the error of each quantity; empty cells for missing values."""
    cells = [Text(f"loss {digits(values[f'{prefix}loss'])}") if f"{prefix}loss" in values else Text()]
    for name, unit in quantities.items():
        value = values.get(f"{prefix}{name}_mae")
        error = (f"{name} MAE ", (digits(value), "bold"), (f" {unit}".rstrip(), "dim"))
        cells.append(Text.assemble(*error) if value is not None else Text())
    return cells


def _rate(trainer: L.Trainer) -> str:
    return f"{current_learning_rate(trainer.optimizers[0]):.3g}" if trainer.optimizers else "?"


def _count(batches: float | list[int | float] | None) -> int:
    """A number of batches, over all loaders; 0 if it is unknown."""
    number = sum(batches) if isinstance(batches, list) else batches
    return int(number) if number is not None and math.isfinite(number) else 0


def _total_batches(trainer: L.Trainer) -> int | None:
    per_epoch = _count(trainer.num_training_batches)
    limits = []
    if trainer.max_epochs not in (None, -1) and per_epoch:
        limits.append(trainer.max_epochs * per_epoch)
    if trainer.max_steps not in (None, -1):
        limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
    return min(limits) if limits else None


def _total_epochs(trainer: L.Trainer) -> int | None:
    total, per_epoch = _total_batches(trainer), _count(trainer.num_training_batches)
    if total is not None and per_epoch:
        return max(math.ceil(total / per_epoch), 1)
    return None


def _validations_per_epoch(trainer: L.Trainer) -> int:
    """Number of validations in an epoch; at least 1, for its end."""
    between, per_epoch = vars(trainer).get("val_check_batch"), _count(trainer.num_training_batches)
    if not per_epoch or between is None or not math.isfinite(between) or not trainer.enable_validation:
        return 1
    return max(math.ceil(per_epoch / max(int(between), 1)), 1)


def _seconds_on_timer(trainer: L.Trainer) -> float | None:
    timers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Timer)]
    return min((left for timer in timers if (left := timer.time_remaining()) is not None), default=None)
