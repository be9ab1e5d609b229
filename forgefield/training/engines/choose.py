"""Builds the engine that the config asks for; `auto` measures those that can run here and takes the fastest.

Whatever is chosen is said, with the numbers, and kept with the run: a resume goes on with the same engine, since another one
would round differently.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from forgefield.data.batch import Batch, is_memory_error
from forgefield.errors import ForgefieldError
from forgefield.kernels.core.runtime import has_triton, interpreted
from forgefield.parallel.ranks import Ranks
from forgefield.training.engines.engine import Engine, OnlyOneSize
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.padding import SizePlan
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import (
    plain_way,
    remedy,
    require_equal,
    require_equal_evaluation,
    same_random_state,
)
from forgefield.training.options import TrainingOptions

ENGINES = ("eager", "compile", "graphs", "script")
WORTH_MEASURING_S = 600.0
"""A training that takes less with the eager engine is not worth the minutes that compiling takes."""
WORTH_KERNELS_S = 60.0
"""Nor one that takes less than this the half minute in which kernels are made."""


@dataclass(frozen=True)
class Circumstances:
    """What an engine is built for. steps: of the training, None where it has no end. plan: sizes of its batches."""

    function: Callable[[str], StepFunction]
    options: TrainingOptions
    world_size: int
    steps: int | None
    plan: Callable[[], SizePlan]
    tolerance: float
    notify: Callable[[str], None]
    given_denominators: bool = False
    against_graphs: str | None = None
    """Why this training cannot be captured, if it cannot."""
    c_code: bool = False
    """Whether the eager engine computes convolutions by compiled C code."""


@dataclass(frozen=True)
class Choice:
    """name: of the engine; captured: `compiled` or `eager`, for graphs; derivative: double, tangent or kernels."""

    name: str
    derivative: str
    captured: str | None = None
    c_code: bool = False
    """Whether convolutions are computed by compiled C code, by the eager engine on a CPU."""

    @property
    def compiles(self) -> bool:
        return self.name == "compile" or self.captured == "compiled"

    def __str__(self) -> str:
        inner = f" of the {self.captured} step" if self.captured else ""
        form = "generated kernels" if self.derivative == "kernels" else f"{self.derivative} derivative"
        code = ", convolutions in C" if self.c_code else ""
        return f"{self.name}{inner}, {form}{code}"


def build(choice: Choice, on: Circumstances, device: torch.device) -> Engine:
    """The engine of that name, or one sentence why it cannot be had here."""
    _refuse(choice, device, on.against_graphs)
    function = on.function(choice.derivative)
    if choice.derivative == "kernels":
        refusal = why_not_kernels(choice, function, device)
        if refusal is not None:
            raise ForgefieldError(f"training.derivative=kernels: {refusal}")
    engine = Engine(function, world_size=on.world_size)
    # Imported where they are needed: what they need takes seconds to import.
    if choice.name == "script":
        from forgefield.training.engines.script import ScriptEngine

        engine = ScriptEngine(function, world_size=on.world_size)
    if choice.compiles:
        from forgefield.training.engines.compiled import CompileEngine

        options = inductor_options(on.options)
        engine = CompileEngine(function, world_size=on.world_size, options=options, notify=on.notify)
    if choice.name == "graphs":
        engine = GraphsEngine(engine, plan=on.plan(), notify=on.notify)
    engine.given_denominators = on.given_denominators
    return engine


def refuse_engine(options: TrainingOptions, device: torch.device) -> None:
    """Stop where the device does not support the engine that the config asks for, before anything is done."""
    against = why_no_kernels_on(device) if options.derivative == "kernels" else None
    if against is not None:
        raise ForgefieldError(f"training.derivative=kernels: {against}")
    choice = wanted(options)
    if choice is not None:
        _refuse(choice, device, None)


def _refuse(choice: Choice, device: torch.device, against_graphs: str | None) -> None:
    refusal = why_not(choice.name, device) or (why_not("compile", device) if choice.compiles else None)
    if choice.name == "graphs":
        refusal = refusal or against_graphs
    if refusal is not None:
        raise ForgefieldError(f"training.engine={choice.name}: {refusal}")


def why_not(name: str, device: torch.device) -> str | None:
    """What keeps an engine from running on a device."""
    if name == "graphs" and device.type != "cuda":
        return f"CUDA graphs need an NVIDIA GPU, and this training runs on {device.type}; use compile or eager."
    if name == "compile" and device.type == "cpu" and not any(shutil.which(word) for word in ("c++", "g++", "clang++")):
        return (
            "on a CPU torch compiles with a C++ compiler, and there is none (g++ or clang++); install one or use eager."
        )
    if name == "compile" and device.type == "cuda" and not has_triton():
        return "torch compiles for a GPU with Triton, which is not installed; use eager."
    return None


def why_not_kernels(choice: Choice, function: StepFunction, device: torch.device) -> str | None:
    """What keeps generated kernels from being used."""
    if choice.compiles or choice.name == "script":
        return "kernels are launched as they are, not compiled or scripted; use training.engine=graphs or auto."
    if (reason := why_no_kernels_on(device)) is not None:
        return reason
    if not (function.task.needs_forces or function.task.needs_stress):
        return "they make forces, and none are trained here; use double."
    return function.potential.interface.kernel_refusal()


def why_no_kernels_on(device: torch.device) -> str | None:
    if (device.type != "cuda" or torch.version.hip is not None) and not interpreted():
        return f"kernels need an NVIDIA GPU, and this is {device.type}; use double or tangent."
    return None if has_triton() else "kernels are made with Triton, which is not installed; use double or tangent."


def inductor_options(options: TrainingOptions) -> dict[str, Any]:
    """Settings of `training.compile`, each of which Inductor must know."""
    import torch._inductor.config as known

    from forgefield.config.nearest import did_you_mean

    given = dict(options.compile.options or {})
    for name in given:
        if name.replace("-", "_") not in known._config:  # type: ignore[attr-defined]
            raise ForgefieldError(
                f"training.compile.options: Inductor has no setting '{name}'.{did_you_mean(name, list(known._config))}"  # type: ignore[attr-defined]
            )
    return given


def wanted(options: TrainingOptions, *, can_use_kernels: bool = False) -> Choice | None:
    """What the config asks for; None where it leaves the choice to a measurement."""
    name = options.engine or "eager"
    if name == "auto":
        return None
    derivative = options.derivative
    if derivative == "auto":
        derivative = "kernels" if name == "graphs" and can_use_kernels else "double"
    captured = None
    if name == "graphs":
        captured = "compiled" if options.graphs.compiled and derivative != "kernels" else "eager"
    return Choice(name, derivative, captured)


def knots_wanted(options: TrainingOptions) -> int:
    """Intervals of the tables that kernels read radial weights from; zero where they take the network's own values."""
    return int(options.kernels.knots) if options.kernels.radial == "table" else 0


