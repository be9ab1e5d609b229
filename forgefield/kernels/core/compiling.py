"""Compiles kernels concurrently, before the first of them is launched, and reports the progress of compilation.

Triton compiles a kernel when it is first launched, one after the other. Large kernels take seconds each, and Triton spends most
of that time in code that does not hold Python's global lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forgefield.kernels.core.generation import TritonFunction
from forgefield.kernels.core.runtime import has_triton

MOST_THREADS = 16
REPORT_S = 5.0
"""Seconds between reports of the progress of compilation."""


@dataclass(frozen=True)
class CompileOnly:
    """A Triton function that is compiled for the arguments of a launch instead of being launched."""

    kernel: TritonFunction

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., object]:
        return lambda **arguments: self.kernel.warmup(grid=grid, **arguments)


def compile_concurrently(jobs: Sequence[Callable[[], object]]) -> bool:
    """Compile what these jobs launch through `CompileOnly`; False if the installed Triton cannot."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # not part of the public API; kernels are then compiled one after the other
        return False
    with ThreadPoolExecutor(_threads()) as executor, AsyncCompileMode(executor, ignore_errors=True):
        for job in jobs:
            job()
    return True


def _threads() -> int:
    """At most the number of cores that this process may use: several processes share a machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(MOST_THREADS, cores)


class CompilationProgress:
    """Counts the kernels that Triton compiles, those on disk excepted, and reports them every `every` seconds.

    notify: called with a sentence, also from other threads. instead: how to do without them, for the first report.
    """

    def __init__(self, notify: Callable[[str], None], instead: str = "", *, every: float = REPORT_S) -> None:
        self.notify, self.instead, self.every = notify, instead, every
        self.count = 0
        self._reports = 0
        self._started = self._reported = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, *, metadata: dict[str, Any], cache_hit: bool, **others: object) -> None:
        """Called by Triton after a kernel was compiled, or loaded from disk (`cache_hit`)."""
        with self._lock:
            self.count += not cache_hit
            now = time.monotonic()
            if cache_hit or now - self._reported < self.every:
                return
            self._reported = now
            self._reports += 1
            name, seconds = metadata.get("name", "a kernel"), now - self._started
            hint = f" Later starts load them from disk. {self.instead}" if self._reports == 1 else ""
            self.notify(
                f"Compiling kernels for this GPU: {self.count} in {seconds:.0f} s, the latest is {name}.{hint}".rstrip()
            )

    def finish(self) -> None:
        """Report the total, if there was a report before."""
        if self._reports:
            self.notify(f"Compiled {self.count} kernels in {time.monotonic() - self._started:.0f} s.")


@contextmanager
def compilation_reported(
    notify: Callable[[str], None], instead: str = "", *, every: float = REPORT_S
) -> Iterator[None]:
    """Inside the block the progress of compilation is reported, see `CompilationProgress`."""
    if not has_triton():
        yield
        return
    from triton import knobs

    before, progress = knobs.compilation.listener, CompilationProgress(notify, instead, every=every)
    knobs.compilation.listener = progress
    try:
        yield
        progress.finish()
    finally:
        knobs.compilation.listener = before
