"""Files of DeePMD-kit as trees of settings and arrays: its backend-free models (.yaml, .dp), its torch checkpoints (.pt) and
frozen models (.pth).

The tree is that of backend-free files; checkpoints and frozen models are converted to the same form. Nothing is executed: of a
frozen model, which is TorchScript, only the attributes are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_descriptors import descriptor_from_checkpoint
from forgefield.models.deeppot.deepmd_networks import TYPES, Tree, networks_of_checkpoint
from forgefield.models.deeppot.deepmd_spin import backbone_settings, spin_section
from forgefield.models.deeppot.deepmd_tables import joined_sum, joined_table, table_of_checkpoint
from forgefield.models.deeppot.options import EnergyFittingOptions, fitting_part
from forgefield.untrusted.archives import check_expansion
from forgefield.untrusted.documents import load_json, load_yaml
from forgefield.untrusted.torch_files import Record, read_torch_file, read_torchscript_records

if TYPE_CHECKING:
    import h5py

DEEPEST = 40
"""Largest number of modules within each other."""


def read_tree(path: Path, head: str | None = None) -> Tree:
    """The tree in a file; its suffix determines the format. head: which of several models in a checkpoint."""
    if path.suffix not in READERS:
        raise ForgefieldError(
            f"{path}: files of DeePMD-kit that can be imported end in {', '.join(READERS)}; others contain code or graphs of "
            f"another backend. `dp convert-backend {path.name} {path.with_suffix('.dp').name}` converts a frozen model."
        )
    if not path.is_file():
        raise ForgefieldError(f"{path} does not exist.")
    if head is not None and path.suffix != ".pt":
        raise ForgefieldError(
            f"{path}: only checkpoints (.pt) contain several models, this file contains one; leave --head out."
        )
    tree = _read_checkpoint(path, head) if path.suffix == ".pt" else READERS[path.suffix](path)
    if not isinstance(tree, Mapping) or not isinstance(tree.get("model"), Mapping):
        raise ForgefieldError(f"{path} does not contain a model of DeePMD-kit.")
    return dict(tree)


def _read_yaml(path: Path) -> Tree:
    try:
        return _tree(_with_arrays(load_yaml(path.read_text()), lambda value: value))
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise ForgefieldError(f"{path} is not readable YAML: {error}") from error


def _read_hdf5(path: Path) -> Tree:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return _tree(_with_arrays(load_json(file.attrs["json"]), lambda name: _read_dataset(path, file[name])))
    except ForgefieldError:
        raise
    except Exception as error:  # the HDF5 library raises errors of all types
        raise ForgefieldError(f"{path} is not a readable .dp file: {error}.") from error


def _tree(content: object) -> Tree:
    return content if isinstance(content, dict) else {}


def _read_dataset(path: Path, dataset: h5py.Dataset) -> np.ndarray:
    remedy = "write it again with `dp convert-backend`"
    check_expansion(dataset.size * dataset.dtype.itemsize, path.stat().st_size, f"{path}#{dataset.name}", remedy)
    return np.asarray(dataset)


def _with_arrays(node: object, fetch: Callable[[Any], object], inside: bool = False) -> object:
    """The tree with arrays in place of their descriptions: read by `fetch`, or written as a list."""
    if isinstance(node, Mapping):
        if node.get("@is_variable"):
            return np.asarray(node["value"], dtype=np.dtype(node["dtype"]))
        return {key: _with_arrays(item, fetch, inside or key == "@variables") for key, item in node.items()}
    if isinstance(node, list):
        return [_with_arrays(item, fetch, inside) for item in node]
    return fetch(node) if inside and node is not None else node


def _read_checkpoint(path: Path, head: str | None = None) -> Tree:
    content = read_torch_file(path)
    state = content.get("model", content) if isinstance(content, Mapping) else None
    extra = state.get("_extra_state") if isinstance(state, Mapping) else None
    settings = extra.get("model_params") if isinstance(extra, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(state, Mapping):
        raise ForgefieldError(
            f"{path} is not a checkpoint of DeePMD-kit: it does not contain the options of its model."
        )
    several = settings.get("model_dict")
    if (several is None) != (head is None) or (several is not None and head not in several):
        contents = (
            f"it contains several models ({', '.join(several)}); choose one with --head"
            if several
            else "it contains one"
        )
        raise ForgefieldError(f"{path}: {contents}" + ("." if head is None else f", and not '{head}'."))
    settings = settings if several is None else several[head]
    prefix = re.compile(rf"^model\.{re.escape(head or 'Default')}\.(atomic_model\.)?")
    arrays = {
        prefix.sub("", key): value.numpy()
        for key, value in state.items()
        if isinstance(value, Tensor) and prefix.match(key)
    }
    return _checkpoint_tree(path, settings, arrays)


def _read_frozen(path: Path) -> Tree:
    """The attributes of a TorchScript model, under the names of a checkpoint."""
    convert = f"`dp convert-backend {path.name} {path.with_suffix('.dp').name}` writes a file that can be imported"
    attributes = dict(_attributes(read_torchscript_records(path), ()))
    try:
        settings = json.loads(attributes.get("model_def_script") or "null")
    except (TypeError, ValueError):
        settings = None
    if not isinstance(settings, Mapping) or not ("descriptor" in settings or "models" in settings):
        raise ForgefieldError(f"{path} does not contain the options of its model; {convert}.")
    if any(value is True for key, value in attributes.items() if key.endswith(".compress")):
        raise ForgefieldError(f"{path} is a compressed model; import the model that was given to `dp compress`.")
    arrays = {
        key.removeprefix("atomic_model."): value.numpy()
        for key, value in attributes.items()
        if isinstance(value, Tensor)
    }
    tree = _checkpoint_tree(path, settings, arrays, attributes.get("atomic_model.smin_alpha"))
    return tree | {"version": "frozen model"}


def _attributes(value: object, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes of a module and of the modules in it."""
    if len(names) > DEEPEST:
        raise ForgefieldError(f"the modules of the model are nested more than {DEEPEST} deep.")
    if isinstance(value, Record) and isinstance(value.state, Mapping):
        for name, item in value.state.items():
            yield from _attributes(item, (*names, str(name)))
    else:
        yield ".".join(names), value


