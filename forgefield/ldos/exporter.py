"""Writes LDOS networks as archives of MALA 1.4, which its `load_run` reads.

An archive NAME.zip holds weights, parameters and two scalers. Scalings of any kind are written as feature-wise-standard ones:
a shift and a factor for each column, which is what they are. Networks are float32 in MALA.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.model import LDOSNetwork, LinearScale, load_network

if TYPE_CHECKING:
    from forgefield.runs import Run

SUFFIX = ".zip"
ACTIVATIONS = {
    "relu": "ReLU",
    "leakyrelu": "LeakyReLU",
    "silu": "SiLU",
    "gelu": "GELU",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "softplus": "Softplus",
    "elu": "ELU",
}
"""Classes of torch.nn, by which MALA names activations."""
NEGATIVE = {"zero": "zero_out_negative", "absolute": "absolute_values", "keep": None}
SCALED = "feature-wise-standard"


def write_mala(run: Run, out: str | os.PathLike[str], *, which: str = "best") -> Path:
    """Write the network of a run to the archive `out`, NAME.zip; MALA reads it with `load_run("NAME", path=FOLDER)`."""
    path = Path(out)
    if path.suffix != SUFFIX:
        raise ForgefieldError(f"{path}: MALA reads archives that end in {SUFFIX}.")
    model = load_network(run, which)
    if model.target != "ldos":
        raise ForgefieldError(f"run {run.name} predicts a {model.target}; MALA reads models of the LDOS.")
    if torch.float32 != model.dtype:
        raise ForgefieldError(
            f"run {run.name} has weights of type {str(model.dtype).removeprefix('torch.')}; MALA computes in float32, so "
            "predictions would differ; train with training.precision=float32."
        )
    weights = io.BytesIO()
    torch.save(_weights(model), weights, _use_new_zipfile_serialization=False)
    scales = {"iscaler": model.facts.inputs, "oscaler": model.facts.outputs}
    files: dict[str, bytes | str] = {
        "params.json": json.dumps(_parameters(run, model)),
        "network.pth": weights.getvalue(),
        **{f"{name}.json": json.dumps(_scaler(scale)) for name, scale in scales.items()},
    }
    with written_atomically(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{path.stem}.{name}", content)
    return path


def _weights(model: LDOSNetwork) -> dict[str, torch.Tensor]:
    """Weights by MALA's names: activations are counted as layers."""
    state: dict[str, torch.Tensor] = {}
    for number, (weight, bias) in enumerate(zip(model.weights, model.biases)):
        state[f"layers.{2 * number}.weight"] = weight.detach().cpu().contiguous()
        state[f"layers.{2 * number}.bias"] = bias.detach().cpu().contiguous()
    return state


def _scaler(scale: LinearScale) -> dict[str, Any]:
    """A scaler as its JSON file."""
    return {
        "typestring": SCALED,
        "use_ddp": False,
        "scale_standard": True,
        "scale_minmax": False,
        "feature_wise": True,
        "cantransform": True,
        "means": [list(scale.shift)],
        "stds": [list(scale.scale)],
        "maxs": [],
        "mins": [],
        "total_mean": 0.0,
        "total_std": 0.0,
        "total_max": -1.0e30,
        "total_min": 1.0e30,
        "total_data_count": 0,
    }


def _parameters(run: Run, model: LDOSNetwork) -> dict[str, Any]:
    """The parameters that differ from MALA's defaults."""
    options, widths = model.options, [model.weights[0].shape[1], *(weight.shape[0] for weight in model.weights)]
    output = options.output_activation
    activations = [None if name is None else ACTIVATIONS[name] for name in options.activations]
    return {
        "comment": "written by Forgefield",
        "network": {
            "nn_type": "feed-forward",
            "layer_sizes": widths,
            "layer_activations": activations,
            "layer_activations_include_output_layer": output is not None,
            "_parameters_type": "ParametersNetwork",
        },
        "descriptors": _descriptors(run, model) | {"_parameters_type": "ParametersDescriptors"},
        "targets": _targets(run) | {"_parameters_type": "ParametersTargets"},
        "data": {
            "input_rescaling_type": SCALED,
            "output_rescaling_type": SCALED,
            "snapshot_directories_list": [],
            "_parameters_type": "ParametersData",
        },
        "running": {"_parameters_type": "ParametersRunning"},
        "hyperparameters": {"hlist": [], "_parameters_type": "ParametersHyperparameterOptimization"},
        "datageneration": {"_parameters_type": "ParametersDataGeneration"},
    }


def _targets(run: Run) -> dict[str, Any]:
    points = run.config.data.points
    assert points is not None, "a run on points has this section"
    windows = points.energies
    if windows is None:
        raise ForgefieldError(f"run {run.name} states no energies of the levels (data.points.energies).")
    keys = {"ldos_gridoffset_ev": "first", "ldos_gridspacing_ev": "spacing", "ldos_gridsize": "levels"}
    values = {
        key: [window[name] for window in windows] if isinstance(windows, list) else windows[name]
        for key, name in keys.items()
    }
    return {"target_type": "LDOS", **values, "restrict_targets": NEGATIVE[run.info.get("negative", "keep")]}


def _descriptors(run: Run, model: LDOSNetwork) -> dict[str, Any]:
    """Settings of descriptors; empty if the run does not state them, so that MALA has its defaults."""
    if model.facts.descriptors is None:
        return {}
    options = DescriptorOptions.from_mapping(model.facts.descriptors, "data.points.descriptors")
    if options.type == "gaussian":
        return {
            "descriptor_type": "AtomicDensity",
            "atomic_density_sigma": options.sigma,
            "atomic_density_cutoff": options.cutoff,
        }
    if (options.rfac0, options.rmin0) != (DescriptorOptions.rfac0, DescriptorOptions.rmin0):
        raise ForgefieldError(f"run {run.name}: MALA has no settings rfac0 and rmin0 of data.points.descriptors.")
    weights = options.element_weights
    species = sorted(run.info.get("species") or [])
    return {
        "descriptor_type": "Bispectrum",
        "bispectrum_twojmax": options.twojmax,
        "bispectrum_cutoff": options.cutoff,
        "bispectrum_switchflag": int(options.switch),
        "bispectrum_element_weights": None if not weights else [weights.get(symbol, 1.0) for symbol in species],
    }
