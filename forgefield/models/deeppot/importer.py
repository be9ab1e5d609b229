"""Models of DeePMD-kit as models of ours: options and weights from the tree that its files hold.

What has no counterpart here is refused, never dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.data import atomic_numbers
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.deeppot import deepmd_attention, deepmd_fittings
from forgefield.models.deeppot.deepmd_files import Tree, read_tree
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.models.resolving import resolve_model


def read_deepmd(path: str | os.PathLike[str], *, head: str | None = None) -> ImportedModel:
    """Model in a file of DeePMD-kit (.yaml, .dp) or a checkpoint of its torch backend (.pt). head: which of several models that
    were trained together."""
    path = Path(path)
    tree = read_tree(path, head)
    try:
        return _assemble(path, tree)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ForgefieldError(f"{path} is not a model as DeePMD-kit 3 writes them: {error!r}.") from error


class DeepmdImporter(Importer):
    """Reads models of DeePMD-kit."""

    accepts = ("head",)

    def read(self, request: ImportRequest) -> ImportedModel:
        return read_deepmd(request.source, head=request.head)


IMPORTER = DeepmdImporter()


def _assemble(path: Path, tree: Tree) -> ImportedModel:
    model = tree["model"]
    if model["type"] != "standard":
        raise ForgefieldError(f"{path} is a model of type {model['type']}; standard models can be imported.")
    species = _species(path, model["type_map"])
    descriptor, fitting = model["descriptor"], model["fitting"]
    if descriptor["type"] not in _DESCRIPTORS:
        raise ForgefieldError(f"{path} has the descriptor {descriptor['type']}; known are {', '.join(_DESCRIPTORS)}.")
    if fitting["type"] not in ("ener", *deepmd_fittings.TYPES):
        known = ", ".join(("ener", *deepmd_fittings.TYPES))
        raise ForgefieldError(f"{path} has a fitting network of type {fitting['type']}; known are {known}.")
    of_descriptor, weights = _DESCRIPTORS[descriptor["type"]](path, descriptor, len(species))
    excluded = [int(number) for number in model.get("atom_exclude_types", [])]
    if fitting["type"] == "ener":
        of_fitting, more = _fitting(path, fitting, excluded)
        biases = {"out_bias": _energy_bias(model, fitting, len(species))}
    else:
        of_fitting, more = _tensor_fitting(path, model, fitting, excluded)
        biases = {}
    given = {
        "name": "deeppot",
        "descriptor": of_descriptor,
        "fitting_net": of_fitting,
        "pair_exclude_types": [list(pair) for pair in model.get("pair_exclude_types", [])],
        "atom_exclude_types": excluded,
        **biases,
    }
    resolved = resolve_model(given, species=species, cutoff=float(descriptor["rcut"]))
    precision = "float64" if "float64" in (of_descriptor["precision"], of_fitting["precision"]) else "float32"
    state = _fill(path, build_model(resolved, precision=precision, seed=0).state_dict(), weights | more)
    version = tree.get("version", "of unknown version")
    return ImportedModel(
        resolved,
        state,
        precision,
        origin=f"{path.name}: {tree.get('software', 'deepmd-kit')} {version}",
        checked="Checked: every weight has the shape that the file's options say, and none is missing; the file holds no "
        "predictions to compare with.",
    )


def _energy_bias(model: Tree, fitting: Tree, n_species: int) -> list[float]:
    bias = np.asarray(model["@variables"]["out_bias"], dtype=np.float64).reshape(n_species)
    more = fitting["@variables"].get("bias_atom_e")
    result: list[float] = (bias if more is None else bias + np.asarray(more, dtype=np.float64).reshape(-1)).tolist()
    return result


def _tensor_fitting(path: Path, model: Tree, section: Tree, excluded: list[int]) -> tuple[Tree, dict[str, np.ndarray]]:
    """Options and weights of a fitting of something else than energies."""
    applied = [model["@variables"].get(name) for name in ("out_bias", "out_std")]
    bias, std = (None if values is None else np.asarray(values, dtype=np.float64)[0] for values in applied)
    try:
        options, state = deepmd_fittings.from_deepmd(section, bias, std, excluded)
    except ForgefieldError as error:
        raise ForgefieldError(f"{path}: {error}") from error
    return options, {f"fitting.{name}": value for name, value in state.items()}


def _species(path: Path, type_map: list[str]) -> list[str]:
    for name in type_map:
        if name not in atomic_numbers:
            raise ForgefieldError(f"{path}: atom type {name} is not a chemical symbol.")
    return list(type_map)


def _fill(path: Path, shapes: Mapping[str, Tensor], weights: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Every tensor of the model, from the file where it has it: `out_bias` comes from the options."""
    state = dict(shapes)
    for name, value in weights.items():
        name = f"model.{name}"
        if name not in shapes or tuple(shapes[name].shape) != value.shape:
            raise ForgefieldError(f"{path}: {name} of shape {value.shape} has no place in a model with these options.")
        state[name] = torch.from_numpy(np.ascontiguousarray(value)).to(shapes[name].dtype)
    missing = [name for name in shapes if name.removeprefix("model.") not in weights and name != "model.out_bias"]
    if missing:
        raise ForgefieldError(f"{path} lacks the weights of {missing[0]}.")
    return state


