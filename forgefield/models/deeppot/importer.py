"""Imports models of DeePMD-kit: options and weights from the tree in its files.

Anything without a counterpart here is refused, never dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.deepmd.spin import spin_fields
from forgefield.config.deepmd.types import describe_types, elements_of_types, renamed
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.deeppot.deepmd_descriptors import cutoff_of_tree, descriptor_from_tree
from forgefield.models.deeppot.deepmd_files import read_tree
from forgefield.models.deeppot.deepmd_networks import (
    HARMLESS,
    SAME,
    TYPES,
    Arrays,
    Tree,
    fitting_from_tree,
    parameter_options,
    refuse,
    stacked_state,
)
from forgefield.models.deeppot.deepmd_spin import REACH, real_rows, split_spin
from forgefield.models.deeppot.deepmd_tables import split_sum, split_table
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.models.resolved import TYPE_NAMES
from forgefield.models.resolving import resolve_model


def read_deepmd(
    path: str | os.PathLike[str], *, head: str | None = None, species: Sequence[str] | None = None
) -> ImportedModel:
    """Model in a file of DeePMD-kit (.yaml, .dp), a frozen model (.pth) or a checkpoint (.pt) of its torch
    backend. head: which of several models that
    were trained together. species: elements of the atom types, in their order, if their names do not tell them."""
    path = Path(path)
    tree = read_tree(path, head)
    try:
        return _assemble(path, tree, species)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ForgefieldError(f"{path} is not a model as DeePMD-kit 3 writes them: {error!r}.") from error


class DeepmdImporter(Importer):
    """Reads models of DeePMD-kit."""

    accepts = ("head", "species")

    def read(self, request: ImportRequest) -> ImportedModel:
        return read_deepmd(request.source, head=request.head, species=request.species)


IMPORTER = DeepmdImporter()


def _assemble(path: Path, tree: Tree, elements: Sequence[str] | None) -> ImportedModel:
    model, table = tree["model"], dict[str, Any]()
    factors, others = [1.0], list[Tree]()
    if model["type"] in ("zbl", "linear", "linear_ener"):
        try:
            if model["type"] == "zbl":
                model, table = split_table(model)
            else:
                model, factors, others, table = split_sum(model)
        except ForgefieldError as error:
            raise ForgefieldError(f"{path}: {error}") from error
    spin: Tree = {}
    if model["type"] == "spin_ener":
        try:
            model, spin = split_spin(model)
        except ForgefieldError as error:
            raise ForgefieldError(f"{path}: {error}") from error
    if model["type"] != "standard":
        raise ForgefieldError(
            f"{path} is a model of type {model['type']}; standard models, those with spins (spin_ener) or a pair table "
            "(zbl), and sums of them (linear), can be imported."
        )
    types = [str(name) for name in model["type_map"]]
    species = elements_of_types(str(path), "type_map", types, elements)
    type_names = renamed(types, species)
    descriptor, fitting = model["descriptor"], model["fitting"]
    if fitting["type"] not in ("ener", *TYPES):
        supported = ", ".join(("ener", *TYPES))
        raise ForgefieldError(f"{path} has a fitting network of type {fitting['type']}; supported are {supported}.")
    excluded = [int(number) for number in model.get("atom_exclude_types", [])]
    biases: Tree = {}
    try:
        of_descriptor, described = descriptor_from_tree(descriptor, len(species) * (2 if spin else 1))
        if spin:
            of_descriptor = real_rows(of_descriptor, len(species))
            spin["rcut"] = cutoff_of_tree(descriptor)
        weights = {f"descriptor.{name}": value for name, value in described.items()}
        if fitting["type"] == "ener":
            of_fitting, fitting_weights = _energy_fitting(fitting, excluded)
            biases = {"out_bias": _energy_bias(model, fitting, len(species))}
            sections, of_others = _added_networks(others, factors[1:], len(species))
            weights |= of_others
            biases |= {"networks": sections, "network_weight": factors[0]}
        else:
            of_fitting, fitting_weights = _tensor_fitting(model, fitting, excluded)
    except ForgefieldError as error:
        raise ForgefieldError(f"{path}: {error}") from error
    section = {
        "name": "deeppot",
        "descriptor": of_descriptor,
        "fitting_net": of_fitting,
        "pair_exclude_types": [list(pair) for pair in model.get("pair_exclude_types", [])],
        "atom_exclude_types": excluded,
        **biases,
        **table,
        **({"spin": spin} if spin else {}),
        **({TYPE_NAMES: types} if type_names else {}),
    }
    cutoffs = [cutoff_of_tree(network["descriptor"]) for network in others]
    cutoff = max(cutoff_of_tree(descriptor), *cutoffs, table.get("pair_table_cutoff", 0.0)) + (REACH if spin else 0.0)
    resolved = resolve_model(section, species=species, cutoff=cutoff)
    weights |= fitting_weights
    precision = "float64" if any(array.dtype == np.float64 for array in weights.values()) else "float32"
    state = _fill(path, build_model(resolved, precision=precision, seed=0).state_dict(), weights)
    version = tree.get("version", "of unknown version")
    return ImportedModel(
        resolved,
        state,
        precision,
        settings={"data": {"labels": {"fields": spin_fields(spin, species, labelled=True)}}} if spin else {},
        origin=f"{path.name}: {tree.get('software', 'deepmd-kit')} {version}",
        checked="Checked: every weight has the shape that follows from the options in the file, and none is missing; the file "
        "contains no predictions to compare with."
        + (f" In structures, {describe_types(type_names)}." if type_names else ""),
    )


def _added_networks(networks: Sequence[Tree], factors: Sequence[float], n_species: int) -> tuple[list[Tree], Arrays]:
    """The option `networks`, and the weights of these networks."""
    sections: list[Tree] = []
    weights: Arrays = {}
    for number, (network, factor) in enumerate(zip(networks, factors, strict=True)):
        of_descriptor, described = descriptor_from_tree(network["descriptor"], n_species)
        of_fitting, fitted = _energy_fitting(network["fitting"], [])
        named = {**{f"descriptor.{name}": value for name, value in described.items()}, **fitted}
        weights |= {f"networks.{number}.{name}": value for name, value in named.items()}
        sections.append({"descriptor": of_descriptor, "fitting_net": of_fitting, "weight": factor})
    return sections, weights


def _energy_bias(model: Tree, fitting: Tree, n_species: int) -> list[float]:
    bias = np.asarray(model["@variables"]["out_bias"], dtype=np.float64).reshape(n_species)
    inner = fitting["@variables"].get("bias_atom_e")
    result: list[float] = (bias if inner is None else bias + np.asarray(inner, dtype=np.float64).reshape(-1)).tolist()
    return result


def _tensor_fitting(model: Tree, section: Tree, excluded: list[int]) -> tuple[Tree, Arrays]:
    """Options and weights of a fitting of another output than energies."""
    applied = [model["@variables"].get(name) for name in ("out_bias", "out_std")]
    bias, std = (None if values is None else np.asarray(values, dtype=np.float64)[0] for values in applied)
    options, state = fitting_from_tree(section, bias, std, excluded)
    return options, {f"fitting.{name}": value for name, value in state.items()}


def _fill(path: Path, shapes: Mapping[str, Tensor], weights: Arrays) -> dict[str, Tensor]:
    """Every tensor of the model, from the file if it is there: `out_bias` comes from the options."""
    state = dict(shapes)
    for name, value in weights.items():
        name = f"model.{name}"
        if name not in shapes or tuple(shapes[name].shape) != value.shape:
            raise ForgefieldError(f"{path}: {name} of shape {value.shape} does not fit a model with these options.")
        state[name] = torch.from_numpy(np.ascontiguousarray(value)).to(shapes[name].dtype)
    missing = [name for name in shapes if name.removeprefix("model.") not in weights and name != "model.out_bias"]
    if missing:
        raise ForgefieldError(f"{path} does not contain the weights of {missing[0]}.")
    return state


def _energy_fitting(section: Tree, excluded: list[int]) -> tuple[Tree, Arrays]:
    """Options and weights of an energy fitting. excluded: species without an energy in the model."""
    harmless = {key: values for key, values in HARMLESS.items() if key != "dim_case_embd"}
    refuse("fitting", section, {**harmless, "exclude_types": ([], excluded)})
    options = {key: section[key] for key in SAME} | parameter_options(section)
    options |= {"type": "ener", "rcond": section.get("rcond"), "trainable": section.get("trainable", True)}
    options["default_fparam"] = section.get("default_fparam")
    if section.get("dim_case_embd"):
        case = np.ravel(section["@variables"]["case_embd"]).tolist()
        if (
            len(case) != section["dim_case_embd"]
            or sorted(case)[:-1] != [0.0] * (len(case) - 1)
            or max(case) not in (0, 1)
        ):
            raise ForgefieldError(f"fitting.case_embd is {case}; it should be one 1 among zeros.")
        options |= {"dim_case_embd": len(case), "case": case.index(1.0) if max(case) == 1 else None}
    if any(energy is not None for energy in section.get("atom_ener") or []):
        options["atom_ener"] = [None if e is None else float(np.ravel(e)[0]) for e in section["atom_ener"]]
    return options, stacked_state("fitting.networks", section["nets"]["networks"])
