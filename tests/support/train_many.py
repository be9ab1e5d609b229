"""Run by several processes in tests: trains every config of a YAML list, one after the other, in one group.

Only the training itself: predictions, report and summary at the end are left out, they take longer than these trainings.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import yaml

from forgefield.config.loading import load_config
from forgefield.parallel.session import abort_all_on_error, current_ranks
from forgefield.runs import Run
from forgefield.training.fit import TrainingResult, fit
from forgefield.training.run.journal import Journal


def train_only(config: dict, *overrides: str, fresh: bool = False, trust_code: bool = False) -> Run:
    """`forgefield.train` up to the end of the training."""
    return _fit(config, *overrides, fresh=fresh, trust_code=trust_code).run


def _fit(config: dict, *overrides: str, fresh: bool = False, trust_code: bool = False) -> TrainingResult:
    ranks = current_ranks()
    journal = Journal(ranks=ranks, mode=os.environ.get("LOG_MODE", "master"))
    try:
        with abort_all_on_error(ranks):
            loaded = load_config(config, list(overrides), trust_code=trust_code)
            return fit(loaded, fresh=fresh, journal=journal, ranks=ranks, trust_code=trust_code)
    finally:
        journal.close()


def main() -> int:
    configs = yaml.safe_load(Path(sys.argv[1]).read_text())
    return max(_fit(config).exit_code for config in (configs if isinstance(configs, list) else [configs]))


if __name__ == "__main__":
    gc.freeze()  # as the command does it after its imports
    sys.exit(main())
