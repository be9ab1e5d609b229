"""Forgefield trains atomistic models: `forgefield.train(config)`, `forgefield.load(run)`, `forgefield.Calculator(run)`.

The names below are imported when they are first used, so that `import forgefield` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forgefield._version import __version__
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.api import (
        Calculator,
        Ensemble,
        check,
        compare,
        convert_data,
        convert_input,
        evaluate,
        export,
        import_mala,
        import_model,
        inspect_data,
        learn,
        list_runs,
        load,
        load_run,
        md,
        predict,
        propose_config,
        relax,
        report,
        run_exists,
        sample_data,
        select,
        test,
        train,
        tune,
        uncertainty,
        watch,
    )
    from forgefield.api import report as write_report

__all__ = [
    "Calculator",
    "Ensemble",
    "ForgefieldError",
    "__version__",
    "check",
    "compare",
    "convert_data",
    "convert_input",
    "evaluate",
    "export",
    "import_mala",
    "import_model",
    "inspect_data",
    "learn",
    "list_runs",
    "load",
    "load_run",
    "md",
    "predict",
    "propose_config",
    "relax",
    "report",
    "run_exists",
    "sample_data",
    "select",
    "test",
    "train",
    "tune",
    "uncertainty",
    "watch",
    "write_report",
]

_FROM_API = frozenset(__all__) - {"ForgefieldError", "__version__"}
_NAMES_IN_API = {"write_report": "report"}
"""An earlier name of `report`."""


def __getattr__(name: str) -> Any:
    if name == "report":  # a package that can be called
        return import_module("forgefield.report")
    if name in _FROM_API:
        from forgefield import api

        return getattr(api, _NAMES_IN_API.get(name, name))
    raise AttributeError(f"module 'forgefield' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_API})
