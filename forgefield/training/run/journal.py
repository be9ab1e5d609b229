"""What a run says: to the terminal and, the same words with a time stamp, to `log.txt` of the run and to a file asked for.

With several processes only rank 0 has the terminal and the run folder. `mode` says what becomes of the words of the others:
`master`: nothing; `collect`: they are sent to rank 0 and written to its files with their rank in front; `workers`: every rank
writes a file of its own.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forgefield.errors import ForgefieldError
from forgefield.parallel.ranks import Ranks, single_process

MODES = ("master", "collect", "workers")
OTHERS = "warnings.txt"
"""Warnings of Lightning and torch about themselves."""
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "py.warnings")


class Journal:
    """console: the terminal. ranks: who speaks. file: a log beside the one of the run folder. Ends with `close`."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        ranks: Ranks | None = None,
        file: Path | None = None,
        mode: str = "master",
    ) -> None:
        if mode not in MODES:
            raise ForgefieldError(f"a log is kept by {', '.join(MODES)}, not '{mode}'.")
        self.ranks = ranks if ranks is not None else single_process()
        self.mode = mode
        if console is None:
            silent = None if self.ranks.is_rank_zero else open(os.devnull, "w")  # noqa: SIM115  as long as the process
            console = Console(highlight=False, file=silent, force_jupyter=None if silent is None else False)
        self.console = console
        self._early: list[str] = []
        self._files: list[TextIO] = []
        self._writing = threading.Lock()
        self._handler: logging.Handler | None = None
        self._others: Path | None = None
        if file is not None and (self.ranks.is_rank_zero or mode == "workers"):
            self._open(rank_file(file, self.ranks.rank) if mode == "workers" else file)
        if mode == "collect" and self.ranks.is_rank_zero:
            self.ranks.on_line = lambda rank, text: self._write(f"[rank {rank}] {text}\n")

    def notify(self, text: str) -> None:
        """One sentence for the user."""
        self.console.print(text, markup=False, soft_wrap=True)
        self._record(text)

    def note(self, text: str) -> None:
        """One line for the files alone, where the terminal shows the same in another way."""
        self._record(text)

    def show(self, render: Any) -> None:
        """`render(console)` prints something larger, a table for instance, to the terminal and to the files."""
        render(self.console)
        copy = io.StringIO()
        # In a notebook rich shows everything as output of the cell, also what is meant for a file.
        plain = Console(file=copy, width=120, highlight=False, force_terminal=False, force_jupyter=False, no_color=True)
        render(plain)
        self._record(copy.getvalue().rstrip("\n"), stamp=False)

    def keep_in(self, folder: Path) -> None:
        """From now on also write `log.txt` in the run folder, everything said so far included."""
        if self.ranks.is_rank_zero:
            self._open(folder / "log.txt").write("".join(self._early))
            self._others = folder / OTHERS
        elif self.mode == "workers" and not self._files:
            self._open(rank_file(folder / "log.txt", self.ranks.rank)).write("".join(self._early))
        self._early.clear()
        self._handler = _Remarks(self)
        logging.captureWarnings(True)
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.addHandler(self._handler)
            logger.propagate = False
        self._quiet_terminal()

    def close(self) -> None:
        logging.captureWarnings(False)
        if self._handler is not None:
            for name in _LOGGERS:
                logging.getLogger(name).removeHandler(self._handler)
            self._handler = None
        self.ranks.on_line = None
        for file in self._files:
            file.close()
        self._files.clear()

    def _open(self, path: Path) -> TextIO:
        try:
            file = open(path, "a")  # noqa: SIM115  closed in close()
        except OSError as error:
            raise ForgefieldError(f"The log {path} cannot be written: {error.strerror}.") from error
        self._files.append(file)
        return file

    def _record(self, text: str, *, stamp: bool = True) -> None:
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}" if stamp else text
        if self._handler is None:
            self._early.append(line + "\n")
        if self.mode == "collect" and not self.ranks.is_rank_zero and self.ranks.watch is not None:
            for part in line.splitlines():
                self.ranks.watch.line(part)
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        with self._writing:  # lines of other ranks come from the thread that hears them
            for file in self._files:
                if not file.closed:
                    file.write(text)
                    file.flush()

    def _remark(self, text: str, *, of_libraries: bool) -> None:
        """A warning. Those of Lightning and torch about themselves are kept in a file of their own."""
        if not of_libraries:
            self._record(text)
        elif self._others is not None:
            with self._writing, suppress(OSError), open(self._others, "a") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text.rstrip()}\n")

    def _quiet_terminal(self) -> None:
        """Lightning's messages about itself do not reach the terminal; Forgefield says what matters to the user."""
        for name in ("lightning.pytorch", "lightning.fabric"):
            for handler in logging.getLogger(name).handlers:
                if handler is not self._handler:
                    handler.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*It is recommended to use `self.log.*sync_dist=True`.*")


class _Remarks(logging.Handler):
    """Takes Lightning's messages and Python's warnings into the journal's files."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            of_libraries = record.levelno < logging.ERROR and is_from_libraries(record.name, message)
            self._journal._remark(f"{record.name}: {message}", of_libraries=of_libraries)
        except Exception:
            self.handleError(record)


def is_from_libraries(logger: str, message: str) -> bool:
    """Whether a message is one of Lightning or torch about themselves: by its logger, or by the file that a warning names."""
    place = message.partition(": ")[0].replace("\\", "/")
    return logger.startswith("lightning") or any(
        f"/site-packages/{package}/" in place
        for package in ("torch", "lightning", "lightning_fabric", "pytorch_lightning")
    )


def rank_file(path: Path, rank: int) -> Path:
    """`train.log` of rank 3 is `train.3.log`."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}")


FIRST_LINE_S, NEXT_LINES_S = 10.0, 30.0
"""A log gets its first line after this time, then one every so often."""

Batch = TypeVar("Batch")


def with_progress(batches: Iterable[Batch], n_batches: int, journal: Journal, what: str) -> Iterator[Batch]:
    """The batches, as they are. what: what is being evaluated, for a person to read."""
    if journal.console.is_terminal and journal.ranks.is_rank_zero:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=journal.console, transient=True) as bar:
            yield from bar.track(batches, total=n_batches, description=f"evaluating {what}")
        return
    next_line = time.monotonic() + FIRST_LINE_S
    for number, batch in enumerate(batches):
        if (now := time.monotonic()) > next_line:
            journal.notify(f"Evaluating {what}: {number} of {n_batches} batches.")
            next_line = now + NEXT_LINES_S
        yield batch
