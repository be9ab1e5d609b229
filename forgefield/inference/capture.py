"""Capture of a function as a CUDA graph, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

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
