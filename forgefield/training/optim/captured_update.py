"""What follows the gradient, as one CUDA graph: clipping, the optimiser's step, the average of the weights.

It takes the place of the optimiser's `step`, so that Lightning calls it where it would call that. Contract: learning rates may
change from step to step, since they are read from the device; a change of any other setting makes a new graph. Optimisers that
look at their own step count on the host cannot be captured. Adam and AdamW in float32 are one kernel, which clips gradients as
it reads them: `grad` is then not clipped. Whoever looks at gradients does so before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.kernels.step.update import AdamStep
from forgefield.training.optim.adam_update import adam_step
from forgefield.training.optim.averages import WeightAverage

Clip = tuple[float | None, str | None]
_CHANGED = ("capturable", "fused", "foreach")
"""Settings of an optimiser that a captured one has otherwise than it was given."""


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
        value, algorithm = self.clip
        if value:
            if algorithm == "value":
                torch.nn.utils.clip_grad_value_(parameters, value)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, value)
        kept = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        try:
            type(self.optimiser).step(self.optimiser)
        finally:
            for group, rate in zip(groups, kept):
                group["lr"] = rate
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


def why_not_capturable(optimiser: torch.optim.Optimizer) -> str | None:
    if "capturable" in optimiser.defaults:
        return None
    return (
        f"{type(optimiser).__name__} cannot be captured, because its step is steered by the host; use adam, adamw or "
        "another optimiser with the option 'capturable', or another engine."
    )


def make_capturable(optimiser: torch.optim.Optimizer, device: torch.device) -> None:
    """Let the optimiser keep its step counts on the device.

    Powers of decays are taken of these counts. torch would do so in float32, where the first corrections for bias are wrong by
    1e-5; the fused kernels do it in float64, and for others the counts are kept in float64.
    """
    for group in optimiser.param_groups:
        fused = _has_fused_kernel(optimiser, group)
        if "capturable" in group:
            group["capturable"] = True
        if fused:
            group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            state = optimiser.state.get(parameter, {})
            for name in _counts(state):
                state[name] = state[name].to(device)
            if "step" in _counts(state):
                state["step"] = state["step"].to(torch.float32 if fused else torch.float64)


def make_plain(optimiser: torch.optim.Optimizer) -> None:
    """The optimiser as it was given, its step counts on the host."""
    states = [{"param_groups": optimiser.param_groups, "state": optimiser.state}]
    portable_optimiser_states(states, [optimiser])


def _has_fused_kernel(optimiser: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether one kernel updates all weights. It takes a learning rate from the device only in float32."""
    known = type(optimiser) in (torch.optim.Adam, torch.optim.AdamW)
    return known and all(p.is_cuda and p.dtype == torch.float32 for p in group["params"])


def portable_optimiser_states(states: list[dict[str, Any]], optimisers: Sequence[torch.optim.Optimizer]) -> None:
    """Stored states as any engine can go on with them; changed in place. optimisers: those they were taken from."""
    for stored, optimiser in zip(states, optimisers):
        as_given = {key: optimiser.defaults[key] for key in _CHANGED if key in optimiser.defaults}
        for group in stored["param_groups"]:
            group.update({key: value for key, value in as_given.items() if key in group})
        for number, state in stored["state"].items():
            stored["state"][number] = state | {name: state[name].cpu().float() for name in _counts(state)}


def _counts(state: dict[str, Any]) -> list[str]:
    """What an optimiser counts for a parameter: its steps, and in some a product over them."""
    return [name for name in ("step", "mu_product") if isinstance(state.get(name), Tensor)]
