"""Self-adapting loss weights: from the rate at which each loss decreases (SoftAdapt), or from learnt variances (uncertainty).

Both multiply the weights of the task by factors, in the tensors that every engine reads. The factors are computed from losses
of all ranks and are the same on all ranks. Losses are reported with the weights of the task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.parallel.ranks import Ranks
from forgefield.tasks.task import Task

WHERE = "training.weighting"


@dataclass(frozen=True)
class SoftAdaptOptions:
    """every: number of steps between two changes of the weights. beta: sensitivity; above 0, targets that improve slowly weigh
    more."""

    every: int = 50
    beta: float = 1.0


@dataclass(frozen=True)
class UncertaintyOptions:
    """lr: learning rate of the variances as a factor of that of the model."""

    lr: float = 1.0


OPTIONS = {"softadapt": SoftAdaptOptions, "uncertainty": UncertaintyOptions}


def weighting_options(setting: str | Mapping[str, Any] | None) -> SoftAdaptOptions | UncertaintyOptions | None:
    """The options in the setting `training.weighting`. Raises ForgefieldError for an invalid one."""
    if setting is None:
        return None
    values = {"name": setting} if isinstance(setting, str) else setting
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
        raise ForgefieldError(
            f"{WHERE} is {setting!r}; it must be a name ({', '.join(OPTIONS)}) or {{name: ..., option: ...}}."
        )
    name = values["name"].lower()
    if name not in OPTIONS:
        raise ForgefieldError(
            f"{WHERE}: unknown name '{name}'.{did_you_mean(name, OPTIONS)} Available: {', '.join(OPTIONS)}."
        )
    valid = {field.name: field for field in fields(OPTIONS[name])}
    options: dict[str, Any] = {str(key): value for key, value in values.items() if key != "name"}
    for key, value in options.items():
        if key not in valid:
            hint = did_you_mean(key, valid) or f" Its options: {', '.join(valid)}."
            raise ForgefieldError(f"{WHERE}.{key} is not an option of {name}.{hint}")
        is_integer = valid[key].type == "int"
        has_type = isinstance(value, int) if is_integer else isinstance(value, (int, float))
        if not has_type or isinstance(value, bool) or not math.isfinite(value) or (key != "beta" and not value > 0):
            raise ForgefieldError(
                f"{WHERE}.{key} is {value!r}; it must be a {'positive integer' if is_integer else 'finite number'}."
            )
    return SoftAdaptOptions(**options) if name == "softadapt" else UncertaintyOptions(**options)


def build_weighting(
    setting: str | Mapping[str, Any] | None, task: Task, optimizer: str | Mapping[str, Any]
) -> SoftAdapt | Uncertainty | None:
    """The weighting that `training.weighting` describes, for this task. optimizer: the setting `training.optimizer`."""
    options = weighting_options(setting)
    if options is None:
        return None
    if len(task.names) < 2:
        raise ForgefieldError(
            f"{WHERE} balances several targets, but the task has only one ({task.names[0]}); leave it out."
        )
    if "lbfgs" in str(optimizer).lower():
        raise ForgefieldError(f"{WHERE}: LBFGS evaluates a step several times with one loss; use another optimiser.")
    if isinstance(options, SoftAdaptOptions):
        return SoftAdapt(options, len(task.names))
    return Uncertainty(options, len(task.names))


class SoftAdapt:
    """factor_k = n softmax(beta s)_k over the n targets, where s_k is the relative change of the loss of target k between the
    last two intervals of `every` steps, divided by the sum of the magnitudes of all changes.
    """

    def __init__(self, options: SoftAdaptOptions, n_targets: int) -> None:
        self.options = options
        self.sums = torch.zeros(2, n_targets, dtype=torch.float64)
        """Numerators and denominators of the losses of this interval, on this rank."""
        self.before = torch.full((n_targets,), torch.nan, dtype=torch.float64)
        self.factors = torch.ones(n_targets, dtype=torch.float64)
        self._changed_at = 0

    def add(self, sums: Tensor) -> None:
        """sums: (2, n_targets), of one batch."""
        self.sums = self.sums.to(sums.device) + sums

    def before_batch(self, step: int, task: Task, ranks: Ranks, device: torch.device) -> None:
        """Change the weights at the end of an interval. All ranks call this at the same step."""
        if step > self._changed_at and step % self.options.every == 0:
            self._changed_at = step
            total = ranks.all_reduce(self.sums.to(device)) if ranks.world_size > 1 else self.sums
            self._change(total.cpu())
            self.sums = torch.zeros_like(self.sums)
        task.adapt(self.factors, device)

    def _change(self, sums: Tensor) -> None:
        now = torch.where(sums[1] > 0, sums[0] / sums[1], self.before)
        slopes = (now - self.before) / self.before.clamp(min=1e-300)
        finite = slopes.isfinite()
        self.before = now
        if int(finite.sum()) < 2:
            return
        slopes = torch.where(finite, slopes, 0.0)
        slopes = slopes / slopes.abs().sum().clamp(min=1e-300)
        shares = torch.softmax(self.options.beta * slopes, 0)
        self.factors = len(shares) * shares

    def state_dict(self) -> dict[str, Any]:
        """Everything except `sums`, which differ between ranks."""
        return {"before": self.before.clone(), "factors": self.factors.clone(), "changed_at": self._changed_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before, self.factors = state["before"].clone(), state["factors"].clone()
        self._changed_at = int(state["changed_at"])


class Uncertainty(nn.Module):
    """Minimises sum_k exp(-s_k) w_k L_k + s_k over the weights of the model and the logarithms s of variances (Kendall, Gal and
    Cipolla, 2018, times two): factor_k = exp(-s_k). Targets with a weight of zero, or without labels in a step, are left out.
    """

    def __init__(self, options: UncertaintyOptions, n_targets: int) -> None:
        super().__init__()
        self.options = options
        self.log_variances = nn.Parameter(torch.zeros(n_targets, dtype=torch.float64))
        self._gradient: Tensor | None = None
        self._static_gradient: Tensor | None = None

    def before_batch(self, step: int, task: Task, ranks: Ranks, device: torch.device) -> None:
        task.adapt(torch.exp(-self.log_variances.detach()), device)

    def loss(self, sums: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """Term to add to the loss of a step: its value is the sum of s, its gradient in s that of the total loss.

        sums: (n_targets,), of this rank, times the number of ranks.
        counts: (n_targets,), of all ranks.
        weights: (n_targets,), those of the task.
        """
        weighted = weights * sums / torch.where(counts > 0, counts, 1.0)
        included = ((weights > 0) & (counts > 0)).to(weighted.dtype)
        terms = torch.exp(-self.log_variances) * weighted
        self._gradient = (included * (1.0 - terms)).detach()
        return (terms - terms.detach() + included * self.log_variances).sum()

    def assign_gradient(self) -> None:
        """Set `grad` of the variances to the gradient of the latest step, in a tensor of fixed address."""
        assert self._gradient is not None
        if self._static_gradient is None:
            self._static_gradient = torch.zeros_like(self._gradient)
        self._static_gradient.copy_(self._gradient)
        self.log_variances.grad = self._static_gradient
