"""Generated kernels: tables of their arguments, modules compiled from source text, and operators of PyTorch.

An argument table is the only list of the arguments of a family of kernels: the code generator writes the signature from it, and
the launcher passes arguments by the same names. A name that is misspelt, missing or left over is an error that names it.
Hand-written kernels need no table: they are launched with keyword arguments, so the signature of the function is the table.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import linecache
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from forgefield.kernels.core.runtime import interpreted

LaunchArguments = dict[str, Any]
"""Tensors and numbers by the names that a kernel has for them."""


class Launchable(Protocol):
    """`kernel[grid](**arguments)` launches it."""

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., object]: ...


class TritonFunction(Launchable, Protocol):
    """A function of Triton, compiled when it is first launched."""

    def warmup(self, *, grid: tuple[Any, ...], **arguments: object) -> object:
        """Compile it for these arguments without launching it."""


class ArgumentTable:
    """arguments: what each argument is, by name, in the order of the signature."""

    def __init__(self, **arguments: str) -> None:
        self.arguments = arguments

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    @property
    def signature(self) -> str:
        """The names as they stand between the parentheses of a definition or of a call."""
        return ", ".join(self.arguments)

    def bind(
        self,
        kernel: str,
        values: Mapping[str, object],
        *,
        unused: Tensor | None = None,
        used: Collection[str] | None = None,
    ) -> LaunchArguments:
        """Keyword arguments of a launch, for every name of the table.

        kernel: for messages.
        values: values by name.
        unused: any tensor; arguments that the kernel does not use are launched with it.
        used: names that the kernel uses, all of which must be in `values`; None: every name of the table.
        """
        unknown = [name for name in values if name not in self.arguments]
        if unknown:
            raise TypeError(f"{kernel}() has no argument '{unknown[0]}'; its arguments are {self.signature}")
        missing = [name for name in (self.arguments if used is None else used) if name not in values]
        if missing:
            raise TypeError(f"{kernel}() needs the argument '{missing[0]}'")
        return {name: values.get(name, unused) for name in self.arguments}


def module_from(source: str) -> types.ModuleType:
    """A module from source text. Triton reads the source of what it compiles, so the text is registered with `linecache`."""
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


def launcher(kernel: TritonFunction) -> Launchable:
    """The kernel in the form for launches inside an operator, which traces record."""
    return kernel if interpreted() else torch.library.wrap_triton(cast(Callable[..., Any], kernel))


@cache
def mark_of_code(*sources: types.ModuleType | Callable[..., object]) -> str:
    """A short hash of the modules and functions that generate a kernel.

    It is an argument of operators, so that compiled graphs from a cache are not mistaken for those of other code.
    """
    try:
        text = "".join(inspect.getsource(source) for source in sources)
    except OSError:  # installed without sources
        text = version("forgefield")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
