"""Schedule-free optimisers (Defazio et al., 2024, The Road Less Scheduled): a running average replaces a falling learning rate.

Three sequences of weights: z takes the steps of the optimiser, x is the average of z, and gradients are computed at
y = (1 - beta) z + beta x. The parameters are always y and the state contains z, so that a resumed training is exact; x is
computed from both where a model is validated or saved (`averages.py`). The numbers are those of the package
schedulefree 1.4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from forgefield.training.optim.stepping import SteppingOptimiser

Group = dict[str, Any]
"""A group of parameters with its options."""


class ScheduleFree(SteppingOptimiser):
    """Base class: the sequences x, y, z and the weights of the average.

    The weight of step k (from 1) in the average is k^r lr_max^weight_lr_power, where lr_max is the largest learning rate so
    far. The counters are stored with each parameter: parameters without a gradient do not step.

    lr: learning rate. beta: share of x in the point where gradients are computed. weight_decay: decoupled, evaluated at y.
    warmup_steps: number of steps in which the rate grows linearly.
    """

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, defaults)

    @abstractmethod
    def beta(self, group: Group) -> float:
        """Share of x in y."""

    @abstractmethod
    def rate(self, group: Group, step: int) -> float:
        """Learning rate of a step, counted from 1."""

    @abstractmethod
    def directions(self, group: Group, step: int, weights: Sequence[Tensor]) -> list[Tensor]:
        """The steps for a learning rate of 1, without weight decay; updates the moments of the gradients."""

    def take_step(self) -> None:
        for group in self.param_groups:
            together: dict[tuple[float, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(z=parameter.detach().clone(), steps=0, weight_sum=0.0, lr_max=0.0)
                    together.setdefault((state["steps"], state["weight_sum"], state["lr_max"]), []).append(parameter)
            for (steps, weight_sum, lr_max), parameters in together.items():
                self._step(group, int(steps) + 1, weight_sum, lr_max, parameters)

    def _step(self, group: Group, step: int, weight_sum: float, lr_max: float, weights: list[Tensor]) -> None:
        """One step of parameters with equal counters. step: counted from 1. weight_sum, lr_max: before it."""
        rate, beta = self.rate(group, step), self.beta(group)
        lr_max = max(rate, lr_max)
        weight = step ** group["r"] * lr_max ** group["weight_lr_power"]
        weight_sum += weight
        share = weight / weight_sum if weight_sum else 0.0
        directions = self.directions(group, step, weights)
        if group["weight_decay"]:
            torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        z = [self.state[parameter]["z"] for parameter in weights]
        torch._foreach_lerp_(weights, z, share)
        torch._foreach_add_(weights, directions, alpha=rate * (beta * (1 - share) - 1))
        torch._foreach_sub_(z, directions, alpha=rate)
        for parameter in weights:
            self.state[parameter].update(steps=step, weight_sum=weight_sum, lr_max=lr_max)

    def averaged(self, group: Group, parameter: Tensor) -> Tensor:
        """x of a parameter of a group."""
        z = self.state[parameter].get("z") if parameter in self.state else None
        return parameter.detach().clone() if z is None else torch.lerp(parameter.detach(), z, 1 - 1 / self.beta(group))


class SGDScheduleFree(ScheduleFree):
    """Steps along the gradient. momentum: share of x in the point where gradients are computed."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        _check(beta=momentum, weight_decay=weight_decay, warmup_steps=warmup_steps)
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
        super().__init__(params, {**options, "r": r, "weight_lr_power": weight_lr_power})

    def beta(self, group: Group) -> float:
        return float(group["momentum"])

    def rate(self, group: Group, step: int) -> float:
        return _warm(group, step)

    def directions(self, group: Group, step: int, weights: Sequence[Tensor]) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in weights if parameter.grad is not None]


class AdamWScheduleFree(ScheduleFree):
    """Steps along the gradient divided by the root of its mean square. betas: share of x, and decay rate of the mean square."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        _check(beta=betas[0], beta2=betas[1], weight_decay=weight_decay, warmup_steps=warmup_steps)
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power})

    def beta(self, group: Group) -> float:
        return float(group["betas"][0])

    def rate(self, group: Group, step: int) -> float:
        return _warm(group, step)

    def directions(self, group: Group, step: int, weights: Sequence[Tensor]) -> list[Tensor]:
        gradients, squares = self._squares(group, weights)
        roots = torch._foreach_div(squares, 1 - group["betas"][1] ** step)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(gradients, roots))

    def _squares(self, group: Group, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients, and the means of their squares including them."""
        gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
        states = [self.state[parameter] for parameter in weights]
        for state, gradient in zip(states, gradients):
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros_like(gradient)
        squares = [state["exp_avg_sq"] for state in states]
        decay = group["betas"][1]
        torch._foreach_mul_(squares, decay)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - decay)
        return gradients, squares


class RAdamScheduleFree(AdamWScheduleFree):
    """AdamW with the rectified rates of RAdam (Liu et al., 2020) in place of a warm-up.

    silent_sgd_phase: whether the first steps, in which the variance of the mean square is not bounded, change nothing; else
    they are steps of SGD.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        silent_sgd_phase: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, 0, r, weight_lr_power)
        for group in self.param_groups:
            group["silent_sgd_phase"] = silent_sgd_phase

    def rate(self, group: Group, step: int) -> float:
        length, longest = self._lengths(group, step)
        if length > 4:
            rectification = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            return float(group["lr"] * rectification**0.5)
        return 0.0 if group["silent_sgd_phase"] else float(group["lr"])

    def directions(self, group: Group, step: int, weights: Sequence[Tensor]) -> list[Tensor]:
        if self._lengths(group, step)[0] > 4:
            return super().directions(group, step, weights)
        gradients, _ = self._squares(group, weights)
        return [gradient.clone() for gradient in gradients]

    @staticmethod
    def _lengths(group: Group, step: int) -> tuple[float, float]:
        """Number of gradients that the mean of squares covers, in this step and in the long run."""
        decay = group["betas"][1]
        longest = 2 / (1 - decay) - 1
        return longest - 2 * step * decay**step / (1 - decay**step), longest


SCHEDULE_FREE: dict[str, type[ScheduleFree]] = {
    cls.__name__: cls for cls in (AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree)
}
"""Schedule-free optimisers by name."""


def _warm(group: Group, step: int) -> float:
    """Learning rate with the linear warm-up."""
    return float(group["lr"] * min(1.0, step / group["warmup_steps"]) if group["warmup_steps"] else group["lr"])


def _check(*, weight_decay: float, warmup_steps: int, **betas: float) -> None:
    for name, value in betas.items():
        if not 0 < value < 1:
            raise ValueError(
                f"{'betas or momentum' if name == 'beta' else name} must be above 0 and below 1, not {value}"
            )
    if weight_decay < 0 or warmup_steps < 0:
        raise ValueError("weight_decay and warmup_steps must not be negative")
