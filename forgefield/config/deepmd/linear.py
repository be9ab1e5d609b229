"""Sums of models (`linear_ener`): networks, and a table of pair energies that are added, such as a dispersion correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.section import MISSING, Section, is_number
from forgefield.files import find_path

SUPPORTED = "supported are sums of networks (models with a descriptor), with or without one table (pairtab)"


@dataclass(frozen=True)
class AddedTable:
    """A table of pair energies. path: its file. cutoff: where it ends, A."""

    path: str
    cutoff: float

    def options(self) -> dict[str, Any]:
        """Options of Forgefield's section `model`."""
        return {"pair_table": self.path, "pair_table_cutoff": self.cutoff}


def within(descriptor: dict[str, Any], cutoff: float, reach: float) -> dict[str, Any]:
    """The descriptor with this cutoff, A, where neighbour lists reach as far as `reach`."""
    if reach <= cutoff or descriptor["type"] == "hybrid":
        return descriptor
    return {"type": "hybrid", "list": [{**descriptor, "rcut": cutoff}]}


@dataclass(frozen=True)
class Sum:
    """A sum of models. first: the section of the first network, with what belongs to the whole model. others: those of the
    other networks. weights: of the networks."""

    first: Section
    others: list[Section]
    weights: list[float]
    table: AddedTable | None


def parts_of_sum(section: Section) -> Sum:
    """The networks and the table of `model`, of type linear_ener."""
    section.choice("type", "linear_ener", ("linear_ener",))
    models, stated = section.take("models", MISSING), section.take("weights", "mean")
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
    if not networks or len(tables) > 1 or len(networks) + len(tables) != len(models):
        raise section.refused("models", f"has {len(networks)} networks and {len(tables)} tables; {SUPPORTED}")
    weights = _weights(section, stated, len(models))
    if any(weights[number] != 1 for number in tables):
        raise section.refused("weights", f"is {stated!r:.60}; a table has the weight 1 here, so write 'sum'")
    first, *rest = networks
    common = {name: section.take(name) for name in section.names()}

    def below(number: int, values: Mapping[str, Any]) -> Section:
        return Section(values, section.file, f"{section.path('models')}[{number}]", section.notes)

    others = []
    for number in rest:
        other = below(number, models[number])
        if other.take("type_map", common.get("type_map")) != common.get("type_map"):
            raise other.refused("type_map", f"is not that of '{section.path('type_map')}'")
        others.append(other)
    table = _table(below(tables[0], models[tables[0]])) if tables else None
    own = {key: value for key, value in models[first].items() if key != "type_map" or value != common.get("type_map")}
    return Sum(below(first, {**common, **own}), others, [weights[number] for number in networks], table)


def _weights(section: Section, stated: object, count: int) -> list[float]:
    if stated in ("sum", "mean"):
        return [1.0 if stated == "sum" else 1 / count] * count
    if not isinstance(stated, list) or len(stated) != count or not all(is_number(weight) for weight in stated):
        raise section.wrong("weights", stated, f"sum, mean, or a list of {count} numbers")
    return [float(weight) for weight in stated]


def _table(section: Section) -> AddedTable:
    section.take("type")
    file, cutoff = section.text("tab_file", MISSING), section.number("rcut", MISSING, above=0)
    section.note("sel", "no effect: there is room for all neighbours.")
    section.take("type_map")
    section.finish()
    return AddedTable(find_path(file, [Path.cwd(), section.file.absolute().parent]), cutoff)
