"""Starts the ranks of one machine where no launcher did, and supervises them until the last one has exited.

No rank outlives this process: not if one fails, not if one does not respond, not if this process is killed.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from forgefield.errors import ForgefieldError
from forgefield.processes import Terminated, die_with_parent, usable_cores

KILL_AFTER = 5.0
"""Seconds between SIGTERM and SIGKILL for a rank that does not exit."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def run_ranks(
    command: Sequence[str], n: int, *, environ: Mapping[str, str], grace: float = 20.0, disposable: bool = False
) -> int:
    """Run `command` as ranks 0 to n - 1 and return 0, or the exit code of the rank that failed first (128 + signal).

    When one fails the others have `grace` seconds to exit by themselves. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are forwarded
    to every rank if this is called in the main thread; a signal that this process ignores stays ignored.

    disposable: the ranks have nothing to save. SIGTERM and SIGINT then stop them within seconds, and are raised here as
    `Terminated` and KeyboardInterrupt.
    """
    if n < 1:
        raise ForgefieldError(f"{n} ranks cannot be started: at least one is required.")
    return run_processes([command] * n, _environments(n, environ), what="Rank", grace=grace, disposable=disposable)


def run_processes(
    commands: Sequence[Sequence[str]],
    environs: Sequence[Mapping[str, str]],
    *,
    what: str,
    grace: float = 20.0,
    disposable: bool = False,
    logs: Sequence[Path] = (),
) -> int:
    """Run several commands at the same time and return 0, or the exit code of the process that failed first (128 + signal).

    environs: variables of each. what: what the processes are, for messages. logs: files that take the output of each; default:
    the terminal. grace, disposable: as in `run_ranks`.
    """
    events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals_to(events):
        try:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()  # earlier output must come before that of the ranks
            for index, (command, variables) in enumerate(zip(commands, environs)):
                # if it fails, those already started must be stopped
                rank = _start(command, variables, f"{what} {index}", logs[index] if logs else None)
                ranks.append(rank)
            for index, rank in enumerate(ranks):
                threading.Thread(target=_report_exit, args=(index, rank.pid, events), daemon=True).start()
            return _supervise(ranks, events, grace, disposable=disposable)
        finally:
            _stop_all(ranks)


def _environments(n: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    common = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // n)),
        **environ,
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "FORGEFIELD_LAUNCHER": "forgefield",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]


def _start(command: Sequence[str], environ: Mapping[str, str], name: str, log: Path | None) -> subprocess.Popen[bytes]:
    try:
        with nullcontext() if log is None else log.open("wb") as output:
            return subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which forwards it once
                preexec_fn=die_with_parent(),
            )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ForgefieldError(f"{name} could not be started: {command[0]}: {reason}.") from error


@contextmanager
def _signals_to(events: queue.SimpleQueue[tuple[str, int]]) -> Iterator[None]:
    """Inside the block signals that are to be forwarded are only queued."""
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in FORWARDED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not set by Python, nor restorable
                    before[number] = signal.signal(number, lambda received, _: events.put(("signal", received)))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_exit(index: int, pid: int, events: queue.SimpleQueue[tuple[str, int]]) -> None:
    """Wait for the exit without reaping the process: until then its number cannot be given to another one."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    events.put(("exit", index))


def _supervise(
    ranks: list[subprocess.Popen[bytes]],
    events: queue.SimpleQueue[tuple[str, int]],
    grace: float,
    *,
    disposable: bool,
) -> int:
    running = set(range(len(ranks)))
    first_failure = 0
    deadlines: list[tuple[float, Callable[[subprocess.Popen[bytes]], None]]] = []
    while running:
        try:
            wait = max(0.0, deadlines[0][0] - time.monotonic()) if deadlines else None
            kind, value = events.get(timeout=wait)
        except queue.Empty:
            _, stop = deadlines.pop(0)
            for index in running:
                stop(ranks[index])
            continue
        if kind == "signal":
            if disposable and value in (signal.SIGTERM, signal.SIGINT):
                raise KeyboardInterrupt if value == signal.SIGINT else Terminated(value)  # `_stop_all` stops the ranks
            for index in running:
                ranks[index].send_signal(value)
            continue
        running.discard(value)
        code = ranks[value].wait()
        if code != 0 and first_failure == 0:
            first_failure = code if code > 0 else 128 - code
            now = time.monotonic()
            deadlines = [(now + grace, subprocess.Popen.terminate), (now + grace + KILL_AFTER, _kill)]
    return first_failure


def _kill(rank: subprocess.Popen[bytes]) -> None:
    """Kill a rank and the processes it has started in its process group."""
    if rank.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)


def _stop_all(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Stop all ranks that are still running, and wait for them."""
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        rank.terminate()
    deadline = time.monotonic() + KILL_AFTER
    for rank in running:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(rank)
            rank.wait()


def free_port() -> int:
    """A port of this machine that is not in use."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
