"""From files to tensors on any device: threads read stretches of points, by way of pinned memory where there is a GPU.

On the CPU a stretch is read straight to its place. For a GPU it is read into a slot of a small ring of pinned memory, sent on a
stream of its own, and the slot is used again once it has arrived.
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
    """Room for points on a device: inputs (n, n_inputs), targets (n, n_targets), number of the snapshot (n,)."""

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
        """Room in which rows that are never filled are finite all the same."""
        block = cls.empty(table, n, dtype, device)
        for tensor in block.tensors:
            tensor.zero_()
        return block

    def __len__(self) -> int:
        return self.snapshot.shape[0]

    def part(self, start: int, stop: int) -> PointBlock:
        return PointBlock(self.inputs[start:stop], self.targets[start:stop], self.snapshot[start:stop])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs, self.targets, self.snapshot


@dataclass(frozen=True)
class Stretch:
    """Places start to stop of a selection, which go to rows `at` and following of a block."""

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

    def fill(self, block: PointBlock, stretches: Iterable[Stretch]) -> Filling:
        """Begin to read these stretches into `block`, once all that the present stream was told to do with it is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        pieces = []
        for stretch in stretches:
            for start in range(stretch.start, stretch.stop, self.slot_rows):
                stop = min(start + self.slot_rows, stretch.stop)
                pieces.append(Stretch(start, stop, stretch.at + start - stretch.start))
        return Filling([self._pool.submit(self._read, block, piece) for piece in pieces], self._stream)

    def _read(self, block: PointBlock, piece: Stretch) -> None:
        room = block.part(piece.at, piece.at + piece.stop - piece.start)
        if not self._on_gpu:
            self._read_to(room, piece)
            return
        slot, sent = self._slots.get()
        try:
            if sent is not None:
                sent.synchronize()
            filled = slot.part(0, len(room))
            self._read_to(filled, piece)
            with self._issuing, torch.cuda.stream(self._stream):
                for target, source in zip(room.tensors, filled.tensors):
                    target.copy_(source, non_blocking=True)
                sent = torch.cuda.Event()
                sent.record(self._stream)
        finally:
            self._slots.put((slot, sent))

    def _read_to(self, room: PointBlock, piece: Stretch) -> None:
        wanted = [tensor.numpy() if tensor.shape[1] else None for tensor in (room.inputs, room.targets)]
        rows = self.table.read_places(self.selection, piece.start, *wanted)
        room.snapshot.copy_(torch.from_numpy(self.table.snapshot_of(rows)))

    def close(self) -> None:
        """Read no further. Whatever is still on its way has arrived, so that blocks may be given up."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()


class Filling:
    """A block that is being filled by other threads."""

    def __init__(self, futures: list[Future[None]], stream: torch.cuda.Stream | None) -> None:
        self._futures, self._stream = futures, stream

    def wait(self) -> None:
        """Wait until the block can be used on the current stream. Errors of the threads are raised here."""
        for future in self._futures:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


PLACES = ("auto", "device", "memory", "disk")
HEADROOM = 0.6
"""Share of free memory that data may take when its place is chosen."""


def load_points(
    table: PointTable,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    workers: int = 2,
) -> PointBlock:
    """All points of a table as tensors on a device, each read once; splits and shuffles choose rows of it."""
    block = PointBlock.empty(table, table.n_points, dtype, device)
    staging = Staging(table, EveryPoint(table.n_points), dtype=dtype, device=device, workers=workers)
    try:
        staging.fill(block, [Stretch(0, table.n_points, 0)]).wait()
    finally:
        staging.close()
    if block.snapshot.is_cuda:
        torch.cuda.synchronize(block.snapshot.device)
    return block


def place_for(tables: Sequence[PointTable], dtype: torch.dtype, *, on_device: int | None, on_host: int) -> str:
    """`device`, `memory` or `disk`: the fastest that holds all tables.

    on_device, on_host: free bytes there; no device is None.
    """
    needed = sum(table.n_bytes(dtype) for table in tables)
    if on_device is not None and needed < HEADROOM * on_device:
        return "device"
    return "memory" if needed < HEADROOM * on_host else "disk"


def gathered(block: PointBlock, rows: Tensor, pin: bool = False) -> dict[str, Tensor]:
    """inputs, targets and snapshot of these rows. pin: in memory from which they are copied to a GPU without waiting."""
    found = {}
    for name, tensor in zip(("inputs", "targets", "snapshot"), block.tensors):
        if pin and not tensor.is_cuda:
            out = torch.empty((rows.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
            found[name] = torch.index_select(tensor, 0, rows, out=out)
        else:
            found[name] = tensor.index_select(0, rows)
    return found
