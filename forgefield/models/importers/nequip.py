"""Reads models trained with NequIP 0.19: a Lightning checkpoint, or a state dict with the options beside it.

Our weights have NequIP's shapes and order, so importing is renaming; what has no counterpart here is refused, never
dropped. Nothing in the file is executed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.data import atomic_numbers
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.importers.torch_file import Foreign, read_torch_file
from forgefield.models.registry import build_model, resolve_model

_RENAMED = {
    "num_layers": "num_layers",
    "l_max": "l_max",
    "parity": "parity",
    "num_features": "num_features",
    "type_embed_num_features": "type_embed_num_features",
    "radial_mlp_depth": "radial_mlp_depth",
    "radial_mlp_width": "radial_mlp_width",
    "num_bessels": "num_bessels",
    "bessel_trainable": "bessel_trainable",
    "polynomial_cutoff_p": "polynomial_cutoff_p",
    "per_edge_type_cutoff": "per_edge_type_cutoff",
    "avg_num_neighbors": "avg_num_neighbours",
    "per_type_energy_scales": "energy_scales",
    "per_type_energy_shifts": "energy_shifts",
    "per_type_energy_scales_trainable": "energy_scales_trainable",
    "per_type_energy_shifts_trainable": "energy_shifts_trainable",
    "readout_mlp_hidden_layers_depth": "readout_mlp_depth",
    "readout_mlp_hidden_layers_width": "readout_mlp_width",
    "readout_mlp_nonlinearity": "readout_mlp_nonlinearity",
    "convnet_sc": "convnet_sc",
    "convnet_resnet": "convnet_resnet",
    "convnet_nonlinearity_type": "nonlinearity",
}
"""NequIP's option -> ours."""
_WITHOUT_EFFECT = ("_target_", "seed", "compile_mode", "do_derivatives", "model_dtype", "type_names", "r_max", "preset")
_REFUSED_UNLESS = {"learnable_shift": False, "categorical_graph_field_embed": None}
_DERIVED = re.compile(
    r"_empty|.*\.(output_mask|bias|tp\.weight|mul\.weight)|.*\._w3j_\d+_\d+_\d+|edge_norm\._rmax_recip"
    r"|pair_potential\.(atomic_numbers|_qqr2exesquare)"
)
"""State that follows from the options."""


@dataclass(frozen=True)
class ImportedModel:
    """`resolved` options and `state` for `build_model(resolved, precision=...).load_state_dict(state)`."""

    resolved: dict[str, Any]
    state: dict[str, Tensor]
    precision: str
    origin: str


def read_nequip(
    path: str | os.PathLike[str], options: str | os.PathLike[str] | None = None, weights: str = "ema"
) -> ImportedModel:
    """Model in a NequIP checkpoint (.ckpt) or state dict (.pt, .pth, .npz).

    A state dict needs `options`, a JSON file with the `model` section it was built from; default: the same name with
    `.json`. `weights`: `ema` takes the averaged weights where the checkpoint has them, `raw` the last ones.
    """
    path = Path(path)
    if weights not in ("ema", "raw"):
        raise ForgefieldError(f"weights is '{weights}'; choose ema or raw.")
    if path.suffix == ".npz":
        tensors, settings = _read_npz(path), _read_options(path, options)
    else:
        content = read_torch_file(path)
        if not isinstance(content, Mapping):
            raise ForgefieldError(f"{path} holds no checkpoint and no state dict.")
        if "state_dict" in content and "hyper_parameters" in content:
            return _from_checkpoint(path, content, weights)
        tensors, settings = dict(content), _read_options(path, options)
    return _assemble(path, settings, _model_tensors(path, tensors))


