"""Sums of models (`linear_ener`): a network with a table of pair energies that are added, such as a dispersion correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.section import MISSING, Section
from forgefield.files import find_path

SUPPORTED = "supported is the sum of one network (a model with a descriptor) and one table (pairtab)"


@dataclass(frozen=True)
class AddedTable:
    """A table of pair energies. path: its file. cutoff: where it ends, A."""

    path: str
    cutoff: float

    def options(self) -> dict[str, Any]:
        """Options of Forgefield's section `model`."""
        return {"pair_table": self.path, "pair_table_cutoff": self.cutoff}

    def within(self, descriptor: dict[str, Any], cutoff: float) -> dict[str, Any]:
        """The descriptor with this cutoff, A, where the neighbour lists reach as far as the table."""
        if self.cutoff <= cutoff or descriptor["type"] == "hybrid":
            return descriptor
        return {"type": "hybrid", "list": [{**descriptor, "rcut": cutoff}]}


def network_and_table(section: Section) -> tuple[Section, AddedTable]:
    """The section of the network, and the table. section: `model`, of type linear_ener."""
    section.choice("type", "linear_ener", ("linear_ener",))
    models, weights = section.take("models", MISSING), section.take("weights", "mean")
    if not isinstance(models, list) or not models or not all(isinstance(model, Mapping) for model in models):
        raise section.wrong("models", models, "a list of models")
    if any(model.get("type") == "frozen" for model in models):
        raise section.refused(
            "models",
            "contains frozen models, which are not combined here; `forgefield import deepmd` imports one of them (a .pb after "
            "`dp convert-backend`), and training.ensemble trains several models at once",
        )
    networks = [number for number, model in enumerate(models) if "descriptor" in model]
    tables = [number for number, model in enumerate(models) if model.get("type") == "pairtab"]
    if len(networks) != 1 or len(tables) != 1 or len(models) != 2:
        raise section.refused(
            "models",
            f"has {len(networks)} networks and {len(tables)} tables; {SUPPORTED}. One larger network replaces several",
        )
    if weights != "sum" and weights != [1, 1]:
        raise section.refused("weights", f"is {weights!r:.60}; {SUPPORTED}, so write 'sum'")
    table = Section(models[tables[0]], section.file, f"{section.path('models')}[{tables[0]}]", section.notes)
    table.take("type")
    file, cutoff = table.text("tab_file", MISSING), table.number("rcut", MISSING, above=0)
    table.note("sel", "no effect: there is room for all neighbours.")
    table.finish()
    common = {name: section.take(name) for name in section.names()}
    network = Section(
        {**common, **models[networks[0]]}, section.file, f"{section.path('models')}[{networks[0]}]", section.notes
    )
    return network, AddedTable(find_path(file, [Path.cwd(), section.file.absolute().parent]), cutoff)
