"""Adam and AdamW by one kernel (`kernels/step/update.py`), on the weights and the state that torch's optimiser holds.

The state stays in the optimiser as torch makes it: checkpoints and other engines do not know of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.availability import can_launch
from forgefield.kernels.step.update import AdamStep, Group, Weight
from forgefield.training.optim.averages import WeightAverage

_UNKNOWN = ("amsgrad", "maximize", "differentiable")
"""Settings with which torch's own code is taken."""


def adam_step(
    optimiser: torch.optim.Optimizer,
    rates: Sequence[Tensor],
    average: WeightAverage | None,
    share: Tensor,
    clip: tuple[str, float] | None,
) -> AdamStep | None:
    """The step as the optimiser stands now, with the gradients where they lie now; None where the kernel does not know it.

    rates: learning rates of the groups; share: of the weights in their average. Both are read in every step, and so is the
    optimiser's `found_inf`, where it has one.
    """
    if not _is_known(optimiser):
        return None
    weights = list(_weights(optimiser, average))
    if not weights or not all(_can_be_read(weight) for weight in weights):
        return None
    if any(number.dtype != torch.float32 for number in (*rates, share)):
        return None
    groups = [
        Group(rate, group["betas"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"])
        for rate, group in zip(rates, optimiser.param_groups)
    ]
    return AdamStep(
        weights,
        groups,
        share=None if average is None else share,
        found_inf=getattr(optimiser, "found_inf", None),
        clip=clip,
    )


def _is_known(optimiser: torch.optim.Optimizer) -> bool:
    hooks: Any = (optimiser._optimizer_step_pre_hooks, optimiser._optimizer_step_post_hooks)
    if any(hooks) or getattr(optimiser, "grad_scale", None) is not None:
        return False
    return type(optimiser) in (torch.optim.Adam, torch.optim.AdamW) and all(
        not any(group[name] for name in _UNKNOWN) and not any(isinstance(beta, Tensor) for beta in group["betas"])
        for group in optimiser.param_groups
    )


def _weights(optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> Iterator[Weight]:
    """Those that have a gradient or an average."""
    averages = {} if average is None else {id(weight): of_it for weight, of_it in average.pairs()}
    for number, group in enumerate(optimiser.param_groups):
        for parameter in group["params"]:
            of_it = averages.pop(id(parameter), None)
            if parameter.grad is not None:
                state = optimiser.state[parameter]
                kept = (state["exp_avg"], state["exp_avg_sq"], state["step"])
                yield Weight(parameter.detach(), of_it, parameter.grad, *kept, group=number)
            elif of_it is not None:
                yield Weight(parameter.detach(), of_it)
    if average is not None:  # weights that another optimiser has, or none
        yield from (Weight(w.detach(), of_it) for w, of_it in average.pairs() if id(w) in averages)


def _can_be_read(of: Weight) -> bool:
    """Whether all of it is float32 on one GPU, in one piece and of one shape."""
    tensors = [t for t in (of.weight, of.average, of.gradient, of.mean, of.square) if t is not None]
    alike = all(
        t.dtype == torch.float32
        and t.layout == torch.strided
        and t.shape == of.weight.shape
        and t.is_contiguous()
        and t.device == of.weight.device
        for t in tensors
    )
    counts = of.count is None or (of.count.dtype == torch.float32 and of.count.device == of.weight.device)
    return alike and counts and can_launch(of.weight)