def _from_checkpoint(path: Path, content: Mapping[str, Any], weights: str) -> ImportedModel:
    hyper = content["hyper_parameters"]
    version = hyper.get("info_dict", {}).get("versions", {}).get("nequip", "unknown")
    settings = hyper.get("model")
    if not isinstance(settings, Mapping):
        raise ForgefieldError(f"{path} does not say how its model was built (hyper_parameters.model).")
    state = content["state_dict"]
    tensors = _model_tensors(path, state)
    averages = sorted((int(key.rsplit("_", 1)[1]), key) for key in state if key.startswith("ema.ema_weight_"))
    extra = state.get("ema._extra_state", {})
    average_is_apart = not isinstance(extra, Mapping) or extra.get("is_holding_ema_weights", True)
    if averages and average_is_apart == (weights == "ema"):
        trained = [key for key in tensors if _is_parameter(key, settings)]
        if len(trained) != len(averages):
            raise ForgefieldError(f"{path} has {len(averages)} averaged weights for {len(trained)} parameters.")
        tensors.update({key: state[name].view_as(tensors[key]) for key, (_, name) in zip(trained, averages)})
    imported = _assemble(path, settings, tensors)
    kind = ("averaged" if weights == "ema" else "last") if averages else "last"
    return ImportedModel(
        imported.resolved, imported.state, imported.precision, f"{path.name}: NequIP {version}, {kind} weights"
    )


def _is_parameter(key: str, settings: Mapping[str, Any]) -> bool:
    if key == "bessel_encode.bessel_weights":
        return bool(settings.get("bessel_trainable", False))
    for name in ("scales", "shifts"):
        if key == f"per_type_energy_scale_shift.{name}":
            return bool(settings.get(f"per_type_energy_{name}_trainable", False))
    return True


