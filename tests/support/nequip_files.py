"""Makes the checkpoints in this folder with nequip 0.19.1 and nequip-allegro 0.8.3 (torch 2.13.0), and what they predict.

    python make.py FOLDER

Every checkpoint holds averaged weights that differ from the last ones by noise; NAME.npz holds a structure in a cubic cell of
4 A, and the energy (eV) and forces (eV/A) of the averaged model, as nequip itself evaluates it.
"""

import sys

import numpy as np
import torch
from nequip.data import from_dict
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.train import EMALightningModule
from nequip.utils.global_state import set_global_state

SHARED = {
    "seed": 3,
    "model_dtype": "float64",
    "type_names": ["H", "O"],
    "r_max": 3.0,
    "num_layers": 2,
    "l_max": 1,
    "parity": True,
    "avg_num_neighbors": 7.0,
    "per_type_energy_scales": {"H": 1.3, "O": 1.7},
    "per_type_energy_shifts": {"H": -13.6, "O": -75.0},
}
NEQUIP = SHARED | {
    "_target_": "nequip.model.NequIPGNNModel",
    "num_features": 4,
    "radial_mlp_depth": 1,
    "radial_mlp_width": 8,
}
ALLEGRO = SHARED | {
    "_target_": "allegro.model.AllegroModel",
    "num_scalar_features": 8,
    "num_tensor_features": 4,
    "radial_chemical_embed": {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 8},
    "per_type_energy_scales_trainable": True,
}
ZBL = {"_target_": "nequip.nn.pair_potential.ZBL", "units": "metal", "chemical_species": ["H", "O"]}
SPLINES = {"_target_": "allegro.nn.TwoBodySplineScalarEmbed", "num_splines": 6, "spline_span": 4}


def modified(model, **arguments):
    modifier = {"modifier": "modify_PerTypeScaleShift", **arguments}
    return {"_target_": "nequip.model.modify", "modifiers": [modifier], "model": model}


MODELS = {
    "nequip_scales_to_shifts": modified(
        NEQUIP | {"per_type_energy_scales_trainable": True}, shifts_trainable=True, scales_trainable=False
    ),
    "nequip_shifts": modified(NEQUIP, shifts_trainable=True),
    "nequip_new_shifts": modified(NEQUIP, shifts={"H": -12.0}),
    "nequip_norm": NEQUIP | {"convnet_nonlinearity_type": "norm"},
    "nequip_pairs": NEQUIP
    | {"l_max": 2, "num_layers": 3, "num_features": [3, 2, 2], "convnet_resnet": True, "pair_potential": ZBL}
    | {"readout_mlp_hidden_layers_depth": 1, "per_edge_type_cutoff": {"H": 2.0}},
    "nequip_single": NEQUIP
    | {"model_dtype": "float32", "convnet_nonlinearity_type": "norm", "num_layers": 3, "bessel_trainable": True}
    | {"pair_potential": ZBL, "num_features": 2},
    "allegro_scales_to_shifts": modified(ALLEGRO, shifts_trainable=True),
    "allegro_splines": ALLEGRO
    | {"num_scalar_features": 4, "num_tensor_features": 2, "num_layers": 3, "tp_path_channel_coupling": False}
    | {"radial_chemical_embed": SPLINES, "weight_individual_irreps": False, "avg_num_neighbors": {"H": 3.0, "O": 4.0}}
    | {"scalar_embed_mlp_nonlinearity": None, "scalar_embed_mlp_hidden_layers_depth": 2, "parity": False},
}


def main(folder):
    set_global_state()
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(1)
    positions, numbers = rng.random((5, 3)) * 3.0, np.array([1, 8, 1, 8, 1])
    for name, options in MODELS.items():
        module = EMALightningModule(
            ema_decay=0.9,
            model=options,
            num_datasets={"train": 1, "val": 1, "test": 0, "predict": 0},
            loss={"_target_": "nequip.train.EnergyForceLoss"},
            val_metrics={
                "_target_": "nequip.train.EnergyForceMetrics",
                "coeffs": {"total_energy_mae": 1.0, "forces_mae": 1.0},
            },
            optimizer={"_target_": "torch.optim.Adam"},
            info_dict={"versions": {"nequip": "0.19.1", "allegro": "0.8.3"}},
        )
        with torch.no_grad():
            for weight in module.ema.ema_weights:
                weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "epoch": 1}
        torch.save(content, f"{folder}/{name}.ckpt")
        frame = {
            "pos": torch.tensor(positions),
            "atomic_numbers": torch.tensor(numbers),
            "cell": 4.0 * torch.eye(3, dtype=torch.float64),
            "pbc": torch.ones(3, dtype=torch.bool),
        }
        frame = NeighborListTransform(r_max=3.0)(ChemicalSpeciesToAtomTypeMapper(["H", "O"])(from_dict(frame)))
        out = module.evaluation_model["sole_model"](frame)
        np.savez(
            f"{folder}/{name}.npz",
            positions=positions,
            numbers=numbers,
            energy=out["total_energy"].detach().numpy().reshape(()),
            forces=out["forces"].detach().numpy(),
        )


if __name__ == "__main__":
    main(sys.argv[1])
