"""The update of the weights as one CUDA graph: clipping, the optimiser's step, the average of the weights.

It replaces the optimiser's `step`, which Lightning calls. Contract: learning rates may change between steps, because they are
read from the device; after a change of any other setting the update is captured again. Optimisers that read their step count on
the host cannot be captured. Adam and AdamW in float32 are one kernel, which clips gradients as it reads them: `grad` itself is
not clipped. Callbacks have to read gradients before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.step.update import AdamStep, Group, Weight
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.schedules import replaced_learning_rates
from forgefield.training.optim.update import Clip, clip_gradients, make_capturable, mark_stepped, restore_settings

T = TypeVar("T")
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
    if not _is_supported(optimiser):
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
        found_inf=_found_inf(optimiser),
        clip=clip,
    )


def _found_inf(optimiser: torch.optim.Optimizer) -> Tensor | None:
    """Tensor that gradient scalers set, 1 if the optimiser must not step; None without a scaler."""
    found: Tensor | None = getattr(optimiser, "found_inf", None)
    return found


def _is_supported(optimiser: torch.optim.Optimizer) -> bool:
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


class CapturedUpdate:
    """Replaces the `step` of an optimiser that can be captured (`capture_refusal`).

    average: updated with the weights, if any.
    static_gradients: whether gradients are in the same tensors in every step; if not, they are copied to such tensors first.
    """

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        average: WeightAverage | None,
        *,
        static_gradients: Callable[[], bool] = lambda: True,
    ) -> None:
        self.optimiser, self.average, self.static_gradients = optimiser, average, static_gradients
        self._copies: dict[Tensor, Tensor] = {}
        """Copies of gradients that are not static, by weight."""
        self.clip: Clip = (None, None)
        parameters = [group["params"][0] for group in optimiser.param_groups]
        self.device = parameters[0].device
        self._rates = [torch.zeros((), dtype=p.dtype, device=self.device) for p in parameters]
        self._share = torch.zeros((), dtype=parameters[0].dtype, device=self.device)
        self._written: list[float | None] = [None] * (len(parameters) + 1)
        """Present values of the rates and the share on the device."""
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, AdamStep | None]] = {}
        make_capturable(optimiser, self.device)
        vars(optimiser)["step"] = self.step

    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """One step, as `torch.optim.Optimizer.step`."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        mark_stepped(self.optimiser)
        if all(p.grad is None for group in self.optimiser.param_groups for p in group["params"]):
            if self.average is not None:  # a callback removed the gradients: the step counts and changes nothing
                self.average.next_share()
            return result
        if len(self.optimiser.param_groups) != len(self._rates):
            raise ForgefieldError(
                "training.engine=graphs: a group of parameters was added to the optimiser during the training, which captured "
                "steps do not support; use training.engine=compile or eager."
            )
        for number, group in enumerate(self.optimiser.param_groups):
            self._write(number, self._rates[number], group["lr"])
        if self.average is not None:
            self._write(-1, self._share, self.average.next_share())
        if self._has_all_states():
            if not self.static_gradients():
                self._copy_gradients()
            self._captured().replay()
        else:  # the optimiser creates its state in its first step
            self._first_update()
        return result

    @torch.no_grad()
    def _copy_gradients(self) -> None:
        """Copy the gradients to tensors of this object."""
        weights = [p for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        for weight in weights:
            if weight not in self._copies:
                self._copies[weight] = torch.empty_like(weight)
        copies = [self._copies[weight] for weight in weights]
        torch._foreach_copy_(copies, [weight.grad for weight in weights])
        for weight, copy in zip(weights, copies):
            weight.grad = copy

    def _write(self, number: int, tensor: Tensor, value: float) -> None:
        """Set a number on the device if it has changed."""
        if self._written[number] != value:
            tensor.fill_(value)
            self._written[number] = value

    def _has_all_states(self) -> bool:
        state = self.optimiser.state
        return all(p in state for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None)

    def _first_update(self) -> None:
        """The first step, not captured; its step counts are exact."""
        restore_settings(self.optimiser)
        self._update([group["lr"] for group in self.optimiser.param_groups])
        make_capturable(self.optimiser, self.device)
        self._graphs.clear()  # they refer to step counts that have been replaced

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
    def _update(self, rates: Sequence[float | Tensor]) -> None:
        """rates: the learning rate of each group."""
        groups = self.optimiser.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        clip_gradients(parameters, self.clip)
        with replaced_learning_rates(self.optimiser, rates):
            type(self.optimiser).step(self.optimiser)
        if self.average is not None:
            found_inf = _found_inf(self.optimiser)
            self.average.update_with_share(self._share if found_inf is None else self._share * (1.0 - found_inf))

    def _settings(self) -> Hashable:
        """Everything that is constant in a graph: settings, and addresses of gradients, which differ between sizes of steps."""
        found_inf = _found_inf(self.optimiser)
        groups = self.optimiser.param_groups
        settings = tuple(
            (key, str(value)) for group in groups for key, value in group.items() if key not in ("params", "lr")
        )
        addresses = tuple(None if p.grad is None else p.grad.data_ptr() for group in groups for p in group["params"])
        return settings, addresses, self.clip, None if found_inf is None else found_inf.data_ptr()
