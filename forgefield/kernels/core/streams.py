"""Work that runs concurrently with the rest of a captured step, on a separate CUDA stream.

A GPU has capacity for it where the rest is limited by latency or by memory, as for small batches. A stream may reuse memory
that it has freed at once. What the work reads is therefore kept until its result is requested: by the work itself if the
request comes from the stream on which it was started, by the requester if it comes from another. What the work allocates may
be freed by anyone, since the next work on its stream first waits for the previous one. Captures are made within `joined`,
which waits for work whose result was never requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_started: set[torch.cuda.Stream] = set()
"""Streams with work in the current capture."""


class Concurrent(Generic[T]):
    """Work that is started at construction, on the stream of this name. Outside of a capture it is simply executed."""

    def __init__(self, stream: str, work: Callable[[], T]) -> None:
        self._kept: Callable[[], T] | None = work  # keeps everything alive that the work reads
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
        self._kept = None
        return self._value


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
