"""`forgefield.report(run)`: writes the page of a run and returns its path, which a notebook displays as the page itself."""

from __future__ import annotations

import os
import sys
from html import escape

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import detect_launch
from forgefield.report.page import write_report
from forgefield.runs import Run

if sys.platform == "win32":
    from pathlib import WindowsPath as _Path
else:
    from pathlib import PosixPath as _Path

HEIGHT = 700
"""Height of the page in a notebook, pixels."""


class Report(_Path):
    """Path of a report; the last expression of a cell displays the page."""

    def _repr_html_(self) -> str | None:
        if self.suffix != ".html" or not self.is_file():
            return None
        page = escape(self.read_text(encoding="utf-8"), quote=True)
        style = f"width: 100%; height: {HEIGHT}px; border: 1px solid #8884"
        return f'<iframe srcdoc="{page}" style="{style}" sandbox="allow-scripts"></iframe>'


def report(run: str | os.PathLike[str] | Run) -> Report:
    """Rewrite `report.html` of a run and return its path; in a notebook the page is displayed."""
    launch = detect_launch(os.environ)
    if launch.rank > 0:
        raise ForgefieldError(f"report runs in one process: call it on rank 0 alone (this is rank {launch.rank}).")
    return Report(write_report(Run.open(run).writable().path))
