"""From files to tensors on any device: threads read ranges of points, through pinned memory for a GPU.

For the CPU a range is read directly into the target tensor. For a GPU it is read into a slot of a small ring of pinned memory
and copied on a separate stream; the slot is reused after the copy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.table import PointTable

SLOT_ROWS = 16384


@dataclass
class PointBlock:
    """Tensors of points on a device: inputs (n, n_inputs), targets (n, n_targets), index of the snapshot (n,)."""

    inputs: Tensor
    targets: Tensor
    snapshot: Tensor

    @classmethod
    def empty(cls, table: PointTable, n: int, dtype: torch.dtype, device: torch.device | str) -> PointBlock:
        return cls(
            torch.empty(n, table.n_inputs, dtype=dtype, device=device),
            torch.empty(n, table.n_targets, dtype=dtype, device=device),
            torch.empty(n, dtype=torch.int64, device=device),
        )

    @classmethod
    def zeros(cls, table: PointTable, n: int, dtype: torch.dtype, device: torch.device | str) -> PointBlock:
        """A block of zeros, so that rows that are never filled are finite."""
        block = cls.empty(table, n, dtype, device)
        for tensor in block.tensors:
            tensor.zero_()
        return block

    def __len__(self) -> int:
        return self.snapshot.shape[0]

    def rows(self, start: int, stop: int) -> PointBlock:
        return PointBlock(self.inputs[start:stop], self.targets[start:stop], self.snapshot[start:stop])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs, self.targets, self.snapshot


@dataclass(frozen=True)
class RowRange:
    """Positions start to stop of a selection, which are stored in rows `at` and following of a block."""

    start: int
    stop: int
    at: int


class Staging:
    """Fills blocks with points by `workers` threads. dtype: of inputs and targets on the device."""

    def __init__(
        self,
        table: PointTable,
        selection: Selection,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        workers: int = 1,
        slot_rows: int = SLOT_ROWS,
    ) -> None:
        self.table, self.selection, self.dtype = table, selection, dtype
        self.device = torch.device(device)
        self.slot_rows = slot_rows
        self._pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="points")
        self._on_gpu = self.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(self.device) if self._on_gpu else None
        self._issuing = threading.Lock()
        self._slots: queue.SimpleQueue[tuple[PointBlock, torch.cuda.Event | None]] = queue.SimpleQueue()
        if self._on_gpu:
            for _ in range(2 * max(workers, 1)):
                block = PointBlock.empty(table, slot_rows, dtype, "cpu")
                self._slots.put((PointBlock(*(tensor.pin_memory() for tensor in block.tensors)), None))

    def fill(self, block: PointBlock, ranges: Iterable[RowRange]) -> Filling:
        """Start reading these ranges into `block`, after all work on it that is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        pieces = []
        for row_range in ranges:
            for start in range(row_range.start, row_range.stop, self.slot_rows):
                stop = min(start + self.slot_rows, row_range.stop)
                pieces.append(RowRange(start, stop, row_range.at + start - row_range.start))
        return Filling([self._pool.submit(self._read, block, piece) for piece in pieces], self._stream)

    def _read(self, block: PointBlock, piece: RowRange) -> None:
        rows_of_block = block.rows(piece.at, piece.at + piece.stop - piece.start)
        if not self._on_gpu:
            self._read_to(rows_of_block, piece)
            return
        slot, sent = self._slots.get()
        try:
            if sent is not None:
                sent.synchronize()
            filled = slot.rows(0, len(rows_of_block))
            self._read_to(filled, piece)
            with self._issuing, torch.cuda.stream(self._stream):
                for target, source in zip(rows_of_block.tensors, filled.tensors):
                    target.copy_(source, non_blocking=True)
                sent = torch.cuda.Event()
                sent.record(self._stream)
        finally:
            self._slots.put((slot, sent))

    def _read_to(self, block: PointBlock, piece: RowRange) -> None:
        arrays = [tensor.numpy() if tensor.shape[1] else None for tensor in (block.inputs, block.targets)]
        rows = self.table.read_selected(self.selection, piece.start, *arrays)
        block.snapshot.copy_(torch.from_numpy(self.table.snapshot_of(rows)))

    def close(self) -> None:
        """Stop reading. Afterwards no copy is in progress, so blocks may be freed."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()


class Filling:
    """A block that other threads are filling."""

    def __init__(self, futures: list[Future[None]], stream: torch.cuda.Stream | None) -> None:
        self._futures, self._stream = futures, stream

    def wait(self) -> None:
        """Wait until the block can be used on the current stream. Errors of the threads are raised here."""
        for future in self._futures:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


HEADROOM = 0.6
"""Fraction of the free memory that data may use when its location is chosen automatically."""


def load_points(
    table: PointTable,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    workers: int = 2,
) -> PointBlock:
    """All points of a table as tensors on a device; each point is read once."""
    block = PointBlock.empty(table, table.n_points, dtype, device)
    staging = Staging(table, EveryPoint(table.n_points), dtype=dtype, device=device, workers=workers)
    try:
        staging.fill(block, [RowRange(0, table.n_points, 0)]).wait()
    finally:
        staging.close()
    if block.snapshot.is_cuda:
        torch.cuda.synchronize(block.snapshot.device)
    return block


def choose_location(tables: Sequence[PointTable], dtype: torch.dtype, *, on_device: int | None, on_host: int) -> str:
    """`device`, `memory` or `disk`: the fastest location with enough space for all tables.

    on_device, on_host: free bytes; on_device is None without a device.
    """
    needed = sum(table.n_bytes(dtype) for table in tables)
    if on_device is not None and needed < HEADROOM * on_device:
        return "device"
    return "memory" if needed < HEADROOM * on_host else "disk"


def gather_rows(block: PointBlock, rows: Tensor, pin: bool = False) -> dict[str, Tensor]:
    """inputs, targets and snapshot of these rows. pin: in pinned memory, for asynchronous copies to a GPU."""
    tensors = {}
    for name, tensor in zip(("inputs", "targets", "snapshot"), block.tensors):
        if pin and not tensor.is_cuda:
            out = torch.empty((rows.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
            tensors[name] = torch.index_select(tensor, 0, rows, out=out)
        else:
            tensors[name] = tensor.index_select(0, rows)
    return tensors
