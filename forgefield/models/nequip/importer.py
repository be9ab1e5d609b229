"""NequIP 0.19 as an architecture of its framework. Our weights have its shapes and order: importing is renaming."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from forgefield.models.importing import ImportedModel
from forgefield.models.nequip.framework import SHARED_OPTIONS, Architecture, FrameworkImporter, read_model

_RENAMED = SHARED_OPTIONS | {
    "preset": "preset",
    "num_features": "num_features",
    "type_embed_num_features": "type_embed_num_features",
    "radial_mlp_depth": "radial_mlp_depth",
    "radial_mlp_width": "radial_mlp_width",
    "num_bessels": "num_bessels",
    "bessel_trainable": "bessel_trainable",
    "polynomial_cutoff_p": "polynomial_cutoff_p",
    "convnet_sc": "convnet_sc",
    "convnet_resnet": "convnet_resnet",
    "convnet_nonlinearity_type": "nonlinearity",
}
_DERIVED = re.compile(
    r"_empty|.*\.(output_mask|bias|tp\.weight|mul\.weight|scalar_multiplier\.weight)|.*\._w3j_\d+_\d+_\d+|edge_norm\._rmax_recip"
    r"|pair_potential\.(atomic_numbers|_qqr2exesquare)"
)


def read_nequip(
    path: str | os.PathLike[str], options: str | os.PathLike[str] | None = None, weights: str = "ema"
) -> ImportedModel:
    """Model in a file of NequIP; see `read_model`."""
    return read_model(NEQUIP, path, options, weights)


def our_name(name: str) -> str | None:
    """Our name of a weight of NequIP."""
    fixed = {
        "type_embed.embed_module.weight": "type_embedding",
        "bessel_encode.bessel_weights": "bessel_frequencies",
        "per_type_energy_scale_shift.scales": "energy_scales",
        "per_type_energy_scale_shift.shifts": "energy_shifts",
    }
    if name in fixed:
        return fixed[name]
    if match := re.fullmatch(r"per_atom_energy_readout\.mlp_module\.mlp\.(\d+)\.weight", name):
        return f"readout.weights.{int(match[1]) // 2}"
    if match := re.fullmatch(r"per_atom_energy_readout\.mlp_module\.mlp\.weights\.(\d+)", name):
        return f"readout.weights.{match[1]}"
    if match := re.fullmatch(r"layer(\d+)_convnet\.conv\.edge_mlp\.mlp\.(\d+)\.weight", name):
        return f"layers.{match[1]}.radial.weights.{int(match[2]) // 2}"
    parts = {"linear_1": "linear_in", "linear_2": "linear_out", "sc": "self_connection"}
    if match := re.fullmatch(r"layer(\d+)_convnet\.conv\.(linear_1|linear_2|sc)\.weight", name):
        return f"layers.{match[1]}.{parts[match[2]]}.weight"
    return None


def _translate(path: Path, key: str, value: Any) -> dict[str, Any] | None:
    if key == "convnet_nonlinearity_gates":
        return {"nonlinearity_gates": value["e"]}
    if key == "convnet_nonlinearity_scalars":
        return {"nonlinearity_scalars": value["e"], "nonlinearity_odd_scalars": value["o"]}
    return None


NEQUIP = Architecture(
    name="nequip",
    title="NequIP",
    builders=("NequIPGNNModel", "PresetNequIPGNNModel"),
    embedding=re.compile(r"type_embed\.embed_module\.weight"),
    derived=_DERIVED,
    renamed=_RENAMED,
    refused_unless={"learnable_shift": False, "categorical_graph_field_embed": None},
    our_name=our_name,
    translate=_translate,
)
IMPORTER = FrameworkImporter(NEQUIP)
