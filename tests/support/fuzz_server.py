"""Runs cases in forked processes that survive them: a crash, a hang or much memory in one case is a result like any other.

A child reads case after case and reports each through a pipe. When it dies, the case it was at is known and the next child
goes on after it. Limits of a case: processor time (SIGPROF ends the child), peak memory, and address space for safety.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forgefield.errors import ForgefieldError
from tests.support.fuzz_formats import FORMATS, Differs, Format

CPU_SECONDS = 2.0
MEBIBYTES = 1024
"""More peak memory than this for one small file counts as a blow-up."""
WALL_SECONDS = 120
CASES_PER_CHILD = 200


@dataclass(frozen=True)
class Result:
    format: str
    case: int
    outcome: str
    """read, refused, or the failure: traceback, wrong, memory, slow, crash."""
    detail: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.outcome not in ("read", "refused")


def run_cases(name: str, cases: Iterable[int], seed: int) -> Iterator[Result]:
    """Results of cases of one format, in order. A case depends on format, seed and its number alone."""
    kind, waiting = FORMATS[name], list(cases)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        kind.prepare(Path(folder) / "good")
        while waiting:
            batch = waiting[:CASES_PER_CHILD]
            done = yield from _child(kind, batch, seed, Path(folder))
            waiting = waiting[done:]


def _child(kind: Format, cases: list[int], seed: int, folder: Path) -> Generator[Result, None, int]:
    """Results of as many of these cases as one process lives through, the one that ends it included. Returns how many."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            _work(kind, cases, seed, folder, writing)
        finally:
            os._exit(0)
    os.close(writing)
    done, started = 0, time.monotonic()
    with os.fdopen(reading) as lines:
        while done < len(cases):
            ready, _, _ = select.select([lines], [], [], WALL_SECONDS)
            line = lines.readline() if ready else ""
            if not line:
                break
            yield Result(**json.loads(line))
            done, started = done + 1, time.monotonic()
    if done < len(cases):
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if done < len(cases):
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        slow = number in (signal.SIGPROF, signal.SIGKILL)
        detail = f"more than {CPU_SECONDS:g} s of processor time" if slow else f"ended by signal {number}"
        yield Result(kind.name, cases[done], "slow" if slow else "crash", detail, time.monotonic() - started)
        done += 1
    return done


def _work(kind: Format, cases: list[int], seed: int, folder: Path, writing: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    faulthandler.disable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    room = _status("VmSize") + 4 * MEBIBYTES
    resource.setrlimit(resource.RLIMIT_AS, (room * 2**20, room * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(writing, "w", buffering=1) as lines:
        for case in cases:
            lines.write(json.dumps(vars(_one(kind, case, seed, folder))) + "\n")


def _one(kind: Format, case: int, seed: int, folder: Path) -> Result:
    place = folder / f"case-{case}"
    rng = np.random.default_rng([seed, case, *kind.name.encode()])
    shutil.copytree(folder / "good", place)
    kind.mutate(place, rng)
    before = _reset_peak()
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        outcome, detail = _read(kind, place)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds, grown = time.process_time() - start, _status("VmHWM") - before
    if grown > MEBIBYTES:
        outcome, detail = "memory", f"{grown} MiB; {outcome}: {detail}"
    shutil.rmtree(place, ignore_errors=True)
    return Result(kind.name, case, outcome, detail.replace(str(place), "")[:600], seconds)


def _read(kind: Format, place: Path) -> tuple[str, str]:
    try:
        kind.read(place)
        return "read", ""
    except ForgefieldError as error:
        return "refused", str(error)
    except Differs as error:
        return "wrong", str(error)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-6:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
        return "traceback", f"{type(error).__name__}: {error} at {where}"


def _reset_peak() -> int:
    """MiB in use now; peak memory is counted from here on."""
    with suppress(OSError):  # not everywhere: the peak is then that of all cases of this child
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """MiB, as the system counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(f"{name}:"))
