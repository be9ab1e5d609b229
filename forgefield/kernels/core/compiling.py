"""Compiles kernels concurrently, before the first of them is launched.

Triton compiles a kernel when it is first launched, one after the other. Large kernels take seconds each, and Triton spends most
of that time in code that does not hold Python's global lock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forgefield.kernels.core.generation import TritonFunction

MOST_THREADS = 16


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
