"""Checkpoints with the layout that Allegro writes."""

from __future__ import annotations

import collections

import torch

from tests.support.allegro_models import potential_of

THEIR_OPTIONS = {
    "_target_": "allegro.model.AllegroModel",
    "seed": 3,
    "model_dtype": "float64",
    "type_names": ["H", "O"],
    "r_max": 3.0,
    "l_max": 1,
    "num_layers": 2,
    "num_scalar_features": 6,
    "num_tensor_features": 3,
    "radial_chemical_embed": {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 5},
    "scalar_embed_mlp_hidden_layers_depth": 1,
    "scalar_embed_mlp_hidden_layers_width": 8,
    "scalar_embed_mlp_nonlinearity": "silu",
    "allegro_mlp_hidden_layers_depth": 1,
    "allegro_mlp_hidden_layers_width": 5,
    "allegro_mlp_nonlinearity": "silu",
    "readout_mlp_hidden_layers_depth": 1,
    "readout_mlp_hidden_layers_width": 4,
    "readout_mlp_nonlinearity": "silu",
    "tp_path_channel_coupling": True,
    "avg_num_neighbors": {"H": 7.0, "O": 8.0},
    "per_type_energy_scales": 1.3,
    "per_type_energy_shifts": {"H": -13.6, "O": -75.0},
    "per_type_energy_shifts_trainable": True,
    "per_edge_type_cutoff": {"H": 2.5},
    "pair_potential": {"_target_": "nequip.nn.pair_potential.ZBL", "units": "metal", "chemical_species": ["H", "O"]},
}
OUR_OPTIONS = {
    "num_bessels": 5,
    "avg_num_neighbours": {"H": 7.0, "O": 8.0},
    "energy_shifts": {"H": -13.6, "O": -75.0},
    "energy_shifts_trainable": True,
    "per_edge_type_cutoff": {"H": 2.5},
    "zbl": True,
}
SPLINES = {"_target_": "allegro.nn.TwoBodySplineScalarEmbed", "num_splines": 6, "spline_span": 4}


def by_channel(weight: torch.Tensor, first: int, channels: int) -> torch.Tensor:
    """Columns from `first` on by channel, then degree, as Allegro has them."""
    tail = weight[:, first:].reshape(len(weight), -1, channels).transpose(1, 2).reshape(len(weight), -1)
    return torch.cat([weight[:, :first], tail], 1)


def trained_elsewhere(seed: int = 7, spline: bool = False):
    """A model of Forgefield, and its weights under the names and in the order that Allegro 0.8 gives them."""
    options = {key: value for key, value in OUR_OPTIONS.items() if not spline or key != "num_bessels"}
    options |= {"radial_chemical_embed": "spline", "num_splines": 6, "spline_span": 4} if spline else {}
    potential = potential_of(seed=seed, **options)
    model, scalars, channels = potential.model, 6, 3
    theirs = collections.OrderedDict()
    theirs["edge_norm._rmax_recip"] = torch.ones(4)
    embed = "radial_chemical_embed"
    if spline:
        theirs[f"{embed}.spline.lower"] = theirs[f"{embed}.spline.upper"] = torch.zeros(6)
        theirs[f"{embed}.spline.class_embed.weight"] = model.splines.transpose(1, 2).flatten(1)
    else:
        theirs[f"{embed}.bessel_encode.bessel_weights"] = model.bessel_frequencies.view(1, -1)
        theirs[f"{embed}.type_embed.center_embed.weight"] = model.centre_embedding
        theirs[f"{embed}.type_embed.neighbor_embed.weight"] = model.neighbour_embedding
        theirs[f"{embed}.type_embed.basis_linear.mlp.0.weight"] = model.radial.weights[0]
    for depth, weight in enumerate(model.scalar_embed.weights):
        theirs[f"scalar_embed_mlp.mlp_module.mlp.{2 * depth}.weight"] = weight
    theirs["tensor_embed.env_embed_linear.mlp.0.weight"] = by_channel(model.tensor_weights.weights[0], 0, channels)
    projection = by_channel(model.first_projection.weights[0], scalars, channels)
    theirs["allegro.first_layer_env_embed_projection.mlp.0.weight"] = projection
    for number, latent in enumerate(model.latents):
        theirs[f"allegro.latents.{number}.mlp.0.weight"] = latent.weights[0]
        last = by_channel(latent.weights[1], scalars, channels) if number == 0 else latent.weights[1]
        theirs[f"allegro.latents.{number}.mlp.2.weight"] = last
    for number, coupling in enumerate(model.couplings):
        theirs[f"allegro.tps.{number}.weights"] = coupling.weight.T
        theirs[f"allegro.tps.{number}.w3j"] = torch.ones(3)
    for depth, weight in enumerate(model.readout.weights):
        theirs[f"edge_readout.mlp_module.mlp.{2 * depth}.weight"] = weight
    theirs["per_type_energy_scale_shift.shifts"] = model.energy_shifts.view(-1, 1)
    theirs["per_type_energy_scale_shift.scales"] = model.energy_scales[:1].view(1, 1)
    theirs["pair_potential.atomic_numbers"] = torch.tensor([1.0, 8.0])
    return potential, collections.OrderedDict((f"model.func.{key}", value.detach()) for key, value in theirs.items())


def checkpoint(tensors, options=THEIR_OPTIONS, **more):
    state = collections.OrderedDict((f"model.sole_model.{key}", value) for key, value in tensors.items())
    hyper = {"model": options, "info_dict": {"versions": {"nequip": "0.19.1", "allegro": "0.8.3"}}}
    return {"state_dict": state | more, "hyper_parameters": hyper}