def can_use_kernels(on: Circumstances, device: torch.device) -> bool:
    """Whether `auto` may take them: float64 is left to the plain operations that are its reference."""
    function = on.function("double")
    if function.potential.interface.weight_dtype() == torch.float64:
        return False
    return why_not_kernels(Choice("graphs", "kernels", "eager"), function, device) is None


def start(choice: Choice, on: Circumstances, batch: Batch) -> Engine:
    """The engine, compared with the eager one on this batch before anything depends on it."""
    device = batch["positions"].device
    engine = build(choice, on, device)
    reference = Engine(on.function("double"), world_size=on.world_size)
    reference.given_denominators = on.given_denominators
    if choice == Choice("eager", "double") and not engine.function.sums_by_kernels:  # the reference itself
        return engine
    try:
        compared = require_equal(engine, reference, batch, on.tolerance)
    except OnlyOneSize as error:
        raise ForgefieldError(f"training.engine={choice.name}: {error}; use {remedy(engine)}.") from error
    except _broken() as error:
        if is_memory_error(error):
            raise
        if choice.derivative == "kernels":
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ForgefieldError(
                f"training.derivative=kernels: the kernels of this model cannot be made or run here ({reason}); use "
                "training.derivative=double."
            ) from error
        from forgefield.training.engines.tracing import where_it_broke

        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ForgefieldError(
            f"training.engine={choice.name}: the step cannot be {_verb(choice)} because of {where_it_broke(error)} ({reason}); "
            f"use {remedy(engine)}."
        ) from error
    if compared.difference is None:
        on.notify(
            f"Engine {choice}: the model is random in training, so it could not be compared with the eager engine."
        )
    else:
        kernels = ", sums over edges by kernels" if engine.function.sums_by_kernels else ""
        on.notify(
            f"Engine {choice}{kernels}: loss, errors and all gradients equal those of {plain_way(engine)} to "
            f"{compared.difference:.1e}.{compared.describe()}"
        )
    return engine


def _broken() -> tuple[type[Exception], ...]:
    """What is raised where a step cannot be traced, captured or compiled; by Triton also where a kernel needs more than the
    device has."""
    errors = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)
    if not has_triton():
        return errors
    from triton.errors import TritonError

    return (*errors, TritonError)


def _verb(choice: Choice) -> str:
    return {"graphs": "captured", "script": "scripted", "compile": "compiled"}.get(choice.name, "computed")


