"""A run that is ASE's EMT calculator: whatever is computed with it must agree with EMT itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forgefield.models.importing import ImportRequest
from forgefield.runs import Run, create_run_from_import
from tests.support.warm import Warm


def emt_run(folder: Path, species: Sequence[str] = ("Cu", "Au")) -> Run:
    run, _ = create_run_from_import(
        "ase", ImportRequest("ase.calculators.emt.EMT", species=list(species)), name="emt", out=folder
    )
    return Run(run.path, trust_code=True)


def start_command(folder: Path, *words: object) -> Warm:
    """`forgefield WORDS` in a folder."""
    return Warm(["forgefield", *map(str, words)], folder, os.environ)


def kill_when(process: Warm, reached: Callable[[], bool], *, timeout: float = 120) -> None:
    """kill -9 as soon as `reached()`; the process must not have ended by itself."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert process.poll() is None, f"ended before it was killed: {process.printed()}"
        assert time.monotonic() < deadline, "nothing to kill"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
