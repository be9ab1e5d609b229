"""How close a training step comes to the limits of the device: measured limits, and the work that a step cannot avoid.

Limits are the rates of a large copy and of large matrix products, each the best of a short loop. Work is counted on one eager
step: the operations of its matrix products, and the bytes that it has to move even if everything else stayed in caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from forgefield.bench.step import BareStep, synchroniser
from forgefield.data.batch import Batch
from forgefield.training.engines.blank import sizes
from forgefield.training.engines.engine import Engine
from forgefield.training.precision import Precision

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
    "bytes that no execution avoids unless it computes something twice: batch, weights, gradients and optimiser state once in "
    "and, where they change, once out; what autograd keeps for a later pass once out and once in"
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
            if size >= largest or _seconds(lambda factor=factor: factor @ factor, device) > 0.02:  # type: ignore[misc]
                break
            size *= 2
        return 2 * size**3 * _most_per_second(lambda: factor @ factor, device)


def _seconds(action: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    wait = synchroniser(device)
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    wait()
    return time.perf_counter() - start


def _most_per_second(action: Callable[[], object], device: torch.device) -> float:
    """How often per second an action runs, in the best of about ten parts of a loop."""
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
    lasting = sum(map(_nbytes, weights)) + sum(_nbytes(p.grad) for p in weights if p.grad is not None)
    state = torch.utils._pytree.tree_leaves(dict(step.optimiser.state))
    lasting += sum(_nbytes(item) for item in state if isinstance(item, Tensor))
    _, atoms, edges = sizes(batch)
    moved = sum(map(_nbytes, batch.values())) + 2 * lasting + 2 * saved.bytes
    return Work(atoms, edges, products.flops, moved)


class _MatrixProducts(TorchDispatchMode):
    """Counts the operations of matrix products inside the context, with torch's formulas.

    (`FlopCounterMode` uses the same formulas, but tracks modules through backward passes, which fails for nested ones.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class _SavedByAutograd(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory that autograd saves inside the context, each block once; blocks of `others` are not counted."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self.bytes = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in others}

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
