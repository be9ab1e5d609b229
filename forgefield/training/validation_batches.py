"""The size of the batches of a validation on a GPU: as large as memory allows, if `data.eval_batch` does not set it.

A validation in many small batches spends its time on launching kernels. Memory is estimated from what the first training step
needed, so the size is chosen after that step. It is the same on all ranks and is stored in the run: a resumed run uses the same
size, because other sizes sum errors in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch

from forgefield.data.sampling.batching import MORE_IN_EVALUATION
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.plan import Budget
from forgefield.parallel.ranks import Ranks
from forgefield.training.trainer import set_validation_length

SHARE_OF_MEMORY = 0.25
"""Share of the free memory of a GPU that a batch of the validation may need."""
MOST_EDGES = 2**17
"""Maximum number of edges of an enlarged batch. Larger ones are not faster, and indices of kernels have 32 bits."""


class ValidationBatches:
    """Enlarges the batches of a validation loader.

    loader: returns the loader; None without one. stored: size of the batches in an earlier start of this run, if any. store:
    called with the size.
    """

    def __init__(
        self,
        loader: Callable[[], FrameLoader | None],
        ranks: Ranks,
        *,
        notify: Callable[[str], None],
        stored: dict[str, Any] | None = None,
        store: Callable[[dict[str, Any]], None] = lambda size: None,
    ) -> None:
        self.loader, self.ranks, self.notify, self.stored, self.store = loader, ranks, notify, stored, store

    def enlarge(self, trainer: L.Trainer, device: torch.device) -> None:
        """Choose the size, after a training step on this device; called by all ranks."""
        loader, limit = self.loader(), trainer.limit_val_batches
        counts_batches = isinstance(limit, int) or limit != 1.0  # the setting counts batches of the usual size
        if loader is None or counts_batches:
            return
        budget = loader.budget
        if self.stored is not None and self.stored["kind"] == budget.kind:
            size = int(self.stored["size"])
        else:
            factors = self.ranks.all_gather(_factor(loader, times_that_fit(device)))
            size = enlarged_size(loader, min(factors))
        if size <= budget.size:
            return
        loader.set_budget(replace(budget, size=size))
        set_validation_length(trainer, loader)
        self.store({"kind": budget.kind, "size": size})
        self.notify(
            f"Validation in batches of {size} {budget.kind}, because memory allows it (data.eval_batch sets another size)."
        )


def times_that_fit(device: torch.device) -> float:
    """How many times a batch of the training fits into the free memory of a GPU, evaluated instead of differentiated; 0 on
    other devices."""
    if device.type != "cuda":
        return 0.0
    used = max(torch.cuda.max_memory_allocated(device), 1)
    return MORE_IN_EVALUATION * SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0] / used


def _factor(loader: FrameLoader, times: float) -> int:
    """By how much batches of this rank may be enlarged. times: number of training batches that fit into memory."""
    sizes = loader.batch_sizes(epochs=1)
    if len(sizes) == 0:  # edges are not counted before a batch is made
        return 1
    return max(1, min(int(times / MORE_IN_EVALUATION), int(MOST_EDGES // max(sizes[:, 2].max(), 1))))


def enlarged_size(loader: FrameLoader, factor: int) -> int:
    """The size of batches that are at most `factor` times as large: with frames, as equal in size as possible."""
    n_batches = -(-len(loader) // factor)
    budget: Budget = loader.budget
    if factor == 1:
        return budget.size
    if budget.kind == "frames":
        return -(-loader.draws // (loader.world_size * n_batches))
    return budget.size * min(factor, len(loader))
