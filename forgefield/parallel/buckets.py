"""Averages gradients over ranks: packed into a few flat buckets, each sent while the next one is being packed.

Contract: called once per optimiser step, when the backward pass is complete. Afterwards every parameter's `grad` is the mean
over ranks, with the same bits on each. A parameter that has no gradient on one rank counts as zero there; one that has none on
any rank keeps none, so that the optimiser leaves it alone as it would in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgefield.errors import ForgefieldError


class GradientBuckets:
    """parameters: all of them, in the same order on all ranks. bucket_bytes: about how much goes into a message."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, bucket_bytes: int) -> None:
        self.parameters = list(parameters)
        self.bucket_bytes = bucket_bytes
        self._used: list[nn.Parameter] | None = None
        self._buckets: list[tuple[Tensor, list[nn.Parameter], list[Tensor]]] = []

    @property
    def message_bytes(self) -> int:
        """Size of all buckets together; 0 before the first reduction."""
        return sum(flat.numel() * flat.element_size() for flat, _, _ in self._buckets)

    @torch.no_grad()
    def average(self) -> None:
        if self._used is None:
            self._agree()
        self._refuse_newcomers()
        works = []
        for flat, parameters, places in self._buckets:
            _pack(parameters, places)
            works.append(dist.all_reduce(flat, async_op=True))
        share = 1.0 / dist.get_world_size()
        for work, (flat, parameters, places) in zip(works, self._buckets):
            work.wait()
            flat.mul_(share)
            for parameter, place in zip(parameters, places):
                parameter.grad = place

    def _agree(self) -> None:
        """Find out, once, which parameters have a gradient on any rank, and lay out the buckets for them."""
        if not self.parameters:
            self._used = []
            return
        device = self.parameters[0].device
        has = torch.tensor([float(p.grad is not None) for p in self.parameters], device=device)
        dist.all_reduce(has)
        self._used = [parameter for parameter, n in zip(self.parameters, has.tolist()) if n > 0]
        group: list[nn.Parameter] = []
        size = 0
        # From the last to the first: the order in which a backward pass finishes them.
        for parameter in reversed(self._used):
            n_bytes = parameter.numel() * parameter.element_size()
            if group and (size + n_bytes > self.bucket_bytes or not _alike(parameter, group[0])):
                self._buckets.append(_bucket(group))
                group, size = [], 0
            group.append(parameter)
            size += n_bytes
        if group:
            self._buckets.append(_bucket(group))

    def _refuse_newcomers(self) -> None:
        known = {id(parameter) for parameter in self._used or []}
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None and id(parameter) not in known:
                raise ForgefieldError(
                    f"Parameter {number} of shape {tuple(parameter.shape)} got its first gradient after the first step. "
                    "Which parameters are trained must not change during a training on several processes; "
                    "trainer.strategy=ddp_find_unused_parameters_true allows it."
                )


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device


def _bucket(parameters: list[nn.Parameter]) -> tuple[Tensor, list[nn.Parameter], list[Tensor]]:
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    places, at = [], 0
    for parameter in parameters:
        places.append(flat[at : at + parameter.numel()].view(parameter.shape))
        at += parameter.numel()
    return flat, parameters, places


def _pack(parameters: list[nn.Parameter], places: list[Tensor]) -> None:
    """Copy gradients to their places in the bucket, unless they were made there."""
    moved = [(place, p.grad) for place, p in zip(places, parameters) if p.grad is not None and p.grad is not place]
    if moved:
        torch._foreach_copy_([place for place, _ in moved], [gradient for _, gradient in moved])
    for place, parameter in zip(places, parameters):
        if parameter.grad is None:
            place.zero_()
