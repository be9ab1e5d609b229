"""Triton's interpreter without work that it repeats: a function that a kernel calls has the whole language patched again, which
may take longer than the kernel. Here it is patched only where that is not in force already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _InForce:
    """Stands for a patch that is in force already, and stays."""

    def restore(self) -> None:
        pass


def speed_up() -> None:
    """For this process; called once, before the first kernel runs."""
    patch = interpreter._patch_lang
    in_force: set[int] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if seen <= in_force:
            return _InForce()
        scope, outermost = patch(function), not in_force
        in_force.update(seen)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (in_force.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once
