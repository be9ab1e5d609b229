"""The progress of a training: a live display on a terminal, a few compact lines in a log.

Contract: a step costs one look at the clock. Metrics are read, and so a device waited for, only when something is
shown: at most `per_second` times a second on a terminal, once per validation or epoch in a log. The terminal is given
back whatever ends the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.timer import Timer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from forgefield.tasks.metrics import UNITS
from forgefield.training.optim.schedules import current_learning_rate
from forgefield.training.run.summary import digits

EVERY_LINE_UP_TO = 20
_SHOWN = ("energy", "forces", "stress")


class RunProgress(ProgressBar):
    """console: where to; the one the rest of the program prints to, so that its lines appear above the display.
    max_lines: about how many lines a log gets for the whole training. monitor: what `best` goes by.
    max_seconds: wall-clock limit of the training, for the time left. units: of further quantities whose errors are shown.
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
        self._live: Live | None = None
        self._next_refresh = 0.0
        self._values: dict[str, float] = {}
        self._speed: dict[str, float] = {}
        self._phase = ""
        self._epoch = 1
        self._batch, self._batches = 0, 0
        self._pace: tuple[float, int] | None = None
        self._done = 0
        self._moments = 0
        self._due: tuple[str, str] | None = None
        self._printed_step = -1

    # ---- Lightning's switches

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, sep: str = " ", end: str = "\n") -> None:  # type: ignore[override]
        self.console.print(Text(sep.join(str(item) for item in args)), soft_wrap=True, end=end)

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict["best"])

    # ---- training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pace, self._done, self._due = None, 0, None
        self._epoch = trainer.current_epoch + 1
        self._moments = trainer.current_epoch * _validations_per_epoch(trainer)
        self._begin("train", _whole(trainer.num_training_batches))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print_due(trainer)
        self._phase, self._batch, self._batches = "train", 0, _whole(trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._epoch = trainer.current_epoch + 1
        self._batch = batch_idx + 1
        self._done += 1
        if self._pace is None:
            # The first step pays for warming up and says little about the rest.
            self._pace = (time.monotonic(), self._done)
        if self._batch == self._batches:
            self._read_speed(trainer, pl_module)
        self._refresh(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The epoch's metrics are final only after all hooks of its end, so its line is printed a moment later; what
        # belongs to this very step is noted now.
        self._moments += 1
        self._due = self._place(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print_due(trainer, last=True)
        self._refresh(trainer, now=True)
        self._finish()

    # ---- validation, test, prediction

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._read_speed(trainer, pl_module)
        self._begin("validate", _whole(trainer.num_val_batches))

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
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
        self._begin("train", _whole(trainer.num_training_batches))
        self._batch = trainer.fit_loop.batch_idx + 1
        if self._batch < self._batches:
            self._moments += 1
            self._due = self._place(trainer)
            self._print_due(trainer)
        self._refresh(trainer, now=True)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("test", _whole(trainer.num_test_batches))

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batch += 1
        self._refresh(trainer)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("predict", _whole(trainer.num_predict_batches))

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batch += 1
        self._refresh(trainer)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Whatever went wrong may be what these values are made of: the display must not fail on top of it.
        self._finish()
        if trainer.training:
            self._print_due(trainer, last=True, read=False)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._finish()

    # ---- what is known

    def _read_values(self, trainer: L.Trainer) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith(("train/", "val/", "test/")):
                self._values[name] = float(value)

    def _read_speed(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Kept, because the counters begin anew with every row of metrics. All ranks are taken to be as fast as this one."""
        throughput = getattr(pl_module, "throughput", None)
        for name in ("atoms_per_second", "frames_per_second", "points_per_second"):
            value = getattr(throughput, name, None)
            if value is not None:
                self._speed[name] = float(value) * trainer.world_size

    def _keep_best(self, trainer: L.Trainer) -> None:
        value = self._values.get(self.monitor)
        if value is not None and value < self.best.get(self.monitor, math.inf):
            self.best = {key: item for key, item in self._values.items() if key.startswith("val/")}
            self.best[self.monitor] = value
            self.best["epoch"] = trainer.current_epoch + 1

    def seconds_left(self, trainer: L.Trainer) -> float | None:
        """Time to the end of the whole training at the pace so far, validation included; None while it is unknown."""
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
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None

    # ---- a log: lines

    def _place(self, trainer: L.Trainer) -> tuple[str, str]:
        """Where the training is, and at which rate, as a line says it."""
        epochs = _total_epochs(trainer)
        of = f"/{epochs}" if epochs else ""
        epoch = f"{trainer.current_epoch + 1}".rjust(len(of) - 1 if of else 3)
        return f"epoch {epoch}{of}  step {trainer.global_step}", f"lr {_rate(trainer)}"

    def _print_due(self, trainer: L.Trainer, *, last: bool = False, read: bool = True) -> None:
        due, self._due = self._due, None
        if due is None or not self._enabled or self.console.is_terminal:
            return
        total = _total_epochs(trainer)
        total = total * _validations_per_epoch(trainer) if total else None
        if not (last or line_is_due(self._moments, total, self.max_lines)) or trainer.global_step == self._printed_step:
            return
        self._printed_step = trainer.global_step
        if read:
            self._read_values(trainer)
        place, rate = due
        parts = [place, *self._log_values(), rate, *self._log_speed(trainer)]
        self.console.print(Text("  ".join(parts)), soft_wrap=True)

    def _log_values(self) -> list[str]:
        parts = [f"loss {digits(self._values['train/loss'])}"] if "train/loss" in self._values else []
        split = "val" if any(key.startswith("val/") for key in self._values) else "train"
        for name, unit in self._shown.items():
            value = self._values.get(f"{split}/{name}_mae")
            if value is not None:
                parts.append(f"{split} {name} MAE {digits(value)} {unit}".rstrip())
        for key, value in self._values.items():
            if key.startswith(f"{split}/") and key.endswith("_accuracy"):
                parts.append(
                    f"{split} {key.removeprefix(f'{split}/').replace('_accuracy', ' accuracy')} {digits(value)}"
                )
        return parts

    def _log_speed(self, trainer: L.Trainer) -> list[str]:
        left = self.seconds_left(trainer)
        kinds = [kind for kind in ("atoms", "points") if f"{kind}_per_second" in self._speed]
        parts = [f"{short(self._speed[f'{kind}_per_second'])} {kind}/s" for kind in kinds]
        return [*parts, f"left {clock(left)}"] if left is not None else parts

    # ---- a terminal: a display

    def _begin(self, phase: str, batches: int) -> None:
        self._phase, self._batch, self._batches = phase, 0, batches
        if self._enabled and self.console.is_terminal and self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=False, redirect_stderr=True)
            self._live.start()

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
        """What a terminal shows: the bar, and under it the errors in physical units."""
        fitting = trainer.state.fn == "fit"
        head = Table.grid(padding=(0, 2))
        epochs = _total_epochs(trainer)
        where = f"epoch {self._epoch}{f'/{epochs}' if epochs else ''}" if fitting else self._phase
        bar = Bar(total=max(self._batches, 1), completed=self._batch, width=32, pulse=self._batches == 0)
        words = {"validate": "validating", "test": "testing", "predict": "predicting"}.get(self._phase, "")
        step = f"{self._batch}/{self._batches}" if self._batches else f"{self._batch}"
        speed = self._speed_texts(trainer, fitting)
        head.add_row(Text(where, style="bold"), bar, Text(f"{step} {words}".strip()), *speed)
        if not fitting:
            return Group(head)
        body = Table.grid(padding=(0, 3))
        known = [f"{split}/{name}_mae" for split in ("train", "val") for name in self._shown]
        known = [key for key in known if key in self._values]
        shown = {name: unit for name, unit in self._shown.items() if any(key.endswith(f"/{name}_mae") for key in known)}
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
        texts = [Text(f"{short(self._speed[f'{kind}_per_second'])} {kind}/s", style="cyan") for kind in kinds]
        left = self.seconds_left(trainer) if fitting else None
        return [*texts, Text(f"left {clock(left)}", style="green")] if left is not None else texts


def line_is_due(moment: int, total: int | None, max_lines: int) -> bool:
    """Whether the log gets a line at the `moment`-th (from 1) of `total` occasions: all of the first 20, then evenly
    thinned so that there are at most `max_lines`; where the total is unknown, ever further apart."""
    first = min(EVERY_LINE_UP_TO, max_lines)
    if moment <= first or (total is not None and total <= max_lines):
        return True
    if total is None:
        growth = 1.2
        return math.floor(math.log(moment / first, growth)) > math.floor(math.log((moment - 1) / first, growth))
    share = max_lines - first
    if share == 0:
        return moment == total
    return (moment - first) * share // (total - first) > (moment - first - 1) * share // (total - first)


def short(value: float) -> str:
    """`812`, `8.1k`, `1.3M`."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            scaled = value / limit
            return f"{scaled:.0f}{letter}" if scaled >= 100 else f"{scaled:.1f}{letter}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def clock(seconds: float | None) -> str:
    """`48s`, `1m20s`, `2h14m`, `3d04h`."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _error_cells(values: dict[str, float], prefix: str, quantities: dict[str, str]) -> list[Text]:
    """The loss and the error of each quantity; an empty cell where there is none, so that columns stay in line."""
    cells = [Text(f"loss {digits(values[f'{prefix}loss'])}") if f"{prefix}loss" in values else Text()]
    for name, unit in quantities.items():
        value = values.get(f"{prefix}{name}_mae")
        error = (f"{name} MAE ", (digits(value), "bold"), (f" {unit}".rstrip(), "dim"))
        cells.append(Text.assemble(*error) if value is not None else Text())
    return cells


def _rate(trainer: L.Trainer) -> str:
    return f"{current_learning_rate(trainer.optimizers[0]):.3g}" if trainer.optimizers else "?"


def _whole(batches: Any) -> int:
    """A number of batches, over all loaders; 0 where it is not known beforehand."""
    number = sum(batches) if isinstance(batches, list) else batches
    return int(number) if number is not None and math.isfinite(number) else 0


def _total_batches(trainer: L.Trainer) -> int | None:
    per_epoch = _whole(trainer.num_training_batches)
    limits = []
    if trainer.max_epochs not in (None, -1) and per_epoch:
        limits.append(trainer.max_epochs * per_epoch)
    if trainer.max_steps not in (None, -1):
        limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
    return min(limits) if limits else None


def _total_epochs(trainer: L.Trainer) -> int | None:
    total, per_epoch = _total_batches(trainer), _whole(trainer.num_training_batches)
    if total is not None and per_epoch:
        return max(math.ceil(total / per_epoch), 1)
    return None


def _validations_per_epoch(trainer: L.Trainer) -> int:
    """How often validation runs within an epoch: occasions for a line, the end of the epoch being the last."""
    between, per_epoch = getattr(trainer, "val_check_batch", None), _whole(trainer.num_training_batches)
    if not per_epoch or between is None or not math.isfinite(between) or not trainer.enable_validation:
        return 1
    return max(math.ceil(per_epoch / max(int(between), 1)), 1)


def _seconds_on_timer(trainer: L.Trainer) -> float | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    timers = [callback for callback in callbacks if isinstance(callback, Timer)]
    return min((left for timer in timers if (left := timer.time_remaining()) is not None), default=None)
