"""The processes that train together: who they are, and the few ways in which they talk outside of the gradient.

A process that trains alone is a group of one: the same calls return at once. `meeting.connect` makes groups of several.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from forgefield.parallel.launch import Launch, detect_launch
from forgefield.parallel.watch_thread import Watch


class Ranks:
    """This process among `world_size`. hosts: name of the node of every rank. backend: what carries the messages."""

    def __init__(self, launch: Launch, *, hosts: Sequence[str], backend: str) -> None:
        self.launch = launch
        self.rank, self.world_size = launch.rank, launch.world_size
        self.hosts = list(hosts)
        self.backend = backend
        self.watch: Watch | None = None
        self.own_error: str | None = None
        """What went wrong in this process, once something has."""
        self.failed_first = False
        self.on_line: Any = None
        """On rank 0: called with (rank, text) for each line of log that another rank sends."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, in the order of their first ranks."""
        return list(dict.fromkeys(self.hosts))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def broadcast(self, value: Any) -> Any:
        """What rank 0 has. The others may pass anything."""
        if self.world_size == 1:
            return value
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, in the order of ranks; empty on all ranks but the first."""
        if self.world_size == 1:
            return [value]
        boxes: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(value, boxes, dst=0)
        return boxes or []

    def all_gather(self, value: Any) -> list[Any]:
        """What every rank has, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, value)
        return boxes

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_gather(None)

    def describe(self, rank: int) -> str:
        """`rank 3 on gpu007`."""
        return f"rank {rank} on {self.hosts[rank]}" if self.world_size > 1 else "this process"

    def leave(self) -> None:
        """The end of this process in good order; the others may go on for a while."""
        if self.world_size == 1:
            return
        if self.watch is not None:
            self.watch.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def alone(launch: Launch | None = None) -> Ranks:
    """A group of one process."""
    launch = detect_launch({}) if launch is None else launch
    return Ranks(launch, hosts=[socket.gethostname()], backend="none")
