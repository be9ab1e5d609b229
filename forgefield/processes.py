"""Termination of processes: child processes end with their parent, and signals end a process at any time.

SIGTERM raises `Terminated` where there is nothing to save. Python runs signal handlers between two bytecode instructions only;
`hearing_signals` detects signals while the main thread is in compiled code, so that another thread can end the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypedDict

STUCK_AFTER_S = 5.0
"""How long the main thread may take to notice a signal."""
_PR_SET_PDEATHSIG = 1


class Terminated(BaseException):
    """The process was asked to end by a signal. `number`: which one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


@contextmanager
def terminating() -> Iterator[None]:
    """Inside the block SIGTERM raises `Terminated`, so that temporary files are removed and children are ended."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    noticed = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        noticed.set()
        raise Terminated(number)

    def force(number: int) -> None:
        is_handled_here = number == signal.SIGTERM and signal.getsignal(number) is end
        if is_handled_here and not noticed.wait(STUCK_AFTER_S):
            end_process(128 + number, "stopped by SIGTERM")

    signal.signal(signal.SIGTERM, end)
    try:
        with hearing_signals(force):
            yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started inside the block never receive Ctrl-C, not even while they import; this one receives it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def hearing_signals(notify: Callable[[int], None]) -> Iterator[None]:
    """Inside the block a thread calls `notify` with every signal that has a handler, even while the main thread is in compiled
    code and cannot run that handler. Blocks may be nested; the innermost one is notified. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def listen() -> None:
        while data := os.read(read, 64):
            for number in data:
                if number == 0:
                    os.close(read)
                    return
                notify(number)

    threading.Thread(target=listen, daemon=True, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        with suppress(BlockingIOError):
            os.write(write, b"\0")
        os.close(write)


def end_process(code: int, text: str) -> None:
    """End this process from any thread, with what it has started, and without waiting for the main thread."""
    with suppress(OSError, ValueError):
        os.write(2, f"{text}\n".encode())
    kill(descendants())
    os._exit(code)


# ---- children


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn`: the new process gets SIGTERM when this one dies, however that happens. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes  # here: every command imports this module

    prctl, getppid, parent = ctypes.CDLL(None).prctl, os.getppid, os.getpid()
    # Prepared here, because as little as possible may happen between fork and exec.
    death_signal, zero = ctypes.c_ulong(signal.SIGTERM.value), ctypes.c_ulong(0)

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, death_signal, zero, zero, zero)
        if getppid() != parent:  # it had ended before prctl was called
            os._exit(128 + signal.SIGTERM)

    return ask


def stop_with_parent(*, grace: float, every: float = 0.5) -> None:
    """Send this process SIGTERM when its parent has ended, and end it at most `grace` seconds later.

    For the processes of a launcher, which would otherwise outlive a launcher that was killed.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        end_process(128 + signal.SIGTERM, "the process that started this one is gone")

    threading.Thread(target=watch, daemon=True, name="parent").start()


def descendants() -> set[int]:
    """Process ids of all descendants of this process; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    processes: set[int] = set()
    new = [os.getpid()]
    while new:
        new = [child for process in new for child in children.get(process, ()) if child not in processes]
        processes.update(new)
    return processes


def kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


# ---- identity


class ProcessIdentity(TypedDict):
    """A process that others may look for. host: the scope of process ids. born: its start time, since ids are reused."""

    host: str
    pid: int
    born: str | None


def this_process() -> ProcessIdentity:
    return {"host": machine(), "pid": os.getpid(), "born": _start_time(os.getpid())}


def machine() -> str:
    """The scope of process ids: the machine, or the container on it."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_alive(process: ProcessIdentity) -> bool:
    """Whether a process of this machine still exists."""
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    started = _start_time(process["pid"])
    return started is None or process["born"] is None or started == process["born"]


def _start_time(pid: int) -> str | None:
    """Start time of a process; None where it is not available, `ended` for a process that its parent has not waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    return "ended" if words[0] == "Z" else words[19]


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
