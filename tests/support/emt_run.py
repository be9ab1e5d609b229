"""A run that is ASE's EMT calculator: whatever is computed with it must agree with EMT itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forgefield.models.importing import ImportRequest
from forgefield.runs import Run, create_run_from_import


def emt_run(folder: Path, species: Sequence[str] = ("Cu", "Au")) -> Run:
    run, _ = create_run_from_import(
        "ase", ImportRequest("ase.calculators.emt.EMT", species=list(species)), name="emt", out=folder
    )
    return Run(run.path, trust_code=True)


def start_command(folder: Path, *words: object) -> subprocess.Popen:
    """`forgefield WORDS` in a folder."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "forgefield", *map(str, words)],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_when(process: subprocess.Popen, reached: Callable[[], bool], *, timeout: float = 120) -> None:
    """kill -9 as soon as `reached()`; the process must not have ended by itself."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert process.poll() is None, f"ended before it was killed: {process.stdout.read()}"
        assert time.monotonic() < deadline, "nothing to kill"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
