"""Batches cut in two between frames, for where memory does not hold the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from forgefield.data.batch import SHAPES, Shapes

Batch = dict[str, Tensor]


def halves(batch: Batch, shapes: Shapes = SHAPES) -> tuple[Batch, Batch]:
    """The batch cut between two frames, so that both parts have about as many atoms."""
    n_atoms = batch["n_atoms"].cpu()
    before = torch.cumsum(n_atoms, 0)
    frames = int(torch.argmin((before[:-1] - before[-1] / 2).abs())) + 1
    atoms = int(before[frames - 1])
    edges = int(torch.searchsorted(batch["edge_index"][1].contiguous(), atoms)) if "edge_index" in batch else 0
    cuts = {"frames": frames, "atoms": atoms, "edges": edges}
    moves = {"frame": frames, "edge_index": atoms, "edge_reverse": edges}
    first, second = {}, {}
    for key, tensor in batch.items():
        dim = int(key == "edge_index")
        at = cuts[next(size for size in shapes[key] if isinstance(size, str))]
        first[key] = tensor.narrow(dim, 0, at)
        rest = tensor.narrow(dim, at, tensor.shape[dim] - at)
        second[key] = rest - moves[key] if key in moves else rest
    return first, second


_WORDS = ("not enough memory", "out of memory", "can't allocate memory")


def is_memory_error(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(words in text for words in _WORDS)
    )
