"""A section of a NequIP config while it is translated, and its objects.

An object is a mapping whose `_target_` names a class. The name is looked up in tables of names and never imported.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from forgefield.config.deepmd.section import Section
from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

STATISTIC = "training_data_stats:"
"""Beginning of the text that stands for a statistic of the training data."""
RUN_FOLDER = "RUN_FOLDER"
"""Text that stands for Hydra's output folder."""


class NequIPSection(Section):
    """One mapping of a config of NequIP."""

    program: ClassVar[str] = "NequIP"
    comment: ClassVar[str | None] = None

    def target(self, classes: Collection[str], default: str | None = None) -> str:
        """Name of the class that `_target_` names, without its module; one of `classes`."""
        value = self.take("_target_", default)
        if not isinstance(value, str):
            raise ForgefieldError(f"{self.file}: '{self.path('_target_')}' is missing; it names a class of NequIP.")
        name = value.rpartition(".")[2]
        if name not in classes:
            hint = did_you_mean(name, classes)
            raise ForgefieldError(
                f"{self.file}: '{self.path('_target_')}' is {value}, which is not translated; supported are "
                f"{', '.join(classes)}.{hint}"
            )
        return name

    def objects(self, name: str) -> list[NequIPSection]:
        """The mappings in a list, or the one mapping that is there instead."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            return [NequIPSection(value, self.file, self.path(name), self.notes)]
        return [
            NequIPSection(item, self.file, f"{self.path(name)}[{index}]", self.notes)
            for index, item in enumerate(value)
        ]

    def mapping(self, name: str) -> dict[str, Any]:
        """A mapping of plain values; empty where there is none."""
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "a mapping")
        return {str(key): item for key, item in value.items()}

    def agree(self, name: str, expected: object, owner: str) -> None:
        """Take a key that repeats what another one says; refuse a different value. owner: the other key."""
        value = self.take(name)
        if value is not None and value != expected:
            raise self.refused(name, f"is {value!r:.80}, but '{owner}' is {expected!r:.80}; they must be equal")


def statistic(value: object) -> str | None:
    """Name of the statistic of the training data that a value stands for; None if it is something else."""
    is_statistic = isinstance(value, str) and value.startswith(STATISTIC)
    return str(value).removeprefix(STATISTIC) if is_statistic else None
