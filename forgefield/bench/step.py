"""One training step of a config without Lightning, to measure its memory and its work, and the limits of the device.

Model, task, optimiser, average and engine are those of a training with the same config; so are the parameters that are trained
(`training.freeze`, `lora`, `lr_groups`).

The limits of the device are the rates of a large copy and of large matrix products, each the best of a short loop. The work of
a step is counted in an eager step: the operations of its matrix products, and the bytes that it moves at least.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from forgefield.data.batch import Batch, batch_shapes, to_device, with_edges
from forgefield.data.module import DataModule, FrameData
from forgefield.data.padding import sizes
from forgefield.models.potential import Potential
from forgefield.settings import Config
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.training.engines.choose import table_knots
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import StepFunction
from forgefield.training.optim.averages import StochasticAverage, WeightAverage, weight_average
from forgefield.training.optim.optimisers import build_optimiser
from forgefield.training.optim.trainable import parameter_groups
from forgefield.training.precision import Precision
from forgefield.training.problem.frames import build_frames_problem


@dataclass
class BareStep:
    """Everything that a training step needs.

    batches: of `data`, as the task and the model need them. average: of the weights, if the config has one. resolved: all
    options of the model. knots: of the tables that kernels read, zero for none. storage: precision in which kernels store
    rows. edge_kernels: whether sums over edges may use kernels.
    """

    data: FrameData
    batches: DataModule
    potential: Potential
    task: Task
    optimiser: torch.optim.Optimizer
    average: WeightAverage | None
    device: torch.device
    resolved: dict[str, Any]
    precision: Precision
    knots: int
    storage: str
    edge_kernels: bool
    errors: ErrorMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.errors = self.task.error_metrics(self.data.species.symbols)

    def function(self, derivative: str) -> StepFunction:
        shapes = batch_shapes(self.data.train.fields)
        return StepFunction(
            self.potential,
            self.task,
            self.errors,
            derivative=derivative,
            knots=self.knots,
            storage=self.storage,
            edge_kernels=self.edge_kernels,
            shapes=shapes,
        )

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """These frames of the training data, on the device."""
        return self.on_device(self.data.train.batch(np.asarray(rows)))

    def first_batch(self) -> Batch:
        """The first batch of a training, on the device."""
        return self.on_device(next(iter(self.batches.train_dataloader())))

    def on_device(self, batch: Batch) -> Batch:
        return with_edges(to_device(batch, self.device), self.potential.cutoff)

    def run(self, engine: Engine, batch: Batch) -> None:
        """One complete step, in the order in which Lightning does it."""

        def evaluate() -> Tensor:
            with self.precision.applied(self.precision.start):
                loss = engine.step(batch).loss
                self.optimiser.zero_grad()
                loss.backward()
            return loss

        # Some optimisers evaluate a batch several times. They accept a tensor, although the annotation requires a float.
        self.optimiser.step(cast(Callable[[], float], evaluate))
        if self.average is not None:
            self.average.update()

    def persistent_tensors(self) -> list[Tensor]:
        """Tensors that persist from step to step: weights, gradients, optimiser state and average."""
        parameters = list(self.potential.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        average = [] if self.average is None else list(self.average.average.values())
        return [*parameters, *self.potential.buffers(), *gradients, *_tensors(self.optimiser.state), *average]


def bare_step(config: Config, *, precision: str | None = None, data: FrameData | None = None) -> BareStep:
    """One training step of a config. precision: replaces that of the config. data: read before, for the same data section."""
    config = copy.deepcopy(config)
    config.training.precision = precision if precision is not None else first_precision(config)
    arithmetic, device = Precision(config.training.precision), training_device(config)
    arithmetic.require_device(device)
    problem = build_frames_problem(config, data)
    task, potential, training = problem.task, problem.model, config.training
    potential.train().to(device)
    groups = parameter_groups(potential, training.lr_groups or {}, training.lr)
    optimiser = build_optimiser(training.optimizer, groups, lr=training.lr, module=potential)
    average = weight_average(potential, training)
    if average is not None:
        average.to(device)
    if isinstance(average, StochasticAverage):
        average.plan(steps=1, steps_of_epoch=1, quick=True)
    kernels = config.training.kernels
    return BareStep(
        problem.data,
        problem.serve(),
        potential,
        task,
        optimiser,
        average,
        device,
        problem.resolved,
        arithmetic,
        table_knots(training),
        kernels.storage,
        kernels.edges,
    )


def first_precision(config: Config) -> str:
    """The precision that a training starts with."""
    return Precision(config.training.precision).start


def training_device(config: Config) -> torch.device:
    """The device on which a single process trains."""
    if (config.trainer.get("accelerator") or "auto") == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    devices = config.trainer.get("devices")
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(kind.type, devices[0] if isinstance(devices, list) and devices else 0)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has completed all work."""
    return (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))


