"""Types for custom autograd functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd import Function
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:

    class AutogradContext(FunctionCtx):
        """What `forward` of an autograd function leaves for `backward` and `jvp`, under any names."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
else:
    AutogradContext = FunctionCtx

Gradients = tuple[Any, ...]
"""Gradients of all inputs, None for those that have none."""

if TYPE_CHECKING:

    class TypedFunction(Function):
        """`torch.autograd.Function` whose `apply` has a signature."""

        @classmethod
        def apply(cls, *args: Any) -> Any: ...
else:
    TypedFunction = Function
