"""Reductions over ranks during a training step: mean gradients, numbers of labels and stop requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgefield.errors import ForgefieldError


class GradientBuckets:
    """Averages gradients over ranks, packed into a few flat buckets, each sent while the next one is packed.

    `average` is called once per optimiser step, when the backward pass is complete. Afterwards the `grad` of every parameter
    is the mean over ranks, bit for bit the same on each. A parameter without a gradient on one rank counts as zero there; one
    without a gradient on any rank keeps none, so that the optimiser skips it as it would in one process.

    parameters: all of them, in the same order on all ranks. bucket_bytes: approximate size of a message.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, bucket_bytes: int) -> None:
        self.parameters = list(parameters)
        self.bucket_bytes = bucket_bytes
        self._trained: list[nn.Parameter] | None = None
        self._buckets: list[tuple[Tensor, list[nn.Parameter], list[Tensor]]] = []

    @property
    def message_bytes(self) -> int:
        """Size of all buckets together; 0 before the first reduction."""
        return sum(flat.numel() * flat.element_size() for flat, _, _ in self._buckets)

    @torch.no_grad()
    def average(self) -> None:
        """Replace every gradient by its mean over ranks."""
        if self._trained is None:
            self._create_buckets()
        self._refuse_new_gradients()
        works = []
        for flat, parameters, views in self._buckets:
            _pack(parameters, views)
            works.append(dist.all_reduce(flat, async_op=True))
        scale = 1.0 / dist.get_world_size()
        for work, (flat, parameters, views) in zip(works, self._buckets):
            work.wait()
            flat.mul_(scale)
            for parameter, view in zip(parameters, views):
                parameter.grad = view

    def _create_buckets(self) -> None:
        """Determine, once, which parameters have a gradient on any rank, and create buckets for them."""
        if not self.parameters:
            self._trained = []
            return
        device = self.parameters[0].device
        has_gradient = torch.tensor([float(p.grad is not None) for p in self.parameters], device=device)
        dist.all_reduce(has_gradient)
        self._trained = [parameter for parameter, n in zip(self.parameters, has_gradient.tolist()) if n > 0]
        group: list[nn.Parameter] = []
        size = 0
        # From the last to the first: the order in which a backward pass completes them.
        for parameter in reversed(self._trained):
            n_bytes = parameter.numel() * parameter.element_size()
            if group and (size + n_bytes > self.bucket_bytes or not _same_kind(parameter, group[0])):
                self._buckets.append(_bucket(group))
                group, size = [], 0
            group.append(parameter)
            size += n_bytes
        if group:
            self._buckets.append(_bucket(group))

    def _refuse_new_gradients(self) -> None:
        trained = {id(parameter) for parameter in self._trained or []}
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None and id(parameter) not in trained:
                raise ForgefieldError(
                    f"Parameter {number} of shape {tuple(parameter.shape)} got its first gradient after the first step. "
                    "The set of trained parameters must not change during a training on several processes; "
                    "trainer.strategy=ddp_find_unused_parameters_true allows it."
                )


def _same_kind(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device


def _bucket(parameters: list[nn.Parameter]) -> tuple[Tensor, list[nn.Parameter], list[Tensor]]:
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    views, start = [], 0
    for parameter in parameters:
        views.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()
    return flat, parameters, views


def _pack(parameters: list[nn.Parameter], views: list[Tensor]) -> None:
    """Copy gradients to their views in the bucket, unless they already are these views."""
    copied = [(view, p.grad) for view, p in zip(views, parameters) if p.grad is not None and p.grad is not view]
    if copied:
        torch._foreach_copy_([view for view, _ in copied], [gradient for _, gradient in copied])
    for view, parameter in zip(views, parameters):
        if parameter.grad is None:
            view.zero_()


class StepExchange:
    """One small all_reduce per batch: the numbers of labels on all ranks, and flags such as a request to stop.

    A loss of several terms has a denominator for each, which the backward pass needs. They depend on labels only, so the
    reduction is started before the forward pass and read after it: it runs while the model is evaluated. The flags are read
    one batch later, when every rank has the same values without waiting for them.

    local_flags: returns the flags of this rank, a tuple of fixed length of zeros and ones.
    """

    def __init__(self, local_flags: Callable[[], tuple[float, ...]]) -> None:
        self._local_flags = local_flags
        self._flag_tensors: dict[tuple[float, ...], Tensor] = {}
        self._message: Tensor | None = None
        self._work: dist.Work | None = None
        self._n_counts = 0
        self._received: Tensor | None = None
        self._pinned = torch.empty(0)
        self._arrived: torch.cuda.Event | None = None
        self.mark: Callable[[str], None] = lambda event: None
        """Called with `wait begins` and `wait ends` around the wait for the counts, for time measurements."""

    def send(self, counts: Tensor) -> None:
        """Start adding up `counts`, (n,) float64, over all ranks."""
        flags = self._local_flags()
        if flags not in self._flag_tensors:  # only once, because the host waits for a copy to the device
            self._flag_tensors[flags] = torch.tensor(flags, dtype=counts.dtype, device=counts.device)
        self._message = torch.cat([counts, self._flag_tensors[flags]])
        self._n_counts = len(counts)
        self._work = dist.all_reduce(self._message, async_op=True)

    def counts(self) -> Tensor:
        """The counts summed over all ranks. On a GPU the stream waits for them, not the host."""
        assert self._message is not None
        assert self._work is not None
        self.mark("wait begins")
        self._work.wait()
        self.mark("wait ends")
        self._received = self._message[self._n_counts :]
        if self._received.is_cuda:
            # On its way to the host while the step is computed, so that reading it does not wait for the whole step.
            if self._arrived is None:
                self._pinned = torch.empty(self._received.shape, dtype=self._received.dtype, pin_memory=True)
                self._arrived = torch.cuda.Event()
            self._received = self._pinned.copy_(self._received, non_blocking=True)
            self._arrived.record()
        return self._message[: self._n_counts]

    def flags(self) -> list[float]:
        """Flags of the latest message, summed over all ranks: the same on each. Empty before the first message."""
        if self._received is None:
            return []
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._received.tolist()