def measure_and_choose(on: Circumstances, batch: Batch) -> tuple[Choice, Engine]:
    """The fastest engine for batches like this one, and the table it was chosen from."""
    device = batch["positions"].device
    derivative = "double" if on.options.derivative == "auto" else on.options.derivative
    eager = Choice("eager", derivative, c_code=on.c_code)
    engine = start(eager, on, batch)
    seconds = _time(engine, batch)
    whole = None if on.steps is None else on.steps * seconds
    kernels = on.options.derivative == "auto" and can_use_kernels(on, device)
    if whole is not None and whole < WORTH_MEASURING_S:
        form = "kernels" if kernels and whole > WORTH_KERNELS_S else eager.derivative
        return _for_a_short_training(eager, engine, seconds, whole, on, batch, form)
    rows: list[tuple[Choice, float | None, str]] = [(eager, seconds, "")]
    engines = {eager: engine}
    for choice in _candidates(eager.derivative, device, kernels):
        try:
            engines[choice] = start(choice, on, batch)
            rows.append((choice, _time(engines[choice], batch), ""))
        except ForgefieldError as error:
            rows.append((choice, None, str(error)))
    for choice, taken, reason in rows:
        on.notify(f"  {choice}: {reason}" if taken is None else f"  {choice}: {1000 * taken:.3g} ms a step")
    best = min((row for row in rows if row[1] is not None), key=lambda row: row[1] or 0.0)[0]
    on.notify(f"Engine auto: {best}.")
    return best, engines[best]


def _for_a_short_training(
    eager: Choice, engine: Engine, seconds: float, whole: float, on: Circumstances, batch: Batch, form: str
) -> tuple[Choice, Engine]:
    """What starts at once, by rule: a choice by the clock could differ between two runs of the same training."""
    said = f"{1000 * seconds:.3g} ms a step, the training takes about {_duration(whole)} that way"
    captured = Choice("graphs", form, "eager")
    if batch["positions"].is_cuda:
        try:
            engine = start(captured, on, batch)
            on.notify(f"Engine auto: {captured}; eager would take {said}.")
            return captured, engine
        except ForgefieldError as error:
            on.notify(f"Engine auto: not graphs, because {error}")
    on.notify(f"Engine auto: eager, {said}.")
    return eager, engine


def _candidates(derivative: str, device: torch.device, kernels: bool) -> list[Choice]:
    """What is measured beside eager. Where kernels can be used nothing else is compiled: it would take minutes, and lose."""
    if device.type != "cuda":
        return [] if derivative == "kernels" else [Choice("compile", derivative)]
    if kernels or derivative == "kernels":
        return [Choice("graphs", "kernels", "eager")]
    return [
        Choice("compile", derivative),
        Choice("graphs", derivative, "eager"),
        Choice("graphs", derivative, "compiled"),
    ]


def _time(engine: Engine, batch: Batch, repeats: int = 3) -> float:
    """Seconds of one step with its gradients; the least of some."""
    on_gpu = batch["positions"].is_cuda
    taken = []
    for number in range(repeats + 1):
        with same_random_state(batch):
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            engine.trial(batch)
            if on_gpu:
                torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
        if number == 1 and taken[1] > 2.0:
            break
    return min(taken[1:])


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


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
        c_code = self._uses_c_code(function("double"))

        def with_c_code(derivative: str) -> StepFunction:
            step = function(derivative)
            step.c_code = c_code
            return step

        on = Circumstances(
            function=with_c_code,
            options=self.options,
            world_size=self.ranks.world_size,
            steps=steps if steps > 0 else None,
            plan=self.plan,
            tolerance=self.tolerance,
            notify=self.notify,
            against_graphs=against_graphs,
            given_denominators=self.ranks.world_size > 1 or self.options.memory.split or self.options.memory.parts > 1,
            c_code=c_code,
        )
        choice = wanted(self.options, can_use_kernels=self._takes_kernels(on, batch))
        engine: Engine | None = None
        if choice is None and self.chosen_before is not None:
            choice = Choice(**self.chosen_before)
        if choice is None:
            if self.ranks.is_rank_zero:
                choice, engine = measure_and_choose(on, batch)
            choice = self.ranks.broadcast(choice)
        chosen: Choice = replace(choice, c_code=c_code and choice.name == "eager")
        return chosen, self._one_after_another(engine, lambda: start(chosen, on, batch))

    @property
    def excludes_c_code(self) -> bool:
        """Whether this run was started without compiled C code, and so is resumed without."""
        return self.chosen_before is not None and not self.chosen_before.get("c_code", False)

    def _uses_c_code(self, function: StepFunction) -> bool:
        """Whether convolutions are computed by C code: as in an earlier start of this run, or if all ranks have a compiler."""
        if not function.may_use_c_code:
            return False
        available = all(self.ranks.all_gather(function.convolves_by_c))
        if self.chosen_before is not None and not available:
            raise ForgefieldError(
                "this run was started with convolutions compiled from C, and on at least one rank there is no working C "
                "compiler now; install one, such as gcc (apt install gcc, conda install gcc), or name it in $CC. To continue "
                "with PyTorch's operations, which round differently, set training.kernels.edges=false."
            )
        return available

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
        if engine.name != "eager" or function.derivative == "kernels" or function.uses_edge_kernels:
            with self.compiling():
                require_equal_evaluation(engine, reference, batch, self.tolerance)
