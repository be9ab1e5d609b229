"""The update after the gradient of a step: averaging over ranks, clipping, the optimiser, the average of the weights.

Learning rates and shares of the average are tensors on the device for captured steps, else numbers. The optimiser is that of
Lightning; only its implementation (one fused kernel, step counts on the device) is changed, and checkpoints do not depend on it
(`portable_optimiser_states`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.schedules import replaced_learning_rates

Clip = tuple[float | None, str | None]
"""Largest value or norm of the gradients (None: they are not clipped), and the algorithm: `value` or `norm`."""
IMPLEMENTATION = ("capturable", "fused", "foreach")
"""Settings of an optimiser that are changed while its steps are captured."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def mark_stepped(optimiser: torch.optim.Optimizer) -> None:
    """Tell schedulers, which warn otherwise, that the optimiser has stepped although its `step` is not called."""
    vars(optimiser)["_opt_called"] = True


def clip_gradients(parameters: Sequence[Tensor], clip: Clip) -> None:
    """Clip the gradients of `parameters` in place."""
    value, algorithm = clip
    if value:
        function = torch.nn.utils.clip_grad_value_ if algorithm == "value" else torch.nn.utils.clip_grad_norm_
        function(parameters, value)


class Update:
    """One update of the weights. optimiser, average: what is updated. reduce: averages the gradients over ranks, in place of
    `grad`."""

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        average: WeightAverage | None,
        *,
        clip: Clip,
        reduce: Callable[[], None] | None,
    ) -> None:
        self.optimiser, self.average, self.clip, self.reduce = optimiser, average, clip, reduce
        self.calls = 0
        """Steps taken since this was built."""
        self._parameters = [p for group in optimiser.param_groups for p in group["params"]]
        self._step = type(optimiser).step
        mark_stepped(optimiser)

    def use(self, gradients: Sequence[Tensor]) -> None:
        """Set the gradients of a step. Reducing them may replace `grad`, so they are set before every step."""
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = gradient

    def __call__(self, rates: Sequence[float | Tensor] | None = None, share: Tensor | None = None) -> None:
        """One step. rates: learning rate of each group, if it replaces that of the group. share: of the weights in the average,
        if it is on the device."""
        self.calls += 1
        if self.reduce is not None:
            self.reduce()
        clip_gradients(self._parameters, self.clip)
        if rates is None:
            self._step(self.optimiser)
        else:
            with replaced_learning_rates(self.optimiser, rates):
                self._step(self.optimiser)
        if self.average is not None:
            if share is None:
                self.average.update()
            else:
                found_inf = found_inf_of(self.optimiser)
                self.average.update_with_share(share if found_inf is None else share * (1.0 - found_inf))

    def average_and_weights(self) -> list[Tensor]:
        """All tensors that an update changes, except the state of the optimiser."""
        return [*self._parameters, *([] if self.average is None else self.average.average.values())]

    def changed(self) -> list[Tensor]:
        """All tensors that an update changes."""
        states = (value for state in self.optimiser.state.values() for value in state.values())
        return [*self.average_and_weights(), *(value for value in states if isinstance(value, Tensor))]

    @property
    def has_states(self) -> bool:
        """Whether the optimiser has its state, which it creates in its first step."""
        return all(parameter in self.optimiser.state for parameter in self._parameters)


def use_fused(optimiser: torch.optim.Optimizer) -> None:
    """Let an optimiser on a CPU update all weights by one kernel, if it has one."""
    on_cpu = optimiser.param_groups[0]["params"][0].device.type == "cpu"
    for group in optimiser.param_groups if on_cpu and type(optimiser) in _FUSED else ():
        if not group.get("foreach") and not group.get("differentiable"):
            group["fused"] = True


def found_inf_of(optimiser: torch.optim.Optimizer) -> Tensor | None:
    """Tensor that gradient scalers set, 1 if the optimiser must not step; None without a scaler."""
    found: Tensor | None = getattr(optimiser, "found_inf", None)
    return found


def capture_refusal(optimiser: torch.optim.Optimizer) -> str | None:
    """Why the steps of an optimiser cannot be captured; None if they can."""
    if "capturable" in optimiser.defaults:
        return None
    return (
        f"{type(optimiser).__name__} cannot be captured, because its step depends on values on the host; use adam, adamw or "
        "another optimiser with the option 'capturable', or another engine."
    )


def make_capturable(optimiser: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the step counts of the optimiser to the device.

    Bias corrections are powers of decay rates to these counts. torch computes them in float32, in which the first ones are
    wrong by 1e-5; fused kernels compute them in float64, and for other implementations the counts are float64.
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


def restore_settings(optimiser: torch.optim.Optimizer) -> None:
    """Undo `make_capturable`: original settings, and step counts on the host."""
    states = [{"param_groups": optimiser.param_groups, "state": optimiser.state}]
    portable_optimiser_states(states, [optimiser])


def _has_fused_kernel(optimiser: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether one kernel updates all weights. It reads learning rates from the device in float32 only."""
    supported = type(optimiser) in (torch.optim.Adam, torch.optim.AdamW)
    return supported and all(p.is_cuda and p.dtype == torch.float32 for p in group["params"])


def portable_optimiser_states(states: list[dict[str, Any]], optimisers: Sequence[torch.optim.Optimizer]) -> None:
    """Change states in place such that any engine can resume from them. optimisers: to which they belong."""
    for stored, optimiser in zip(states, optimisers):
        original = {key: optimiser.defaults[key] for key in IMPLEMENTATION if key in optimiser.defaults}
        for group in stored["param_groups"]:
            group.update({key: value for key, value in original.items() if key in group})
        places = [(number, name) for number, state in stored["state"].items() for name in _counts(state)]
        if not places:
            continue
        counts = torch.stack([stored["state"][number][name].double() for number, name in places]).cpu().float()
        for (number, name), count in zip(places, counts):
            stored["state"][number] = stored["state"][number] | {name: count.clone()}


def _counts(state: dict[str, Any]) -> list[str]:
    """Names of the step counts of a parameter, and in some optimisers of a product over steps."""
    return [name for name in ("step", "mu_product") if isinstance(state.get(name), Tensor)]
