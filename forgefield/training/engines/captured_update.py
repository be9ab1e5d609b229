"""What follows the gradient, as one CUDA graph: clipping, the optimiser's step, the average of the weights.

It takes the place of the optimiser's `step`, so that Lightning calls it where it would call that. Contract: learning rates may
change from step to step, since they are read from the device; a change of any other setting makes a new graph. Optimisers that
look at their own step count on the host cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forgefield.training.ema import WeightAverage

Clip = tuple[float | None, str | None]


class CapturedUpdate:
    """optimiser: its `step` is replaced; one that `why_not_capturable` has nothing against. average: taken along, if any."""

    def __init__(self, optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> None:
        self.optimiser, self.average = optimiser, average
        self.clip: Clip = (None, None)
        parameters = [group["params"][0] for group in optimiser.param_groups]
        self.device = parameters[0].device
        self._rates = [torch.zeros((), dtype=p.dtype, device=self.device) for p in parameters]
        self._share = torch.zeros((), dtype=parameters[0].dtype, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made_for: Any = None
        self._is_warm = False
        make_capturable(optimiser, self.device)
        optimiser.step = self.step  # type: ignore[method-assign]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.optimiser._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        for rate, group in zip(self._rates, self.optimiser.param_groups):
            rate.fill_(group["lr"])
        if self.average is not None:
            self._share.fill_(self.average.next_share())
        if not self._is_warm:  # the optimiser makes its state in its first step
            self._update()
            self._is_warm = True
            return result
        settings = self._settings()
        if self._graph is None or settings != self._made_for:
            self._graph, self._made_for = torch.cuda.CUDAGraph(), settings
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._update()
        self._graph.replay()
        return result

    @torch.no_grad()
    def _update(self) -> None:
        groups = self.optimiser.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        value, algorithm = self.clip
        if value:
            if algorithm == "value":
                torch.nn.utils.clip_grad_value_(parameters, value)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, value)
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates):
            group["lr"] = rate
        try:
            type(self.optimiser).step(self.optimiser)
        finally:
            for group, rate in zip(groups, rates):
                group["lr"] = rate
        if self.average is not None:
            self.average.take_in(self._share)

    def _settings(self) -> Any:
        """Everything that is baked into a graph: settings, and where gradients lie."""
        groups = self.optimiser.param_groups
        settings = [
            sorted((key, str(value)) for key, value in group.items() if key not in ("params", "lr")) for group in groups
        ]
        places = [None if p.grad is None else p.grad.data_ptr() for group in groups for p in group["params"]]
        return settings, places, self.clip


def why_not_capturable(optimiser: torch.optim.Optimizer) -> str | None:
    if "capturable" in optimiser.defaults:
        return None
    return (
        f"{type(optimiser).__name__} cannot be captured, because its step is steered by the host; use adam, adamw or "
        "another optimiser with the option 'capturable', or another engine."
    )


def make_capturable(optimiser: torch.optim.Optimizer, device: torch.device) -> None:
    """Let the optimiser keep its step counts on the device."""
    for group in optimiser.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for state in optimiser.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device, torch.float32)


def portable_optimiser_states(states: list[dict[str, Any]]) -> None:
    """Stored states as any engine can go on with them; changed in place."""
    for stored in states:
        for group in stored["param_groups"]:
            if "capturable" in group:
                group["capturable"] = False
        for number, state in stored["state"].items():
            if isinstance(state.get("step"), Tensor):
                stored["state"][number] = {**state, "step": state["step"].cpu()}