def _checkpoint_tree(
    path: Path, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], smin_alpha: float | None = None
) -> Tree:
    if settings.get("spin") is not None:
        prefix = "backbone_model.atomic_model."
        inside = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
        standard = _checkpoint_tree(path, backbone_settings(settings), inside)
        joined = {"type": "spin_ener", "backbone_model": standard["model"], "spin": spin_section(settings)}
        return standard | {"model": joined}
    if "use_srtab" in settings and "models.1.tab_data" in arrays:
        network = {key.removeprefix("models.0."): value for key, value in arrays.items() if key.startswith("models.0.")}
        without = {key: value for key, value in settings.items() if key != "use_srtab"}
        standard = _checkpoint_tree(path, without, network)
        return standard | {"model": joined_table(standard["model"], arrays, settings, smin_alpha)}
    kind = settings.get("type", "standard")
    if "models" in settings:
        return _tree_of_sum(path, settings, arrays)
    if "descriptor" not in settings:
        raise ForgefieldError(f"{path} is a model of type {kind}, which cannot be imported.")
    n_species = len(settings["type_map"])
    descriptor = dict(settings["descriptor"])
    section = dict(settings["fitting_net"])
    is_energy = section.get("type", "ener") not in TYPES
    defaults_of_fitting = EnergyFittingOptions() if is_energy else fitting_part({"type": section["type"]})[1]
    fitting = asdict(defaults_of_fitting) | section
    if kind == "standard":
        inside = {
            key.removeprefix("descriptor."): value for key, value in arrays.items() if key.startswith("descriptor.")
        }
        descriptor = descriptor_from_checkpoint(descriptor, inside, n_species)
        fitting["nets"] = {"networks": networks_of_checkpoint(arrays, "fitting_net.filter_layers.networks")}
        fitting["precision"] = fitting["nets"]["networks"][0]["layers"][0]["@variables"]["w"].dtype.name
    names = ("bias_atom_e", "fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std", "case_embd")
    fitting["@variables"] = {name: arrays.get(f"fitting_net.{name}") for name in names}
    fitting["type"] = fitting.get("type", "ener")
    if not is_energy:
        fitting |= _tensor_tree(fitting, arrays, n_species)
    model = {
        "type": kind,
        "type_map": settings["type_map"],
        "pair_exclude_types": settings.get("pair_exclude_types", []),
        "atom_exclude_types": settings.get("atom_exclude_types", []),
        "@variables": {"out_bias": arrays["out_bias"], "out_std": arrays.get("out_std")},
        "descriptor": descriptor,
        "fitting": fitting,
    }
    return {"model": model, "software": "deepmd-kit", "version": "checkpoint"}


def _tree_of_sum(path: Path, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Tree:
    """A sum of models; each part has its options in `models`."""
    parts: list[Tree] = []
    for number, section in enumerate(settings["models"]):
        prefix, own = f"models.{number}.", {"type_map": settings["type_map"], **section}
        if section.get("type") == "pairtab":
            table = table_of_checkpoint(arrays, prefix)
            parts.append({**table, "type_map": own["type_map"], "rcut": section["rcut"]})
        else:
            inside = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            parts.append(_checkpoint_tree(path, own, inside)["model"])
    return {"model": joined_sum(parts, arrays, settings), "software": "deepmd-kit", "version": "checkpoint"}


def _tensor_tree(fitting: Tree, arrays: Mapping[str, np.ndarray], n_species: int) -> Tree:
    """Settings of fittings of other outputs than energies."""
    variables = dict(fitting["@variables"])
    size = fitting["nets"]["networks"][0]["layers"][-1]["@variables"]["w"].shape[1] if "nets" in fitting else 0
    if variables["bias_atom_e"] is None:
        variables["bias_atom_e"] = np.zeros((n_species, size))
    if fitting["type"] == "polar":
        scale = np.ravel(fitting["scale"])
        variables["scale"] = arrays.get("fitting_net.scale", np.broadcast_to(scale, n_species))
        variables["constant_matrix"] = arrays.get("fitting_net.constant_matrix", np.zeros(n_species))
    names = {"dim_out": size, "ntypes": n_species, "var_name": fitting.get("property_name")}
    return {**names, "rcond": fitting.get("rcond"), "@variables": variables}


READERS: dict[str, Callable[[Path], Tree]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".dp": _read_hdf5,
    ".pt": _read_checkpoint,
    ".pth": _read_frozen,
}
