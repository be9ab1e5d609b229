"""Work that goes on beside the rest of a captured step, on a stream of its own.

A GPU has room for it where the rest is limited by latency or by memory, as small batches are. Memory that is given back may be
used again at once by the stream that it came from, so: what the work reads is kept until its result has been asked for, by the
work itself if that is where it was begun, by whoever asks if it is on another stream. What the work makes may be given back by
anybody, since the next work of its stream first waits for the present one. Whoever captures does so within `joined`, which
waits for what nobody has asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_begun: set[torch.cuda.Stream] = set()
"""Streams with work in the present capture."""


class Beside(Generic[T]):
    """work: begun here, on the stream of this name. Where nothing is captured it is simply done."""

    def __init__(self, stream: str, work: Callable[[], T]) -> None:
        self._kept: Callable[[], T] | None = work  # and with it all that it reads
        self._done: torch.cuda.Event | None = None
        if not capturing():
            self._value = work()
            return
        side = _stream(stream, torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        _begun.add(side)
        with torch.cuda.stream(side):
            self._value = work()
            self._done = side.record_event()

    def unfinished(self) -> T:
        """What the work gives, which nobody may read yet."""
        return self._value

    def result(self) -> T:
        """What the work gave; the present stream waits for it."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._kept = None
        return self._value


@contextmanager
def joined() -> Iterator[None]:
    """Inside a capture. At the end, also by an exception, the present stream waits for all others that were begun: a capture
    cannot end otherwise."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the capture may be at an end itself, and what went wrong first is to be heard
            _join()
        raise
    else:
        _join()
    finally:
        _begun.clear()


def _join() -> None:
    for side in _begun:
        torch.cuda.current_stream().wait_stream(side)


def capturing() -> bool:
    """Whether what is launched now becomes part of a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def _stream(name: str, device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
