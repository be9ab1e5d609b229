"""Writes `metrics.csv`, `metrics.jsonl` and `timing.csv`: one row per validation, or per epoch where there is none.

Metrics hold no wall-clock value, so that a resumed run writes the same bytes as an uninterrupted one; how long things took is
in `timing.csv`. On a resume, rows behind the checkpoint are cut off before training goes on.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

_TIMING = ["epoch", "step", "seconds", "frames", "atoms", "frames_per_second", "atoms_per_second"]


class MetricsLog(Callback):
    """folder: the run. columns: every metric a row may hold, in order."""

    def __init__(self, folder: Path, columns: list[str]) -> None:
        self.folder = folder
        self.columns = ["epoch", "step", "lr", *columns]
        self._row_step = -1

    def start(self, step: int) -> None:
        """Begin new files (step 0), or keep of the old ones what was written up to `step`."""
        for name, header in (("metrics.csv", self.columns), ("timing.csv", _TIMING)):
            _keep_rows(self.folder / name, header, step)
        lines = self.folder / "metrics.jsonl"
        kept = [line for line in _lines(lines) if step and json.loads(line)["step"] <= step]
        lines.write_text("".join(line + "\n" for line in kept))
        self._row_step = json.loads(kept[-1])["step"] if kept else -1

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step != self._row_step:
            pl_module.finish_row()
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: Any) -> None:
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            **pl_module.latest,
        }
        _append(self.folder / "metrics.csv", _csv_line([row.get(name) for name in self.columns]))
        _append(self.folder / "metrics.jsonl", json.dumps({k: row[k] for k in self.columns if k in row}) + "\n")
        timing = {"epoch": trainer.current_epoch, "step": trainer.global_step, **pl_module.throughput.take()}
        _append(self.folder / "timing.csv", _csv_line([timing[name] for name in _TIMING]))
        self._row_step = trainer.global_step
        pl_module.latest.clear()


def _append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


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


def _keep_rows(path: Path, header: list[str], step: int) -> None:
    first = _csv_line(header)
    lines = _lines(path)
    at = header.index("step")
    if step and lines and lines[0] + "\n" == first:
        kept = [line for line in lines[1:] if int(next(csv.reader([line]))[at]) <= step]
    else:
        kept = []
    path.write_text(first + "".join(line + "\n" for line in kept))
