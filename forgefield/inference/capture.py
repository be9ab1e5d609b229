"""Capture of functions as CUDA graphs, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from forgefield.data.batch import is_memory_error
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from torch.cuda.graphs import _POOL_HANDLE

T = TypeVar("T")


def capture(
    function: Callable[[], T],
    *,
    warm_up: Callable[[], object],
    warm_ups: int,
    pool: _POOL_HANDLE | None = None,
    refusal: str = "training.engine=graphs: the step cannot be captured",
    instead: str = "use training.engine=compile or eager.",
) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of `function()`, and what it returned: tensors that every replay overwrites.

    warm_up: called `warm_ups` times on a side stream before the capture, so that libraries and compilers create what they need.
    pool: memory that the graph shares with others, from `torch.cuda.graph_pool_handle`.
    refusal, instead: beginning and end of the message where it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            warm_up()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()
    except RuntimeError as error:
        if is_memory_error(error):
            raise
        raise ForgefieldError(
            f"{refusal}, because something in it waits for the GPU or is executed by the host "
            f"({str(error).splitlines()[0]}); {instead}"
        ) from error
    return graph, result


class Replays(Generic[T]):
    """Functions captured as CUDA graphs, one for each key, and what they returned: tensors that every replay overwrites.

    On other devices than GPUs nothing is captured: a replay calls the function, which is how captured work is tested.

    warm_ups: number of calls before a capture. pool: memory that the graphs share, from `shared_pool`.
    """

    def __init__(self, device: torch.device, *, warm_ups: int = 0, pool: _POOL_HANDLE | None = None) -> None:
        self.captures, self.warm_ups = device.type == "cuda", warm_ups
        self._pool = pool
        self._replays: dict[Hashable, Callable[[], T]] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    def add(self, key: Hashable, function: Callable[[], T], *, warm_up: Callable[[], object] | None = None) -> None:
        """Capture a function, which is kept, and so is what it refers to. warm_up: called before; default: the function."""
        if not self.captures:
            self._replays[key] = function
            return
        graph, result = capture(function, warm_up=warm_up or function, warm_ups=self.warm_ups, pool=self._pool)

        def replay(_kept: Callable[[], T] = function) -> T:
            graph.replay()
            return result

        self._replays[key] = replay

    def run(self, key: Hashable) -> T:
        """Replay what was captured for a key."""
        return self._replays[key]()

    def clear(self) -> None:
        self._replays.clear()


def shared_pool(device: torch.device) -> _POOL_HANDLE | None:
    """Memory for graphs of which only one runs at a time, and whose results are valid until the next replay of any."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
