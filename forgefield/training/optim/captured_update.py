"""The update of the weights in a CUDA graph: clipping, the optimiser's step, the average of the weights.

Contract: learning rates may change between steps, because they are read from the device; other settings are part of a graph.
Optimisers that read their step count on the host cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.step.update import AdamStep, Group, Weight
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.update import (
    IMPLEMENTATION,
    Update,
    found_inf_of,
    make_capturable,
)

_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Settings that the kernel does not support."""


def adam_step(
    optimiser: torch.optim.Optimizer,
    rates: Sequence[Tensor],
    average: WeightAverage | None,
    share: Tensor,
    clip: tuple[str, float] | None,
) -> AdamStep | None:
    """The step with the present settings and tensors of gradients; None if the kernel does not support the optimiser.

    rates: learning rates of the groups. share: weight of the parameters in their average. Both are read in every step, and so
    is the optimiser's `found_inf` if it has one.
    """
    if not is_plain_adam(optimiser):
        return None
    weights = list(_weights(optimiser, average))
    if not weights or not all(_is_contiguous_float32(weight) for weight in weights):
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
        found_inf=found_inf_of(optimiser),
        clip=clip,
    )


def is_plain_adam(optimiser: torch.optim.Optimizer) -> bool:
    """Whether the steps of an optimiser are those of Adam or AdamW that kernels compute."""
    hooks = (optimiser._optimizer_step_pre_hooks, optimiser._optimizer_step_post_hooks)
    if any(hooks) or getattr(optimiser, "grad_scale", None) is not None:
        return False
    return type(optimiser) in (torch.optim.Adam, torch.optim.AdamW) and all(
        not any(group[name] for name in _UNSUPPORTED) and not any(isinstance(beta, Tensor) for beta in group["betas"])
        for group in optimiser.param_groups
    )


def _weights(optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> Iterator[Weight]:
    """The weights that have a gradient or an average."""
    averages = {} if average is None else {id(weight): mean for weight, mean in average.pairs()}
    for number, group in enumerate(optimiser.param_groups):
        for parameter in group["params"]:
            mean = averages.pop(id(parameter), None)
            if parameter.grad is not None:
                state = optimiser.state[parameter]
                moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
                yield Weight(parameter.detach(), mean, parameter.grad, *moments, group=number)
            elif mean is not None:
                yield Weight(parameter.detach(), mean)
    if average is not None:  # weights of another optimiser, or of none
        yield from (Weight(w.detach(), mean) for w, mean in average.pairs() if id(w) in averages)


def _is_contiguous_float32(weight: Weight) -> bool:
    """Whether all tensors are contiguous, float32, of one shape and on one GPU."""
    like = weight.weight
    tensors = [t for t in (like, weight.average, weight.gradient, weight.mean, weight.square) if t is not None]
    same = all(
        t.dtype == torch.float32
        and t.layout == torch.strided
        and t.shape == like.shape
        and t.is_contiguous()
        and t.device == like.device
        for t in tensors
    )
    count = weight.count
    return (
        same and (count is None or (count.dtype == torch.float32 and count.device == like.device)) and can_launch(like)
    )


def constant_settings(optimiser: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Settings of an optimiser that are constants of captured steps: all except learning rates and implementation choices."""
    keys = [key for key in optimiser.defaults if key not in ("lr", *IMPLEMENTATION)]
    return [
        {key: group.get(key) for key in keys if not isinstance(group.get(key), Tensor)}
        for group in optimiser.param_groups
    ]


class CapturedUpdate:
    """The update of up to `n` captured steps, whose learning rates and shares of the average are on the device.

    On a CPU it is executed, with the same numbers.

    by_kernel: whether Adam and AdamW in float32 are one kernel (for n = 1), which clips gradients as it reads them: `grad`
    itself is not clipped.
    """

    def __init__(self, update: Update, n: int = 1, *, by_kernel: bool = False) -> None:
        self.update, self.n, self.by_kernel = update, n, by_kernel
        self.optimiser, self.average = update.optimiser, update.average
        parameters = [group["params"][0] for group in update.optimiser.param_groups]
        self.device: torch.device = parameters[0].device
        self.rates = [torch.zeros(n, dtype=p.dtype, device=self.device) for p in parameters]
        """(n,) for each group."""
        self.shares = torch.zeros(n, dtype=parameters[0].dtype, device=self.device)
        self._written: list[list[float]] = [[] for _ in range(len(parameters) + 1)]
        """Present values of the rates and the shares on the device."""
        self._kernel: AdamStep | None = None

    def make_capturable(self) -> None:
        """Prepare the optimiser for captured steps."""
        if self.device.type == "cuda":
            # torch would warn of steps that are not captured, such as those with snapshot terms.
            vars(self.optimiser)["_warned_capturable_if_run_uncaptured"] = True
            make_capturable(self.optimiser, self.device)

    def next_shares(self, n: int) -> list[float]:
        """Shares of the weights in their average in the next `n` steps, which are counted."""
        return [0.0 if self.average is None else self.average.next_share() for _ in range(n)]

    def write(self, rates: Sequence[Sequence[float]], shares: Sequence[float]) -> None:
        """Set the numbers of the next steps. rates: of each group, for each step."""
        columns = [*(list(column) for column in zip(*rates)), list(shares)]
        for number, (tensor, values) in enumerate(zip((*self.rates, self.shares), columns)):
            if self._written[number] == values:
                continue
            self._written[number] = values
            if len(values) == 1:
                tensor[:1].fill_(values[0])
            else:
                numbers = torch.tensor(values, dtype=tensor.dtype)
                tensor[: len(values)].copy_(numbers.pin_memory() if tensor.is_cuda else numbers, non_blocking=True)

    @torch.no_grad()
    def launch(self, number: int = 0) -> None:
        """Update the weights with the present gradients and the numbers of step `number`. A capture comes after an update that
        is not captured, with other gradients of the same shapes, and `bind` follows it."""
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._kernel = self._build_kernel() if self.by_kernel else None
        if self._kernel is not None:
            self._kernel.launch()
            return
        rates: Sequence[float | Tensor] = [rates[number] for rates in self.rates]
        if self.device.type != "cuda":  # optimisers read their rates on the host
            rates = [values[number] for values in self._written[:-1]]
        self.update(rates, self.shares[number])

    def _build_kernel(self) -> AdamStep | None:
        value, algorithm = self.update.clip
        clip = ("value" if algorithm == "value" else "norm", float(value)) if value else None
        return adam_step(self.optimiser, [rates[0] for rates in self.rates], self.average, self.shares[0], clip)

    def bind(self) -> AdamStep | None:
        """Let the kernel, if it was captured, read the present gradients. The graph needs it as long as it exists."""
        if self._kernel is not None:
            self._kernel.bind(list(_weights(self.optimiser, self.average)))
        return self._kernel

    def settings(self) -> tuple[object, ...]:
        """Everything that is constant in a graph, except addresses of gradients."""
        found_inf = found_inf_of(self.optimiser)
        return constant_settings(self.optimiser), self.update.clip, None if found_inf is None else found_inf.data_ptr()
