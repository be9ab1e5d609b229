"""The report of a run: figures and one self-contained HTML page, written from the run folder alone.

`page.write_report` writes the page, `figures` holds the plots, which can also be used separately. The
model, the training data and a network connection are not needed.

The package can be called: `forgefield.report(run)` is `forgefield.api.report(run)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from forgefield.report.notebook import Report
    from forgefield.runs import Run


class _CallableModule(ModuleType):
    def __call__(self, run: str | os.PathLike[str] | Run) -> Report:
        from forgefield.report.notebook import report

        return report(run)


sys.modules[__name__].__class__ = _CallableModule
