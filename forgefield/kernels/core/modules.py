"""From source text to kernels: modules made of generated code, operators of PyTorch, and marks of the code behind them."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import linecache
import types
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from forgefield.kernels.core.availability import interpreted


def module_from(source: str) -> types.ModuleType:
    """A module made of text. Triton reads the source of what it compiles, so the text is registered with `linecache`."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"forgefield_kernel_{digest}"
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that registers a custom operator. Compilers see the kernels inside; without Triton it is opaque to them."""
    if importlib.util.find_spec("triton") is None:
        return torch.library.custom_op(name, mutates_args=())
    return torch.library.triton_op(name, mutates_args=())


def launcher(kernel: Any) -> Any:
    """The kernel as it is launched inside of an operator, such that traces record the launch."""
    return kernel if interpreted() else torch.library.wrap_triton(kernel)


@cache
def mark_of_code(*sources: Any) -> str:
    """A short hash of the modules and functions that generate a kernel.

    It is an argument of operators, so that compiled graphs from a cache are not mistaken for those of other code.
    """
    try:
        text = "".join(inspect.getsource(source) for source in sources)
    except OSError:  # installed without sources
        text = version("forgefield")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
