"""Writes archives as MALA 1.4's `save_run` does, and applies such a model as MALA does: float32, scaled in place."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ENERGIES = {"first": -4.0, "spacing": 2.0, "levels": 7}
INFO = {
    "temperature": 3000.0,
    "number_of_electrons_exact": 4.0,
    "grid_dimensions": [4, 3, 5],
    "ecutrho": 20.0,
    "pseudopotentials": {"Be": "Be.upf"},
    "atoms": {"numbers": [4, 4], "positions": [[0, 0, 0], [1, 1, 1.5]], "cell": np.diag([2.0, 2.0, 3.0]).tolist()},
}


def scaler(kind: str, values: np.ndarray) -> dict[str, Any]:
    """The JSON of a scaler that was fitted to values (n, columns)."""
    wise, data = kind.startswith("feature-wise"), torch.tensor(values, dtype=torch.float32)
    rows = {name: [] for name in ("means", "stds", "maxs", "mins")}
    if wise:
        rows = {
            "means": data.mean(0, keepdim=True).tolist(),
            "stds": data.std(0, keepdim=True).tolist(),
            "maxs": data.max(0, keepdim=True).values.tolist(),
            "mins": data.min(0, keepdim=True).values.tolist(),
        }
    return {
        "typestring": kind,
        "use_ddp": False,
        "scale_standard": kind.endswith("standard"),
        "scale_minmax": kind.endswith("minmax"),
        "feature_wise": wise,
        "cantransform": True,
        **rows,
        "total_mean": float(data.mean()),
        "total_std": float(data.std()),
        "total_max": float(data.max()),
        "total_min": float(data.min()),
        "total_data_count": 0,
    }


def parameters(sizes: list[int], **changes: Any) -> dict[str, Any]:
    """changes: `section__name` -> value."""
    found: dict[str, Any] = {
        "network": {
            "nn_type": "feed-forward",
            "layer_sizes": sizes,
            "layer_activations": "LeakyReLU",
            "layer_activations_include_output_layer": True,
        },
        "descriptors": {
            "descriptor_type": "Bispectrum",
            "bispectrum_twojmax": 2,
            "bispectrum_cutoff": 3.0,
            "bispectrum_switchflag": 1,
            "bispectrum_element_weights": None,
            "atomic_density_cutoff": 3.0,
            "atomic_density_sigma": None,
            "custom_lammps_compute_file": "",
        },
        "targets": {
            "target_type": "LDOS",
            "ldos_gridsize": 7,
            "ldos_gridspacing_ev": 2.0,
            "ldos_gridoffset_ev": -4,
            "restrict_targets": "zero_out_negative",
        },
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        found[section][name] = value
    return found


def layers(sizes: list[int], activation: Any = torch.nn.LeakyReLU, output: bool = True) -> torch.nn.ModuleList:
    made = torch.nn.ModuleList()
    for number in range(len(sizes) - 1):
        made.append(torch.nn.Linear(sizes[number], sizes[number + 1]))
        if output or number < len(sizes) - 2:
            made.append(activation())
    return made


def write(
    path: Path, network: torch.nn.ModuleList, given: dict[str, Any], scalers: list[dict[str, Any]], info: Any = INFO
) -> Path:
    """The archive: weights in the old format of torch, as MALA writes them."""
    content = io.BytesIO()
    state = {f"layers.{name}": value for name, value in network.state_dict().items()}
    torch.save(state, content, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("be.v2.network.pth", content.getvalue())
        archive.writestr("be.v2.params.json", json.dumps(given))
        for name, values in zip(("iscaler", "oscaler"), scalers):
            archive.writestr(f"be.v2.{name}.json", json.dumps(values))
        if info is not None:
            archive.writestr("be.v2.info.json", json.dumps(info))
    return path


@torch.no_grad()
def predicted(network: torch.nn.ModuleList, scalers: list[dict[str, Any]], inputs: np.ndarray) -> np.ndarray:
    """What MALA gives for raw descriptors (n, columns): its formulas, in its precision, values below zero left alone."""
    x = torch.tensor(inputs, dtype=torch.float32)
    shift, scale = _numbers(scalers[0])
    x = (x - shift) / scale
    for layer in network:
        x = layer(x)
    shift, scale = _numbers(scalers[1])
    return (x * scale + shift).numpy()


def _numbers(values: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    wise = values["feature_wise"]
    names = ("means", "stds", "maxs", "mins") if wise else ("total_mean", "total_std", "total_max", "total_min")
    mean, std, high, low = (torch.tensor(values[name]) for name in names)
    if values["scale_standard"]:
        return mean, std
    return (low, high - low) if values["scale_minmax"] else (torch.tensor(0.0), torch.tensor(1.0))
