"""Execution of the steps of a block: one by one, or captured as CUDA graphs of many steps.

All engines execute the same steps: gather, gradient, update, sums of the loss. Captured steps are those of
`training/engines/captured.py`; a block of k steps is composed of graphs of n, n // 4, n // 16, ... steps and of single steps,
and the result does not depend on the length of blocks. Which of two kinds of steps is captured is measured once; the choice is
stored in checkpoints, because the two round differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.loss import PointTask
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training.blocks import Block
from forgefield.ldos.training.data import ResidentRows, RowLayout
from forgefield.ldos.training.fused import FusedStep, current_factor_dtype
from forgefield.ldos.training.gradient import Gradient
from forgefield.ldos.training.snapshots import TermGradient
from forgefield.training.engines.captured import CapturedSteps
from forgefield.training.optim.captured_update import CapturedUpdate, constant_settings
from forgefield.training.optim.update import Update

Rates = Callable[[], list[float]]
"""Returns the learning rate of each group for the next step, and advances schedules by step."""
WARM_UPS = 3
"""Executions of the steps before they are captured."""
TIMED = 16
"""Maximum number of steps of the graphs that are timed."""
MARGIN = 1.15
"""Fused kernels are used unless they take longer than PyTorch's by this factor."""


class Sums:
    """Contribution of a block to a row of metrics: by_level (n_levels,) float64, errors of the loss; points: of this rank;
    terms: (2, n_terms)."""

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
    """Executes steps one by one. resident: rows that blocks refer to, if they are in memory. fast: gather the rows of a
    complete block at once and copy them to the device; otherwise point by point for each step."""

    name = "eager"

    def __init__(
        self,
        model: LDOSNetwork,
        task: PointTask,
        gradient: Gradient,
        update: Update,
        *,
        resident: ResidentRows | None,
        world_size: int = 1,
        terms: TermGradient | None = None,
        fast: bool = True,
    ) -> None:
        self.model, self.task, self.gradient, self.update = model, task, gradient, update
        self.layout = RowLayout(len(model.input_shift), len(model.output_shift))
        self.resident, self.world_size, self.terms, self.fast = resident, world_size, terms, fast
        self.device = model.weights[0].device
        self._factors: dict[int, Tensor] = {}

    def run(self, block: Block, first_step: int, rates: Rates) -> Sums:
        """Execute the steps of a block. first_step: index of the first one."""
        sums = Sums(self.task, self.device)
        rows = self.rows(block)
        for number in range(len(block)):
            self.step(sums, *self.batch(block, rows, number), block.totals[number], first_step + number, rates())
        sums.points = sum(block.local)
        return sums

    def step(
        self, sums: Sums, inputs: Tensor, targets: Tensor, total: int, step: int, rates: list[float] | None = None
    ) -> None:
        """One step. total: its points over all ranks."""
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
        """Rows of all steps of a block on the device, in one copy; None if they are there already."""
        if not self.fast or self.resident is None or block.rows is None or self.resident.rows.device == self.device:
            return None
        rows = self.resident.rows.index_select(0, block.rows.reshape(-1))
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        return rows.to(self.device, non_blocking=True).view(*block.rows.shape, -1)

    def batch(self, block: Block, rows: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
        n_local = block.local[number]
        if block.batches is not None:
            batch = block.batches[number]
            inputs, targets = (batch[name][:n_local].to(self.device) for name in ("inputs", "targets"))
            return self.model.scaled_inputs(inputs), self.model.scaled_targets(targets)
        assert self.resident is not None
        assert block.rows is not None
        if rows is not None:
            return self.layout.split(rows[number, :n_local])
        indices = block.rows[number, :n_local]
        if not self.fast:  # as a data set of single points would do it
            picked = [self.resident.rows[int(row)] for row in indices]
            return self.layout.split((torch.stack(picked) if picked else self.resident.rows[:0]).to(self.device))
        return self.layout.split(self.resident.rows.index_select(0, indices))

    def reset(self) -> None:
        """Discard state that is specific to one precision."""


class GraphsEngine:
    """CUDA graphs of up to `n` steps.

    inner: executes the first steps, and steps with terms for snapshots. points: per step. fuses: use `FusedStep` in the
    precisions that it supports, if it is faster than the gradient of inner. choices: whether it was faster, by the type of
    factors, as measured earlier in the training. notify: receives messages.

    On a CPU the steps of a graph are executed one by one, which is how they are tested.
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
        self.inner, self.points, self.fuses, self.notify = inner, points, fuses, notify
        self.choices = dict(choices or {})
        self.n = n
        self._lengths = [*(n // 4**power for power in range(8) if n // 4**power > 1), 1]
        """Numbers of steps of graphs."""
        self.steps: CapturedSteps[int] = CapturedSteps(self, CapturedUpdate(inner.update, n), warm_ups=WARM_UPS)
        device, dtype = inner.device, inner.model.dtype
        self.sums = torch.zeros(inner.task.n_levels, dtype=torch.float64, device=device)
        self._gathers_rows = inner.resident is not None and inner.resident.rows.device == device
        self._rows = torch.zeros(n, points, dtype=torch.int64, device=device)
        width = 0 if self._gathers_rows else inner.layout.width
        self._data = torch.zeros(n, points, width, dtype=dtype, device=device)
        n_groups = len(inner.update.optimiser.param_groups)
        self._numbers = torch.zeros(n, n_groups, 4, dtype=torch.float32, device=device)
        self._weight = torch.ones(points, dtype=dtype, device=device)
        self._factor = torch.zeros(inner.task.n_levels, dtype=dtype, device=device)
        self._in_order = torch.arange(points, device=device)
        self._settings = constant_settings(inner.update.optimiser)
        self._ready = False
        self._fused: FusedStep | None = None
        self._chosen = False
        self._stale = True
        """Whether weights may have been changed outside of captured steps."""

    def reset(self) -> None:
        """Discard state that is specific to one precision."""
        self.steps.reset()
        self._fused, self._chosen = None, False

    def run(self, block: Block, first_step: int, rates: Rates) -> Sums:
        """Execute the steps of a block. first_step: index of the first one."""
        inner, n_done = self.inner, 0
        sums = Sums(inner.task, inner.device)
        rows = inner.rows(block)
        self.sums.zero_()
        self._stale = True
        while n_done < len(block):
            step = first_step + n_done
            if not self._ready and inner.update.has_states:
                self.steps.update.make_capturable()  # before any step, so that a resumed run executes the same kind of steps
                self._ready = True
            if not inner.update.has_states or (inner.terms is not None and inner.task.due(step)):
                inner.step(sums, *inner.batch(block, rows, n_done), block.totals[n_done], step, rates())
                n_done, self._stale = n_done + 1, True
                continue
            length = self._length(block, n_done, step)
            self._write(block, rows, n_done, length)
            if not self._chosen:
                self._choose(length)
            self._execute(length, [rates() for _ in range(length)])
            n_done += length
        sums.by_level += self.sums
        if self._fused is not None:
            sums.by_level += self._fused.sums.sum(0)
            self._fused.sums.zero_()
            if not self._stale:  # gradients are those of the last step for callbacks that read them
                if self._fused.adam is not None:
                    self._fused.complete_gradients()
                inner.update.use(self._fused.gradients)
        if constant_settings(inner.update.optimiser) != self._settings:
            raise ForgefieldError(
                "training.engine: captured steps follow learning rates only, but a scheduler or callback has changed another "
                "setting of the optimiser (such as betas or weight_decay); use training.engine=eager, and with OneCycleLR and "
                "CyclicLR training.scheduler.cycle_momentum=false."
            )
        sums.points = sum(block.local)
        return sums

    def _choose(self, length: int) -> None:
        """Choose the kind of captured steps. length: of the next graph, whose points are already in place."""
        inner, dtype = self.inner, current_factor_dtype() if self.fuses else None
        self._chosen = True
        if dtype is None:
            return
        name = str(dtype).removeprefix("torch.")
        try:
            fused = FusedStep(inner.model, inner.task.loss, inner.layout, self.points, inner.update, dtype)
            if self.steps.captures and name not in self.choices:
                self.choices[name] = self._is_faster(fused, length)
            self._fused = fused if self.choices.get(name, True) else None
        except Exception as error:  # a failure of Triton, memory or the driver must not end the training
            self._fused, self.choices[name] = None, False
            self.notify(
                f"Fused kernels do not run here ({type(error).__name__}: {str(error)[:200]}); PyTorch's steps are used."
            )
        self.steps.reset()

    def _is_faster(self, fused: FusedStep, length: int) -> bool:
        """Whether fused kernels are faster, measured by replays of both kinds of steps on the points of the next graph.
        PyTorch's steps must be faster by a margin, so that noise does not decide."""
        length = self._longest(min(length, TIMED))
        times = []
        for candidate in (fused, None):
            self._fused = candidate
            self.steps.capture(length, length)
            times.append(1e6 * self.steps.seconds(length) / length)
        faster = times[0] < MARGIN * times[1]
        self.notify(
            f"A captured step takes {times[0]:.0f} us with fused kernels and {times[1]:.0f} us with PyTorch's: "
            f"{'fused kernels' if faster else 'those of PyTorch'} are used."
        )
        return faster

    def _length(self, block: Block, first: int, step: int) -> int:
        """Number of steps of the next graph: full steps without terms, with equal numbers of points over all ranks; otherwise
        1."""
        n_equal = 0
        for number in range(first, min(first + self.n, len(block))):
            due = self.inner.terms is not None and self.inner.task.due(step + number - first)
            if due or block.local[number] != self.points or block.totals[number] != block.totals[first]:
                break
            n_equal += 1
        return self._longest(n_equal)

    def _longest(self, n: int) -> int:
        """Number of steps of the longest graph of at most `n` steps, or 1."""
        return next((length for length in self._lengths if length <= n), 1)

    def _write(self, block: Block, rows: Tensor | None, first: int, length: int) -> None:
        """Write points and factors of the next steps to the tensors that captured steps read."""
        inner = self.inner
        if self._gathers_rows:
            assert block.rows is not None
            self._rows[:length].copy_(block.rows[first : first + length])
        else:
            for number in range(length):
                for buffer, values in zip(
                    inner.layout.split(self._data[number]), inner.batch(block, rows, first + number)
                ):
                    buffer[: len(values)] = values
        self._factor.copy_(inner.factor(block.totals[first]))
        if length == 1:
            self._weight.zero_()
            self._weight[: block.local[first]] = 1

    def _execute(self, length: int, rates: list[list[float]]) -> None:
        update, fused = self.steps.update, self._fused
        shares = update.next_shares(length)
        if fused is not None and self._stale:
            fused.refresh()
            self._stale = False
        if fused is None or fused.adam is None:
            update.write(rates, shares)
        else:
            numbers = fused.adam.numbers(rates, shares)
            self._numbers[:length].copy_(numbers.pin_memory() if self.steps.captures else numbers, non_blocking=True)
        self.steps.run(length, length)
        if fused is not None and fused.adam is not None:
            fused.adam.count(length)

    # ---- the work of captured steps

    def launch(self, length: int, number: int) -> bool:
        """A single step weights its points, some of which may be padding."""
        inner, fused = self.inner, self._fused
        weight = self._weight if length == 1 else None
        rows, index = self._data[number], self._in_order
        if self._gathers_rows:
            assert inner.resident is not None
            rows, index = inner.resident.rows, self._rows[number]
        if fused is not None:
            fused(rows, index, self._factor, weight, None if fused.adam is None else self._numbers[number])
            if fused.adam is None:
                inner.update.use(fused.gradients)
            return fused.adam is None
        if self._gathers_rows:
            rows = rows.index_select(0, index)
        self.sums += inner.gradient(*inner.layout.split(rows), self._factor, weight)
        inner.update.use(inner.gradient.gradients)
        return True

    def changed(self) -> list[Tensor]:
        return [self.sums, *([] if self._fused is None else [self._fused.sums])]

    def refresh(self) -> None:
        if self._fused is not None:
            self._fused.refresh()
