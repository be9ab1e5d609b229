"""An ASE calculator as a run. It has no weights: its import path, arguments and elements are all that is stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ase.data import atomic_numbers

from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.models.resolving import resolve_model

EDGES_UP_TO = 1.0
"""A; edges are not used by a calculator, which finds neighbours itself."""


def read_calculator(module: str, species: Sequence[str], options: str | None) -> ImportedModel:
    """module: import path of the calculator. options: JSON file with its arguments."""
    if not species:
        raise ForgefieldError("Name the elements that the calculator is for: --species Cu Au.")
    for symbol in species:
        if not atomic_numbers.get(symbol):
            raise ForgefieldError(f"--species {symbol}: there is no element of that name.")
    given = {} if options is None else json.loads(Path(options).read_text())
    section = {"name": "calculator", "module": module, "options": given}
    ordered = sorted(set(species), key=lambda symbol: atomic_numbers[symbol])
    resolved = resolve_model(section, species=ordered, cutoff=EDGES_UP_TO, trust=CONFIG)
    state = build_model(resolved, precision="float64", seed=0, trust=CONFIG).state_dict()
    return ImportedModel(resolved=resolved, state=state, precision="float64", origin=f"ASE calculator {module}")


class CalculatorImporter(Importer):
    """Makes models of ASE calculators."""

    accepts = ("options", "species")
    reasons = {"weights": "a calculator has none", "head": "a calculator is one model"}
    trust = CONFIG  # the user typed the import path of the calculator

    def read(self, request: ImportRequest) -> ImportedModel:
        return read_calculator(request.source, request.species or [], request.options)

    def run_name(self, request: ImportRequest) -> str:
        return request.source.split(".")[-1]


IMPORTER = CalculatorImporter()
