"""How far a prediction is from its label, element by element.

Each function takes prediction and target of the same shape and returns an error of that shape; averaging, weighting and
masking happen in `task.py`, so that a loss kind is one line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from forgefield.config.components import import_function
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError

ElementLoss = Callable[[Tensor, Tensor], Tensor]


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared error."""
    return (prediction - target).square()


def mae(prediction: Tensor, target: Tensor) -> Tensor:
    """Absolute error."""
    return (prediction - target).abs()


def rmse(prediction: Tensor, target: Tensor) -> Tensor:
    """Of every value the root of the mean square of its components' errors, for each of them the same."""
    squares = (prediction - target).square()
    mean = squares.reshape(squares.shape[0], -1).mean(1) if squares.dim() > 1 else squares
    exact = mean == 0
    root = torch.where(exact, mean, torch.where(exact, 1.0, mean).sqrt())  # its slope at zero is infinite
    return root.reshape(-1, *[1] * (squares.dim() - 1)).expand_as(squares)


def huber(prediction: Tensor, target: Tensor, *, delta: float) -> Tensor:
    """Quadratic below `delta`, linear above, with one slope where they meet."""
    return torch.nn.functional.huber_loss(prediction, target, reduction="none", delta=delta)


def element_loss(name: str, *, huber_delta: float, where: str) -> ElementLoss:
    """The loss of that name, or the user's own function at that import path. `where` is the setting, for messages."""
    if name == "mse":
        return mse
    if name == "mae":
        return mae
    if name == "rmse":
        return rmse
    if name == "huber":
        if not huber_delta > 0:
            raise ForgefieldError(f"{where.rsplit('.', 1)[0]}.huber_delta must be positive, not {huber_delta}.")
        return partial(huber, delta=huber_delta)
    if "." not in name:
        raise ForgefieldError(
            f"{where}: unknown loss '{name}'; use mse, mae, rmse, huber or the import path of a function."
        )
    return import_function(name, where=where, trust=CONFIG)  # tasks are built from configs, never from a run
