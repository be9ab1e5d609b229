"""Properties and forces learnt from small real data sets by several encoders, next to what can be had without learning.

    python benchmarks/properties.py --data FOLDER [--only oqmd,lips,crystals] [--out runs/properties] [--gpu]

FOLDER holds the devsets of Open MatSciML (oqmd, lips). `crystals` are made here: prototypes of six space groups with elements,
sizes and displacements at random; composition alone (one element or two) would find 2 of 7. Held-out frames are not trained on,
but they choose the best epoch, and the weights of energy and forces on lips were chosen by looking at them. One thread of a
CPU; each training takes a minute or two. --gpu: lips alone, a larger NequIP on an NVIDIA GPU. Running it again trains again.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.data import chemical_symbols

import forgefield
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.reading import read_table

ENCODERS: dict[str, dict[str, Any]] = {
    "schnet": {"name": "schnet", "num_layers": 3, "num_features": 64},
    "painn": {"name": "painn", "num_layers": 2, "num_features": 48},
    "egnn": {"name": "egnn", "num_layers": 3, "num_features": 48},
    "cgcnn": {"name": "cgcnn", "num_layers": 3, "num_features": 48},
    "nequip": {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": [32, 8], "radial_mlp_width": 16},
    "nequip-l2": {"name": "nequip", "num_layers": 4, "l_max": 2, "parity": False, "num_features": [64, 32, 16]},
}
RATES = {"nequip": 5e-3, "nequip-l2": 5e-3}
ELEMENTS = ("Al", "Cu", "Mg", "Fe", "Si", "Na", "Cl", "Zn")
GROUPS = {"fcc": 225, "rocksalt": 225, "bcc": 229, "hcp": 194, "diamond": 227, "zincblende": 216, "cesiumchloride": 221}


def trained(
    name: str, encoder: str, args: argparse.Namespace, epochs: int, data: dict, task: dict
) -> tuple[Any, float]:
    """The run, and its CPU seconds; with a GPU wall seconds."""
    folder = Path(args.out) / f"{name}-{encoder}"
    shutil.rmtree(folder, ignore_errors=True)
    clock = time.perf_counter if args.gpu else time.process_time
    begin = clock()
    run = forgefield.train(
        {
            "name": folder.name,
            "out": str(args.out),
            "seed": 2,
            "data": data,
            "model": ENCODERS[encoder],
            "task": task,
            "training": {
                "lr": RATES.get(encoder, 2e-3),
                "ema": 0.99 if args.gpu else 0.98,
                "tensorboard": 0,
                "engine": "graphs" if args.gpu else "eager",
                "scheduler": {"name": "CosineAnnealingLR"},
            },
            "trainer": {
                "max_epochs": epochs,
                "check_val_every_n_epoch": 10 if args.gpu else 1,
                "enable_progress_bar": False,
                "accelerator": "gpu" if args.gpu else "cpu",
                "devices": 1,
            },
        }
    )
    return run, clock() - begin


def oqmd(args: argparse.Namespace) -> None:
    """Formation energies of 40 held-out crystals of 200, cutoff 4.5 A."""
    source = Path(args.data) / "oqmd"
    numbers = np.unique(read_table(str(source), LabelOptions(), UnitOptions()).components.number)
    data = {
        "train": str(source),
        "val": 40,
        "cutoff": 4.5,
        "species": [chemical_symbols[int(number)] for number in numbers],
        "labels": {"fields": {"delta_e": {"unit": "eV/atom"}}},
    }
    print("oqmd: formation energy, eV/atom, MAE on 40 held-out crystals", flush=True)
    for encoder in ("schnet", "painn", "cgcnn", "nequip"):
        run, seconds = trained("oqmd", encoder, args, 25, data, {"delta_e": {"loss": "mae"}})
        with np.load(run.path / "predictions" / "val.npz") as found:
            reference, predicted = found["delta_e_ref"], found["delta_e_pred"]
        mean = run.heads["delta_e"]["shift"][0][0]
        error, blind = np.abs(predicted - reference).mean(), np.abs(mean - reference).mean()
        print(f"  {encoder:8s} {error:.3f}   mean of the training data {blind:.3f}   {seconds:.0f} s", flush=True)


def lips(args: argparse.Namespace) -> None:
    """Energies and forces of 40 held-out frames of 200, cutoff 4 A, with a GPU 5 A."""
    data: dict[str, Any] = {"train": str(Path(args.data) / "lips"), "val": 40, "batch": {"frames": 2}}
    data |= {"cutoff": 5.0 if args.gpu else 4.0}
    print("lips: 40 held-out frames; RMSE of energy, meV/atom; MAE of forces, meV/A", flush=True)
    for encoder, epochs in (("nequip-l2", 400),) if args.gpu else (("painn", 20), ("schnet", 20)):
        task = {"energy": {"weight": 100.0}, "forces": {"weight": 1.0}}
        run, seconds = trained("lips", encoder, args, epochs, data, task)
        with np.load(run.path / "predictions" / "val.npz") as found:
            forces, off = found["forces_ref"], found["forces_pred"] - found["forces_ref"]
            energy, energy_off = (1000 * found[key] / found["n_atoms"] for key in ("energy_ref", "energy_pred"))
        energy_off = energy_off - energy
        print(
            f"  {encoder:8s} energy {np.sqrt((energy_off**2).mean()):.2f} (standard deviation {energy.std():.2f})   "
            f"forces {1000 * np.abs(off).mean():.0f} (zero forces {1000 * np.abs(forces).mean():.0f})   {seconds:.0f} s",
            flush=True,
        )


def crystals(args: argparse.Namespace) -> None:
    """Space groups of 100 held-out crystals of 500, cutoff 4.5 A."""
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    frames = [crystal(number) for number in range(500)]
    ase.io.write(folder / "crystals.extxyz", frames)
    groups = np.array([atoms.info["space_group"] for atoms in frames])
    often = max(float((groups == group).mean()) for group in set(groups.tolist()))
    data = {
        "train": str(folder / "crystals.extxyz"),
        "val": 100,
        "cutoff": 4.5,
        "labels": {"fields": {"space_group": {}}},
    }
    print(f"crystals: share of 100 held-out crystals whose space group is right (commonest: {often:.2f})", flush=True)
    for encoder in ("schnet", "cgcnn", "painn"):
        run, seconds = trained("crystals", encoder, args, 20, data, {"space_group": {"classes": "auto"}})
        best = min(run.metrics(), key=lambda row: row["val/loss"])
        accuracy, f1 = best["val/space_group_accuracy"], best["val/space_group_f1"]
        print(f"  {encoder:8s} accuracy {accuracy:.2f}   F1 {f1:.2f}   {seconds:.0f} s", flush=True)


def crystal(number: int) -> Atoms:
    """One of the prototypes, its nearest neighbours about 2.5 A apart, repeated and shaken by 0.08 A."""
    random = np.random.default_rng(number)
    kind = str(random.choice(list(GROUPS)))
    one, other = (str(symbol) for symbol in random.choice(ELEMENTS, 2, replace=False))
    two = kind in ("rocksalt", "zincblende", "cesiumchloride")
    extra = {"covera": 1.633} if kind == "hcp" else {}
    atoms = bulk(one + other if two else one, kind, a=4.0, **extra)
    if not two:  # several atoms to displace
        atoms = atoms * (2, 1, 1)
    shortest = np.sort(np.unique((atoms * (3, 3, 3)).get_all_distances(mic=True).round(4)))[1]
    atoms.set_cell(atoms.cell.array * (random.uniform(2.3, 2.7) / shortest), scale_atoms=True)
    atoms.rattle(0.08, rng=random)
    atoms.info["space_group"] = GROUPS[kind]
    return atoms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--only", default="oqmd,lips,crystals")
    parser.add_argument("--out", default="runs/properties")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    for name in ["lips"] if args.gpu else args.only.split(","):
        {"oqmd": oqmd, "lips": lips, "crystals": crystals}[name](args)


if __name__ == "__main__":
    main()
