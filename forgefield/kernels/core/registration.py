"""How kernels become operators of torch that compilers look into."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from forgefield.kernels.core.switches import interpreted


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers an operator. Without Triton it is one that compilers do not look into."""
    if importlib.util.find_spec("triton") is None:
        return torch.library.custom_op(name, mutates_args=())
    return torch.library.triton_op(name, mutates_args=())


def launcher(kernel: Any) -> Any:
    """The kernel as it is launched inside of an operator, where traces see it."""
    return kernel if interpreted() else torch.library.wrap_triton(kernel)


@cache
def mark_of_code(*written_by: Any) -> str:
    """Of the modules and functions that write a kernel: operators are given it, so that compiled graphs which hold them are
    not taken for those of other code."""
    try:
        text = "".join(inspect.getsource(part) for part in written_by)
    except OSError:  # installed without sources
        text = version("forgefield")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
