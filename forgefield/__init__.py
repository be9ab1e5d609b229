"""Forgefield trains atomistic models: `forgefield.train(config)`, `forgefield.load(run)`, `forgefield.Calculator(run)`.

The names below are imported when they are first used, so that `import forgefield` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forgefield._version import __version__
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.api import (
        Calculator,
        Ensemble,
        evaluate,
        learn,
        load,
        load_run,
        md,
        predict,
        relax,
        run_exists,
        select,
        train,
        tune,
    )

__all__ = [
    "Calculator",
    "Ensemble",
    "ForgefieldError",
    "__version__",
    "evaluate",
    "learn",
    "load",
    "load_run",
    "md",
    "predict",
    "relax",
    "run_exists",
    "select",
    "train",
    "tune",
]

_FROM_API = frozenset(__all__) - {"ForgefieldError", "__version__"}


def __getattr__(name: str) -> Any:
    if name in _FROM_API:
        from forgefield import api

        return getattr(api, name)
    raise AttributeError(f"module 'forgefield' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_API})
