"""Inputs of DeePMD-kit in the shape of its documentation, for tests to change and translate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from forgefield.config.deepmd import Translation, translation

WATER: dict[str, Any] = {
    "_comment": "that's all",
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [46, 92],
            "rcut_smth": 0.5,
            "rcut": 6.0,
            "neuron": [25, 50, 100],
            "resnet_dt": False,
            "axis_neuron": 16,
            "type_one_side": True,
            "precision": "float64",
            "seed": 1,
            "_comment": "local",
        },
        "fitting_net": {"neuron": [240, 240, 240], "resnet_dt": True, "precision": "float64", "seed": 1},
        "data_stat_nbatch": 20,
    },
    "learning_rate": {"type": "exp", "decay_steps": 5000, "start_lr": 0.001, "stop_lr": 3.51e-8},
    "loss": {
        "type": "ener",
        "start_pref_e": 0.02,
        "limit_pref_e": 1,
        "start_pref_f": 1000,
        "limit_pref_f": 1,
        "start_pref_v": 0,
        "limit_pref_v": 0,
    },
    "training": {
        "stat_file": "./se_e2_a.hdf5",
        "training_data": {"systems": ["../data/data_0", "../data/data_1"], "batch_size": 1, "_comment": "train"},
        "validation_data": {"systems": ["../data/data_3"], "batch_size": 1, "numb_btch": 3},
        "numb_steps": 100000,
        "gradient_max_norm": 5.0,
        "seed": 10,
        "disp_file": "lcurve.out",
        "disp_freq": 100,
        "save_freq": 10000,
    },
}
"""The settings of the water example of DeePMD-kit for its PyTorch."""

DPA3: dict[str, Any] = {
    "type": "dpa3",
    "repflow": {
        "e_rcut": 6.0,
        "e_rcut_smth": 5.3,
        "e_sel": 120,
        "a_rcut": 4.0,
        "a_rcut_smth": 3.5,
        "a_sel": 30,
        "n_dim": 128,
        "edge_use_dist": True,
        "optim_update": False,
    },
    "activation_function": "silut:10.0",
}
"""A descriptor with a section of its own."""


def changed(changes: dict[str, Any], base: dict[str, Any] = WATER) -> dict[str, Any]:
    """`base` with values by dotted key; `...` takes a key out."""
    content = copy.deepcopy(base)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        if value is ...:
            del place[name]
        else:
            place[name] = copy.deepcopy(value)
    return content


def translated(changes: dict[str, Any] | None = None, file: str = "input.json") -> dict[str, Any]:
    return both(changes, file).config


def both(changes: dict[str, Any] | None = None, file: str = "input.json") -> Translation:
    return translation(changed(changes or {}), Path(file))