def _refuse(path: Path, section: Tree, where: str, unless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for settings without a counterpart, unless they ask for nothing."""
    for key, harmless in unless.items():
        if section.get(key) is not None and section[key] not in harmless:
            raise ForgefieldError(f"{path}: {where}.{key} is {section[key]!r}, which has no counterpart here.")


def _two_body(path: Path, section: Tree, n_species: int) -> tuple[Tree, dict[str, np.ndarray]]:
    """Options and weights of se_e2_a and se_e2_r."""
    _refuse(path, section, "descriptor", {"spin": (), "compress": ()})
    variables = section["@variables"]
    same = ("rcut_smth", "neuron", "resnet_dt", "type_one_side", "set_davg_zero", "activation_function", "trainable")
    if not isinstance(section["trainable"], bool):
        section = section | {"trainable": bool(np.all(section["trainable"]))}
    options = {key: section[key] for key in same}
    options |= {
        "type": {"se_a": "se_e2_a", "se_r": "se_e2_r"}.get(section["type"], section["type"]),
        "sel": [int(number) for number in section["sel"]],
        "precision": section["precision"],
        "exclude_types": [list(pair) for pair in section["exclude_types"]],
        "env_protection": float(section.get("env_protection", 0.0)),
        "davg": _one_per_centre(path, "davg", variables["davg"]),
        "dstd": _one_per_centre(path, "dstd", variables["dstd"]),
    }
    if options["type"] == "se_e2_a":
        options["axis_neuron"] = section["axis_neuron"]
    networks = section["embeddings"]["networks"]
    if not section["type_one_side"]:  # ours are numbered by centre, then neighbour
        networks = [networks[b * n_species + a] for a in range(n_species) for b in range(n_species)]
    return options, _layers("descriptor.networks", networks)


def _one_per_centre(path: Path, name: str, values: np.ndarray) -> list[list[float]]:
    """(species, slots, columns) -> (species, columns): they are the same in all slots."""
    if not np.allclose(values, values[:, :1], rtol=1e-12, atol=0):
        raise ForgefieldError(f"{path}: descriptor.{name} differs between the neighbours of a centre.")
    result: list[list[float]] = values[:, 0].astype(np.float64).tolist()
    return result


def _attention(path: Path, section: Tree, n_species: int) -> tuple[Tree, dict[str, np.ndarray]]:
    """Options and weights of se_atten and se_atten_v2."""
    try:
        options, state = deepmd_attention.from_deepmd(section)
    except ForgefieldError as error:
        raise ForgefieldError(f"{path}: {error}") from error
    return options, {f"descriptor.{name}": value for name, value in state.items()}


_DESCRIPTORS: dict[str, Callable[[Path, Tree, int], tuple[Tree, dict[str, np.ndarray]]]] = {
    **dict.fromkeys(("se_e2_a", "se_a", "se_e2_r", "se_r"), _two_body),
    **dict.fromkeys(deepmd_attention.TYPES, _attention),
}


def _fitting(path: Path, section: Tree, excluded: list[int]) -> tuple[Tree, dict[str, np.ndarray]]:
    """Options and weights of an energy fitting. excluded: species without an energy, which the model says too."""
    harmless = {
        "dim_case_embd": (0,), "tot_ener_zero": (False,), "use_aparam_as_mask": (False,), "spin": (),
        "layer_name": (), "exclude_types": ([], excluded),
    }  # fmt: skip
    _refuse(path, section, "fitting", harmless)
    same = ("neuron", "resnet_dt", "numb_fparam", "numb_aparam", "activation_function", "precision")
    options = {key: section[key] for key in same}
    options["rcond"] = section.get("rcond")
    options["type"] = "ener"
    options["trainable"] = section.get("trainable", True)
    options["default_fparam"] = section.get("default_fparam")
    if any(energy is not None for energy in section.get("atom_ener") or []):
        options["atom_ener"] = [None if e is None else float(np.ravel(e)[0]) for e in section["atom_ener"]]
    variables = section["@variables"]
    for name in ("fparam", "aparam"):
        if section[f"numb_{name}"]:
            options[f"{name}_avg"] = np.ravel(variables[f"{name}_avg"]).astype(float).tolist()
            options[f"{name}_std"] = (1 / np.ravel(variables[f"{name}_inv_std"]).astype(float)).tolist()
    return options, _layers("fitting.networks", section["nets"]["networks"])


def _layers(name: str, networks: list[Tree]) -> dict[str, np.ndarray]:
    """Weights of networks of one shape, stacked by layer."""
    found: dict[str, np.ndarray] = {}
    for number, same_layer in enumerate(zip(*(network["layers"] for network in networks), strict=True)):
        for key in ("w", "b", "idt"):
            arrays = [layer["@variables"].get(key) for layer in same_layer]
            if any(array is not None for array in arrays):
                arrays = [array if key == "w" else np.ravel(array) for array in arrays]
                found[f"{name}.layers.{number}.{key}"] = np.stack(arrays)
    return found
