"""How the steps of a block are executed: one by one, or captured as CUDA graphs of many whole steps.

All engines take the same steps: gather, gradient, update, sums of the loss. Contract of captured ones: everything that changes
from step to step (rows, learning rates, shares of the average, the weight of points that only fill up) is written to tensors
that stay where they are before a replay; the optimiser has made its state in steps before the capture. A block of k steps is
made of graphs of n, n // 4, n // 16, ... steps and of one, as they fit; blocks of any length give the same bits. Which of two
kinds of steps is captured is measured once; the choice is part of checkpoints, since the two round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.loss import PointTask
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training.blocks import Block
from forgefield.ldos.training.data import KeptRows, RowLayout
from forgefield.ldos.training.fused import FusedStep, factors_now
from forgefield.ldos.training.gradient import Gradient
from forgefield.ldos.training.terms import TermGradient
from forgefield.training.engines.capture import capture
from forgefield.training.optim.update import Update

Rates = Callable[[], list[float]]
"""Learning rate of each group for the step that is about to be made; asking moves schedules by step on."""
WARM_UPS = 3
"""Executions of the steps before they are captured."""
TIMED = 16
"""Steps of the graphs that are timed, at most."""
MARGIN = 1.15
"""Own kernels are used unless they take so many times as long as torch's."""


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

    def reset(self) -> None:
        """Drop what holds for one precision only."""


