"""Gets the engine of a training going on its first batch: on all ranks the same one, and the one it had before a resume."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from torch import Tensor

from forgefield.config.schema import TrainingOptions
from forgefield.parallel.ranks import Ranks
from forgefield.training.engines.choose import Choice, Circumstances, can_use_kernels, measure_and_choose, start, wanted
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.size_plan import SizePlan
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import require_equal_evaluation

Batch = dict[str, Tensor]


class EngineStarter:
    """options: the config's `training` section. plan: sizes of the batches to come. tolerance: of the precision.

    chosen_before: what an earlier start of this run has chosen, if anything. keep: called with the choice, to be stored.
    compiling: entered where code is generated, which may take minutes; a request to stop ends it.
    """

    def __init__(
        self,
        options: TrainingOptions,
        ranks: Ranks,
        *,
        plan: Callable[[], SizePlan],
        tolerance: float,
        notify: Callable[[str], None],
        chosen_before: dict[str, Any] | None = None,
        keep: Callable[[dict[str, Any]], None] = lambda choice: None,
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.options, self.ranks, self.plan, self.tolerance, self.notify = options, ranks, plan, tolerance, notify
        self.chosen_before, self.keep, self.compiling = chosen_before, keep, compiling

    def start(
        self, function: Callable[[str], StepFunction], batch: Batch, *, steps: int, against_graphs: str | None = None
    ) -> Engine:
        """The engine. steps: of the whole training, -1 without limit. against_graphs: why it cannot be captured, if so."""
        with self.compiling():
            chosen, engine = self._start(function, batch, steps=steps, against_graphs=against_graphs)
        self.keep(asdict(chosen))
        return engine

    def _start(
        self, function: Callable[[str], StepFunction], batch: Batch, *, steps: int, against_graphs: str | None
    ) -> tuple[Choice, Engine]:
        on = Circumstances(
            function=function,
            options=self.options,
            world_size=self.ranks.world_size,
            steps=steps if steps > 0 else None,
            plan=self.plan,
            tolerance=self.tolerance,
            notify=self.notify,
            against_graphs=against_graphs,
            given_denominators=self.ranks.world_size > 1 or self.options.memory.split or self.options.memory.parts > 1,
        )
        choice = wanted(self.options, can_use_kernels=self._takes_kernels(on, batch))
        engine: Engine | None = None
        if choice is None and self.chosen_before is not None:
            choice = Choice(**self.chosen_before)
        if choice is None:
            if self.ranks.is_rank_zero:
                choice, engine = measure_and_choose(on, batch)
            choice = self.ranks.broadcast(choice)
        chosen: Choice = choice
        return chosen, self._one_after_another(engine, lambda: start(chosen, on, batch))

    def _takes_kernels(self, on: Circumstances, batch: Batch) -> bool:
        """Whether an engine that can use kernels takes them, where the config leaves it open: as an earlier start did."""
        before = self.chosen_before
        if before is not None and before["name"] == self.options.engine:
            return bool(before["derivative"] == "kernels")
        return self.ranks.broadcast(can_use_kernels(on, batch["positions"].device))

    def _one_after_another(self, engine: Engine | None, build: Callable[[], Engine]) -> Engine:
        """The first process of each node compiles, the others find its code on disk. engine: where there is one already."""
        if engine is None and self.ranks.launch.local_rank == 0:
            engine = build()
        self.ranks.all_gather(None)
        return engine if engine is not None else build()

    def check_evaluation(self, engine: Engine, reference: Engine, batch: Batch) -> None:
        """Compare what a validation computes, once."""
        function = engine.function
        if engine.name != "eager" or function.derivative == "kernels" or function.sums_by_kernels:
            with self.compiling():
                require_equal_evaluation(engine, reference, batch, self.tolerance)
