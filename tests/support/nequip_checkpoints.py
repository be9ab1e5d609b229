"""Checkpoints with the layout that NequIP writes."""

from __future__ import annotations

import collections

import torch

from tests.support.structures import make_potential

THEIR_OPTIONS = {
    "_target_": "nequip.model.NequIPGNNModel",
    "seed": 3,
    "model_dtype": "float64",
    "type_names": ["H", "O"],
    "r_max": 3.0,
    "num_layers": 2,
    "l_max": 1,
    "parity": True,
    "num_features": 4,
    "radial_mlp_depth": 1,
    "radial_mlp_width": 8,
    "avg_num_neighbors": {"H": 7.0, "O": 8.0},
    "per_type_energy_scales": 1.3,
    "per_type_energy_shifts": {"H": -13.6, "O": -75.0},
    "per_type_energy_shifts_trainable": True,
    "per_edge_type_cutoff": {"H": 2.5},
    "pair_potential": {"_target_": "nequip.nn.pair_potential.ZBL", "units": "metal", "chemical_species": ["H", "O"]},
}
OUR_OPTIONS = {
    "avg_num_neighbours": {"H": 7.0, "O": 8.0},
    "energy_shifts_trainable": True,
    "per_edge_type_cutoff": {"H": 2.5},
    "zbl": {"polynomial_cutoff_p": 6.0},
}


def trained_elsewhere(seed: int = 7):
    """A model of ours, and its weights under the names and shapes that NequIP 0.19 gives them."""
    potential = make_potential(seed=seed, **OUR_OPTIONS)
    model = potential.model
    theirs = collections.OrderedDict()
    theirs["type_embed.embed_module.weight"] = model.type_embedding
    theirs["edge_norm._rmax_recip"] = torch.ones(4)
    theirs["bessel_encode.bessel_weights"] = model.bessel_frequencies.view(1, -1)
    for number, layer in enumerate(model.layers):
        prefix = f"layer{number}_convnet.conv"
        theirs[f"{prefix}.linear_1.weight"] = layer.linear_in.weight
        theirs[f"{prefix}.linear_1.bias"] = torch.empty(0)
        theirs[f"{prefix}.linear_1.output_mask"] = torch.ones(4)
        theirs[f"{prefix}.tp_scatter.tp.weight"] = torch.empty(0)
        for depth, weight in enumerate(layer.radial.weights):
            theirs[f"{prefix}.edge_mlp.mlp.{2 * depth}.weight"] = weight
        theirs[f"{prefix}.linear_2.weight"] = layer.linear_out.weight
        if layer.self_connection is not None:
            theirs[f"{prefix}.sc.weight"] = layer.self_connection.weight
    theirs["per_atom_energy_readout.mlp_module.mlp.0.weight"] = model.readout.weights[0]
    theirs["per_type_energy_scale_shift.shifts"] = model.energy_shifts.view(-1, 1)
    theirs["per_type_energy_scale_shift.scales"] = model.energy_scales[:1].view(1, 1)
    theirs["pair_potential.atomic_numbers"] = torch.tensor([1.0, 8.0])
    return potential, collections.OrderedDict((f"model.func.{key}", value.detach()) for key, value in theirs.items())


def checkpoint(tensors, options=THEIR_OPTIONS, **more):
    state = collections.OrderedDict((f"model.sole_model.{key}", value) for key, value in tensors.items())
    state["run_stage"] = torch.zeros(1)
    state["loss._extra_state"] = {"coeff_dict": {"forces_mse": 0.5}}
    state.update(more)
    hyper = {"model": options, "info_dict": {"versions": {"nequip": "0.19.1"}}}
    return {"state_dict": state, "hyper_parameters": hyper, "epoch": 3, "callbacks": {}}
