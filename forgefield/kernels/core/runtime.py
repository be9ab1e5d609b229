"""Where and how Forgefield's kernels run: whether they can and should be used, the types they store numbers in, and work on
separate CUDA streams.

Kernels run on GPUs where Triton is installed. Everywhere else the reference operations of PyTorch are used, with which kernels
are compared in tests. Whether kernels are used is set in the execution context (`forgefield.ops.execution`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ops.execution import STORAGE, current


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1), which is how they are tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_launch(x: Tensor) -> bool:
    """Whether kernels can run on the device of x."""
    return has_triton() and (x.is_cuda or interpreted())


def use_kernels(x: Tensor) -> bool:
    """Whether operations on x are to be computed by kernels."""
    return current().kernels and can_launch(x)


def use_tables(x: Tensor) -> bool:
    """Whether radial weights are to be read from tables. Not in float64, where a table would limit the precision."""
    return current().knots > 0 and x.dtype == torch.float32


def rounds_to_tf32() -> bool:
    """Whether PyTorch's setting allows products whose factors are rounded to the ten bits of tf32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def storage_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which rows of atoms and edges are stored that are computed in `dtype`."""
    storage = current().storage
    if STORAGE[storage] == torch.float32:
        return dtype
    if dtype != torch.float32:
        raise ForgefieldError(
            f"training.kernels.storage={storage} would round what a training in {str(dtype).removeprefix('torch.')} "
            "computes; leave it out, or use training.precision=float32."
        )
    return STORAGE[storage]


def weight_cotangent_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which cotangents of radial weights are stored until they are summed over the edges of an interval: 16 bits
    where products may be rounded to tf32."""
    if dtype == torch.float32 and rounds_to_tf32():
        return torch.bfloat16
    return storage_type(dtype)


T = TypeVar("T")
_started: set[torch.cuda.Stream] = set()
"""Streams with work in the current capture."""


class Concurrent(Generic[T]):
    """Work that is started at construction, on the stream of this name, concurrently with the rest of a captured step.
    Outside of a capture it is simply executed.

    A GPU has capacity for it where the rest is limited by latency or by memory, as for small batches. A stream may reuse memory
    that it has freed at once. What the work reads is therefore kept until its result is requested: by the work itself if the
    request comes from the stream on which it was started, by the requester if it comes from another. What the work allocates
    may be freed by anyone, since the next work on its stream first waits for the previous one. Captures are made within
    `joined`, which waits for work whose result was never requested.
    """

    def __init__(self, stream: str, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work  # keeps everything alive that the work reads
        self._done: torch.cuda.Event | None = None
        if not capturing():
            self._value = work()
            return
        side = _stream(stream, torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        _started.add(side)
        with torch.cuda.stream(side):
            self._value = work()
            self._done = side.record_event()

    def unfinished(self) -> T:
        """The result, which must not be read yet."""
        return self._value

    def result(self) -> T:
        """The result; the current stream waits for it."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._work = None
        return self._value


class Finished(Concurrent[T]):
    """A result that exists already, in the form of work."""

    def __init__(self, value: T) -> None:
        self._work, self._done, self._value = None, None, value


@contextmanager
def joined() -> Iterator[None]:
    """For the body of a capture. At the end, also after an exception, the current stream waits for all others that were
    started: a capture cannot end otherwise."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the capture may have ended already, and the first error is the one to report
            _join()
        raise
    else:
        _join()
    finally:
        _started.clear()


def _join() -> None:
    for side in _started:
        torch.cuda.current_stream().wait_stream(side)


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def _stream(name: str, device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
