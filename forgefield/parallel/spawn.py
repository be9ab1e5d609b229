"""Starts the ranks of one machine where no launcher did, and looks after them until the last one has ended.

No rank is left behind: not when one fails, not when one does not want to end, not when this process is killed.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from forgefield.errors import ForgefieldError
from forgefield.parallel.network import free_port
from forgefield.processes import Terminated, die_with_parent

KILL_AFTER = 5.0
"""Seconds between SIGTERM and SIGKILL for a rank that does not end."""
PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


def run_ranks(
    command: Sequence[str], n: int, *, environ: Mapping[str, str], grace: float = 20.0, disposable: bool = False
) -> int:
    """Run `command` as ranks 0 to n - 1 and return 0, or the exit code of the rank that failed first (128 + signal).

    When one fails the others have `grace` seconds to end by themselves. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are passed
    on to every rank, if this is called in the main thread; a signal that this process ignores stays ignored.

    disposable: the ranks have nothing to save. SIGTERM and SIGINT then end them within seconds, and are raised here as
    `Terminated` and KeyboardInterrupt.
    """
    if n < 1:
        raise ForgefieldError(f"{n} ranks cannot be started: at least one is needed.")
    events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals_to(events):
        try:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()  # what was said before comes before what the ranks say
            for variables in _environments(n, environ):
                ranks.append(_start(command, variables))  # noqa: PERF401  the next one may fail
            for index, rank in enumerate(ranks):
                threading.Thread(target=_report_end, args=(index, rank.pid, events), daemon=True).start()
            return _supervise(ranks, events, grace, disposable=disposable)
        finally:
            _end(ranks)


def _environments(n: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {
        "OMP_NUM_THREADS": str(max(1, cores // n)),
        **environ,
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "FORGEFIELD_LAUNCHER": "forgefield",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]


def _start(command: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which passes it on once
            preexec_fn=die_with_parent(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ForgefieldError(f"Rank {environ['RANK']} could not be started: {command[0]}: {reason}.") from error


@contextmanager
def _signals_to(events: queue.SimpleQueue[tuple[str, int]]) -> Iterator[None]:
    """Inside the block the signals to be passed on only leave a note."""
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in PASSED_ON if hasattr(signal, name)):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not set by Python, nor restorable
                    before[number] = signal.signal(number, lambda got, _: events.put(("signal", got)))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_end(index: int, pid: int, events: queue.SimpleQueue[tuple[str, int]]) -> None:
    """Wait for the end without collecting the process: as long as nobody has, its number cannot belong to another."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    events.put(("end", index))


def _supervise(
    ranks: list[subprocess.Popen[bytes]],
    events: queue.SimpleQueue[tuple[str, int]],
    grace: float,
    *,
    disposable: bool,
) -> int:
    living = set(range(len(ranks)))
    first_failure = 0
    last_steps: list[tuple[float, Callable[[subprocess.Popen[bytes]], None]]] = []
    while living:
        try:
            wait = max(0.0, last_steps[0][0] - time.monotonic()) if last_steps else None
            kind, value = events.get(timeout=wait)
        except queue.Empty:
            _, step = last_steps.pop(0)
            for index in living:
                step(ranks[index])
            continue
        if kind == "signal":
            if disposable and value in (signal.SIGTERM, signal.SIGINT):
                raise KeyboardInterrupt if value == signal.SIGINT else Terminated(value)  # `_end` sees to the ranks
            for index in living:
                ranks[index].send_signal(value)
            continue
        living.discard(value)
        code = ranks[value].wait()
        if code != 0 and first_failure == 0:
            first_failure = code if code > 0 else 128 - code
            now = time.monotonic()
            last_steps = [(now + grace, subprocess.Popen.terminate), (now + grace + KILL_AFTER, _kill)]
    return first_failure


def _kill(rank: subprocess.Popen[bytes]) -> None:
    """Kill a rank and whatever it has started in its session's first group."""
    if rank.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """However we came here: no rank stays behind."""
    living = [rank for rank in ranks if rank.poll() is None]
    for rank in living:
        rank.terminate()
    deadline = time.monotonic() + KILL_AFTER
    for rank in living:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(rank)
            rank.wait()
