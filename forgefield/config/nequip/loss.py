"""Losses and metrics. NequIP divides coefficients by their sum, and so does the translation: losses have the same values."""

from __future__ import annotations

from typing import Any

from forgefield.config.nequip.section import NequIPSection

EV_PER_A3_TO_GPA = 160.21766208
"""CODATA 2014, as in `physics/units.py`, which configs do not import."""
LOSSES = {
    "EnergyForceLoss": ("energy", "forces"),
    "EnergyForceStressLoss": ("energy", "forces", "stress"),
    "EnergyOnlyLoss": ("energy",),
    "MetricsManager": (),
}
METRICS = ("EnergyForceMetrics", "EnergyForceStressMetrics", "EnergyOnlyMetrics", "MetricsManager")
FIELDS = {"total_energy": "energy", "forces": "forces", "stress": "stress", "virial": "virial"}
KINDS = {"MeanSquaredError": "mse", "MeanAbsoluteError": "mae", "HuberLoss": "huber"}
ERRORS = {"MeanAbsoluteError": "mae", "RootMeanSquaredError": "rmse"}
QUANTITIES = {"total_energy": "energy_total", "per_atom_energy": "energy", "forces": "forces", "stress": "stress"}
"""NequIP's names of errors and Forgefield's."""


class LossTranslation:
    """task: Forgefield's section. names: NequIP's name of each term -> the target."""

    def __init__(self, section: NequIPSection) -> None:
        self.task: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}
        kind = section.target(LOSSES)
        section.take("type_names")
        section.take("ignore_nan")  # missing labels never count
        if kind == "MetricsManager":
            for item in section.objects("metrics"):
                self._term(item)
        else:
            self._wrapper(section, LOSSES[kind])
        section.finish()
        self.scale({name: float(target["weight"]) for name, target in self.task.items()})

    def _wrapper(self, section: NequIPSection, targets: tuple[str, ...]) -> None:
        coefficients = section.mapping("coeffs")
        per_atom = section.flag("per_atom_energy", True)
        by_type = section.mapping("per_type_forces_coeffs")
        if by_type:
            raise section.refused(
                "per_type_forces_coeffs",
                "averages the errors of each type first; use task.forces.species_weights instead",
            )
        section.only("extra_metrics", None, "give all terms of the loss in a MetricsManager")
        for theirs, target in FIELDS.items():
            if target in targets:
                self.task[target] = {"weight": float(coefficients.pop(theirs, 1.0)), "loss": "mse"}
                name = ("per_atom_energy" if per_atom else "total_energy") if target == "energy" else theirs
                self.names[f"{name}_mse"] = target
        if coefficients:
            raise section.refused("coeffs", f"has {next(iter(coefficients))}, which this loss does not have")
        self.task["energy"]["per_atom"] = per_atom

    def _term(self, item: NequIPSection) -> None:
        field, per_atom = _field(item)
        if field not in FIELDS:
            raise item.refused("field", f"is {field}; supported are {', '.join(FIELDS)}")
        metric = item.below("metric")
        if metric is None:
            raise item.refused("metric", "is missing")
        kind = KINDS[metric.target(KINDS)]
        target: dict[str, Any] = {"weight": float(item.number("coeff", 0.0, at_least=0)), "loss": kind}
        if kind == "huber":
            target["huber_delta"] = metric.number("delta", 1.0, above=0)
            metric.only("reduction", "mean", "losses are means")
        metric.finish()
        if FIELDS[field] in ("energy", "virial"):
            target["per_atom"] = per_atom
        if FIELDS[field] in self.task:
            raise item.refused("field", f"is {field} a second time; a target has one loss")
        item.flag("ignore_nan", False)
        if item.flag("per_type", False):
            raise item.refused("per_type", "averages the errors of each type first; use task.forces.species_weights")
        name = ("per_atom_energy" if per_atom else field) + f"_{kind}"
        self.names[str(item.text("name", name))] = FIELDS[field]
        self.task[FIELDS[field]] = target
        item.finish()

    def scale(self, weights: dict[str, float]) -> None:
        for name, weight in normalised(weights).items():
            self.task[name]["weight"] = weight


def normalised(weights: dict[str, float]) -> dict[str, float]:
    """Weights divided by their sum."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()} if total > 0 else weights


def weighted_sum(section: NequIPSection | None) -> dict[str, float]:
    """Weights of the errors whose sum NequIP monitors, for metrics in meV and GPa."""
    if section is None:
        return {}
    kind = section.target(METRICS)
    section.take("type_names")
    section.take("ignore_nan")
    if kind == "MetricsManager":
        weights: dict[str, float] = {}
        for item in section.objects("metrics"):
            weights |= _metric(item)
    else:
        section.only("extra_metrics", None, "give all metrics in a MetricsManager")
        weights = {name: value for name, value in section.mapping("coeffs").items() if value}
        weights = weights or {"total_energy_rmse": 1.0, "forces_rmse": 1.0} | (
            {"stress_rmse": 1.0} if "Stress" in kind else {}
        )
    section.finish()
    return {_renamed(section, name): value * _factor(name) for name, value in normalised(weights).items()}


def _metric(item: NequIPSection) -> dict[str, float]:
    field, per_atom = _field(item)
    metric = item.below("metric")
    kind = "" if metric is None else metric.target((*ERRORS, "MeanSquaredError", "MaximumAbsoluteError", "HuberLoss"))
    weight = item.number("coeff", None, at_least=0)
    for name in ("name", "ignore_nan", "per_type", "per_type_coeffs"):
        item.take(name)
    item.finish()
    if not weight:
        return {}
    if kind not in ERRORS:
        raise item.refused("metric", f"is {kind}, which is not part of a monitored sum; use {' or '.join(ERRORS)}")
    return {f"{'per_atom_energy' if per_atom else field}_{ERRORS[kind]}": float(weight)}


def _field(item: NequIPSection) -> tuple[str, bool]:
    """The field of a term, and whether it is divided by the number of atoms."""
    value = item.take("field")
    if isinstance(value, str):
        return value, False
    inner = NequIPSection(value, item.file, item.path("field"), item.notes)
    inner.target(("PerAtomModifier",))
    field = str(inner.text("field", ""))
    inner.finish()
    return field, True


def _renamed(section: NequIPSection, name: str) -> str:
    quantity, _, kind = name.rpartition("_")
    if quantity not in QUANTITIES or kind not in ("mae", "rmse"):
        raise section.refused("coeffs", f"has {name}, which is not monitored here; use errors of kind mae or rmse")
    return f"{QUANTITIES[quantity]}_{kind}"


def _factor(name: str) -> float:
    """From the metric's unit (meV, meV/A, GPa) to NequIP's."""
    return 1 / EV_PER_A3_TO_GPA if name.startswith("stress") else 1e-3
