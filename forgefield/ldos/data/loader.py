"""Batches of points that are kept in memory or on a device, gathered as whole tensors.

The order is a computed permutation (`permutation.py`): a fresh one of all points in every epoch, the same on CPU and GPU, and
an epoch can begin anywhere without the part before it being made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor

from forgefield.data.sampling.loader import prepared_ahead
from forgefield.ldos.data.memory import gathered
from forgefield.ldos.data.permutation import Permutation, positions_tensor
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.staging import PointBlock
from forgefield.ldos.data.steps import Batch, PointSteps, filled_up

CHUNK = 1 << 16
"""Places whose rows are computed at once on the CPU; on a device 64 times as many."""
KEPT_CHUNKS = 4


class PointLoader(PointSteps):
    """Batches {inputs (B, f), targets (B, t), weight (B,), snapshot (B,)} for one of `world_size` ranks.

    points: all points of some snapshots, on the CPU or on a device, where the batches will be too. selection: which of them;
    all, if None. batch: points of a rank. workers: threads that gather ahead, 0 for none (always on a device). prefetch: how
    many batches ahead. pin: put batches into memory from which they are copied to a GPU without waiting.
    """

    def __init__(
        self,
        points: PointBlock,
        batch: int,
        *,
        selection: Selection | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        prefetch: int | None = None,
        pin: bool = False,
        pad: bool = False,
    ) -> None:
        self.points = points
        self.selection = EveryPoint(len(points)) if selection is None else selection
        super().__init__(
            self.selection.n, batch, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, pad=pad, pin=pin
        )
        self.device = points.snapshot.device
        self.workers = 0 if points.snapshot.is_cuda else workers
        self.prefetch = 2 * workers if prefetch is None else prefetch
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int, bool], Tensor] = OrderedDict()

    # ---- rows

    def order(self, start: int, stop: int, epoch: int | None = None) -> Tensor:
        """Rows of `points` at this rank's places among start to stop of an epoch's order (default the present), int64."""
        epoch = self.epoch if epoch is None else epoch
        own = self.places(start, stop)
        places = positions_tensor(own.start, own.stop, own.step, self.device)
        if self.shuffle:
            places = Permutation(self.draws, self.seed, epoch)(places)
        return self.selection.rows(places)

    def epoch_rows(self) -> tuple[Tensor, Tensor]:
        """Rows and weights of all batches of the present epoch, or of what `start_at` left of it, (n_steps, points) each.

        On the device of the points, for engines that gather within a captured step. Padded whatever `pad` says.
        """
        start, n_steps = self._coming()
        rows = filled_up(self.order(start, self.draws), n_steps * self.budget.size)
        weight = torch.zeros_like(rows, dtype=self.points.inputs.dtype)
        weight[: len(self.places(start, self.draws))] = 1
        shape = (n_steps, self.budget.size)
        return rows.view(shape), weight.view(shape)

    def _rows(self, start: int, step: int, real: int) -> Tensor:
        """Rows of a step of the iteration that began at place `start`; those of many steps are computed at once."""
        steps = max(1, (CHUNK if self.device.type == "cpu" else 64 * CHUNK) // self.budget.size)
        number, within = divmod(step, steps)
        key = (self.epoch, start + number * steps * self._stride, self.shuffle)
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = self.order(key[1], min(key[1] + steps * self._stride, self.draws))
                while len(self._chunks) > KEPT_CHUNKS:
                    self._chunks.popitem(last=False)
        return chunk[within * self.budget.size :][:real]

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing is taken from `start_at` until the first batch is asked for. Lightning makes an iterator
        # just to see that it can.
        start, n_steps = self._begin()

        def prepare(step: int) -> Batch:
            return self._batch(start, step, self._own_places(start, step))

        if self.workers == 0:
            yield from map(prepare, range(n_steps))
        else:
            yield from prepared_ahead(prepare, n_steps, self.workers, max(self.prefetch, 1))

    def _batch(self, start: int, step: int, places: range) -> Batch:
        real = len(places)
        size = self._size(real)
        if self._lies_together and size == real:
            part = self.points.part(places.start, places.stop)
            found = dict(zip(("inputs", "targets", "snapshot"), part.tensors))
            if self.pin and not self.points.snapshot.is_cuda:
                found = {name: tensor.pin_memory() for name, tensor in found.items()}
        else:
            rows = filled_up(self._rows(start, step, real), size)
            found = gathered(self.points, rows, self.pin)
        return {**found, "weight": self._weight(real, size, self.points.inputs)}

    @property
    def _lies_together(self) -> bool:
        """Whether the points of a batch are a stretch of rows: nothing is gathered then."""
        return not self.shuffle and self.world_size == 1 and isinstance(self.selection, EveryPoint)
