"""Work that nothing waits for soon, done beside the rest: on a stream of its own where there is a GPU, at once elsewhere.

    with aside:
        gradient = rows.t() @ others
    ...
    aside.join()

Inside, only memory that stays in use until `join` may be read. A CUDA graph keeps the two branches apart as they are.
`abreast` does several things at the same time that are each too small to fill a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Aside:
    """A branch beside the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device, 0) if device.type == "cuda" else None
        self._context: torch.cuda.StreamContext | None = None

    def __enter__(self) -> Aside:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self._context = torch.cuda.stream(self.stream)
            self._context.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._context is not None:
            self._context.__exit__(*exception)
            self._context = None

    def join(self) -> None:
        """From here on the current stream has what was made inside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def abreast(device: torch.device, tasks: Sequence[Callable[[], None]]) -> None:
    """Do all of them, which neither depend on each other nor make anything that is not there before."""
    if device.type != "cuda" or len(tasks) < 2:
        for task in tasks:
            task()
        return
    main = torch.cuda.current_stream(device)
    streams = [_stream(device, number) for number in range(1, len(tasks))]
    for stream, task in zip(streams, tasks[1:]):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            task()
    tasks[0]()
    for stream in streams:
        main.wait_stream(stream)
