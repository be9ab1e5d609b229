"""Names and units of errors; can be imported without PyTorch."""

from __future__ import annotations

from forgefield.tasks.options import quantity

UNITS = {"energy": "meV/atom", "energy_total": "meV", "forces": "meV/A", "stress": "GPa", "virial": "meV/atom"}
"""Unit of each metric; `energy_mae`, `energy_rmse` and so on share the unit of `energy`. Errors of any other quantity are in
the unit of its label."""
CLASS_METRICS = ("accuracy", "f1", "cross_entropy")
"""Metrics of a target with classes."""


def unit_of(metric: str) -> str:
    """The unit of a metric such as `val/forces_mae/Cu`; empty for a loss or a learning rate."""
    split = metric.split("/")[0].partition("-")[0]
    name = metric.split("/")[1] if split in ("train", "val", "test") and "/" in metric else metric.split("/")[0]
    return UNITS.get(quantity(name.rsplit("_", 1)[0]), "")
