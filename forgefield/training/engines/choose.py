"""Builds the engine that the config requests; `auto` measures the available ones and uses the fastest.

The choice is logged with the measured times and stored in the run: a resumed run uses the same engine, because another one
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
from forgefield.data.padding import SizePlan
from forgefield.errors import ForgefieldError
from forgefield.kernels.core.compiling import compilation_reported
from forgefield.kernels.core.runtime import has_triton, interpreted
from forgefield.ops.execution import C_LATEST, C_NONE
from forgefield.parallel.ranks import Ranks
from forgefield.training.engines.engine import Engine, FixedSizeError
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import (
    reference_name,
    remedy,
    require_equal,
    require_equal_evaluation,
    same_random_state,
)
from forgefield.training.options import TrainingOptions

ENGINES = ("eager", "compile", "graphs", "script")
WORTH_MEASURING_S = 600.0
"""Trainings that take less with the eager engine are not compiled, which takes minutes."""
INSTEAD_OF_KERNELS = "training.derivative=double trains without most of them; Ctrl-C stops, and the run is unchanged."
WORTH_KERNELS_S = 60.0
"""Trainings that take less do not use generated kernels, whose compilation takes half a minute."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is built for.

    function: the step for a form of derivative.
    steps: number of steps of the training; None without limit.
    plan: sizes to which batches are padded.
    tolerance: largest relative difference from the eager engine.
    external_denominators: whether steps get the denominators of the loss from outside.
    graphs_refusal: why this training cannot be captured; None if it can.
    evaluation_plan: as `plan`, for batches of the validation, whose sizes are settled after the first training step.
    c_code: what the eager engine computes by compiled C code (`ops/execution.py`).
    """

    function: Callable[[str], StepFunction]
    options: TrainingOptions
    world_size: int
    steps: int | None
    plan: Callable[[], SizePlan]
    tolerance: float
    notify: Callable[[str], None]
    external_denominators: bool = False
    graphs_refusal: str | None = None
    evaluation_plan: Callable[[], SizePlan] = lambda: SizePlan(())
    c_code: int = C_NONE


@dataclass(frozen=True)
class Choice:
    """name: of the engine; captured: `compiled` or `eager`, for graphs; derivative: double, tangent or kernels."""

    name: str
    derivative: str
    captured: str | None = None
    c_code: int = C_NONE
    """What the eager engine computes by compiled C code on a CPU (`ops/execution.py`)."""

    @property
    def compiles(self) -> bool:
        return self.name == "compile" or self.captured == "compiled"

    def __str__(self) -> str:
        inner = f" of the {self.captured} step" if self.captured else ""
        form = "generated kernels" if self.derivative == "kernels" else f"{self.derivative} derivative"
        code = ("", ", convolutions in C", ", C code")[self.c_code]
        return f"{self.name}{inner}, {form}{code}"


def build(choice: Choice, setup: EngineSetup, device: torch.device) -> Engine:
    """The chosen engine. Raises ForgefieldError if it is not available."""
    _refuse(choice, device, setup.graphs_refusal)
    function = setup.function(choice.derivative)
    if choice.derivative == "kernels":
        refusal = kernels_refusal(choice, function, device)
        if refusal is not None:
            raise ForgefieldError(f"training.derivative=kernels: {refusal}")
    engine = Engine(function, world_size=setup.world_size)
    # Imported on demand, because their dependencies take seconds to import.
    if choice.name == "script":
        from forgefield.training.engines.script import ScriptEngine

        engine = ScriptEngine(function, world_size=setup.world_size)
    if choice.compiles:
        from forgefield.training.engines.compiled import CompileEngine

        options = inductor_options(setup.options)
        engine = CompileEngine(function, world_size=setup.world_size, options=options, notify=setup.notify)
    if choice.name == "graphs":
        engine = GraphsEngine(engine, plan=setup.plan(), evaluation_plan=setup.evaluation_plan, notify=setup.notify)
    engine.external_denominators = setup.external_denominators
    return engine


def refuse_engine(options: TrainingOptions, device: torch.device) -> None:
    """Raise ForgefieldError if the device does not support the engine that the config requests."""
    refusal = kernels_refusal_on(device) if options.derivative == "kernels" else None
    if refusal is not None:
        raise ForgefieldError(f"training.derivative=kernels: {refusal}")
    choice = requested_choice(options)
    if choice is not None:
        _refuse(choice, device, None)


def _refuse(choice: Choice, device: torch.device, graphs_refusal: str | None) -> None:
    refusal = engine_refusal(choice.name, device) or (engine_refusal("compile", device) if choice.compiles else None)
    if choice.name == "graphs":
        refusal = refusal or graphs_refusal
    if refusal is not None:
        raise ForgefieldError(f"training.engine={choice.name}: {refusal}")


def engine_refusal(name: str, device: torch.device) -> str | None:
    """Why an engine cannot run on a device; None if it can."""
    if name == "graphs" and device.type != "cuda":
        return f"CUDA graphs need an NVIDIA GPU, but this training runs on {device.type}; use compile or eager."
    if name == "compile" and device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "torch needs a C++ compiler (g++ or clang++) on a CPU, but none is installed; install one or use eager."
    if name == "compile" and device.type == "cuda" and not has_triton():
        return "torch needs Triton to compile for a GPU, but it is not installed; use eager."
    return None


def kernels_refusal(choice: Choice, function: StepFunction, device: torch.device) -> str | None:
    """Why generated kernels cannot be used; None if they can."""
    if choice.compiles or choice.name == "script":
        return "kernels cannot be compiled or scripted; use training.engine=graphs or auto."
    if (reason := kernels_refusal_on(device)) is not None:
        return reason
    if not (function.task.needs_forces or function.task.needs_stress):
        return "kernels compute forces, but neither forces nor stress are trained here; use double."
    return function.potential.interface.kernel_refusal()


def kernels_refusal_on(device: torch.device) -> str | None:
    """Why generated kernels cannot run on a device; None if they can."""
    if (device.type != "cuda" or torch.version.hip is not None) and not interpreted():
        return f"kernels need an NVIDIA GPU, but this training runs on {device.type}; use double or tangent."
    return None if has_triton() else "kernels need Triton, which is not installed; use double or tangent."


def inductor_options(options: TrainingOptions) -> dict[str, Any]:
    """The settings in `training.compile.options`. Raises ForgefieldError for a setting that Inductor does not have."""
    import torch._inductor.config as inductor

    from forgefield.config.nearest import did_you_mean

    available = vars(inductor)["_config"]
    for name in options.compile.options:
        if name.replace("-", "_") not in available:
            hint = did_you_mean(name, list(available))
            raise ForgefieldError(f"training.compile.options: Inductor has no setting '{name}'.{hint}")
    return dict(options.compile.options)


def requested_choice(options: TrainingOptions, *, can_use_kernels: bool = False) -> Choice | None:
    """The choice that the config makes; None if it is left to a measurement."""
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


def table_knots(options: TrainingOptions) -> int:
    """Number of intervals of the tables from which kernels read radial weights; 0 if they use the exact values."""
    return int(options.kernels.knots) if options.kernels.radial == "table" else 0


def can_use_kernels(setup: EngineSetup, device: torch.device) -> bool:
    """Whether `auto` may use kernels; float64 always uses the reference operations."""
    function = setup.function("double")
    if function.potential.interface.weight_dtype() == torch.float64:
        return False
    return kernels_refusal(Choice("graphs", "kernels", "eager"), function, device) is None


def start(choice: Choice, setup: EngineSetup, batch: Batch) -> Engine:
    """The engine, after a comparison with the eager engine on this batch."""
    device = batch["positions"].device
    engine = build(choice, setup, device)
    reference = Engine(setup.function("double"), world_size=setup.world_size)
    reference.external_denominators = setup.external_denominators
    if choice == Choice("eager", "double") and not engine.function.sums_by_kernels:  # the reference itself
        return engine
    try:
        compared = require_equal(engine, reference, batch, setup.tolerance)
    except FixedSizeError as error:
        raise ForgefieldError(f"training.engine={choice.name}: {error}; use {remedy(engine)}.") from error
    except _engine_errors() as error:
        if is_memory_error(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if choice.derivative == "kernels":
            raise ForgefieldError(
                f"training.derivative=kernels: the kernels of this model could not be compiled or run ({reason}); use "
                "training.derivative=double."
            ) from error
        from forgefield.training.engines.tracing import failing_line

        raise ForgefieldError(
            f"training.engine={choice.name}: the step cannot be {_verb(choice)} because of {failing_line(error)} ({reason}); "
            f"use {remedy(engine)}."
        ) from error
    if compared.difference is None:
        setup.notify(
            f"Engine {choice}: could not be compared with the eager engine, because the model is random in training."
        )
    else:
        kernels = ", sums over edges by kernels" if engine.function.sums_by_kernels else ""
        setup.notify(
            f"Engine {choice}{kernels}: loss, errors and all gradients equal those of {reference_name(engine)} to "
            f"{compared.difference:.1e}.{compared.describe()}"
        )
    return engine


def _engine_errors() -> tuple[type[Exception], ...]:
    """Exceptions of steps that cannot be traced, captured or compiled; Triton's also if a kernel exceeds the device's
    resources."""
    errors = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)
    if not has_triton():
        return errors
    from triton.errors import TritonError

    return (*errors, TritonError)


def _verb(choice: Choice) -> str:
    return {"graphs": "captured", "script": "scripted", "compile": "compiled"}.get(choice.name, "computed")


def measure_and_choose(setup: EngineSetup, batch: Batch) -> tuple[Choice, Engine]:
    """The fastest engine for batches like this one. The measured times are logged."""
    device = batch["positions"].device
    derivative = "double" if setup.options.derivative == "auto" else setup.options.derivative
    eager = Choice("eager", derivative, c_code=setup.c_code)
    engine = start(eager, setup, batch)
    seconds = _time(engine, batch)
    total = None if setup.steps is None else setup.steps * seconds
    kernels = setup.options.derivative == "auto" and can_use_kernels(setup, device)
    if total is not None and total < WORTH_MEASURING_S:
        form = "kernels" if kernels and total > WORTH_KERNELS_S else eager.derivative
        return _choose_for_short_training(eager, engine, seconds, total, setup, batch, form)
    rows: list[tuple[Choice, float | None, str]] = [(eager, seconds, "")]
    engines = {eager: engine}
    for choice in _candidates(eager.derivative, device, kernels):
        try:
            engines[choice] = start(choice, setup, batch)
            rows.append((choice, _time(engines[choice], batch), ""))
        except ForgefieldError as error:
            rows.append((choice, None, str(error)))
    for choice, step_seconds, reason in rows:
        result = reason if step_seconds is None else f"{1000 * step_seconds:.3g} ms per step"
        setup.notify(f"  {choice}: {result}")
    best = min((row for row in rows if row[1] is not None), key=lambda row: row[1] or 0.0)[0]
    setup.notify(f"Engine auto: {best}.")
    return best, engines[best]


def _choose_for_short_training(
    eager: Choice, engine: Engine, seconds: float, total: float, setup: EngineSetup, batch: Batch, form: str
) -> tuple[Choice, Engine]:
    """An engine that starts fast, chosen by rule: measured times could differ between two runs of the same training."""
    estimate = f"{1000 * seconds:.3g} ms per step, about {_duration(total)} for the training"
    captured = Choice("graphs", form, "eager")
    if batch["positions"].is_cuda:
        try:
            engine = start(captured, setup, batch)
            setup.notify(f"Engine auto: {captured}; eager would take {estimate}.")
            return captured, engine
        except ForgefieldError as error:
            setup.notify(f"Engine auto: not graphs, because {error}")
    setup.notify(f"Engine auto: eager, {estimate}.")
    return eager, engine


def _candidates(derivative: str, device: torch.device, kernels: bool) -> list[Choice]:
    """Engines to measure in addition to eager. Where kernels can be used nothing else is compiled, because it would be
    slower."""
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
    """Minimum time of one step with its gradients, in seconds, after one step to warm up."""
    on_gpu = batch["positions"].is_cuda
    times: list[float] = []
    for number in range(repeats + 1):
        with same_random_state(batch):
            if on_gpu:
                torch.cuda.synchronize()
            start_time = time.perf_counter()
            engine.trial(batch)
            if on_gpu:
                torch.cuda.synchronize()
        times.append(time.perf_counter() - start_time)
        if number == 1 and times[1] > 2.0:
            break
    return min(times[1:])


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class EngineStarter:
    """Chooses and starts the engine of a training, the same one on all ranks.

    options: the config's `training` section.
    plan, evaluation_plan: sizes to which batches of the training and of the validation are padded.
    tolerance: of the precision.
    stored_choice: the choice of an earlier start of this run, if any.
    store: called with the choice.
    compiling: context in which code is generated, which may take minutes; a request to stop ends it.
    """

    def __init__(
        self,
        options: TrainingOptions,
        ranks: Ranks,
        *,
        plan: Callable[[], SizePlan],
        tolerance: float,
        notify: Callable[[str], None],
        stored_choice: dict[str, Any] | None = None,
        store: Callable[[dict[str, Any]], None] = lambda choice: None,
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
        evaluation_plan: Callable[[], SizePlan] = lambda: SizePlan(()),
    ) -> None:
        self.options, self.ranks, self.plan, self.tolerance, self.notify = options, ranks, plan, tolerance, notify
        self.stored_choice, self.store, self.compiling = stored_choice, store, compiling
        self.evaluation_plan = evaluation_plan

    def start(
        self, function: Callable[[str], StepFunction], batch: Batch, *, steps: int, graphs_refusal: str | None = None
    ) -> Engine:
        """The engine.

        steps: number of steps of the training, -1 without limit.
        graphs_refusal: why the training cannot be captured; None if it can.
        """
        with self.compiling(), compilation_reported(self.notify, INSTEAD_OF_KERNELS):
            chosen, engine = self._start(function, batch, steps=steps, graphs_refusal=graphs_refusal)
        self.store(asdict(chosen))
        return engine

    def _start(
        self, function: Callable[[str], StepFunction], batch: Batch, *, steps: int, graphs_refusal: str | None
    ) -> tuple[Choice, Engine]:
        c_code = self._level_of_c_code(function("double"))

        def with_c_code(derivative: str) -> StepFunction:
            step = function(derivative)
            step.c_code = c_code
            return step

        setup = EngineSetup(
            function=with_c_code,
            options=self.options,
            world_size=self.ranks.world_size,
            steps=steps if steps > 0 else None,
            plan=self.plan,
            tolerance=self.tolerance,
            notify=self.notify,
            graphs_refusal=graphs_refusal,
            evaluation_plan=self.evaluation_plan,
            external_denominators=self.ranks.world_size > 1
            or self.options.memory.split
            or self.options.memory.parts > 1,
            c_code=c_code,
        )
        choice = requested_choice(self.options, can_use_kernels=self._uses_kernels(setup, batch))
        engine: Engine | None = None
        if choice is None and self.stored_choice is not None:
            choice = Choice(**{**self.stored_choice, "c_code": self.c_code})
        if choice is None:
            if self.ranks.is_rank_zero:
                choice, engine = measure_and_choose(setup, batch)
            choice = self.ranks.broadcast(choice)
        chosen: Choice = replace(choice, c_code=c_code if choice.name == "eager" else C_NONE)
        return chosen, self._build_by_node(engine, lambda: start(chosen, setup, batch))

    @property
    def c_code(self) -> int:
        """What compiled C code may compute: everything in a new run, otherwise what it computed in the first start of this one.
        Runs of earlier versions stored whether convolutions were compiled."""
        return C_LATEST if self.stored_choice is None else int(self.stored_choice.get("c_code", C_NONE))

    def _level_of_c_code(self, function: StepFunction) -> int:
        """What is computed by C code: as in an earlier start of this run, or everything if all ranks have a compiler."""
        if not function.may_use_c_code:
            return C_NONE
        available = all(self.ranks.all_gather(function.convolves_by_c))
        if self.stored_choice is not None and not available:
            raise ForgefieldError(
                "this run was started with convolutions compiled from C, and on at least one rank there is no working C "
                "compiler now; install one, such as gcc (apt install gcc, conda install gcc), or name it in $CC. To continue "
                "with PyTorch's operations, which round differently, set training.kernels.edges=false."
            )
        return function.c_code if available else C_NONE

    def _uses_kernels(self, setup: EngineSetup, batch: Batch) -> bool:
        """Whether kernels are used where the config does not specify it: as in an earlier start of the run."""
        stored = self.stored_choice
        if stored is not None and stored["name"] == self.options.engine:
            return bool(stored["derivative"] == "kernels")
        return self.ranks.broadcast(can_use_kernels(setup, batch["positions"].device))

    def _build_by_node(self, engine: Engine | None, build: Callable[[], Engine]) -> Engine:
        """The engine, compiled by the first process of each node; the others load its code from disk.

        engine: if it exists already.
        """
        if engine is None and self.ranks.launch.local_rank == 0:
            engine = build()
        self.ranks.all_gather(None)
        return engine if engine is not None else build()

    def check_evaluation(self, engine: Engine, reference: Engine, batch: Batch) -> None:
        """Compare the evaluation of a batch with that of the reference engine."""
        function = engine.function
        compiles = engine.name != "eager" or function.derivative == "kernels" or function.sums_by_kernels
        if compiles or function.convolves_by_c:
            # C code has been compiled by now, so that a request to stop can wait for the end of the batch.
            with self.compiling() if compiles else nullcontext():
                require_equal_evaluation(engine, reference, batch, self.tolerance)
