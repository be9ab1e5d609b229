"""Losses: how far a prediction is from its label, element by element.

A loss is one `Loss` object that holds its reference formula in PyTorch and, optionally, the same formula for the generated
kernels of `loss_kernels.py`. Averaging, weighting and masking are done in `task.py`. To add a loss, write its formula here and
register it in `LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from forgefield.config.components import import_function
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from torch import Tensor

# PyTorch is imported by the formulas that need it: configs are checked against the names of losses without it.
ElementLoss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""(prediction, target) -> error, all of the same shape."""


@dataclass(frozen=True)
class KernelFormula:
    """Triton expressions of a difference `d` between prediction and label. error: the loss of d. slope: its derivative."""

    error: str
    slope: str


@dataclass(frozen=True)
class Loss:
    """A loss of single elements.

    name: for summaries.
    error: reference formula. It need not be differentiable where prediction and label are equal.
    kernel: the same for kernels; None for a loss that kernels do not compute.
    """

    name: str
    error: ElementLoss
    kernel: KernelFormula | None = None

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        return self.error(prediction, target)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square()


def absolute_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs()


def root_mean_square(prediction: Tensor, target: Tensor) -> Tensor:
    """For each value the root of the mean square of its components' errors, repeated for every component."""
    import torch

    squares = (prediction - target).square()
    mean = squares.reshape(squares.shape[0], -1).mean(1) if squares.dim() > 1 else squares
    exact = mean == 0
    root = torch.where(exact, mean, torch.where(exact, 1.0, mean).sqrt())  # the slope at zero is infinite
    return root.reshape(-1, *[1] * (squares.dim() - 1)).expand_as(squares)


def huber_error(prediction: Tensor, target: Tensor, *, delta: float) -> Tensor:
    """Quadratic below `delta`, linear above, with a continuous derivative."""
    from torch.nn.functional import huber_loss

    return huber_loss(prediction, target, reduction="none", delta=delta)


MSE = Loss("mse", squared_error, KernelFormula("d * d", "2.0 * d"))
MAE = Loss(
    "mae", absolute_error, KernelFormula("tl.abs(d)", "tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))")
)  # NaN remains NaN
RMSE = Loss("rmse", root_mean_square)


def huber(delta: float) -> Loss:
    """The Huber loss. delta: where it turns from quadratic to linear."""
    value = repr(float(delta))
    kernel = KernelFormula(
        f"tl.where(tl.abs(d) < {value}, 0.5 * d * d, {value} * (tl.abs(d) - 0.5 * {value}))",
        f"tl.where(tl.abs(d) < {value}, d, tl.where(d > 0, {value}, tl.where(d < 0, -{value}, d)))",
    )
    return Loss("huber", partial(huber_error, delta=delta), kernel)


def stratified_huber(strata: Sequence[tuple[float, float]]) -> Loss:
    """The Huber loss of vectors whose delta depends on the magnitude of the reference.

    strata: (bound, delta), by ascending bound: this delta holds from this magnitude on. Below the first bound the loss is half
    the squared error.
    """
    return Loss("huber by magnitude", partial(stratified_huber_error, strata=tuple(strata)))


def stratified_huber_error(prediction: Tensor, target: Tensor, *, strata: Sequence[tuple[float, float]]) -> Tensor:
    import torch

    magnitude = target.square().sum(-1, keepdim=True).sqrt()
    delta = torch.full_like(magnitude, float("inf"))
    for bound, value in strata:
        delta = torch.where(magnitude >= bound, value, delta)
    error = (prediction - target).abs()
    clipped = torch.minimum(error, delta)
    return clipped * (error - 0.5 * clipped)


LOSSES: dict[str, Callable[[float], Loss]] = {
    "mse": lambda delta: MSE,
    "mae": lambda delta: MAE,
    "rmse": lambda delta: RMSE,
    "huber": huber,
}
"""Losses by their names in `task.*.loss`, as functions of `task.*.huber_delta`."""


def find_loss(name: str, *, huber_delta: float, key: str) -> Loss:
    """The loss of that name, or the function at that import path. key: of the setting, for messages."""
    if name in LOSSES:
        if name == "huber" and not huber_delta > 0:
            raise ForgefieldError(f"{key.rsplit('.', 1)[0]}.huber_delta must be positive, not {huber_delta}.")
        return LOSSES[name](huber_delta)
    if "." not in name:
        raise ForgefieldError(
            f"{key}: unknown loss '{name}'; use {', '.join(LOSSES)} or the import path of a function."
        )
    function: ElementLoss = import_function(
        name, where=key, trust=CONFIG
    )  # tasks are built from configs, never from a run
    return Loss(getattr(function, "__name__", type(function).__name__), function)
