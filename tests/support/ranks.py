"""Starts N processes of `train_many` the way the command does: python -m tests.support.ranks N CONFIG."""

import os
import sys

from forgefield.parallel.spawn import run_ranks

if __name__ == "__main__":
    command = [sys.executable, "-m", "tests.support.train_many", sys.argv[2]]
    sys.exit(run_ranks(command, int(sys.argv[1]), environ=os.environ))
