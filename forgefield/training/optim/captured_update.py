"""What follows the gradient, as one CUDA graph: clipping, the optimiser's step, the average of the weights.

It takes the place of the optimiser's `step`, so that Lightning calls it where it would call that. Contract: learning rates may
change from step to step, since they are read from the device; a change of any other setting makes a new graph. Optimisers that
look at their own step count on the host cannot be captured. Adam and AdamW in float32 are one kernel, which clips gradients as
it reads them: `grad` is then not clipped. Whoever looks at gradients does so before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.step.update import AdamStep, Group, Weight
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.schedules import replaced_learning_rates
from forgefield.training.optim.update import Clip, clip_gradients, make_capturable, make_plain

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


class CapturedUpdate:
    """optimiser: its `step` is replaced; one that `why_not_capturable` has nothing against. average: taken along, if any.
    still: whether gradients lie where they lay in an earlier step; if not they are copied first, so that one graph will do."""

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        average: WeightAverage | None,
        *,
        still: Callable[[], bool] = lambda: True,
    ) -> None:
        self.optimiser, self.average, self.still = optimiser, average, still
        self._copies: dict[Tensor, Tensor] = {}
        """Of gradients that do not lie still, by weight."""
        self.clip: Clip = (None, None)
        parameters = [group["params"][0] for group in optimiser.param_groups]
        self.device = parameters[0].device
        self._rates = [torch.zeros((), dtype=p.dtype, device=self.device) for p in parameters]
        self._share = torch.zeros((), dtype=parameters[0].dtype, device=self.device)
        self._written: list[float | None] = [None] * (len(parameters) + 1)
        """Of the rates and the share on the device."""
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, AdamStep | None]] = {}
        make_capturable(optimiser, self.device)
        optimiser.step = self.step  # type: ignore[method-assign]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.optimiser._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        if all(p.grad is None for group in self.optimiser.param_groups for p in group["params"]):
            if self.average is not None:  # a callback took the gradients away: the step counts and changes nothing
                self.average.next_share()
            return result
        if len(self.optimiser.param_groups) != len(self._rates):
            raise ForgefieldError(
                "training.engine=graphs: a group of parameters was added to the optimiser during the training, which a "
                "captured step does not know; use training.engine=compile or eager."
            )
        for number, group in enumerate(self.optimiser.param_groups):
            self._write(number, self._rates[number], group["lr"])
        if self.average is not None:
            self._write(-1, self._share, self.average.next_share())
        if self._has_all_states():
            if not self.still():
                self._move_gradients()
            self._captured().replay()
        else:  # the optimiser makes its state in its first step
            self._first_update()
        return result

    @torch.no_grad()
    def _move_gradients(self) -> None:
        """To where this object keeps them."""
        weights = [p for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        for weight in weights:
            if weight not in self._copies:
                self._copies[weight] = torch.empty_like(weight)
        copies = [self._copies[weight] for weight in weights]
        torch._foreach_copy_(copies, [weight.grad for weight in weights])
        for weight, copy in zip(weights, copies):
            weight.grad = copy

    def _write(self, number: int, place: Tensor, value: float) -> None:
        """To the device, where it is not there already."""
        if self._written[number] != value:
            place.fill_(value)
            self._written[number] = value

    def _has_all_states(self) -> bool:
        state = self.optimiser.state
        return all(p in state for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None)

    def _first_update(self) -> None:
        """By the optimiser as it was given, whose step counts are exact from the beginning."""
        make_plain(self.optimiser)
        self._update([group["lr"] for group in self.optimiser.param_groups])
        make_capturable(self.optimiser, self.device)
        self._graphs.clear()  # they count steps where no optimiser looks any more

    def _captured(self) -> torch.cuda.CUDAGraph:
        settings = self._settings()
        if settings not in self._graphs:
            graph, by_kernel = torch.cuda.CUDAGraph(), self._by_kernel()
            if by_kernel is not None:
                by_kernel.compile()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                if by_kernel is not None:
                    by_kernel.launch()
                else:
                    self._update(self._rates)
            self._graphs[settings] = graph, by_kernel
        return self._graphs[settings][0]

    def _by_kernel(self) -> AdamStep | None:
        value, algorithm = self.clip
        clip = ("value" if algorithm == "value" else "norm", float(value)) if value else None
        return adam_step(self.optimiser, self._rates, self.average, self._share, clip)

    @torch.no_grad()
    def _update(self, rates: Sequence[Any]) -> None:
        """rates: the learning rate of each group."""
        groups = self.optimiser.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        clip_gradients(parameters, self.clip)
        with replaced_learning_rates(self.optimiser, rates):
            type(self.optimiser).step(self.optimiser)
        if self.average is not None:
            found = getattr(self.optimiser, "found_inf", None)  # 1 where the optimiser is told not to step
            self.average.take_in(self._share if found is None else self._share * (1.0 - found))

    def _settings(self) -> Any:
        """Everything that is baked into a graph: settings, and where gradients lie (elsewhere for each size of a step)."""
        found = getattr(self.optimiser, "found_inf", None)
        groups = self.optimiser.param_groups
        settings = tuple(
            (key, str(value)) for group in groups for key, value in group.items() if key not in ("params", "lr")
        )
        places = tuple(None if p.grad is None else p.grad.data_ptr() for group in groups for p in group["params"])
        return settings, places, self.clip, None if found is None else found.data_ptr()
