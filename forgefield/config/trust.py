"""Who may name code. A config that the user names may; a run, a package or a data file may not without permission.

Importing a module executes it, so the decision is taken before anything is imported: `components.py` asks a `Trust` first.
docs/explanations/security.md lists every setting that names code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgefield.errors import ForgefieldError

TRAINER_OBJECTS = ("logger", "callbacks", "strategy", "plugins", "profiler")
"""Settings of `trainer` that may describe an object by the import path of its class."""
BUILT_IN = ("forgefield.training.callbacks.lcurve.LearningCurve",)
"""Classes of Forgefield that configs name by their import path: those of inputs of DeePMD-kit, for lcurve.out."""
HOW_TO_ALLOW = "--trust-code on the command line, trust_code=True in Python"


@dataclass(frozen=True)
class Trust:
    """Whether code that a file names may be imported.

    Parameters
    ----------
    source : what names the code, for messages, such as `run water (runs/water)`.
    allowed : whether it may be imported.
    never_from : a folder whose modules are not imported even then: that of the run itself.
    """

    source: str
    allowed: bool
    never_from: Path | None = None

    def require(self, path: str, where: str, folder: str | Path | None = None) -> None:
        """Raise unless the code at the import path `path` may be imported.

        Parameters
        ----------
        path : import path, such as `my_model.Net`.
        where : the setting that names it, such as `model.name`.
        folder : folder of its module when the file was written.
        """
        if self.allowed:
            return
        location = "" if folder is None else f", found in {folder} when it was written"
        raise ForgefieldError(
            f"{where}: {self.source} names {path}{location}. It is not part of Forgefield, and importing it executes its code. "
            f"If you trust where the file and that code come from, allow it: {HOW_TO_ALLOW}."
        )


CONFIG = Trust("the config", allowed=True)
"""For settings of a config, a command line or a Python call: the user chose them."""
NO_CODE = Trust("this file", allowed=False)
"""For everything else: only classes of Forgefield."""


def refuse_interpolations(content: object, path: Path) -> None:
    """Raise if the config of a run contains `${...}`.

    Forgefield stores configs with every interpolation resolved. One that is there all the same could read the environment, or
    call any resolver that this process has registered.
    """
    for text in _strings(content):
        if "${" in text:
            raise ForgefieldError(
                f"{path}: it contains the interpolation '{text}', which configs of runs never do: the file was changed. "
                "Replace it by its value."
            )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str):
        yield value


def named_code(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Setting and import path of everything in a config of plain values that is not part of Forgefield."""
    yield from code_of_model(_mapping(config.get("model")))
    yield from _entries("data.transforms", _mapping(config.get("data")).get("transforms"), short_names=False)
    yield from _losses("task", config.get("task"))
    training = _mapping(config.get("training"))
    for key in ("optimizer", "scheduler"):
        yield from _entries(f"training.{key}", training.get(key))
    yield from _entries("training.scheduler.schedulers", _mapping(training.get("scheduler")).get("schedulers"))
    yield from _entries("callbacks", config.get("callbacks"))
    trainer = _mapping(config.get("trainer"))
    for key in TRAINER_OBJECTS:
        yield from _entries(f"trainer.{key}", trainer.get(key))


def code_of_model(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same of a `model` section, as written or resolved."""
    yield from _entries("model.name", model.get("name"))
    yield from _entries("model.module", model.get("module"), short_names=False)


def _losses(where: str, value: object) -> Iterator[tuple[str, str]]:
    """Losses of all targets; those of branches are nested."""
    for key, item in _mapping(value).items():
        yield from _entries(f"{where}.{key}", item) if key == "loss" else _losses(f"{where}.{key}", item)


def _entries(where: str, value: object, *, short_names: bool = True) -> Iterator[tuple[str, str]]:
    """Import paths among names, {name: ...} and lists of these. Names without a dot are those of built-in classes."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _entries(where, item)
    elif isinstance(value, Mapping):
        yield from _entries(where, value.get("name"))
    elif isinstance(value, str) and value not in BUILT_IN and (not short_names or "." in value):
        yield where, value


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
