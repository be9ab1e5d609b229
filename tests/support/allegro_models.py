"""Small Allegro models."""

from __future__ import annotations

import json

from forgefield.models import Potential, build_model, resolve_model
from tests.support.structures import SPECIES, STATISTICS

TINY = {
    "name": "allegro", "l_max": 1, "num_layers": 2, "num_scalar_features": 6, "num_tensor_features": 3,
    "scalar_embed_mlp_width": 8, "allegro_mlp_width": 5, "readout_mlp_width": 4,
}  # fmt: skip


def potential_of(
    precision: str = "float64", seed: int = 0, cutoff: float = 3.0, species=SPECIES, **options
) -> Potential:
    facts = STATISTICS | {"reference_energies": dict.fromkeys(species, -1.5)}
    resolved = resolve_model({**TINY, **options}, species=species, cutoff=cutoff, statistics=facts)
    return build_model(json.loads(json.dumps(resolved)), precision=precision, seed=seed)
