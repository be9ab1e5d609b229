"""Losses and metrics. NequIP divides coefficients by their sum, and so does the translation: losses have the same values."""

from __future__ import annotations

from itertools import pairwise
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
TYPE_NAMES = "training_module.model.type_names"
BY_TYPE = (
    "averages the errors of each type first, over the types that a batch happens to contain, so that the loss depends on how "
    "frames are divided among batches and processes; use task.forces.species_weights, such as one over the share of a type"
)
MISSING_LABELS = "labels that are missing (NaN) never count."
METRICS = ("EnergyForceMetrics", "EnergyForceStressMetrics", "EnergyOnlyMetrics", "MetricsManager")
FIELDS = {"total_energy": "energy", "forces": "forces", "stress": "stress", "virial": "virial"}
KINDS = {
    "MeanSquaredError": "mse",
    "MeanAbsoluteError": "mae",
    "HuberLoss": "huber",
    "StratifiedHuberForceLoss": "stratified huber",
}
ERRORS = {"MeanAbsoluteError": "mae", "RootMeanSquaredError": "rmse", "MaximumAbsoluteError": "max"}
ERROR_SUFFIXES = {"mae": "mae", "rmse": "rmse", "max": "max", "maxabserr": "max"}
"""Ends of the names of errors in coefficients, and Forgefield's."""
QUANTITIES = {"total_energy": "energy_total", "per_atom_energy": "energy", "forces": "forces", "stress": "stress"}
"""NequIP's names of errors and Forgefield's."""


class LossTranslation:
    """task: Forgefield's section. names: NequIP's name of each term -> the target."""

    def __init__(self, section: NequIPSection, names: list[str]) -> None:
        self.task: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}
        kind = section.target(LOSSES)
        section.agree("type_names", names, TYPE_NAMES)
        section.note("ignore_nan", MISSING_LABELS)
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
                BY_TYPE,
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
        elif kind == "stratified huber":
            if field != "forces":
                raise item.refused("metric", "is StratifiedHuberForceLoss, which is for forces")
            target |= {"loss": "huber", "huber_deltas": _strata(metric)}
            metric.only("reduction", "mean", "losses are means")
        metric.finish()
        if FIELDS[field] in ("energy", "virial"):
            target["per_atom"] = per_atom
        if FIELDS[field] in self.task:
            raise item.refused("field", f"is {field} a second time; a target has one loss")
        item.note("ignore_nan", MISSING_LABELS, unless=[False])
        if item.flag("per_type", False) or item.mapping("per_type_coeffs"):
            raise item.refused("per_type", BY_TYPE)
        name = ("per_atom_energy" if per_atom else field) + f"_{kind}"
        self.names[str(item.text("name", name))] = FIELDS[field]
        self.task[FIELDS[field]] = target
        item.finish()

    def scale(self, weights: dict[str, float]) -> None:
        for name, weight in normalised(weights).items():
            self.task[name]["weight"] = weight


def _strata(metric: NequIPSection) -> list[list[float]]:
    """[[force, delta], ...] of a stratified loss. NequIP takes the bounds in the order in which they are written."""
    values = metric.take("delta_dict")
    try:
        strata = [[float(bound), float(delta)] for bound, delta in dict(values or {}).items()]
    except (TypeError, ValueError):
        raise metric.wrong("delta_dict", values, "a mapping of forces to deltas") from None
    if len(strata) < 1 or any(one[0] >= other[0] for one, other in pairwise(strata)):
        raise metric.refused("delta_dict", "must have ascending forces, each with its delta")
    return strata


def normalised(weights: dict[str, float]) -> dict[str, float]:
    """Weights divided by their sum."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()} if total > 0 else weights


def weighted_sum(section: NequIPSection | None, symbols: dict[str, str]) -> dict[str, float]:
    """Weights of the errors whose sum NequIP monitors, for metrics in meV and GPa. symbols: by type name."""
    if section is None:
        return {}
    kind = section.target(METRICS)
    section.agree("type_names", list(symbols), TYPE_NAMES)
    section.note("ignore_nan", MISSING_LABELS)
    if kind == "MetricsManager":
        weights: dict[str, float] = {}
        for item in section.objects("metrics"):
            weights |= _metric(item, symbols)
    else:
        section.only("extra_metrics", None, "give all metrics in a MetricsManager")
        weights = {name: value for name, value in section.mapping("coeffs").items() if value}
        weights = weights or {"total_energy_rmse": 1.0, "forces_rmse": 1.0} | (
            {"stress_rmse": 1.0} if "Stress" in kind else {}
        )
    section.finish()
    return {_renamed(section, name): value * _factor(name) for name, value in normalised(weights).items()}


def _metric(item: NequIPSection, symbols: dict[str, str]) -> dict[str, float]:
    """Weights of the errors of one entry, by NequIP's names."""
    field, per_atom = _field(item)
    metric = item.below("metric")
    kind = "" if metric is None else metric.target((*ERRORS, "MeanSquaredError", "HuberLoss"))
    weight = item.number("coeff", None, at_least=0)
    if metric is not None:
        for name in metric.names():
            metric.note(name, "it is an option of a metric that is not monitored.")
            if weight:
                raise metric.refused(name, "is not supported in a monitored sum")
    item.note("name", "metrics have Forgefield's names.")
    item.note("ignore_nan", MISSING_LABELS, unless=[False])
    by_type = item.flag("per_type", False)
    shares = _shares(item, symbols)
    item.finish()
    if not weight:
        item.notes[item.key] = (
            "it is not part of the monitored sum; MAE and RMSE of all targets are always measured, the largest errors with "
            "training.max_errors."
        )
        return {}
    if per_atom and field != "total_energy":
        raise item.refused("field", f"is {field} per atom; errors per atom are measured for total_energy")
    if by_type and field != "forces":
        raise item.refused("per_type", f"is true for {field}; errors by species are measured for forces")
    if kind not in ERRORS:
        raise item.refused("metric", f"is {kind}, which is not part of a monitored sum; use {' or '.join(ERRORS)}")
    name = f"{'per_atom_energy' if per_atom else field}_{ERRORS[kind]}"
    if by_type:
        return {f"{name}/{symbol}": float(weight) * share for symbol, share in shares.items()}
    return {name: float(weight)}


def _shares(item: NequIPSection, symbols: dict[str, str]) -> dict[str, float]:
    """Share of the error of each species in an error that is averaged by type; they add up to 1."""
    coefficients = item.mapping("per_type_coeffs")
    if coefficients and set(coefficients) != set(symbols):
        raise item.refused("per_type_coeffs", f"must have a number for each of {', '.join(symbols)}")
    return normalised({symbol: float(coefficients.get(name, 1.0)) for name, symbol in symbols.items()})


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
    name, slash, symbol = name.partition("/")
    quantity, _, kind = name.rpartition("_")
    if quantity not in QUANTITIES or kind not in ERROR_SUFFIXES:
        raise section.refused("coeffs", f"has {name}, which is not monitored here; use mae, rmse or maxabserr")
    return f"{QUANTITIES[quantity]}_{ERROR_SUFFIXES[kind]}{slash}{symbol}"


def _factor(name: str) -> float:
    """From the metric's unit (meV, meV/A, GPa) to NequIP's."""
    return 1 / EV_PER_A3_TO_GPA if name.startswith("stress") else 1e-3
