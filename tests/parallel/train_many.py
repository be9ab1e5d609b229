"""Run by several processes in tests: trains every config of a YAML list, one after the other, in one group.

Only the training itself: predictions, report and summary at the end are left out, they take longer than these trainings.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from forgefield.config.loading import load_config
from forgefield.parallel.faults import failing_together
from forgefield.parallel.session import this_group
from forgefield.runs import Run
from forgefield.training.fit import fit
from forgefield.training.journal import Journal


def train_only(config: dict) -> Run:
    ranks = this_group()
    journal = Journal(ranks=ranks)
    try:
        with failing_together(ranks):
            return fit(load_config(config), fresh=False, journal=journal, ranks=ranks).run
    finally:
        journal.close()


def main() -> None:
    for config in yaml.safe_load(Path(sys.argv[1]).read_text()):
        train_only(config)


if __name__ == "__main__":
    main()
