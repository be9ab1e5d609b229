"""Makes the packages and fine-tuned checkpoints in tests/models/nequip/packages with nequip 0.19.1, nequip-allegro 0.8.3 and
schedulefree 1.4.1 (torch 2.13.0), and what these programs predict with them.

    python nequip_packages.py FOLDER

Code is left out of the packages, which makes them small; modules, weights and texts are as `nequip-package` wrote them. All
files are compressed. NAME.npz holds a structure in a cubic cell of 4 A, its energy and its forces in the units of the model.
"""

import contextlib
import io
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import ase.io
import numpy as np
import torch
from nequip.data import from_dict
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.model.saved_models import load_saved_model
from nequip.train import EMALightningModule, ScheduleFreeLightningModule
from nequip.utils.global_state import set_global_state

TYPES = {"H": "hyd", "O": "oxy"}
MODEL = {
    "seed": 3,
    "model_dtype": "float64",
    "type_names": ["hyd", "oxy"],
    "r_max": 3.0,
    "num_layers": 2,
    "l_max": 1,
    "avg_num_neighbors": {"hyd": 7.0, "oxy": 8.0},
    "per_type_energy_scales": 1.3,
    "per_type_energy_shifts": {"hyd": -13.6, "oxy": -75.0},
}
ZBL = {"_target_": "nequip.nn.pair_potential.ZBL", "units": "real", "chemical_species": ["H", "O"]}
NEQUIP = MODEL | {
    "_target_": "nequip.model.NequIPGNNModel",
    "num_features": [3, 2],
    "radial_mlp_width": 4,
    "num_bessels": 4,
    "per_edge_type_cutoff": {"hyd": 2.5},
    "per_type_energy_shifts_trainable": True,
}
ALLEGRO = MODEL | {
    "_target_": "allegro.model.AllegroModel",
    "l_max": 2,
    "parity": False,
    "num_scalar_features": 4,
    "num_tensor_features": 2,
    "scalar_embed_mlp_hidden_layers_width": 4,
    "allegro_mlp_hidden_layers_width": 4,
    "readout_mlp_hidden_layers_depth": 0,
    "forward_normalize": False,
    "radial_chemical_embed": {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 4},
}
SHIFTED = {"modifier": "modify_PerTypeScaleShift", "shifts": {"hyd": -12.5}, "shifts_trainable": True}


