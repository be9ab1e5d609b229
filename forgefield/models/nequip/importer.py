"""Reads models trained with the NequIP framework: checkpoints, packages, and state dicts with a file of options next to them.

The differences between its architectures (names of options and weights, order of numbers) are in an `Architecture`; everything
else is shared. Anything without a counterpart in Forgefield's models is refused, never dropped. Nothing in a file is executed.
NequIP 0.19 is defined here; its weights have the same shapes and order in Forgefield, so importing them is renaming.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.config.nequip.full_model import FULL_MODEL, options_of_all_layers
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.models.nequip.architecture import SHARED_OPTIONS, Architecture
from forgefield.models.nequip.importer_checks import (
    CUTOFF,
    apply_modifiers,
    check_constants,
    cutoff_in_file,
    describe_checks,
)
from forgefield.models.nequip.modules import nequip_settings_of_modules
from forgefield.models.nequip.saved import PACKAGE, SavedModel, model_tensors, read_saved
from forgefield.models.nequip.types_and_units import ModelUnits, in_ev_and_angstrom, with_elements
from forgefield.models.resolving import resolve_model
from forgefield.untrusted.archives import npz_arrays
from forgefield.untrusted.documents import load_json
from forgefield.untrusted.torch_files import Foreign, read_torch_file

_WITHOUT_EFFECT = ("_target_", "seed", "compile_mode", "do_derivatives", "model_dtype", "type_names", "r_max")
_CONSTANTS = {"model.energy_scales", "model.energy_shifts", "model.bessel_frequencies"}
"""State that follows from the options if it is not in the file."""


class FrameworkImporter(Importer):
    """Reads models of one architecture of the framework."""

    accepts = ("options", "weights", "species", "energy_unit", "length_unit")

    def __init__(self, kind: Architecture) -> None:
        self.kind = kind

    def read(self, request: ImportRequest) -> ImportedModel:
        units = ModelUnits(request.energy_unit, request.length_unit)
        return read_model(self.kind, request.source, request.options, request.weights or "ema", request.species, units)


def read_model(
    kind: Architecture,
    path: str | os.PathLike[str],
    options: str | os.PathLike[str] | None = None,
    weights: str = "ema",
    species: Sequence[str] | None = None,
    units: ModelUnits | None = None,
) -> ImportedModel:
    """Model in a checkpoint (.ckpt), package (.nequip.zip) or state dict (.pt, .pth, .npz).

    options: for a state dict, a JSON file with the `model` section it was built from; default: the same name with `.json`.
    For a model that was trained from another file, that checkpoint or package, if it is not where it was.
    weights: `ema` takes the averaged weights where the checkpoint has them, `raw` the last ones.
    species: chemical symbols of the types, in their order, where type names are not chemical symbols.
    units: of energies and lengths of the model.
    """
    path = Path(path)
    if weights not in ("ema", "raw"):
        raise ForgefieldError(f"weights is '{weights}'; choose ema or raw.")
    saved = _read(kind, path, None if options is None else Path(options), weights)
    saved = replace(saved, settings=_for_all_layers(path, saved.settings))
    saved, names = with_elements(path, saved, species)
    saved, converted = in_ev_and_angstrom(kind, path, saved, units or ModelUnits())
    imported = _assemble(kind, path, saved.settings, saved.tensors)
    checked = " ".join(filter(None, (imported.checked, names, converted)))
    return replace(imported, origin=f"{path.name}: {saved.origin}", checked=checked)


def _read(kind: Architecture, path: Path, options: Path | None, weights: str) -> SavedModel:
    if path.suffix == ".npz":
        tensors: Mapping[str, Any] = _read_npz(path)
    elif path.name.endswith(PACKAGE):
        if options is not None:
            raise ForgefieldError(f"{path}: a package has all options of its model; leave --options out.")
        return read_saved(kind, path, weights)
    else:
        tensors = read_torch_file(path)
        if not isinstance(tensors, Mapping):
            raise ForgefieldError(f"{path} is neither a checkpoint nor a state dict.")
        if "state_dict" in tensors and "hyper_parameters" in tensors:
            return read_saved(kind, path, weights, options)
    settings = _read_options(kind, path, options)
    return SavedModel(dict(settings), model_tensors(kind, path, tensors), f"{kind.title} state dict")


def _for_all_layers(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Options of `NequIPGNNModel` in place of those of `FullNequIPGNNModel`."""
    if str(settings.get("_target_", "")).rsplit(".", 1)[-1] != FULL_MODEL:
        return settings
    try:
        return options_of_all_layers(settings) | {"_target_": "nequip.model.NequIPGNNModel"}
    except ValueError as error:
        raise ForgefieldError(f"{path}: {error}.") from error


