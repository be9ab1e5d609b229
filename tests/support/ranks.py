"""Starts N processes of a command as `forgefield train` does it: python -m tests.support.ranks N COMMAND ..."""

import os
import sys

from forgefield.parallel.spawn import run_ranks

if __name__ == "__main__":
    sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1]), environ=os.environ))
