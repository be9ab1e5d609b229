"""How the steps of a block are executed: one by one, or captured as CUDA graphs of many whole steps.

All engines take the same steps: gather, gradient, update, sums of the loss. Contract of captured ones: everything that changes
from step to step (rows, learning rates, shares of the average, the weight of points that only fill up) is written to tensors
that stay where they are before a replay; the optimiser has made its state in steps before the capture. A block of k steps is
k // n replays of n steps and k % n of one, so that blocks of any length give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forgefield.models.ldos import LDOSNetwork
from forgefield.tasks.ldos import PointTask
from forgefield.training.points.blocks import Block
from forgefield.training.points.data import KeptRows, RowLayout
from forgefield.training.points.gradient import Gradient
from forgefield.training.points.terms import TermGradient
from forgefield.training.points.update import Update

Rates = Callable[[], list[float]]
"""Learning rate of each group for the step that is about to be made; asking moves schedules by step on."""


class Sums:
    """What a block adds to the sums of a row: by_level (n_levels,) float64, errors of the loss; points: of this rank; terms:
    (2, n_terms)."""

    def __init__(self, task: PointTask, device: torch.device) -> None:
        self.by_level = torch.zeros(task.n_levels, dtype=torch.float64, device=device)
        self.points = 0
        self.terms: Tensor | None = None

    def add_terms(self, sums: Tensor) -> None:
        self.terms = sums if self.terms is None else self.terms + sums

    def add(self, other: Sums) -> None:
        self.by_level += other.by_level
        self.points += other.points
        if other.terms is not None:
            self.add_terms(other.terms)


class EagerEngine:
    """One step after the other. kept: rows that blocks refer to, where they are kept; fast: gathered as whole tensors, and
    brought to the device for a whole block; else point by point, and for each step."""

    name = "eager"

    def __init__(
        self,
        model: LDOSNetwork,
        task: PointTask,
        gradient: Gradient,
        update: Update,
        *,
        kept: KeptRows | None,
        world_size: int = 1,
        terms: TermGradient | None = None,
        fast: bool = True,
    ) -> None:
        self.model, self.task, self.gradient, self.update = model, task, gradient, update
        self.layout = RowLayout(len(model.input_shift), len(model.output_shift))
        self.kept, self.world_size, self.terms, self.fast = kept, world_size, terms, fast
        self.device = model.weights[0].device
        self._factors: dict[int, Tensor] = {}

    def run(self, block: Block, first_step: int, rates: Rates) -> Sums:
        """Make the steps of a block. first_step: number of the first of them, from 0."""
        sums = Sums(self.task, self.device)
        rows = self.rows(block)
        for number in range(len(block)):
            self.step(sums, *self.batch(block, rows, number), block.totals[number], first_step + number, rates())
        sums.points = sum(block.own)
        return sums

    def step(
        self, sums: Sums, inputs: Tensor, targets: Tensor, total: int, step: int, rates: list[float] | None = None
    ) -> None:
        """One whole step. total: its points over all ranks."""
        by_level = self.gradient(inputs, targets, self.factor(total), None)
        sums.by_level += by_level
        if self.terms is not None and (names := self.task.due(step)):
            sums.add_terms(self.terms.add_to(self.gradient.gradients, names, step))
        self.update.use(self.gradient.gradients)
        self.update(rates)

    def factor(self, total: int) -> Tensor:
        """(n_levels,): see `PointTask.slope_factor`; gradients are averaged over ranks, hence times their number."""
        if total not in self._factors:
            factor = self.world_size * self.task.slope_factor(total)
            self._factors[total] = factor.to(self.device, self.model.dtype)
        return self._factors[total]

    def rows(self, block: Block) -> Tensor | None:
        """Rows of the whole block on the device, where they are kept elsewhere: one copy for all its steps."""
        if not self.fast or self.kept is None or block.rows is None or self.kept.rows.device == self.device:
            return None
        chosen = self.kept.rows.index_select(0, block.rows.reshape(-1))
        if self.device.type == "cuda":
            chosen = chosen.pin_memory()
        return chosen.to(self.device, non_blocking=True).view(*block.rows.shape, -1)

    def batch(self, block: Block, rows: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
        own = block.own[number]
        if block.batches is not None:
            batch = block.batches[number]
            inputs, targets = (batch[name][:own].to(self.device) for name in ("inputs", "targets"))
            return self.model.scaled_inputs(inputs), self.model.scaled_targets(targets)
        assert self.kept is not None
        assert block.rows is not None
        if rows is not None:
            return self.layout.split(rows[number, :own])
        wanted = block.rows[number, :own]
        if not self.fast:  # as a data set of single points does it
            picked = [self.kept.rows[int(row)] for row in wanted]
            return self.layout.split((torch.stack(picked) if picked else self.kept.rows[:0]).to(self.device))
        return self.layout.split(self.kept.rows.index_select(0, wanted))

    def forget(self) -> None:
        """Drop what holds for one precision only."""


class GraphsEngine:
    """CUDA graphs of `n` whole steps and of one. inner: makes the first steps, and those that hold terms on snapshots.

    On a CPU nothing can be captured; there the steps of a graph are made one after the other, which is how they are tested.
    """

    name = "graphs"

    def __init__(self, inner: EagerEngine, n: int, points: int) -> None:
        self.inner, self.n, self.points = inner, n, points
        device, dtype = inner.device, inner.model.dtype
        self._captures = device.type == "cuda"
        self.sums = torch.zeros(inner.task.n_levels, dtype=torch.float64, device=device)
        self._gathers = inner.kept is not None and inner.kept.rows.device == device
        self._rows = torch.zeros(n, points, dtype=torch.int64, device=device)
        width = 0 if self._gathers else inner.layout.width
        self._data = torch.zeros(n, points, width, dtype=dtype, device=device)
        self._rates = torch.zeros(n, len(inner.update.optimiser.param_groups), dtype=dtype, device=device)
        self._shares = torch.zeros(n, dtype=dtype, device=device)
        self._weight = torch.ones(points, dtype=dtype, device=device)
        self._factor = torch.zeros(inner.task.n_levels, dtype=dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._ready = False

    def forget(self) -> None:
        """Drop what holds for one precision only."""
        self._graphs.clear()

    def run(self, block: Block, first_step: int, rates: Rates) -> Sums:
        """Make the steps of a block. first_step: number of the first of them, from 0."""
        inner, done = self.inner, 0
        sums = Sums(inner.task, inner.device)
        rows = inner.rows(block)
        self.sums.zero_()
        while done < len(block):
            step = first_step + done
            if self._captures and not self._ready and inner.update.has_states:
                inner.update.make_capturable()  # before any step, of a term too: a resumed run makes steps of the same kind
                self._ready = True
            if not inner.update.has_states or (inner.terms is not None and inner.task.due(step)):
                inner.step(sums, *inner.batch(block, rows, done), block.totals[done], step, rates())
                done += 1
                continue
            length = self._length(block, done, step)
            self._write(block, rows, done, length)
            self._make(length, [rates() for _ in range(length)])
            done += length
        sums.by_level += self.sums
        sums.points = sum(block.own)
        return sums

    def _length(self, block: Block, done: int, step: int) -> int:
        """n where the next n steps are full and hold no term, else 1."""
        ahead = range(done, done + self.n)
        full = len(block) - done >= self.n and all(block.own[number] == self.points for number in ahead)
        same = full and len({block.totals[number] for number in ahead}) == 1
        free = self.inner.terms is None or not any(self.inner.task.due(step + i) for i in range(self.n))
        return self.n if same and free else 1

    def _write(self, block: Block, rows: Tensor | None, first: int, length: int) -> None:
        """Bring the points of the next steps, and what they count, to where the steps read them."""
        inner = self.inner
        if self._gathers:
            assert block.rows is not None
            self._rows[:length].copy_(block.rows[first : first + length])
        else:
            for place in range(length):
                for room, values in zip(inner.layout.split(self._data[place]), inner.batch(block, rows, first + place)):
                    room[: len(values)] = values
        self._factor.copy_(inner.factor(block.totals[first]))
        if length == 1:
            self._weight.zero_()
            self._weight[: block.own[first]] = 1

    def _make(self, length: int, rates: list[list[float]]) -> None:
        average = self.inner.update.average
        shares = [0.0 if average is None else average.next_share() for _ in range(length)]
        if not self._captures:
            self._steps(length, rates, torch.tensor(shares, dtype=self._shares.dtype))
            return
        for room, values in ((self._rates, rates), (self._shares, shares)):
            room[:length].copy_(torch.tensor(values, dtype=room.dtype).pin_memory(), non_blocking=True)
        if length not in self._graphs:
            self._graphs[length] = self._capture(length)
        self._graphs[length].replay()

    def _capture(self, length: int) -> torch.cuda.CUDAGraph:
        """The graph, and no effect on weights, averages, optimiser and sums: what warming up changes is put back."""
        held = _held_tensors(self.inner, self.sums)
        before = [tensor.detach().clone() for tensor in held]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._steps(length, self._rates, self._shares)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._steps(length, self._rates, self._shares)
        with torch.no_grad():
            for tensor, value in zip(held, before):
                tensor.copy_(value)
        return graph

    def _steps(self, length: int, rates: Any, shares: Tensor) -> None:
        """What is captured: `length` steps; a single one weights its points, which may be fewer."""
        inner = self.inner
        for number in range(length):
            rows = self._data[number]
            if self._gathers:
                assert inner.kept is not None
                rows = inner.kept.rows.index_select(0, self._rows[number])
            by_level = inner.gradient(*inner.layout.split(rows), self._factor, self._weight if length == 1 else None)
            self.sums += by_level
            inner.update.use(inner.gradient.gradients)
            inner.update(list(rates[number]), shares[number])


def _held_tensors(inner: EagerEngine, sums: Tensor) -> list[Tensor]:
    """Everything that a step changes."""
    update: Any = inner.update
    states = [
        value for state in update.optimiser.state.values() for value in state.values() if isinstance(value, Tensor)
    ]
    averages = [] if update.average is None else list(update.average.average.values())
    return [*inner.model.parameters(), *states, *averages, sums]
