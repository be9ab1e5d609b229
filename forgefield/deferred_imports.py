"""Imports that the commands do not need before they have a result, deferred until something asks for them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types

_USED_BY_LIGHTNING = {"Metric": "torchmetrics.metric", "MetricCollection": "torchmetrics.collections"}


class _Torchmetrics(types.ModuleType):
    """The package torchmetrics, of which Lightning needs two classes. Anything else loads all of it, and SciPy."""

    def __getattr__(self, name: str) -> object:
        if name == "_logger":
            return logging.getLogger("torchmetrics")
        if name == "__version__":
            from torchmetrics.__about__ import __version__

            return __version__
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _USED_BY_LIGHTNING:
            importlib.import_module("torchmetrics.utilities")  # first, because it and the metrics import each other
            return getattr(importlib.import_module(_USED_BY_LIGHTNING[name]), name)
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(self)
        return getattr(self, name)


def defer_torchmetrics() -> None:
    """Let `import lightning` load only the part of torchmetrics that it needs: about a second less before the first step."""
    spec = None if "torchmetrics" in sys.modules else importlib.util.find_spec("torchmetrics")
    if spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Torchmetrics
    sys.modules["torchmetrics"] = module
