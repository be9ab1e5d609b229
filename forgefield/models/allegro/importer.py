"""Allegro 0.8 as an architecture of the NequIP framework.

Weights are renamed; the columns of tensor weights are ordered by channel, then degree, in Allegro, and by degree, then
channel, in Forgefield.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.allegro.modules import allegro_settings_of_modules
from forgefield.models.importing import ImportedModel
from forgefield.models.nequip.architecture import SHARED_OPTIONS, Architecture
from forgefield.models.nequip.importer import FrameworkImporter, read_model
from forgefield.models.nequip.types_and_units import ModelUnits

MLPS = ("scalar_embed", "allegro")
_SAME = (
    "num_scalar_features", "num_tensor_features", "radial_chemical_embed_dim", "tp_path_channel_coupling",
    "weight_individual_irreps", "forward_normalize", *(f"{part}_mlp_nonlinearity" for part in MLPS),
)  # fmt: skip
OPTIONS = (
    SHARED_OPTIONS
    | {key: key for key in _SAME}
    | {f"{part}_mlp_hidden_layers_{what}": f"{part}_mlp_{what}" for part in MLPS for what in ("depth", "width")}
)
EMBEDDINGS = {
    "TwoBodyBesselScalarEmbed": ("bessel", {"num_bessels", "bessel_trainable", "polynomial_cutoff_p"}),
    "TwoBodySplineScalarEmbed": ("spline", {"num_splines", "spline_span"}),
}
FIXED = {
    "radial_chemical_embed.bessel_encode.bessel_weights": "bessel_frequencies",
    "radial_chemical_embed.type_embed.center_embed.weight": "centre_embedding",
    "radial_chemical_embed.type_embed.neighbor_embed.weight": "neighbour_embedding",
    "radial_chemical_embed.spline.class_embed.weight": "splines",
    "per_type_energy_scale_shift.scales": "energy_scales",
    "per_type_energy_scale_shift.shifts": "energy_shifts",
}
PERCEPTRONS = {
    "radial_chemical_embed.type_embed.basis_linear": "radial",
    "scalar_embed_mlp.mlp_module": "scalar_embed",
    "tensor_embed.env_embed_linear": "tensor_weights",
    "allegro.first_layer_env_embed_projection": "first_projection",
    "edge_readout.mlp_module": "readout",
}
_DERIVED = re.compile(
    r"_empty|edge_norm\._rmax_recip|allegro\.tps\.\d+\.w3j|radial_chemical_embed\.spline\.(lower|upper)"
    r"|(allegro\._env_weighter|tensor_embed\._edge_weighter)\._rtoi|pair_potential\.(atomic_numbers|_qqr2exesquare)"
)


def read_allegro(
    path: str | os.PathLike[str],
    options: str | os.PathLike[str] | None = None,
    weights: str = "ema",
    species: Sequence[str] | None = None,
    units: ModelUnits | None = None,
) -> ImportedModel:
    """Model in a file of Allegro; see `read_model`."""
    return read_model(ALLEGRO, path, options, weights, species, units)


def weight_name(name: str) -> str | None:
    """Forgefield's name of a weight of Allegro; None for an unknown one."""
    if name in FIXED:
        return FIXED[name]
    if match := re.fullmatch(r"allegro\.tps\.(\d+)\.weights", name):
        return f"couplings.{match[1]}.weight"
    for layers, step in ((r"\.mlp\.(\d+)\.weight", 2), (r"\.mlp\.weights\.(\d+)", 1)):
        if match := re.fullmatch(r"(.+)" + layers, name):
            number = int(match[2]) // step
            latent = re.fullmatch(r"allegro\.latents\.(\d+)", match[1])
            perceptron = f"latents.{latent[1]}" if latent else PERCEPTRONS.get(match[1])
            return None if perceptron is None else f"{perceptron}.weights.{number}"
    return None


def arrange(name: str, value: Tensor, resolved: Mapping[str, Any]) -> Tensor:
    """A weight in Forgefield's order."""
    if name == "splines":
        return value.reshape(value.shape[0], -1, resolved["num_splines"]).transpose(1, 2)
    if re.fullmatch(r"couplings\.\d+\.weight", name):
        channels = resolved["num_tensor_features"] if resolved["tp_path_channel_coupling"] else 1
        return value.reshape(channels, -1).T
    columns = weight_columns(name, resolved)
    if columns is None:
        return value
    n_features, degrees = columns
    features, weights = value[:, :n_features], value[:, n_features:]
    by_degree = weights.unflatten(1, (-1, degrees)).transpose(1, 2).flatten(1) if weights.shape[1] else weights
    return torch.cat([features, by_degree], 1)


def weight_columns(name: str, resolved: Mapping[str, Any]) -> tuple[int, int] | None:
    """Of a matrix that computes weights of tensors: columns of scalar features before them, and the number of degrees that
    have separate weights; None for other matrices."""
    first = {"tensor_weights": 0, "first_projection": resolved["num_scalar_features"]}
    degrees = resolved["l_max"] + 1 if name.startswith("tensor") or resolved["weight_individual_irreps"] else 1
    part, _, number = name.rpartition(".weights.")
    if part.startswith("latents.") and int(number) == resolved["allegro_mlp_depth"]:
        first[part] = resolved["num_scalar_features"]
    return (first[part], degrees) if part in first else None


def _translate(path: Path, key: str, value: object) -> dict[str, Any] | None:
    if key != "radial_chemical_embed" or not isinstance(value, Mapping):
        return None
    settings = dict(value)
    target = str(settings.pop("_target_", "")).rsplit(".", 1)[-1]
    if target not in EMBEDDINGS:
        raise ForgefieldError(f"{path}: radial_chemical_embed is {target}; supported are {' and '.join(EMBEDDINGS)}.")
    kind, names = EMBEDDINGS[target]
    for option in settings:
        if option not in names:
            raise ForgefieldError(f"{path}: radial_chemical_embed.{option} is not supported.")
    return {"radial_chemical_embed": kind, **settings}


ALLEGRO = Architecture(
    name="allegro",
    title="Allegro",
    builders=("AllegroModel",),
    embedding=re.compile(r"radial_chemical_embed\.(type_embed\.center_embed|spline\.class_embed)\.weight"),
    derived=_DERIVED,
    renamed=OPTIONS,
    refused_unless={},
    weight_name=weight_name,
    translate=_translate,
    describe=allegro_settings_of_modules,
    arrange=arrange,
)
IMPORTER = FrameworkImporter(ALLEGRO)
