"""The processes of a training and their collective operations except for gradients: broadcast, gather, all_reduce.

A single process is a group of one, for which these return immediately. `rendezvous.connect` creates larger groups.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from forgefield.parallel.launch import Launch, detect_launch
from forgefield.parallel.watch_thread import Watch

T = TypeVar("T")


class Ranks:
    """This process among `world_size`. hosts: name of the node of each rank. backend: of `torch.distributed`."""

    def __init__(self, launch: Launch, *, hosts: Sequence[str], backend: str) -> None:
        self.launch = launch
        self.rank, self.world_size = launch.rank, launch.world_size
        self.hosts = list(hosts)
        self.backend = backend
        self.watch: Watch | None = None
        self.error_text: str | None = None
        """Message of the error that ended this process, if any."""
        self.error_code = 1
        """Its exit code."""
        self.failed_first = False
        self.on_line: Callable[[int, str], None] | None = None
        """On rank 0: called with (rank, text) for each line that another rank sends to the log."""

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, ordered by their lowest rank."""
        return list(dict.fromkeys(self.hosts))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, bit for bit the same on each."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest value of each element over ranks."""
        if self.world_size == 1:
            return tensor
        largest = tensor.contiguous().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest

    def broadcast(self, value: T | None) -> T:
        """The value of rank 0, on every rank. The values of other ranks are ignored and may be None."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return cast(T, values[0])

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, ordered by rank, on rank 0; an empty list on the others."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size if self.is_rank_zero else None
        dist.gather_object(value, values, dst=0)
        return values or []

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, ordered by rank, on every rank."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all ranks have reached this call."""
        self.all_gather(None)

    def describe(self, rank: int) -> str:
        """`rank 3 on gpu007`."""
        return f"rank {rank} on {self.hosts[rank]}" if self.world_size > 1 else "this process"

    def leave(self) -> None:
        """Leave the group before this process exits; the other processes may continue."""
        if self.world_size == 1:
            return
        if self.watch is not None:
            self.watch.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def single_process(launch: Launch | None = None) -> Ranks:
    """A group of one process."""
    launch = detect_launch({}) if launch is None else launch
    return Ranks(launch, hosts=[socket.gethostname()], backend="none")
