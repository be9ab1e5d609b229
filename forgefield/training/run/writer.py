"""Writes files of a run in a thread, while the training continues.

Contract. Files are written one after another in the order in which they were submitted, so that a file on disk implies that all
earlier ones are. What is written is copied first (`Snapshot`): on a GPU the copy is only started, and the thread waits for it.
The first error ends all writing; it is raised in the training at the next batch, and wherever the training waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

GATHERED_BYTES = 64 * 2**20
"""Memory of a GPU that a snapshot may use while it gathers small tensors."""
PINNED_BYTES = 4 * 2**30
"""Larger states are copied to ordinary memory, for which the training waits."""


class BackgroundWriter:
    """Executes submitted functions in a thread. At the end of the `with` block everything has been written."""

    def __init__(self) -> None:
        self._pending: OrderedDict[str, Callable[[], None]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_writing = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def submit(self, name: str, write: Callable[[], None]) -> None:
        """Execute `write` after everything that was submitted before. A function of the same name that has not been started is
        replaced, at its place in the queue. Raises the error of an earlier function."""
        self.raise_error()
        with self._changed:
            self._pending[name] = write
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether something has been submitted that is not complete."""
        return self._is_writing or bool(self._pending)

    def wait(self) -> None:
        """Wait until everything has been written. Raises the first error."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error of the thread, if there was one."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
            return
        with self._changed:  # the error that ended the block is the one to report
            self._changed.wait_for(lambda: not self.is_busy)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending))
                _, write = self._pending.popitem(last=False)
                self._is_writing = True
            error: Exception | None = None
            try:
                write()
            except Exception as raised:
                error = raised
            with self._changed:
                if error is not None:
                    self._error = error
                    self._pending.clear()
                self._is_writing = False
                self._changed.notify_all()


class Snapshot:
    """A copy of nested containers and of the tensors in them, which may be changed afterwards.

    Tensors on an NVIDIA GPU are gathered there and copied to the host while the GPU continues; `content` waits for the copy.
    """

    def __init__(self, content: Any) -> None:
        self._copies: dict[tuple[object, ...], _Copy] = {}
        self._on_gpu: dict[tuple[torch.device, torch.dtype], list[_Copy]] = {}
        self._structure = self._copied(content)
        pinned = sum(copy.n_bytes for copies in self._on_gpu.values() for copy in copies) <= PINNED_BYTES
        for copies in self._on_gpu.values():
            for group in _groups(copies):
                _start_transfer(group, pinned=pinned)
        self._arrived = None
        if self._on_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def content(self) -> Any:
        """The copy, with all tensors on the host. May be called in another thread, once."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return _resolved(self._structure)

    def _copied(self, value: Any) -> Any:
        """The value with a `_Copy` in place of each tensor."""
        if isinstance(value, Tensor):
            return self._copy(value.detach())
        if isinstance(value, dict):
            items = {key: self._copied(item) for key, item in value.items()}
            return _rebuilt(value, items)
        if isinstance(value, (list, tuple)):
            return _sequence(value, (self._copied(item) for item in value))
        return value

    def _copy(self, tensor: Tensor) -> _Copy:
        key = (tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
        if not tensor.numel() or key not in self._copies:
            copy = _Copy(tensor)
            if tensor.is_cuda and tensor.layout == torch.strided and tensor.is_contiguous() and tensor.numel():
                self._on_gpu.setdefault((tensor.device, tensor.dtype), []).append(copy)
            else:
                copy.values = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
            self._copies[key] = copy
        return self._copies[key]


class _Copy:
    """A tensor and, later, its copy on the host: a part of a buffer that is shared with others, or a tensor of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.shape = tensor.shape
        self.values: Tensor | None = None
        self.is_shared = False
        self.n_bytes = tensor.numel() * tensor.element_size()

    def resolved(self) -> Tensor:
        assert self.values is not None
        if self.is_shared:
            self.values, self.is_shared = self.values.clone().view(self.shape), False
        return self.values


def _groups(copies: list[_Copy]) -> Iterator[list[_Copy]]:
    """Consecutive copies of at most `GATHERED_BYTES` together, or single ones."""
    group: list[_Copy] = []
    for copy in copies:
        if group and sum(other.n_bytes for other in group) + copy.n_bytes > GATHERED_BYTES:
            yield group
            group = []
        group.append(copy)
    if group:
        yield group


@torch.no_grad()
def _start_transfer(copies: list[_Copy], *, pinned: bool) -> None:
    """Start copying tensors of one type and GPU to the host, in one piece. pinned: without waiting."""
    tensors = [copy.tensor.reshape(-1) for copy in copies if copy.tensor is not None]
    gathered = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    buffer = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=pinned)
    buffer.copy_(gathered, non_blocking=True)
    for copy, part in zip(copies, buffer.split([len(tensor) for tensor in tensors])):
        copy.tensor, copy.values, copy.is_shared = None, part, True


def _resolved(value: Any) -> Any:
    """The value with the tensor in place of each `_Copy`."""
    if isinstance(value, _Copy):
        return value.resolved()
    if isinstance(value, dict):
        return _rebuilt(value, {key: _resolved(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return _sequence(value, (_resolved(item) for item in value))
    return value


def _rebuilt(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary of the same type with these items. State dictionaries of modules are OrderedDicts with an attribute."""
    if type(like) is not OrderedDict:
        return items
    ordered = OrderedDict(items)
    vars(ordered).update(vars(like))
    return ordered


def _sequence(like: list[Any] | tuple[Any, ...], items: Iterator[Any]) -> list[Any] | tuple[Any, ...]:
    if isinstance(like, list):
        return list(items)
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
