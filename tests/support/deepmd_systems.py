"""Systems of DeePMD-kit with dipoles, polarisabilities, densities of states and a property, and inputs that train them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

TYPES = ("O", "H")
N_DOS = 5
DESCRIPTOR = {
    "type": "se_e2_a",
    "neuron": [3, 6],
    "axis_neuron": 2,
    "rcut": 3.0,
    "rcut_smth": 1.0,
    "seed": 1,
    "sel": [9, 18],
}
FITTINGS: dict[str, dict[str, Any]] = {
    "dipole": {"type": "dipole"},
    "polar": {"type": "polar", "fit_diag": False, "scale": [1.0, 0.5]},
    "dos": {"type": "dos", "numb_dos": N_DOS},
    "intensive": {"type": "property", "property_name": "gap", "task_dim": 2, "intensive": True},
    "extensive": {"type": "property", "property_name": "gap", "task_dim": 2, "distinguish_types": False},
}
LOSSES: dict[str, dict[str, Any]] = {
    "dipole": {"type": "tensor", "pref": 1.0, "pref_atomic": 2.0},
    "polar": {"type": "tensor", "pref": 0.5, "pref_atomic": 0.0},
    "dos": {
        "type": "dos",
        **{f"{end}_pref_{name}": w for name, w in (("dos", 1.0), ("cdf", 0.5), ("acdf", 2.0)) for end in ("start", "limit")},
        "start_pref_ados": 3.0,
        "limit_pref_ados": 0.5,
    },
    "intensive": {"type": "property", "loss_func": "smooth_mae", "beta": 0.7, "metric": ["mae", "rmse", "mse"]},
    "extensive": {"type": "property", "loss_func": "mse"},
}  # fmt: skip
COLUMNS = {
    "dipole": ["rmse_global_dipole", "rmse_local_dipole"],
    "polar": ["rmse_global_polar"],
    "dos": ["rmse_global_cdf", "rmse_global_dos", "rmse_local_cdf", "rmse_local_dos"],
    "intensive": ["mae", "mse", "rmse"],
    "extensive": ["mae"],
}
"""Of the learning curve, as DeePMD-kit names them."""


def write_system(folder: Path, n_frames: int, seed: int, atoms: tuple[int, int] = (2, 4)) -> Path:
    """Water-like atoms in a box of 6 A, every label a smooth function of positions and species."""
    rng = np.random.default_rng(seed)
    types = np.repeat([0, 1], atoms)
    n = len(types)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)[:n] * 2.0
    coord = grid[None] + rng.normal(scale=0.15, size=(n_frames, n, 3))
    shape = np.cos(np.outer(np.arange(N_DOS), [0.7, 1.3])).T + 1.5
    dos = shape[types][None] * (1 + 0.1 * coord.sum(-1, keepdims=True))
    charge = np.array([-0.8, 0.4])[types][None, :, None]
    dipole = charge * (coord - grid[None])
    polar = np.array([1.5, 0.5])[types][None, :, None, None] * np.eye(3) + dipole[..., None] * dipole[..., None, :]
    values = {
        "coord": coord,
        "box": np.repeat(6.0 * np.eye(3)[None], n_frames, 0),
        "energy": (dipole**2).sum((1, 2)) - 3.0 * n,
        "force": -2 * charge * dipole,
        "atomic_dipole": dipole,
        "dipole": dipole.sum(1),
        "polarizability": polar.sum(1),
        "atom_dos": dos,
        "dos": dos.sum(1),
        "gap": np.stack([dipole.std((1, 2)) + atoms[0] / n, 3 * coord.std((1, 2))], 1) * (1 if seed % 2 else 1.2),
    }
    (folder / "set.000").mkdir(parents=True)
    for name, array in values.items():
        np.save(folder / "set.000" / f"{name}.npy", array.reshape(n_frames, -1))
    (folder / "type.raw").write_text("\n".join(map(str, types)))
    (folder / "type_map.raw").write_text("\n".join(TYPES))
    return folder


def several_input(folder: Path, **training: Any) -> Path:
    """Two energies of one descriptor: b's are 500 eV higher, and it has no validation data."""
    for name, n_frames, seed, atoms in (("a", 5, 1, (2, 4)), ("b", 4, 2, (3, 4)), ("val", 3, 3, (2, 4))):
        if not (folder / name).exists():
            write_system(folder / name, n_frames, seed, atoms)
            if name == "b":
                energies = folder / "b" / "set.000" / "energy.npy"
                np.save(energies, np.load(energies) + 500.0)
    prefactors = {"start_pref_e": 0.1, "limit_pref_e": 1, "start_pref_f": 100, "limit_pref_f": 1}
    content = {
        "model": {
            "shared_dict": {"types": list(TYPES), "described": DESCRIPTOR},
            "model_dict": {
                name: {"type_map": "types", "descriptor": "described", "fitting_net": {"neuron": [6, 6], "seed": seed}}
                for name, seed in (("wet", 1), ("dry", 2))
            },
        },
        "learning_rate": {"type": "exp", "decay_steps": 4, "start_lr": 0.005, "stop_lr": 1e-5},
        "loss_dict": {
            "wet": {"type": "ener", **prefactors},
            "dry": {"type": "ener", "start_pref_e": 0.2, "limit_pref_e": 0.2, "start_pref_f": 0, "limit_pref_f": 0},
        },
        "training": {
            "model_prob": {"wet": 0.5, "dry": 0.5},
            "data_dict": {
                "wet": {
                    "training_data": {"systems": [str(folder / "a")], "batch_size": 1},
                    "validation_data": {"systems": [str(folder / "val")], "batch_size": 1},
                },
                "dry": {"training_data": {"systems": [str(folder / "b")], "batch_size": 1}},
            },
            "numb_steps": 6,
            "disp_freq": 3,
            "save_freq": 3,
            "seed": 1,
            **training,
        },
    }
    path = folder / "several.json"
    path.write_text(json.dumps(content))
    return path


def write_input(folder: Path, kind: str, **training: Any) -> Path:
    """An input of that kind of fitting; its two systems differ in their atoms."""
    for name, n_frames, seed, atoms in (("a", 5, 1, (2, 4)), ("b", 4, 2, (3, 4)), ("val", 3, 3, (2, 4))):
        if not (folder / name).exists():
            write_system(folder / name, n_frames, seed, atoms)
    content = {
        "model": {
            "type_map": list(TYPES),
            "descriptor": DESCRIPTOR,
            "fitting_net": {"neuron": [6, 6], "seed": 1, **FITTINGS[kind]},
        },
        "learning_rate": {"type": "exp", "decay_steps": 4, "start_lr": 0.005, "stop_lr": 1e-5},
        "loss": LOSSES[kind],
        "training": {
            "training_data": {"systems": [str(folder / "a"), str(folder / "b")], "batch_size": 1},
            "validation_data": {"systems": [str(folder / "val")]},
            "numb_steps": 6,
            "disp_freq": 3,
            "save_freq": 3,
            "seed": 1,
            **training,
        },
    }
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(content))
    return path
