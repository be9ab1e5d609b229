"""Physical laws, checked on the user's model and data: `run_checks`, and `print_checks` for a table of the results."""

from __future__ import annotations

from forgefield.checks.probe import CheckResult
from forgefield.checks.suite import print_checks, run_checks

__all__ = ["CheckResult", "print_checks", "run_checks"]
