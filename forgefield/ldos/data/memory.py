"""Points that are kept whole: in the memory of the host, or moved once to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forgefield.ldos.data.selection import EveryPoint
from forgefield.ldos.data.staging import PointBlock, Staging, Stretch
from forgefield.ldos.data.table import PointTable

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
