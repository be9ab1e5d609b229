"""Moves its process into a control group, then runs a module: `python -m tests.support.limited GROUP MODULE WORDS`."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    _, group, *sys.argv = sys.argv
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
