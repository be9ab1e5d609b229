"""Inspecting a training step from outside: the contract of Forgefield's modules, and tools for any LightningModule.

A callback can evaluate a batch again without side effects, split it into single frames, and record the output of every
submodule. `ProbedModule` declares what Forgefield's training modules offer beyond that.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from forgefield.data.batch import SHAPES, Batch, Shapes, halves
from forgefield.data.sampling.loader import FrameLoader
from forgefield.models.potential import Potential
from forgefield.tasks.task import Task
from forgefield.training.engines.engine import Engine
from forgefield.training.module import TrainingModule
from forgefield.training.optim.averages import WeightAverage

T = TypeVar("T")
ModuleOutput = Callable[[str, nn.Module, Any, Any], None]
"""Called with the name of a submodule, the submodule, the value of `before`, and its output."""


class ProbedModule(ABC):
    """What Forgefield's training modules offer to callbacks that inspect, repeat or discard a step.

    Such callbacks work with any LightningModule. From one that implements this class they also learn which labels a batch
    has, how it is split into frames, and what its loss is without the engine.
    """

    potential: Potential
    """The model that is trained."""
    task: Task
    shapes: Shapes
    """Shapes of the tensors of a batch."""
    engine: Engine | None
    """How steps are computed; None before the first batch."""
    ema: WeightAverage | None
    """The running average of the weights, if there is one."""
    task_loss: Tensor | None
    """Loss of the latest batch, detached, without the terms that self-adapting loss weights add; None before the first."""

    @abstractmethod
    def notify(self, text: str) -> None:
        """Show one sentence to the user."""

    @abstractmethod
    def eager_loss(self, batch: Batch) -> Tensor:
        """Loss of this batch on this rank, computed eagerly whatever the engine; differentiable, and not part of any metric."""

    @abstractmethod
    def discard_step(self, condition: Tensor | None = None, *, average: bool = True) -> None:
        """Remove the batches of the current optimiser step from all metrics.

        condition: a boolean on the device that decides; default: always. average: also leave the average of the weights as
        it is.
        """


def probed(module: nn.Module) -> ProbedModule | None:
    """What a module offers to callbacks: its executor, or the module itself; None for any other LightningModule."""
    candidate = module.executor if isinstance(module, TrainingModule) else module
    return candidate if isinstance(candidate, ProbedModule) else None


# ---- evaluating a batch again


@contextmanager
def without_side_effects(module: L.LightningModule) -> Iterator[None]:
    """Evaluate the module inside; random state, buffers and logged values are the same afterwards as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    device = module.device
    forked = (
        torch.random.fork_rng(devices=[])
        if device.type in ("cpu", "mps")
        else torch.random.fork_rng(devices=[device], device_type=device.type)
    )
    with forked:
        for name in ("log", "log_dict"):
            module.__dict__[name] = _log_nothing
        try:
            yield
        finally:
            for name in ("log", "log_dict"):
                module.__dict__.pop(name, None)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _log_nothing(*arguments: object, **options: object) -> None:
    """Stands in for `log`."""


def loss_of(module: L.LightningModule, batch: Any, batch_idx: int) -> Tensor | None:
    """The training loss of a batch, evaluated eagerly on this rank alone; None where the module returns no loss."""
    if (inspected := probed(module)) is not None:
        return inspected.eager_loss(batch)
    output = module.training_step(*training_step_arguments(module, batch, batch_idx))
    return output.get("loss") if isinstance(output, Mapping) else output


def training_step_arguments(module: L.LightningModule, batch: object, batch_idx: int) -> tuple[object, ...]:
    """Positional arguments of `training_step`: the batch and, where it takes a second argument, the number of the batch."""
    takes_two = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if takes_two else (batch,)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients to None, so that a torch optimiser leaves weights and its state exactly as they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


# ---- outputs of submodules