class GraphsEngine:
    """CUDA graphs of up to `n` whole steps. inner: makes the first steps, and those that hold terms on snapshots. fuses:
    steps are made by `FusedStep` in the precisions that it knows, where that is faster than those of inner's gradient.
    choices: whether it was, by the type of factors, as an earlier part of the training found; say: told what is found now.

    On a CPU nothing can be captured; there the steps of a graph are made one after the other, which is how they are tested.
    """

    name = "graphs"

    def __init__(
        self,
        inner: EagerEngine,
        n: int,
        points: int,
        *,
        fuses: bool = False,
        choices: dict[str, bool] | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.inner, self.n, self.points, self.fuses, self.notify = inner, n, points, fuses, notify
        self.choices = dict(choices or {})
        device, dtype = inner.device, inner.model.dtype
        self._captures = device.type == "cuda"
        self._lengths = [n // 4**power for power in range(8) if n // 4**power > 1]
        self.sums = torch.zeros(inner.task.n_levels, dtype=torch.float64, device=device)
        self._gathers = inner.kept is not None and inner.kept.rows.device == device
        self._rows = torch.zeros(n, points, dtype=torch.int64, device=device)
        width = 0 if self._gathers else inner.layout.width
        self._data = torch.zeros(n, points, width, dtype=dtype, device=device)
        self._rates = torch.zeros(n, len(inner.update.optimiser.param_groups), dtype=dtype, device=device)
        self._shares = torch.zeros(n, dtype=dtype, device=device)
        self._numbers = torch.zeros(*self._rates.shape, 4, dtype=torch.float32, device=device)
        self._weight = torch.ones(points, dtype=dtype, device=device)
        self._factor = torch.zeros(inner.task.n_levels, dtype=dtype, device=device)
        self._in_order = torch.arange(points, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._ready = False
        self._settings = _settings(inner.update.optimiser)
        self._fused: FusedStep | None = None
        self._chosen = False
        self._stale = True
        """Whether weights may have changed otherwise than by captured steps."""

    def reset(self) -> None:
        """Drop what holds for one precision only."""
        self._graphs.clear()
        self._fused, self._chosen = None, False

    def run(self, block: Block, first_step: int, rates: Rates) -> Sums:
        """Make the steps of a block. first_step: number of the first of them, from 0."""
        inner, done = self.inner, 0
        sums = Sums(inner.task, inner.device)
        rows = inner.rows(block)
        self.sums.zero_()
        self._stale = True
        while done < len(block):
            step = first_step + done
            if self._captures and not self._ready and inner.update.has_states:
                inner.update.make_capturable()  # before any step, of a term too: a resumed run makes steps of the same kind
                self._ready = True
            if not inner.update.has_states or (inner.terms is not None and inner.task.due(step)):
                inner.step(sums, *inner.batch(block, rows, done), block.totals[done], step, rates())
                done, self._stale = done + 1, True
                continue
            length = self._length(block, done, step)
            self._write(block, rows, done, length)
            if not self._chosen:
                self._choose(length)
            self._make(length, [rates() for _ in range(length)])
            done += length
        sums.by_level += self.sums
        if self._fused is not None:
            sums.by_level += self._fused.sums.sum(0)
            self._fused.sums.zero_()
            if not self._stale:  # whoever looks at gradients finds those of the last step
                if self._fused.adam is not None:
                    self._fused.add_up()
                inner.update.use(self._fused.gradients)
        if _settings(inner.update.optimiser) != self._settings:
            raise ForgefieldError(
                "training.engine: captured steps read learning rates anew, but a scheduler or callback has changed another "
                "setting of the optimiser (such as betas or weight_decay); use training.engine=eager, and with OneCycleLR and "
                "CyclicLR training.scheduler.cycle_momentum=false."
            )
        sums.points = sum(block.own)
        return sums

    def _choose(self, length: int) -> None:
        """What makes the steps from now on. length: of the graph that comes next, whose points are there already."""
        inner, dtype = self.inner, factors_now() if self.fuses else None
        self._chosen = True
        if dtype is None:
            return
        name = str(dtype).removeprefix("torch.")
        try:
            fused = FusedStep(inner.model, inner.task.loss, inner.layout, self.points, inner.update, dtype)
            if self._captures and name not in self.choices:
                self.choices[name] = self._is_faster(fused, length)
            self._fused = fused if self.choices.get(name, True) else None
        except Exception as error:  # what Triton, memory or the driver does not manage is no reason to stop
            self._fused, self.choices[name] = None, False
            self.notify(
                f"Own kernels do not run here ({type(error).__name__}: {str(error)[:200]}); steps of torch are used."
            )

    def _is_faster(self, fused: FusedStep, length: int) -> bool:
        """Whether own kernels are, by replays of both kinds of steps on the points of the next graph. Torch's have to be faster
        by a margin, so that chance does not decide."""
        length = next((n for n in self._lengths if n <= min(length, TIMED)), 1)
        times = []
        for candidate in (fused, None):
            self._fused = candidate
            times.append(self._time(self._capture(length)) / length)
        faster = times[0] < MARGIN * times[1]
        self.notify(
            f"A captured step takes {times[0]:.0f} us by own kernels and {times[1]:.0f} us by torch's: "
            f"{'own kernels' if faster else 'those of torch'} are used."
        )
        return faster

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of a replay, the least of some."""
        times = []
        with self._nothing_changed():
            for _ in range(4):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                times.append(1e3 * start.elapsed_time(stop))
        return min(times)

    def _length(self, block: Block, done: int, step: int) -> int:
        """How many steps the next graph has: all of them full, without terms, and of as many points over all ranks; else 1."""
        alike = 0
        for number in range(done, min(done + self.n, len(block))):
            due = self.inner.terms is not None and self.inner.task.due(step + number - done)
            if due or block.own[number] != self.points or block.totals[number] != block.totals[done]:
                break
            alike += 1
        return next((length for length in self._lengths if length <= alike), 1)

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
        average, fused = self.inner.update.average, self._fused
        shares = [0.0 if average is None else average.next_share() for _ in range(length)]
        rooms = [
            (room, torch.tensor(of, dtype=room.dtype)) for room, of in ((self._rates, rates), (self._shares, shares))
        ]
        if fused is not None:
            if self._stale:
                fused.refresh()
                self._stale = False
            if fused.adam is not None:
                rooms = [(self._numbers, fused.adam.numbers(rates, shares))]
        for room, values in rooms:
            room[:length].copy_(values.pin_memory() if self._captures else values, non_blocking=True)
        if not self._captures:
            self._steps(length, rates)
        else:
            if length not in self._graphs:
                self._graphs[length] = self._capture(length)
            self._graphs[length].replay()
        if fused is not None and fused.adam is not None:
            fused.adam.count(length)

    def _capture(self, length: int) -> torch.cuda.CUDAGraph:
        """The graph of `length` steps. Everything that the warm-up changes is restored."""

        def steps() -> None:
            self._steps(length, self._rates)

        with self._nothing_changed():
            graph, _ = capture(steps, warm_up=steps, warm_ups=WARM_UPS)
        return graph

    @contextmanager
    def _nothing_changed(self) -> Iterator[None]:
        """Weights, averages, optimiser and sums are afterwards what they were before."""
        update, fused = self.inner.update, self._fused
        held = _held_tensors(self.inner, self.sums, *([] if fused is None else [fused.sums]))
        before, calls = [tensor.detach().clone() for tensor in held], update.calls
        try:
            yield
        finally:
            if self.inner.device.type == "cuda":
                torch.cuda.synchronize()  # after an error another stream may still be writing
            with torch.no_grad():
                for tensor, value in zip(held, before):
                    tensor.copy_(value)
            update.calls = calls
            if fused is not None:
                fused.refresh()

    def _steps(self, length: int, rates: Any) -> None:
        """What is captured: `length` steps; a single one weights its points, which may be fewer."""
        inner, fused = self.inner, self._fused
        weight = self._weight if length == 1 else None
        for number in range(length):
            if fused is not None:
                kept, index = self._data[number], self._in_order
                if self._gathers:
                    assert inner.kept is not None
                    kept, index = inner.kept.rows, self._rows[number]
                fused(kept, index, self._factor, weight, None if fused.adam is None else self._numbers[number])
                if fused.adam is not None:
                    continue
                gradients = fused.gradients
            else:
                rows = self._data[number]
                if self._gathers:
                    assert inner.kept is not None
                    rows = inner.kept.rows.index_select(0, self._rows[number])
                self.sums += inner.gradient(*inner.layout.split(rows), self._factor, weight)
                gradients = inner.gradient.gradients
            inner.update.use(gradients)
            inner.update(list(rates[number]), self._shares[number])
            if fused is not None:
                fused.refresh()


def _settings(optimiser: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What captured steps hold as it is: all settings but learning rates and the way to compute."""
    held = [key for key in optimiser.defaults if key not in ("lr", "capturable", "fused", "foreach")]
    return [
        {key: group.get(key) for key in held if not isinstance(group.get(key), Tensor)}
        for group in optimiser.param_groups
    ]


def _held_tensors(inner: EagerEngine, *sums: Tensor) -> list[Tensor]:
    """Everything that a step changes."""
    update: Any = inner.update
    states = [
        value for state in update.optimiser.state.values() for value in state.values() if isinstance(value, Tensor)
    ]
    averages = [] if update.average is None else list(update.average.average.values())
    return [*inner.model.parameters(), *states, *averages, *sums]