def _assemble(
    kind: Architecture, path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> ImportedModel:
    section, species, cutoff = translate_options(kind, path, settings)
    reach = cutoff_in_file(path, tensors, settings)
    constants = check_constants(path, tensors, settings, species)
    precision = str(settings.get("model_dtype", "float32")).removeprefix("torch.")
    resolved = resolve_model(section, species=species, cutoff=cutoff)
    shapes = build_model(resolved, precision=precision, seed=0).state_dict()
    state = {}
    for name, value in tensors.items():
        if name == CUTOFF:
            continue
        weight = kind.weight_name(name)
        if weight is None:
            raise ForgefieldError(f"{path}: {name} is not a weight of a {kind.title} model of a supported version.")
        parameter = f"model.{weight}"
        if parameter not in shapes:
            raise ForgefieldError(f"{path}: a model with these options has no weight {name}.")
        count = shapes[parameter].numel()
        value = value.reshape(-1).expand(count) if value.numel() == 1 != count else value
        if value.numel() != count:
            raise ForgefieldError(f"{path}: {name} has {value.numel()} numbers; with these options it needs {count}.")
        value = kind.arrange(weight, value, resolved)
        state[parameter] = value.reshape(shapes[parameter].shape).to(shapes[parameter].dtype).clone()
    for name, value in shapes.items():
        if name not in state and name not in _CONSTANTS:
            raise ForgefieldError(f"{path} does not contain the weights of {name}.")
        state.setdefault(name, value)
    checked = describe_checks(sum(value.numel() for value in tensors.values()), [*reach, *constants])
    return ImportedModel(resolved, state, precision, path.name, checked)


def translate_options(
    kind: Architecture, path: Path, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], float]:
    """The framework's `model` section converted to Forgefield's: (options, species, cutoff in A)."""
    target = str(settings.get("_target_", kind.builders[0])).rsplit(".", 1)[-1]
    if target not in kind.builders:
        raise ForgefieldError(f"{path} is a {target}; as {kind.name}, {' and '.join(kind.builders)} can be imported.")
    for key in ("type_names", "r_max"):
        if key not in settings:
            raise ForgefieldError(f"{path}: the options do not contain {key}.")
    species = [str(name) for name in settings["type_names"]]
    section: dict[str, Any] = {"name": kind.name}
    for key, value in settings.items():
        section |= _translate_option(kind, path, key, value, species)
    for key, default in (("energy_scales", 1.0), ("energy_shifts", 0.0)):
        if section.get(key) is None:
            section[key] = default
    return section, species, float(settings["r_max"])


def _translate_option(kind: Architecture, path: Path, key: str, value: object, species: list[str]) -> dict[str, Any]:
    if isinstance(value, Foreign):
        raise ForgefieldError(f"{path}: option {key} is an object of an unknown class.")
    if key in _WITHOUT_EFFECT:
        return {}
    if key in kind.renamed:
        return {kind.renamed[key]: value}
    if key == "pair_potential":
        return {"zbl": _translate_pair_potential(path, value, species)}
    if key in kind.refused_unless:
        if value != kind.refused_unless[key]:
            raise ForgefieldError(f"{path}: {key}={value} has no counterpart here.")
        return {}
    translated = kind.translate(path, key, value)
    if translated is None:
        raise ForgefieldError(f"{path}: option {key} is unknown, so the model cannot be imported exactly.")
    return translated


