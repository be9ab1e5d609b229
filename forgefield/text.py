"""Numbers in messages, and where messages are shown."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def can_redraw(console: Console) -> bool:
    """Whether lines that were printed can be replaced by others, as a progress bar does.

    They cannot where programs are told to use colours (FORCE_COLOR) without a terminal, as in the log of a CI, or by the kernel
    of a notebook, whose cells show everything that a command like `!forgefield train` prints.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return False
    if not os.environ.get("FORCE_COLOR"):
        return True
    in_notebook = os.environ.get("TERM") == "xterm-color" and os.environ.get("GIT_PAGER") == "cat"  # set by ipykernel
    return console.file.isatty() and not in_notebook


def notebook_cell() -> int | None:
    """Number of the cell of a notebook that is being executed."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell.execution_count if shell is not None else None


def counted(n: int, noun: str) -> str:
    """`1 frame`, `2 frames`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def size_text(n_bytes: int) -> str:
    """`812 B`, `1.4 MB`, `3.2 GB`."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
