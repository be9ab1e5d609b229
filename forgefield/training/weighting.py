"""Weights of targets that find themselves: by how fast each loss falls (SoftAdapt), or by how well it is learnt (uncertainty).

Both multiply the weights of the task by factors, in the tensors that every engine reads. They are made of losses of all ranks
together, so that ranks agree. Losses are reported with the task's own weights all the same.
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
    """every: steps between two changes of the weights. beta: how much slopes matter; above 0 what falls slowest weighs most."""

    every: int = 50
    beta: float = 1.0


@dataclass(frozen=True)
class UncertaintyOptions:
    """lr: learning rate of the variances over that of the model."""

    lr: float = 1.0


OPTIONS = {"softadapt": SoftAdaptOptions, "uncertainty": UncertaintyOptions}


def weighting_options(given: Any) -> SoftAdaptOptions | UncertaintyOptions | None:
    """The setting `training.weighting`, or one sentence on what is wrong with it."""
    if given is None:
        return None
    values = {"name": given} if isinstance(given, str) else given
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
        raise ForgefieldError(
            f"{WHERE} is {given!r}; it should be a name ({', '.join(OPTIONS)}) or {{name: ..., option: ...}}."
        )
    name = values["name"].lower()
    if name not in OPTIONS:
        raise ForgefieldError(
            f"{WHERE}: there is no '{name}'.{did_you_mean(name, OPTIONS)} Known: {', '.join(OPTIONS)}."
        )
    known = {field.name: field for field in fields(OPTIONS[name])}
    rest = {str(key): value for key, value in values.items() if key != "name"}
    value: Any
    for key, value in rest.items():
        if key not in known:
            hint = did_you_mean(key, known) or f" It has: {', '.join(known)}."
            raise ForgefieldError(f"{WHERE}.{key} is not an option of {name}.{hint}")
        whole = known[key].type == "int"
        right = isinstance(value, int) if whole else isinstance(value, (int, float))
        if not right or isinstance(value, bool) or not math.isfinite(value) or (key != "beta" and not value > 0):
            raise ForgefieldError(
                f"{WHERE}.{key} is {value!r}; it is a {'positive whole' if whole else 'finite'} number."
            )
    return OPTIONS[name](**rest)


def build_weighting(given: Any, task: Task, optimizer: Any) -> SoftAdapt | Uncertainty | None:
    """What the setting asks for, for this task. optimizer: the setting `training.optimizer`."""
    options = weighting_options(given)
    if options is None:
        return None
    if len(task.names) < 2:
        raise ForgefieldError(
            f"{WHERE} balances several targets, and the task has one ({task.names[0]}); leave it out."
        )
    if "lbfgs" in str(optimizer).lower():
        raise ForgefieldError(f"{WHERE}: LBFGS evaluates a step several times with one loss; use another optimiser.")
    kind = SoftAdapt if isinstance(options, SoftAdaptOptions) else Uncertainty
    return kind(options, len(task.names))  # type: ignore[arg-type]


class SoftAdapt:
    """factor_k = n softmax(beta s)_k over the n targets, with s_k the relative change of the loss of target k between the last
    two stretches of `every` steps, over the sum of the sizes of all changes.
    """

    def __init__(self, options: SoftAdaptOptions, n_targets: int) -> None:
        self.options = options
        self.sums = torch.zeros(2, n_targets, dtype=torch.float64)
        """Numerators and denominators of the losses of this stretch, on this rank."""
        self.before = torch.full((n_targets,), torch.nan, dtype=torch.float64)
        self.factors = torch.ones(n_targets, dtype=torch.float64)
        self._changed_at = 0

    def add(self, sums: Tensor) -> None:
        """sums: (2, n_targets), of one batch."""
        self.sums = self.sums.to(sums.device) + sums

    def before_batch(self, step: int, task: Task, ranks: Ranks, device: torch.device) -> None:
        """Change the weights where it is time; all ranks come here at the same step."""
        if step > self._changed_at and step % self.options.every == 0:
            self._changed_at = step
            whole = ranks.all_reduce(self.sums.to(device)) if ranks.world_size > 1 else self.sums
            self._change(whole.cpu())
            self.sums = torch.zeros_like(self.sums)
        task.adapt(self.factors, device)

    def _change(self, sums: Tensor) -> None:
        now = torch.where(sums[1] > 0, sums[0] / sums[1], self.before)
        slopes = (now - self.before) / self.before.clamp(min=1e-300)
        known = slopes.isfinite()
        self.before = now
        if int(known.sum()) < 2:
            return
        slopes = torch.where(known, slopes, 0.0)
        slopes = slopes / slopes.abs().sum().clamp(min=1e-300)
        shares = torch.softmax(self.options.beta * slopes, 0)
        self.factors = len(shares) * shares

    def state_dict(self) -> dict[str, Any]:
        """All but `sums`, which each rank has its own of."""
        return {"before": self.before.clone(), "factors": self.factors.clone(), "changed_at": self._changed_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before, self.factors = state["before"].clone(), state["factors"].clone()
        self._changed_at = int(state["changed_at"])


class Uncertainty(nn.Module):
    """Minimises sum_k exp(-s_k) w_k L_k + s_k over weights and the logarithms s of the variances (Kendall, Gal and Cipolla,
    2018, times two): factor_k = exp(-s_k). Targets without weight are left out,
    and in a step those that none of its frames is labelled for.
    """

    def __init__(self, options: UncertaintyOptions, n_targets: int) -> None:
        super().__init__()
        self.options = options
        self.log_variances = nn.Parameter(torch.zeros(n_targets, dtype=torch.float64))
        self._gradient: Tensor | None = None
        self._lying: Tensor | None = None

    def before_batch(self, step: int, task: Task, ranks: Ranks, device: torch.device) -> None:
        task.adapt(torch.exp(-self.log_variances.detach()), device)

    def loss(self, sums: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """What is added to the loss of a step: its value is the sum of s, its gradient in s that of the whole.

        sums: (n_targets,) of this rank, times the number of ranks; counts: of all ranks; weights: those of the task.
        """
        weighted = weights * sums / torch.where(counts > 0, counts, 1.0)
        taking_part = ((weights > 0) & (counts > 0)).to(weighted.dtype)
        factors = torch.exp(-self.log_variances)
        made = factors * weighted
        self._gradient = (taking_part * (1.0 - made)).detach()
        return (made - made.detach() + taking_part * self.log_variances).sum()

    def bring_gradient(self) -> None:
        """Let the variances' `grad` be that of the latest step, where it always lies."""
        assert self._gradient is not None
        if self._lying is None:
            self._lying = torch.zeros_like(self._gradient)
        self._lying.copy_(self._gradient)
        self.log_variances.grad = self._lying
