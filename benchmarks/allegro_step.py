"""CPU time of one training step of Allegro beside nequip-allegro's eager step, with the same weights.

    python benchmarks/allegro_step.py [--cases l1 l2 l3] [--repeats 8]

Needs nequip-allegro 0.8 in the environment; done as in `nequip_step.py`. Water of 81 or 192 atoms, cutoff 5 A; the
peer takes up to 3 GB.
"""

from __future__ import annotations

from typing import Any

from allegro.model import AllegroModel
from nequip_step import COMMON, compare

from forgefield.models.allegro.importer import read_allegro


def settings(l_max: int, layers: int, scalars: int, tensors: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "num_scalar_features": scalars, "num_tensor_features": tensors}
    widths = {f"{part}_mlp_hidden_layers_width": scalars for part in ("scalar_embed", "allegro", "readout")}
    embed = {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 8}
    return {**COMMON, "r_max": 5.0, "l_max": l_max, **sizes, **widths, "radial_chemical_embed": embed, **more}


CASES = {
    "l1": (settings(1, 2, 64, 32), 4),
    "l2": (settings(2, 2, 64, 32), 4),
    "l2-shared": (settings(2, 2, 64, 32, tp_path_channel_coupling=False), 4),
    "l2-wide": (settings(2, 2, 128, 64), 3),
    "l2-3layers": (settings(2, 3, 64, 16), 3),
    "l3": (settings(3, 2, 64, 16), 3),
}

if __name__ == "__main__":
    compare(AllegroModel, read_allegro, CASES)
