"""Messages of a run: to the terminal and, with a time stamp, to `log.txt` of the run and to an additional log file.

With several processes only rank 0 writes to the terminal and the run folder. `mode` determines what happens with messages of
the other ranks: `master`: they are discarded; `collect`: they are sent to rank 0, which writes them to its files with their
rank; `workers`: every rank writes its own file.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forgefield.errors import ForgefieldError
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.text import can_redraw

MODES = ("master", "collect", "workers")
WARNINGS = "warnings.txt"
"""File of the run folder with warnings of Lightning and torch that do not concern the user."""
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "py.warnings")


class Journal:
    """Writes messages until `close`.

    console: the terminal.
    file: a log file in addition to that of the run folder.
    mode: for messages of ranks other than 0.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        ranks: Ranks | None = None,
        file: Path | None = None,
        mode: str = "master",
    ) -> None:
        if mode not in MODES:
            raise ForgefieldError(f"The mode of a log must be one of {', '.join(MODES)}, not '{mode}'.")
        self.ranks = ranks if ranks is not None else single_process()
        self.mode = mode
        if console is None:
            silent = None if self.ranks.is_rank_zero else open(os.devnull, "w")  # noqa: SIM115
            console = Console(highlight=False, file=silent, force_jupyter=None if silent is None else False)
        self.console = console
        self._early: list[str] = []
        self._files: list[TextIO] = []
        self._writing = threading.Lock()
        self._handler: logging.Handler | None = None
        self._warnings: Path | None = None
        if file is not None and (self.ranks.is_rank_zero or mode == "workers"):
            self._open(rank_file(file, self.ranks.rank) if mode == "workers" else file)
        if mode == "collect" and self.ranks.is_rank_zero:
            self.ranks.on_line = lambda rank, text: self._write(f"[rank {rank}] {text}\n")

    def notify(self, text: str) -> None:
        """Show a message on the terminal and write it to the files."""
        self.console.print(text, markup=False, soft_wrap=True)
        self._record(text)

    def note(self, text: str) -> None:
        """Write a line to the files only."""
        self._record(text)

    def show(self, render: Callable[[Console], None]) -> None:
        """Print a table or panel to the terminal and to the files. render: prints to a console."""
        render(self.console)
        copy = io.StringIO()
        # Without force_jupyter=False, rich prints to the output of the cell in a notebook.
        plain = Console(file=copy, width=120, highlight=False, force_terminal=False, force_jupyter=False, no_color=True)
        render(plain)
        self._record(copy.getvalue().rstrip("\n"), stamp=False)

    def keep_in(self, folder: Path) -> None:
        """Write to `log.txt` in the run folder from now on, earlier messages included."""
        if self.ranks.is_rank_zero:
            self._open(folder / "log.txt").write("".join(self._early))
            self._warnings = folder / WARNINGS
        elif self.mode == "workers" and not self._files:
            self._open(rank_file(folder / "log.txt", self.ranks.rank)).write("".join(self._early))
        self._early.clear()
        self._handler = _LogHandler(self)
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
            file = path.open("a")
        except OSError as error:
            raise ForgefieldError(f"Could not write the log {path}: {error.strerror}.") from error
        self._files.append(file)
        return file

    def _record(self, text: str, *, stamp: bool = True) -> None:
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}" if stamp else text
        if self._handler is None:
            self._early.append(line + "\n")
        if self.mode == "collect" and not self.ranks.is_rank_zero and self.ranks.watch is not None:
            for single_line in line.splitlines():
                self.ranks.watch.line(single_line)
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        with self._writing:  # lines of other ranks come from another thread
            for file in self._files:
                if not file.closed:
                    file.write(text)
                    file.flush()

    def _warn(self, text: str, *, from_libraries: bool) -> None:
        """Record a warning. Those of Lightning and torch go to a separate file."""
        if not from_libraries:
            self._record(text)
        elif self._warnings is not None:
            with self._writing, suppress(OSError), open(self._warnings, "a") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text.rstrip()}\n")

    def _quiet_terminal(self) -> None:
        """Suppress messages of Lightning on the terminal."""
        for name in ("lightning.pytorch", "lightning.fabric"):
            for handler in logging.getLogger(name).handlers:
                if handler is not self._handler:
                    handler.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*It is recommended to use `self.log.*sync_dist=True`.*")


class _LogHandler(logging.Handler):
    """Records messages of Lightning and Python's warnings in the files of a journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            from_libraries = record.levelno < logging.ERROR and is_from_libraries(record.name, message)
            self._journal._warn(f"{record.name}: {message}", from_libraries=from_libraries)
        except Exception:
            self.handleError(record)


def is_from_libraries(logger: str, message: str) -> bool:
    """Whether a message comes from Lightning or torch: from its logger, or from the file that a warning names."""
    location = message.partition(": ")[0].replace("\\", "/")
    return logger.startswith("lightning") or any(
        f"/site-packages/{package}/" in location
        for package in ("torch", "lightning", "lightning_fabric", "pytorch_lightning")
    )


def rank_file(path: Path, rank: int) -> Path:
    """The log file of a rank: `train.3.log` for `train.log` and rank 3."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}")


FIRST_LINE_S, NEXT_LINES_S = 10.0, 30.0
"""Time until the first line of progress in a log, and between two lines, in seconds."""

Batch = TypeVar("Batch")


def with_progress(batches: Iterable[Batch], n_batches: int, journal: Journal, what: str) -> Iterator[Batch]:
    """The batches, with a progress bar or, in a log, lines. what: what is evaluated, for messages."""
    if can_redraw(journal.console) and not journal.console.is_jupyter and journal.ranks.is_rank_zero:
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