def _translate_pair_potential(path: Path, value: object, species: list[str]) -> bool | dict[str, float]:
    if value is None:
        return False
    settings = dict(value) if isinstance(value, Mapping) else {}
    kind = str(settings.pop("_target_", "")).rsplit(".", 1)[-1]
    symbols, units = settings.pop("chemical_species", species), settings.pop("units", "metal")
    unknown = set(settings) - {"polynomial_cutoff_p"}
    if kind != "ZBL" or units != "metal" or list(symbols) != species or unknown:
        raise ForgefieldError(
            f"{path}: the only supported pair potential is ZBL in metal units for the species of the model."
        )
    return {"polynomial_cutoff_p": float(settings.get("polynomial_cutoff_p", 6.0))}


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        arrays = npz_arrays(path)
        prefixed = [key for key in arrays if key.startswith("weight/")]
        return {key: torch.from_numpy(arrays[key].copy()) for key in prefixed or arrays}
    except (OSError, TypeError) as error:
        raise ForgefieldError(f"{path} cannot be read: {error}.") from error


def _read_options(kind: Architecture, path: Path, options: Path | None) -> Mapping[str, Any]:
    where = path.with_suffix(".json") if options is None else options
    try:
        settings = load_json(where.read_text())
    except FileNotFoundError as error:
        raise ForgefieldError(
            f"{path} contains only weights; write {kind.title}'s model section as JSON to {where}, or pass its file with "
            "--options."
        ) from error
    except (OSError, ValueError) as error:
        raise ForgefieldError(f"{where} cannot be read: {error}.") from error
    model = (
        settings.get("model", settings) if isinstance(settings, Mapping) and "_target_" not in settings else settings
    )
    if not isinstance(model, Mapping):
        raise ForgefieldError(f"{where} should contain {kind.title}'s model section, a mapping of options.")
    return apply_modifiers(path, model)


OPTIONS = SHARED_OPTIONS | {
    "preset": "preset",
    "num_features": "num_features",
    "type_embed_num_features": "type_embed_num_features",
    "radial_mlp_depth": "radial_mlp_depth",
    "radial_mlp_width": "radial_mlp_width",
    "num_bessels": "num_bessels",
    "bessel_trainable": "bessel_trainable",
    "polynomial_cutoff_p": "polynomial_cutoff_p",
    "convnet_sc": "convnet_sc",
    "convnet_resnet": "convnet_resnet",
    "convnet_nonlinearity_type": "nonlinearity",
}
_DERIVED = re.compile(
    r"_empty|.*\.(output_mask|bias|tp\.weight|mul\.weight|scalar_multiplier\.weight)|.*\._w3j_\d+_\d+_\d+|edge_norm\._rmax_recip"
    r"|pair_potential\.(atomic_numbers|_qqr2exesquare)"
)


def read_nequip(
    path: str | os.PathLike[str],
    options: str | os.PathLike[str] | None = None,
    weights: str = "ema",
    species: Sequence[str] | None = None,
    units: ModelUnits | None = None,
) -> ImportedModel:
    """Model in a file of NequIP; see `read_model`."""
    return read_model(NEQUIP, path, options, weights, species, units)


def weight_name(name: str) -> str | None:
    """Forgefield's name of a weight of NequIP; None for an unknown one."""
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
    return None


def _translate(path: Path, key: str, value: object) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    if key == "convnet_nonlinearity_gates":
        return {"nonlinearity_gates": value["e"]}
    if key == "convnet_nonlinearity_scalars":
        return {"nonlinearity_scalars": value["e"], "nonlinearity_odd_scalars": value["o"]}
    return None


NEQUIP = Architecture(
    name="nequip",
    title="NequIP",
    builders=("NequIPGNNModel", "PresetNequIPGNNModel"),
    embedding=re.compile(r"type_embed\.embed_module\.weight"),
    derived=_DERIVED,
    renamed=OPTIONS,
    refused_unless={"learnable_shift": False, "categorical_graph_field_embed": None},
    weight_name=weight_name,
    translate=_translate,
    describe=nequip_settings_of_modules,
    radial=re.compile(r"layer\d+_convnet\.conv\.edge_mlp\.mlp\.(weights\.)?0(\.weight)?"),
)
IMPORTER = FrameworkImporter(NEQUIP)
