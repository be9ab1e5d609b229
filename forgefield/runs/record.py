"""The record of a run, `run.json`: its format and the types of its entries."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from forgefield._version import __version__
from forgefield.errors import ForgefieldError
from forgefield.formats import Format
from forgefield.models.resolved import HEADS, PREDICTS


def _explicit_defaults(info: dict[str, Any]) -> dict[str, Any]:
    """Version 1 of `run.json` to version 2: the first runs, whose random splits could leave a species out of training, did not
    record `keep_species`."""
    return {"keep_species": False, **info}


def _omitted_options(info: dict[str, Any]) -> dict[str, Any]:
    """Version 2 to version 3: earlier runs used 8 frames where `data.batch` was left out, and did not train stress where `task`
    was."""
    return {"defaults": {"frames": 8, "stress": False}, **info}


RUN_JSON = Format("the record of a run", (_explicit_defaults, _omitted_options))
"""The format of `run.json`."""
MEMBERS = "members"
"""Folder of the runs of an ensemble, in its run folder; also the entry of `run.json` with the options of their models."""
SCALES = "uncertainty_scales"
"""Entry of `run.json` of an ensemble: factors of its deviations that agree with the errors of validation frames."""


@dataclass(frozen=True)
class OmittedOptions:
    """What options that a config leaves out mean in a run. A run keeps them when the defaults of Forgefield change."""

    keep_species: bool = True
    """Whether random splits keep every species in the training set."""
    frames: int | None = None
    """Number of frames of a batch. None: from the data."""
    stress: bool = True
    """Whether stress is trained where the data has it."""

    @classmethod
    def of_run(cls, info: Mapping[str, Any]) -> OmittedOptions:
        """From `run.json`."""
        defaults = info["defaults"]
        return cls(bool(info["keep_species"]), defaults["frames"], bool(defaults["stress"]))

    def record(self) -> dict[str, Any]:
        """Entries of `run.json`."""
        return {"keep_species": self.keep_species, "defaults": {"frames": self.frames, "stress": self.stress}}


class RunInfo(dict[str, Any]):
    """Content of a `run.json`. The types of its entries are checked; access to a missing one raises an error."""

    TYPES: ClassVar[dict[str, tuple[type | tuple[type, ...], str]]] = {
        "model": (dict, "a mapping of options"),
        "species": (list, "a list of elements"),
        "cutoff": ((int, float), "a number"),
        "precision": (str, "text"),
        "status": (str, "text"),
    }

    def __init__(self, path: Path, content: object) -> None:
        self._path = path
        if not isinstance(content, dict):
            raise ForgefieldError(f"{path} is not the record of a run: it must contain a mapping.")
        for name, (kind, expected) in self.TYPES.items():
            value = content.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise ForgefieldError(f"{path} is damaged: '{name}' must be {expected}, not {value!r:.60}.")
        members = content.get(MEMBERS, {})
        if not isinstance(members, dict) or not all(isinstance(options, dict) for options in members.values()):
            raise ForgefieldError(f"{path} is damaged: '{MEMBERS}' must be a mapping of options by name.")
        predicts = (content.get("model") or {}).get(PREDICTS, {})
        heads = predicts.get(HEADS, {}) if isinstance(predicts, dict) else None
        if not isinstance(heads, dict) or not all(isinstance(head, dict) for head in heads.values()):
            raise ForgefieldError(f"{path} is damaged: 'model.{PREDICTS}' must describe heads by name.")
        super().__init__({key: value for key, value in content.items() if value is not None or key not in self.TYPES})

    def __missing__(self, key: str) -> Any:
        raise ForgefieldError(
            f"{self._path} has no '{key}': the training was stopped before it was written, or the file was changed. Resume the "
            "training, or restore the run from a backup."
        )


def versions() -> dict[str, str]:
    """Versions of Forgefield, Python and the packages that determine the results of a run."""
    numbers = {"forgefield": __version__, "python": platform.python_version()}
    for package in ("torch", "lightning", "e3nn", "ase", "numpy"):
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            numbers[package] = "unknown"
    return numbers