def _tensors(state: Mapping[Tensor, object]) -> list[Tensor]:
    return [item for item in torch.utils._pytree.tree_leaves(dict(state)) if isinstance(item, Tensor)]


# ---- limits of the device, and the work of a step


MATMUL_TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "fp16-mixed": torch.float16,
}
"""Types of the factors of matrix products, by precision."""
LOOP_SECONDS = 0.3
"""Duration of a measurement."""
COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Far more than caches hold."""
LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192}
COUNTED_BYTES = (
    "bytes that every execution moves unless it recomputes values: batch, weights, gradients and optimiser state are read once "
    "and, if they change, written once; tensors saved by autograd are written and read once"
)


@dataclass(frozen=True)
class Limits:
    """copy: bytes read and written per second. matmul: operations per second, by precision."""

    copy: float
    matmul: dict[str, float]


@dataclass(frozen=True)
class Work:
    """Work of one step on this many atoms and edges. flops: of matrix products. bytes: see `COUNTED_BYTES`."""

    atoms: int
    edges: int
    flops: int
    bytes: int

    def fractions(self, limits: Limits, *, edges_per_second: float, precision: str) -> tuple[float, float | None]:
        """Shares of the copy rate and of the matmul rate at which steps are done, the work being proportional to edges."""
        steps_per_second = edges_per_second / max(self.edges, 1)
        matmul = limits.matmul.get(precision)
        return self.bytes * steps_per_second / limits.copy, self.flops * steps_per_second / matmul if matmul else None

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Work:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


# ---- limits


def measure_limits(device: torch.device, precisions: list[str]) -> Limits:
    """The rates that this process, with its threads, reaches on the device."""
    rates = {name: _matmul_rate(device, name) for name in precisions if name in MATMUL_TYPES}
    return Limits(_copy_rate(device), rates)


def _copy_rate(device: torch.device) -> float:
    n = COPY_BYTES.get(device.type, 2**28)
    source = torch.ones(n // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * n * _most_per_second(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, precision: str) -> float:
    size, largest = 256, LARGEST_MATRIX.get(device.type, 2048)
    with Precision(precision).applied(precision):
        while True:
            factor = torch.ones(size, size, dtype=MATMUL_TYPES[precision], device=device) / size
            multiply = partial(torch.matmul, factor, factor)
            if size >= largest or _seconds(multiply, device) > 0.02:
                return 2 * size**3 * _most_per_second(multiply, device)
            size *= 2


def _seconds(action: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    wait = synchroniser(device)
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    wait()
    return time.perf_counter() - start


def _most_per_second(action: Callable[[], object], device: torch.device) -> float:
    """How often per second an action runs, in the fastest of about ten repetitions of a loop."""
    action()
    once = _seconds(action, device)
    repeats = max(1, int(LOOP_SECONDS / 10 / max(once, 1e-6)))
    rates: list[float] = []
    spent = 0.0
    while spent < LOOP_SECONDS or len(rates) < 3:
        seconds = _seconds(action, device, repeats)
        rates.append(repeats / seconds)
        spent += seconds
    return max(rates)


# ---- work


def count_work(step: BareStep, batch: Batch) -> Work:
    """The work of one eager step with double backward, after a first step that creates the optimiser's state."""
    engine = Engine(step.function("double"))
    step.run(engine, batch)
    saved = _SavedByAutograd([*batch.values(), *step.potential.parameters(), *step.potential.buffers()])
    products = _MatrixProducts()
    with products, saved:
        step.run(engine, batch)
    weights = [p for p in step.potential.parameters() if p.requires_grad]
    persistent = sum(map(_nbytes, weights)) + sum(_nbytes(p.grad) for p in weights if p.grad is not None)
    state = torch.utils._pytree.tree_leaves(dict(step.optimiser.state))
    persistent += sum(_nbytes(item) for item in state if isinstance(item, Tensor))
    _, atoms, edges = sizes(batch)
    moved = sum(map(_nbytes, batch.values())) + 2 * persistent + 2 * saved.bytes
    return Work(atoms, edges, products.flops, moved)


class _MatrixProducts(TorchDispatchMode):
    """Counts the operations of matrix products inside the context, with torch's formulas.

    (`FlopCounterMode` uses the same formulas, but tracks modules through backward passes, which fails for nested ones.)
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.flops = 0

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class _SavedByAutograd(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory that autograd saves inside the context, each block once; blocks of `others` are not counted."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__(self._count, lambda tensor: tensor)
        self.bytes = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in others}

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
