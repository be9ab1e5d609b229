"""MACE models for comparisons of generated kernels with reference operations."""

from __future__ import annotations

from forgefield.models import Potential, build_model, resolve_model
from tests.support.structures import SPECIES, STATISTICS

TINY = {
    "name": "mace",
    "hidden_irreps": "4x0e + 4x1o",
    "max_ell": 1,
    "radial_mlp": [6, 6],
    "mlp_irreps": "4x0e",
    "num_bessel": 4,
    "correlation": 2,
}
CASES: dict[str, dict[str, object]] = {
    "residual, correlation 3": {"correlation": 3, "max_ell": 2},
    "plain": {"interaction_first": "plain", "interaction": "plain", "use_reduced_cg": False},
    "residual after plain, three layers": {
        "interaction_first": "plain",
        "num_interactions": 3,
        "correlation": [1, 2, 2],
    },
    "density": {"interaction_first": "density", "interaction": "density_residual", "pair_repulsion": True},
    "nonlinear": {
        "interaction_first": "nonlinear",
        "interaction": "nonlinear",
        "apply_cutoff": False,
        "readout_bias": True,
    },
    "both parities": {"hidden_irreps": "3x0e + 3x0o + 3x1o + 3x1e", "use_agnostic_product": True},
    "transformed distances": {"distance_transform": "Agnesi", "radial_mlp": [6], "keep_last_layer_irreps": True},
    "envelope of weights": {"apply_cutoff": False, "radial_type": "gaussian", "edge_irreps": "2x0e + 3x1o"},
    "last readout alone": {"use_last_readout_only": True, "correlation": 1, "radial_mlp": [6, 5]},
    "one layer": {"num_interactions": 1, "hidden_irreps": "4x0e", "correlation": 4, "gate": None},
}


def mace(precision: str, *, species: tuple[str, ...] = SPECIES, **options: object) -> Potential:
    section = {**TINY, **options}
    shifts = dict.fromkeys(species, -1.0)
    statistics = STATISTICS | {"reference_energies": shifts}
    resolved = resolve_model(section, species=species, cutoff=3.0, statistics=statistics)
    return build_model(resolved, precision=precision, seed=1)