class OutputHooks:
    """Calls `look(name, submodule, stored, output)` after every call of a submodule, until `remove` or the end of the `with`.

    before: called with (arguments, keyword arguments) before each of these calls; its result is passed on as `stored`. Only
    there are the inputs unchanged: some modules modify them in place, or write their results into the batch.
    """

    def __init__(
        self, module: nn.Module, look: ModuleOutput, before: Callable[[object, object], object] | None = None
    ) -> None:
        self._handles = []
        stored: list[object] = []

        def hooks_of(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
            def enter(sub: nn.Module, inputs: object, options: object) -> None:
                stored.append(before(inputs, options) if before is not None else None)

            return enter, lambda sub, inputs, options, output: look(name, sub, stored.pop() if stored else None, output)

        for name, sub in module.named_modules():
            if name:
                enter, leave = hooks_of(name)
                self._handles.append(sub.register_forward_pre_hook(enter, with_kwargs=True))
                self._handles.append(sub.register_forward_hook(leave, with_kwargs=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> OutputHooks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def tensors_in(value: object, excluded: Collection[int] = (), depth: int = 4) -> Iterator[Tensor]:
    """All floating-point tensors inside nested containers. excluded: addresses (`data_ptr`) of tensors to skip."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and (not excluded or value.data_ptr() not in excluded):
            yield value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else {}
    elif hasattr(value, "to_dict") and not isinstance(value, Mapping):  # of PyTorch Geometric
        value = value.to_dict()
    if depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, excluded, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, excluded, depth - 1)


def label_addresses(batch: object, module: nn.Module) -> set[int]:
    """Addresses of the labels in a batch of Forgefield's modules, where NaN marks a missing label; empty for other modules.

    Labels are identified by address, since an output of the model may have the name of a label.
    """
    inspected = probed(module)
    if inspected is None or not isinstance(batch, Mapping):
        return set()
    names = {"energy", "forces", "stress", *(target.label for target in inspected.task.targets)}
    return {batch[name].data_ptr() for name in names if name in batch}


# ---- frames of a batch


def frames_of(
    trainer: L.Trainer, module: nn.Module, batch: Any, batch_idx: int
) -> list[tuple[str, dict[str, Tensor] | object]] | None:
    """The frames of a batch one by one, each with a description; None where the batch cannot be split.

    Handles Forgefield's batches, those of PyTorch Geometric, and tensors (in tuples, lists, dictionaries) with a row for each
    sample.
    """
    if isinstance(batch, Mapping) and {"frame_id", "n_atoms", "positions"} <= batch.keys():
        inspected = probed(module)
        shapes = inspected.shapes if inspected is not None else SHAPES
        return [
            (_frame_name(trainer, int(frame["frame_id"][0])), frame)
            for frame in _single_frames(dict(batch), shapes)
            if int(frame["frame_id"][0]) >= 0
        ]
    if hasattr(batch, "to_data_list"):
        collate = type(batch).from_data_list
        return [(f"sample {i} of batch {batch_idx}", collate([item])) for i, item in enumerate(batch.to_data_list())]
    rows = _row_count(batch)
    if rows is None:
        return None
    return [(f"sample {i} of batch {batch_idx}", _slice(batch, i)) for i in range(rows)]


def _frame_name(trainer: L.Trainer, row: int) -> str:
    loader = trainer.train_dataloader
    where = f" ({loader.dataset.frames.where(row)})" if isinstance(loader, FrameLoader) else ""
    return f"frame {row}{where}"


def _single_frames(batch: Batch, shapes: Shapes) -> list[Batch]:
    if batch["n_atoms"].shape[0] == 1:
        return [batch]
    first, second = halves(batch, shapes)
    return [*_single_frames(first, shapes), *_single_frames(second, shapes)]


def _row_count(batch: object) -> int | None:
    """Number of samples if all tensors in the containers have the same; None where they differ or are not tensors."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, (list, tuple)) or not batch:
        return None
    counts = {_row_count(item) for item in batch}
    return counts.pop() if len(counts) == 1 else None


def _slice(batch: Any, row: int) -> object:
    if isinstance(batch, Tensor):
        return batch[row : row + 1]
    if isinstance(batch, Mapping):
        return {key: _slice(item, row) for key, item in batch.items()}
    return type(batch)(_slice(item, row) for item in batch)


# ---- ranks, and text


def all_gather(value: T) -> list[T]:
    """The values of all ranks, in the order of ranks; all ranks have to call this."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean over ranks, bit for bit the same on each."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def join_names(names: Sequence[str], limit: int = 5) -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
