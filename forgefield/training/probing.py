"""Ways to look into a training step from outside, for any LightningModule: evaluate it once more without a trace, take a batch
apart into frames, find out which module gave what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from forgefield.training.engines.sparing import halves


@contextmanager
def rehearsal(module: Any) -> Iterator[None]:
    """Inside, the module can be evaluated once more: random state, buffers and logged values are afterwards as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    device = module.device
    forked = (
        torch.random.fork_rng(devices=[])
        if device.type in ("cpu", "mps")
        else torch.random.fork_rng(devices=[device], device_type=device.type)
    )
    with forked:
        for name in ("log", "log_dict"):
            module.__dict__[name] = _nothing
        try:
            yield
        finally:
            for name in ("log", "log_dict"):
                module.__dict__.pop(name, None)
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)


def _nothing(*arguments: Any, **options: Any) -> None:
    """Stands in for `log`."""


def loss_of(module: Any, batch: Any, batch_idx: int) -> Tensor | None:
    """The training loss of a batch, evaluated eagerly; on this rank alone. None where the module gives none."""
    if hasattr(module, "eager_loss"):
        return module.eager_loss(batch)
    output = module.training_step(*arguments_of_step(module, batch, batch_idx))
    return output.get("loss") if isinstance(output, Mapping) else output


def arguments_of_step(module: Any, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """What `training_step` takes, by position as Lightning calls it: the batch and, where there is a second argument of
    whatever name, the number of the batch."""
    takes_two = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if takes_two else (batch,)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def outputs_of_modules(module: nn.Module, look: Callable[[str, nn.Module, Any, Any], None], before: Any = None) -> Any:
    """Inside the `with`, `look(name, submodule, kept, output)` is called after every call of a submodule.

    before: called with (arguments, keyword arguments) before each of these calls; what it returns is passed on as `kept`. Only
    then are inputs what they were: some modules change them in place, or write their results into the batch.
    """
    handles = []
    kept: list[Any] = []

    def hooks_of(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(sub: nn.Module, inputs: Any, options: Any) -> None:
            kept.append(before(inputs, options) if before is not None else None)

        return enter, lambda sub, inputs, options, output: look(name, sub, kept.pop() if kept else None, output)

    for name, sub in module.named_modules():
        if name:
            enter, leave = hooks_of(name)
            handles.append(sub.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(sub.register_forward_hook(leave, with_kwargs=True))
    return _Removing(handles)


class _Removing(nullcontext):
    """Takes hooks away at its end."""

    def __init__(self, handles: Sequence[Any]) -> None:
        super().__init__()
        self._handles = handles

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()


def tensors_in(value: Any, without: Collection[int] = (), depth: int = 4) -> Iterator[Tensor]:
    """All tensors of floating numbers inside nested containers. without: addresses of tensors that are left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and (not without or value.data_ptr() not in without):
            yield value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else {}
    elif hasattr(value, "to_dict") and not isinstance(value, Mapping):  # of PyTorch Geometric
        value = value.to_dict()
    if depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, without, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, without, depth - 1)


def labels_in(batch: Any, module: Any) -> set[int]:
    """Addresses of the labels in a batch of Forgefield's modules, where NaN means that a label is missing; none for others.

    They are told by address: a model's own output may have the name of a label.
    """
    if not hasattr(module, "eager_loss") or not isinstance(batch, Mapping):
        return set()
    names = {"energy", "forces", "stress", *(target.label for target in module.task.targets)}
    return {batch[name].data_ptr() for name in names if name in batch}


def frames_of(trainer: Any, module: Any, batch: Any, batch_idx: int) -> list[tuple[str, Any]] | None:
    """The frames of a batch one by one, each with words that name it; None where the batch cannot be taken apart.

    A batch of ours, one of PyTorch Geometric, or tensors (in tuples, lists, dictionaries) with a row for each sample.
    """
    if isinstance(batch, Mapping) and {"frame_id", "n_atoms", "positions"} <= batch.keys():
        return [
            (_frame_name(trainer, int(part["frame_id"][0])), part)
            for part in _single(dict(batch), getattr(module, "shapes", None))
            if int(part["frame_id"][0]) >= 0
        ]
    if hasattr(batch, "to_data_list"):
        again = type(batch).from_data_list
        return [(f"sample {i} of batch {batch_idx}", again([item])) for i, item in enumerate(batch.to_data_list())]
    rows = _rows(batch)
    if rows is None:
        return None
    return [(f"sample {i} of batch {batch_idx}", _slice(batch, i)) for i in range(rows)]


def _frame_name(trainer: Any, row: int) -> str:
    frames: Any = getattr(getattr(trainer.train_dataloader, "dataset", None), "frames", None)
    where = f" ({frames.where(row)})" if hasattr(frames, "where") else ""
    return f"frame {row}{where}"


def _single(batch: dict[str, Tensor], shapes: Any) -> list[dict[str, Tensor]]:
    if batch["n_atoms"].shape[0] == 1:
        return [batch]
    first, second = halves(batch, shapes) if shapes is not None else halves(batch)
    return [*_single(first, shapes), *_single(second, shapes)]


def _rows(batch: Any) -> int | None:
    """How many samples tensors in containers have, all alike; None where they differ or there is something else."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, (list, tuple)) or not batch:
        return None
    counts = {_rows(item) for item in batch}
    return counts.pop() if len(counts) == 1 else None


def _slice(batch: Any, row: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[row : row + 1]
    if isinstance(batch, Mapping):
        return {key: _slice(item, row) for key, item in batch.items()}
    return type(batch)(_slice(item, row) for item in batch)


def all_gather(value: Any) -> list[Any]:
    """What every rank has, in the order of ranks; all ranks have to ask."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, value)
    return boxes


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean over ranks, the same bits on each."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def take_gradients_away(optimizer: torch.optim.Optimizer) -> None:
    """Without gradients a torch optimiser leaves weights and its own state exactly as they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def listed(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
