"""What a run says: to the terminal and, the same words with a time stamp, to `log.txt` in the run folder."""

from __future__ import annotations

import logging
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console


class Journal:
    """Prints to the terminal; once `keep_in` was called, also to a file. Ends with `close`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._early: list[str] = []
        self._file: TextIO | None = None
        self._handler: logging.Handler | None = None

    def say(self, text: str) -> None:
        """One sentence for the user."""
        self.console.print(text, markup=False)
        self._record(text)

    def show(self, render: Any) -> None:
        """`render(console)` prints something larger, a table for instance, to the terminal and to the file."""
        render(self.console)
        if self._file is not None:
            render(Console(file=self._file, width=120, highlight=False, force_terminal=False, no_color=True))
            self._file.flush()

    def keep_in(self, path: Path) -> None:
        self._file = open(path, "a")  # noqa: SIM115  closed in close()
        for line in self._early:
            self._file.write(line)
        self._handler = logging.StreamHandler(self._file)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
        logging.captureWarnings(True)
        for name in ("lightning.pytorch", "lightning.fabric", "py.warnings"):
            logger = logging.getLogger(name)
            logger.addHandler(self._handler)
            logger.propagate = False
        self._quiet_terminal()

    def close(self) -> None:
        logging.captureWarnings(False)
        if self._handler is not None:
            for name in ("lightning.pytorch", "lightning.fabric", "py.warnings"):
                logging.getLogger(name).removeHandler(self._handler)
            self._handler = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _record(self, text: str) -> None:
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n"
        if self._file is None:
            self._early.append(line)
        else:
            self._file.write(line)
            self._file.flush()

    def _quiet_terminal(self) -> None:
        """Lightning's remarks about itself go to the file only; ours say what matters to the user."""
        for name in ("lightning.pytorch", "lightning.fabric"):
            for handler in logging.getLogger(name).handlers:
                if handler is not self._handler:
                    handler.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
