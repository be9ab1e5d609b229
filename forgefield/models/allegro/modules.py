"""Reads the options of Allegro's builder off a pickled module, which has been read as inert records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgefield.config.nequip.full_model import parsed_irreps
from forgefield.errors import ForgefieldError
from forgefield.models.module_records import attribute, children_of, class_name, irreps_text
from forgefield.models.nequip.modules import (
    Parts,
    bessel_settings,
    depth_and_width,
    neighbours,
    perceptron,
    readout_settings,
    require_parts,
)
from forgefield.untrusted.torch_files import Record

PARTS = (
    "edge_norm", "radial_chemical_embed", "scalar_embed_mlp", "tensor_embed", "allegro", "edge_readout", "edge_eng_sum",
)  # fmt: skip
"""Modules of the network."""


def allegro_settings_of_modules(path: Path, parts: Parts, names: Sequence[str]) -> dict[str, Any]:
    """Arguments of `AllegroModel` that depend on the network."""
    require_parts(path, parts, PARTS)
    allegro = parts["allegro"]
    inner = children_of(allegro)
    latents, couplings = list(children_of(inner["latents"]).values()), list(children_of(inner["tps"]).values())
    sizes, function = perceptron(path, latents[0])
    if any(perceptron(path, latent)[0][1:-1] != sizes[1:-1] for latent in latents):
        raise ForgefieldError(f"{path}: perceptrons of Allegro's layers differ in size, which is not supported.")
    depth, width = depth_and_width(sizes)
    l_max = int(attribute(path, children_of(parts["tensor_embed"])["sh"], "_lmax"))
    hidden = {} if not depth else {"allegro_mlp_hidden_layers_width": width, "allegro_mlp_nonlinearity": function}
    networks = [children_of(parts[name])["mlp_module"] for name in ("scalar_embed_mlp", "edge_readout")]
    networks += [children_of(parts["tensor_embed"])["env_embed_linear"], *latents]
    return {
        "_target_": "allegro.model.AllegroModel",
        "l_max": l_max,
        "parity": _parity(path, allegro, l_max),
        "num_layers": int(attribute(path, allegro, "num_layers")),
        "num_scalar_features": int(attribute(path, allegro, "num_scalar_features")),
        "num_tensor_features": int(attribute(path, allegro, "num_tensor_features")),
        "radial_chemical_embed": _embedding(path, parts["radial_chemical_embed"]),
        "radial_chemical_embed_dim": perceptron(path, networks[0])[0][0],
        "tp_path_channel_coupling": bool(attribute(path, couplings[0], "path_channel_coupling")),
        "weight_individual_irreps": bool(attribute(path, inner["_env_weighter"], "weight_individual_irreps")),
        "forward_normalize": _forward_normalize(path, networks),
        "avg_num_neighbors": neighbours(path, inner["avg_num_neighbors_norm"], names),
        "allegro_mlp_hidden_layers_depth": depth,
        **hidden,
        **readout_settings(path, parts["scalar_embed_mlp"], "scalar_embed_mlp"),
        **readout_settings(path, parts["edge_readout"], "readout_mlp"),
    }


def _parity(path: Path, allegro: Record, l_max: int) -> bool:
    """Whether tensors of both parities are kept."""
    tracked = {
        (l, p) for _, l, p in parsed_irreps(irreps_text(attribute(path, allegro, "tensor_track_allowed_irreps")))
    }
    for parity in (True, False):
        if tracked == {(l, p) for l in range(l_max + 1) for p in ((1, -1) if parity else ((-1) ** l,))}:
            return parity
    raise ForgefieldError(f"{path}: tensor_track_allowed_irreps has other irreps than those of AllegroModel.")


def _embedding(path: Path, module: Record) -> dict[str, Any]:
    parts = children_of(module)
    if "bessel_encode" in parts:
        return {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", **bessel_settings(path, parts["bessel_encode"])}
    if "spline" in parts:
        options = {name: int(attribute(path, parts["spline"], name)) for name in ("num_splines", "spline_span")}
        return {"_target_": "allegro.nn.TwoBodySplineScalarEmbed", **options}
    raise ForgefieldError(f"{path}: the embedding {class_name(module)} is not supported.")


def _forward_normalize(path: Path, networks: Sequence[Record]) -> bool:
    """Whether perceptrons are normalised by their inputs: their first factors are those of inputs."""
    for network in networks:
        sizes, _ = perceptron(path, network)
        layers = children_of(network)["mlp"]
        if "alpha" in attribute(path, layers, "_buffers"):  # linear layers, stored as one product
            factor, expected = attribute(path, layers, "_buffers")["alpha"], math.prod(sizes[:-1]) ** -0.5
        else:
            factor, expected = attribute(path, children_of(layers)["0"], "_buffers")["alpha"], sizes[0] ** -0.5
        if not math.isclose(float(factor), expected, rel_tol=1e-5):
            return False
    return True
