"""What an importer is: it reads a model of another program, for `forgefield import`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forgefield.config.trust import NO_CODE, Trust
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from torch import Tensor

IN_FILE = "its files hold the options of the model"
REASONS = {
    "options": IN_FILE,
    "weights": IN_FILE,
    "species": "its files name the species",
    "head": "its files hold one model",
    "energy_unit": "its energies are in eV",
    "length_unit": "its lengths are in A",
}
"""Arguments that only some importers have, and why the others have not."""


@dataclass(frozen=True)
class ImportRequest:
    """source: file, or import path of a calculator.

    options: JSON file with the options of the model, arguments of the calculator, or the file that the model was trained from.
    species: chemical symbols. head: which of several models. weights: `ema` or `raw`. energy_unit, length_unit: of the model.
    None where the user did not give it.
    """

    source: str
    options: str | None = None
    species: list[str] | None = None
    head: str | None = None
    weights: str | None = None
    energy_unit: str | None = None
    length_unit: str | None = None


@dataclass(frozen=True)
class ImportedModel:
    """Resolved options and state, for `build_model(resolved, precision=...).load_state_dict(state)`."""

    resolved: dict[str, Any]
    state: dict[str, Tensor]
    precision: str
    origin: str
    checked: str = ""
    """What of the file was verified, as a sentence for the user."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Additional sections of the run's config."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Additional values of `run.json`."""
    summary: str = ""
    """What the model is for, one line. Default: species and cutoff."""

    @property
    def description(self) -> str:
        if self.summary:
            return self.summary
        return f"species {' '.join(self.resolved['species'])}, cutoff {self.resolved['cutoff']:g} A"


class Importer(ABC):
    """Reads models of one program."""

    accepts: ClassVar[tuple[str, ...]] = ()
    """Fields of `ImportRequest` other than the source that it uses."""
    reasons: ClassVar[Mapping[str, str]] = {}
    """Why it does not use others, where it is not as in `REASONS`."""
    trust: ClassVar[Trust] = NO_CODE
    """Whether the source names code that has to be imported."""

    @abstractmethod
    def read(self, request: ImportRequest) -> ImportedModel:
        """The model that the request names."""

    def run_name(self, request: ImportRequest) -> str:
        """Name of the run where the user gives none."""
        return Path(request.source).stem

    def check(self, request: ImportRequest, program: str) -> None:
        """Raise for arguments that this importer does not use. program: its name."""
        for name, reason in (REASONS | dict(self.reasons)).items():
            if name not in self.accepts and getattr(request, name) is not None:
                raise ForgefieldError(f"--{name} does not apply to {program}: {reason}.")
