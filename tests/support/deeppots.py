"""Small Deep Potential models for tests."""

from __future__ import annotations

from typing import Any

from forgefield.models import Potential, build_model, resolve_model

SPECIES = ("H", "O")
CUTOFF = 3.0


def section(kind: str = "se_e2_a", fitting: dict[str, Any] | None = None, **descriptor: Any) -> dict[str, Any]:
    """A `model` section with the numbers that data would give."""
    columns = 1 if kind == "se_e2_r" else 4
    numbers: dict[str, Any] = {
        "davg": [[0.11, 0.0, 0.0, 0.0][:columns], [0.17, 0.0, 0.0, 0.0][:columns]],
        "dstd": [[0.14, 0.09, 0.09, 0.09][:columns], [0.18, 0.11, 0.11, 0.11][:columns]],
        "neuron": [4, 8, 16],
    }
    if "sel" not in descriptor:
        numbers["neighbour_norm"] = 12.0
    if kind == "se_e2_a":
        numbers["axis_neuron"] = 3
    return {
        "name": "deeppot",
        "descriptor": {"type": kind, **numbers, **descriptor},
        "fitting_net": {"type": "ener", "neuron": [10, 10], **(fitting or {})},
        "out_bias": [-3.0, -7.0],
    }


def make_deeppot(
    kind: str = "se_e2_a",
    *,
    precision: str = "float64",
    seed: int = 0,
    model: dict[str, Any] | None = None,
    fitting: dict[str, Any] | None = None,
    **descriptor: Any,
) -> Potential:
    given = section(kind, fitting, **descriptor) | (model or {})
    return build_model(resolve_model(given, species=SPECIES, cutoff=CUTOFF), precision=precision, seed=seed)
