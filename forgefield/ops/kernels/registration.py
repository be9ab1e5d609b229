"""How kernels become operators of torch that compilers look into."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from forgefield.ops.kernels.setting import interpreted


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers an operator. Without Triton it is one that compilers do not look into."""
    if importlib.util.find_spec("triton") is None:
        return torch.library.custom_op(name, mutates_args=())
    return torch.library.triton_op(name, mutates_args=())


def launcher(kernel: Any) -> Any:
    """The kernel as it is launched inside of an operator, where traces see it."""
    return kernel if interpreted() else torch.library.wrap_triton(kernel)