def data(folder):
    """A data module with a file of water-like frames, which `nequip-package` needs."""
    atoms = ase.Atoms("HOHOH", positions=structure()[0], cell=4.0 * np.eye(3), pbc=True)
    atoms.info["energy"], atoms.arrays["forces"] = 0.0, np.zeros((5, 3))
    ase.io.write(folder / "frames.xyz", [atoms] * 4, format="extxyz")
    mapper = {
        "_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper",
        "model_type_names": list(TYPES.values()),
        "chemical_species_to_atom_type_map": TYPES,
    }
    return {
        "_target_": "nequip.data.datamodule.ASEDataModule",
        "seed": 1,
        "split_dataset": {"file_path": str(folder / "frames.xyz"), "train": 2, "val": 2},
        "transforms": [mapper, {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": 3.0}],
    }


def structure():
    rng = np.random.default_rng(1)
    return rng.random((5, 3)) * 3.0, np.array([1, 8, 1, 8, 1])


def frame():
    positions, numbers = structure()
    raw = {
        "pos": torch.tensor(positions),
        "atomic_numbers": torch.tensor(numbers),
        "cell": 4.0 * torch.eye(3, dtype=torch.float64),
        "pbc": torch.ones(3, dtype=torch.bool),
    }
    mapper = ChemicalSpeciesToAtomTypeMapper(list(TYPES.values()), TYPES)
    return NeighborListTransform(r_max=3.0)(mapper(from_dict(raw)))


def checkpoint(path, folder, model, kind=EMALightningModule, optimizer=None):
    """A checkpoint as Lightning writes it, whose averaged weights differ from the last ones by noise."""
    arguments = {"ema_decay": 0.9} if kind is EMALightningModule else {}
    module = kind(
        model=model,
        num_datasets={"train": 1, "val": 1, "test": 0, "predict": 0},
        loss={"_target_": "nequip.train.EnergyForceLoss"},
        val_metrics={"_target_": "nequip.train.EnergyForceMetrics"},
        optimizer=optimizer or {"_target_": "torch.optim.Adam"},
        info_dict={
            "versions": {"nequip": "0.19.1", "allegro": "0.8.3"},
            "data": data(folder),
            "training_module": {"_target_": f"nequip.train.{kind.__name__}", "model": model},
        },
        **arguments,
    )
    content = {}
    if kind is EMALightningModule:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in module.ema.ema_weights:
                weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    else:
        content["schedulefree_optimizer_state_dict"] = trained(module)
    content |= {
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
    }
    torch.save(content, path)


def trained(module):
    """The state of a schedule-free optimiser after some steps, in the middle of a training."""
    optimiser = module.configure_optimizers()
    optimiser.train()
    for _ in range(5):
        optimiser.zero_grad()
        module(frame())["forces"].square().sum().backward()
        optimiser.step()
    return optimiser.state_dict()


def store(path, folder, name):
    """The file without code, compressed, and the predictions of its model."""
    model = load_saved_model(path, compile_mode="eager")
    out = model(frame())
    positions, numbers = structure()
    energy, forces = out["total_energy"].detach().numpy().reshape(()), out["forces"].detach().numpy()
    np.savez(folder / f"{name}.npz", positions=positions, numbers=numbers, energy=energy, forces=forces)
    content = path.read_bytes()
    if path.name.endswith(".zip"):
        content = without_code(path)
    (folder / f"{path.name}.xz").write_bytes(lzma.compress(content, preset=9))


def without_code(path):
    stream = io.BytesIO()
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as small:
        for item in whole.infolist():
            if not item.filename.endswith((".py", "compile_model.pkl", "example_data.pkl")):
                small.writestr(item, whole.read(item))
    return stream.getvalue()


def package(*arguments):
    subprocess.run([Path(sys.executable).with_name("nequip-package"), *arguments], check=True)


def main(target):
    set_global_state()
    target = Path(target).absolute()
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = Path(temporary)
        for name, model in (("nequip", NEQUIP), ("allegro", ALLEGRO), ("zbl", NEQUIP | {"pair_potential": ZBL})):
            checkpoint(folder / f"{name}.ckpt", folder, model)
            package("build", f"{name}.ckpt", f"{name}.nequip.zip")
            store(folder / f"{name}.nequip.zip", target, name)
        changes = ["--modifier", "modify_PerTypeScaleShift", "scales={hyd: 2.0}", "shifts={oxy: -70.0}"]
        package("modify", "nequip.nequip.zip", "modified.nequip.zip", *changes)
        store(folder / "modified.nequip.zip", target, "modified")
        for name in ("nequip", "allegro"):
            packaged = {"_target_": "nequip.model.ModelFromPackage", "package_path": f"{name}.nequip.zip"}
            model = {"_target_": "nequip.model.modify", "modifiers": [SHIFTED], "model": packaged}
            checkpoint(folder / f"{name}_finetuned.ckpt", folder, model)
            store(folder / f"{name}_finetuned.ckpt", target, f"{name}_finetuned")
            package("build", f"{name}_finetuned.ckpt", f"{name}_again.nequip.zip")
            store(folder / f"{name}_again.nequip.zip", target, f"{name}_again")
        loaded = {"_target_": "nequip.model.ModelFromCheckpoint", "checkpoint_path": "nequip_finetuned.ckpt"}
        checkpoint(folder / "nequip_twice.ckpt", folder, loaded)
        store(folder / "nequip_twice.ckpt", target, "nequip_twice")
        optimiser = {"_target_": "schedulefree.AdamWScheduleFree", "lr": 0.05}
        checkpoint(folder / "nequip_free.ckpt", folder, NEQUIP, ScheduleFreeLightningModule, optimiser)
        store(folder / "nequip_free.ckpt", target, "nequip_free")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1])