def _model_tensors(path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State of the energy network by NequIP's module names, without what follows from the options."""
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or key.startswith(("ema.", "loss.", "run_stage")) or "metrics" in key:
            continue
        name = re.sub(r"^(weight/)?(model\.)*(sole_model\.)?(model\.)*(func\.)*", "", key)
        if _DERIVED.fullmatch(name):
            if value.numel() and name.endswith((".bias", "tp.weight", "mul.weight")):
                raise ForgefieldError(f"{path}: {key} has weights that this kind of model does not have.")
            continue
        tensors[name] = value
    if "type_embed.embed_module.weight" not in tensors:
        raise ForgefieldError(
            f"{path} holds no NequIP model (no type embedding); Allegro and others cannot be imported."
        )
    return tensors


def _assemble(path: Path, settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> ImportedModel:
    given, species, cutoff = translate_options(path, settings)
    precision = str(settings.get("model_dtype", "float32")).removeprefix("torch.")
    resolved = resolve_model(given, species=species, cutoff=cutoff)
    shapes = build_model(resolved, precision=precision, seed=0).state_dict()
    state = {}
    for name, value in tensors.items():
        ours = "model." + _our_name(path, name)
        if ours not in shapes:
            raise ForgefieldError(f"{path}: {name} has no place in a model with these options.")
        value = value.reshape(-1).expand(shapes[ours].numel()) if value.numel() == 1 else value
        if value.numel() != shapes[ours].numel():
            raise ForgefieldError(
                f"{path}: {name} has {value.numel()} numbers, the options ask for {shapes[ours].numel()}."
            )
        state[ours] = value.reshape(shapes[ours].shape).to(shapes[ours].dtype).clone()
    constants = {"model.energy_scales", "model.energy_shifts", "model.bessel_frequencies"}
    for name, value in shapes.items():
        if name not in state and name not in constants:
            raise ForgefieldError(f"{path} lacks the weights of {name}.")
        state.setdefault(name, value)
    return ImportedModel(resolved, state, precision, f"{path.name}: NequIP state dict")


def _our_name(path: Path, name: str) -> str:
    fixed = {
        "type_embed.embed_module.weight": "type_embedding",
        "bessel_encode.bessel_weights": "bessel_frequencies",
        "per_type_energy_scale_shift.scales": "energy_scales",
        "per_type_energy_scale_shift.shifts": "energy_shifts",
    }
    if name in fixed:
        return fixed[name]
    if match := re.fullmatch(r"per_atom_energy_readout\.mlp_module\.mlp\.(\d+)\.weight", name):
        return f"readout.weights.{int(match[1]) // 2}"
    if match := re.fullmatch(r"per_atom_energy_readout\.mlp_module\.mlp\.weights\.(\d+)", name):
        return f"readout.weights.{match[1]}"
    if match := re.fullmatch(r"layer(\d+)_convnet\.conv\.edge_mlp\.mlp\.(\d+)\.weight", name):
        return f"layers.{match[1]}.radial.weights.{int(match[2]) // 2}"
    parts = {"linear_1": "linear_in", "linear_2": "linear_out", "sc": "self_connection"}
    if match := re.fullmatch(r"layer(\d+)_convnet\.conv\.(linear_1|linear_2|sc)\.weight", name):
        return f"layers.{match[1]}.{parts[match[2]]}.weight"
    raise ForgefieldError(f"{path}: {name} is not a weight of a NequIP 0.19 model.")


def translate_options(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], float]:
    """NequIP's `model` section as ours: (options, species, cutoff in A)."""
    settings = dict(settings)
    target = str(settings.get("_target_", "nequip.model.NequIPGNNModel")).rsplit(".", 1)[-1]
    if target == "modify":
        return translate_options(path, settings["model"])
    if target not in ("NequIPGNNModel", "PresetNequIPGNNModel"):
        raise ForgefieldError(f"{path} is a {target}; NequIPGNNModel and PresetNequIPGNNModel can be imported.")
    for key in ("type_names", "r_max"):
        if key not in settings:
            raise ForgefieldError(f"{path}: the options do not give {key}.")
    species = [str(name) for name in settings["type_names"]]
    for name in species:
        if name not in atomic_numbers:
            raise ForgefieldError(f"{path}: atom type {name} is not a chemical symbol.")
    given: dict[str, Any] = {"name": "nequip"}
    if target == "PresetNequIPGNNModel":
        given["preset"] = settings["preset"]
    for key, value in settings.items():
        if isinstance(value, Foreign):
            raise ForgefieldError(f"{path}: option {key} is an object of an unknown class.")
        if key in _RENAMED:
            given[_RENAMED[key]] = value
        elif key == "pair_potential":
            given["zbl"] = _translate_pair_potential(path, value, species)
        elif key in ("convnet_nonlinearity_scalars", "convnet_nonlinearity_gates"):
            given |= _translate_activations(key, value)
        elif key in _REFUSED_UNLESS and value != _REFUSED_UNLESS[key]:
            raise ForgefieldError(f"{path}: {key}={value} has no counterpart here.")
        elif key not in _WITHOUT_EFFECT and key not in _REFUSED_UNLESS:
            raise ForgefieldError(f"{path}: option {key} is not known, so the model cannot be imported faithfully.")
    for key, absent in (("energy_scales", 1.0), ("energy_shifts", 0.0)):
        if given.get(key) is None:
            given[key] = absent
    return given, species, float(settings["r_max"])


def _translate_pair_potential(path: Path, value: Any, species: list[str]) -> Any:
    if value is None:
        return False
    settings = dict(value)
    kind = str(settings.pop("_target_", "")).rsplit(".", 1)[-1]
    symbols, units = settings.pop("chemical_species", species), settings.pop("units", "metal")
    unknown = set(settings) - {"polynomial_cutoff_p"}
    if kind != "ZBL" or units != "metal" or list(symbols) != species or unknown:
        raise ForgefieldError(
            f"{path}: of pair potentials only ZBL in metal units for the model's own species is known."
        )
    return {"polynomial_cutoff_p": float(settings.get("polynomial_cutoff_p", 6.0))}


def _translate_activations(key: str, value: Mapping[str, str]) -> dict[str, str]:
    if key == "convnet_nonlinearity_gates":
        return {"nonlinearity_gates": value["e"]}
    return {"nonlinearity_scalars": value["e"], "nonlinearity_odd_scalars": value["o"]}


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as data:
            prefixed = [key for key in data.files if key.startswith("weight/")]
            return {key: torch.from_numpy(data[key].copy()) for key in prefixed or data.files}
    except (OSError, ValueError) as error:
        raise ForgefieldError(f"{path} cannot be read: {error}.") from error


def _read_options(path: Path, options: str | os.PathLike[str] | None) -> dict[str, Any]:
    where = path.with_suffix(".json") if options is None else Path(options)
    try:
        settings = json.loads(where.read_text())
    except FileNotFoundError as error:
        raise ForgefieldError(
            f"{path} holds weights alone; write NequIP's model section as JSON to {where} or name its file: --options."
        ) from error
    except (OSError, ValueError) as error:
        raise ForgefieldError(f"{where} cannot be read: {error}.") from error
    return settings.get("model", settings)
