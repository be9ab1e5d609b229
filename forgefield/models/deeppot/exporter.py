"""Writes Deep Potential models as DeePMD-kit's backend-free files (.yaml, .dp); `dp convert-backend` makes any other of them.

A model trained without `sel` gets the slots for neighbours that DeePMD-kit needs (`deepmd_two_body.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

try:
    from yaml import CSafeDumper as _Dumper
except ImportError:  # PyYAML without libyaml
    from yaml import SafeDumper as _Dumper

from forgefield._version import __version__
from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.models.deeppot.deepmd_descriptors import descriptor_tree
from forgefield.models.deeppot.deepmd_networks import (
    Tree,
    Weights,
    collection_tree,
    fitting_tree,
    precision_of,
    weights_of,
)
from forgefield.models.deeppot.deepmd_spin import joined_spin
from forgefield.models.deeppot.deepmd_tables import sum_tree, table_tree
from forgefield.models.deeppot.deepmd_two_body import FittingInputs
from forgefield.models.deeppot.fitting import Fitting
from forgefield.models.deeppot.model import DeepPot
from forgefield.models.deeppot.networks import Networks
from forgefield.models.deeppot.options import EnergyFittingOptions
from forgefield.models.deeppot.spin import with_virtual
from forgefield.models.deeppot.sums import Summand
from forgefield.models.deeppot.tensor_fitting import TensorFitting
from forgefield.models.potential import Potential


def write_deepmd(potential: Potential, path: str | os.PathLike[str], *, sel: Sequence[int] | None = None) -> Path:
    """Write the model to `path`. sel: slots for neighbours of each species, for a model that was trained without."""
    path = Path(path)
    writers: dict[str, Callable[[Path, Tree], None]] = {".yaml": _write_yaml, ".yml": _write_yaml, ".dp": _write_hdf5}
    if path.suffix not in writers:
        raise ForgefieldError(f"{path}: files that DeePMD-kit reads end in {', '.join(writers)}.")
    model = potential.model
    if not isinstance(model, DeepPot):
        raise ForgefieldError(
            f"a {type(model).__name__} cannot be exported to DeePMD-kit, only a model with model.name=deeppot."
        )
    if potential.forces_are_direct:
        raise ForgefieldError(
            "forces of this model are not the derivative of its energy, which DeePMD-kit does not support."
        )
    others = [name for name in potential.extra_outputs if name not in potential.derivative_outputs]
    if others and model.gives_energy:
        raise ForgefieldError(f"this model also predicts {', '.join(others)}, which DeePMD-kit does not support.")
    tree = model_tree(model, None if sel is None else list(sel))
    with written_atomically(path) as temporary:
        writers[path.suffix](Path(temporary), tree)
    return path


def model_tree(model: DeepPot, sel: list[int] | None = None) -> Tree:
    """The model as a tree of settings and arrays, as in DeePMD-kit's files."""
    options = model.options
    if options.zbl:
        raise ForgefieldError(
            "the model adds the ZBL repulsion (model.zbl), which DeePMD-kit does not have; its models have a table of pair "
            "energies (model.use_srtab)."
        )
    descriptors = [model.descriptor, *(summand.descriptor for summand in model.summands)]
    other = next((descriptor for descriptor in descriptors if not descriptor.mixed_types), None)
    if (options.srtab or options.added_table or options.networks) and other is not None:
        raise ForgefieldError(
            f"the model is a sum (use_srtab, pair_table, networks) with the descriptor {other.options.type}; DeePMD-kit's "
            "PyTorch accepts se_atten only."
        )
    fitting_inputs = FittingInputs(_networks(model), weights_of(_networks(model)))
    descriptor = descriptor_tree(model.descriptor, sel, fitting_inputs)
    weights, species = fitting_inputs.weights, list(model.species)
    fitting, out_bias, out_std = _fitting_and_statistics(model, weights)
    standard = {
        "@class": "Model",
        "@version": 2,
        "type": "standard",
        "type_map": species,
        "atom_exclude_types": list(model.unseen),
        "pair_exclude_types": [list(pair) for pair in options.pair_exclude_types],
        "rcond": None,
        "preset_out_bias": None,
        "@variables": {"out_bias": out_bias[None], "out_std": out_std[None]},
        "descriptor": descriptor,
        "fitting": fitting,
    }
    if options.spin is not None:
        names = options.type_names or species
        return _file(joined_spin(_with_type_map(standard, names), options.spin), with_virtual(names))
    written = standard if options.srtab is None else table_tree(standard, options, model.cutoff)
    if options.added_table is not None or options.networks:
        if options.srtab is not None:
            raise ForgefieldError(
                "the model has two pair tables (use_srtab, pair_table), which DeePMD-kit does not support."
            )
        written = sum_tree(standard, [_network(model, summand) for summand in model.summands], options, model.cutoff)
    return _file(written, options.type_names or species)


def _network(model: DeepPot, summand: Summand) -> Tree:
    """An added network as a model of its own, without energies of species."""
    inputs = FittingInputs(summand.fitting.networks, weights_of(summand.fitting.networks))
    descriptor = descriptor_tree(summand.descriptor, None, inputs)
    return {
        "@class": "Model",
        "@version": 2,
        "type": "standard",
        "type_map": list(model.species),
        "rcond": None,
        "preset_out_bias": None,
        "descriptor": descriptor,
        "fitting": _energy_tree(summand.fitting, model.species, summand.descriptor.mixed_types, [], inputs.weights),
    }


def _file(model: Tree, names: Sequence[str]) -> Tree:
    """Content of a file. names: of the types."""
    return {
        "model": _with_type_map(model, names),
        "model_def_script": {},
        "software": "forgefield",
        "version": __version__,
    }


def _with_type_map(node: Any, names: Sequence[str]) -> Any:
    """The tree with these names of types."""
    if isinstance(node, Mapping):
        return {key: list(names) if key == "type_map" else _with_type_map(item, names) for key, item in node.items()}
    return [_with_type_map(item, names) for item in node] if isinstance(node, list) else node


def _networks(model: DeepPot) -> Networks:
    """Networks of the fitting."""
    fitting = model.fitting
    return fitting.network.networks if isinstance(fitting, TensorFitting) else fitting.networks


def _fitting_and_statistics(model: DeepPot, weights: list[Weights]) -> tuple[Tree, np.ndarray, np.ndarray]:
    """The fitting with these weights, and the shifts and factors of its outputs, (n_species, size)."""
    if not isinstance(model.fitting, TensorFitting):
        bias = model.out_bias.detach().numpy().reshape(-1, 1)
        return _fitting(model, weights), bias, np.ones_like(bias)
    return fitting_tree(model.fitting, model.unseen, weights)


def _fitting(model: DeepPot, weights: list[Weights]) -> Tree:
    assert isinstance(model.fitting, Fitting)
    excluded = list(model.options.atom_exclude_types)
    return _energy_tree(model.fitting, model.species, model.descriptor.mixed_types, excluded, weights)


def _energy_tree(
    fitting: Fitting, species: Sequence[str], mixed: bool, excluded: list[int], weights: list[Weights]
) -> Tree:
    n = len(species)
    options, precision = fitting.options, precision_of(fitting.networks)
    assert isinstance(options, EnergyFittingOptions)
    layers = len(options.neuron) + 1
    variables: Tree = {"bias_atom_e": np.zeros((n, 1))}
    for name, (count, mean, deviation) in options.parameters.items():
        variables[f"{name}_avg"] = np.array(mean) if count else None
        variables[f"{name}_inv_std"] = 1 / np.array(deviation) if count else None
    case_embedding = {}
    if options.dim_case_embd:
        case_embedding = {"dim_case_embd": options.dim_case_embd}
        variables["case_embd"] = np.array([float(number == options.case) for number in range(options.dim_case_embd)])
    default = {} if options.default_fparam is None else {"@version": 4, "default_fparam": list(options.default_fparam)}
    return {
        "@class": "Fitting",
        "@version": 2,
        "type": "ener",
        "var_name": "energy",
        "ntypes": n,
        "dim_descrpt": fitting.dim_descriptor,
        "dim_out": 1,
        "neuron": list(options.neuron),
        "resnet_dt": options.resnet_dt,
        "numb_fparam": options.numb_fparam,
        "numb_aparam": options.numb_aparam,
        "rcond": options.rcond,
        "activation_function": options.activation_function,
        "precision": precision,
        "mixed_types": mixed,
        "exclude_types": excluded,
        "type_map": list(species),
        "atom_ener": list(options.atom_ener) or None,
        "tot_ener_zero": False,
        "trainable": [options.trainable] * layers if isinstance(options.trainable, bool) else list(options.trainable),
        "layer_name": None,
        "use_aparam_as_mask": False,
        "spin": None,
        "nets": collection_tree(fitting.networks, n, "fitting_network", ndim=0 if mixed else 1, weights=weights),
        "@variables": variables,
        **default,
        **case_embedding,
    }


def _write_yaml(path: Path, tree: Tree) -> None:
    def as_list(array: np.ndarray) -> Tree:
        return {
            "@class": "np.ndarray",
            "@is_variable": True,
            "@version": 1,
            "dtype": array.dtype.name,
            "value": array.tolist(),
        }

    plain = _without_arrays(tree, as_list)
    path.write_text(yaml.dump(plain, Dumper=_Dumper))


def _write_hdf5(path: Path, tree: Tree) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        names = iter(range(10**6))
        plain = _without_arrays(tree, lambda array: file.create_dataset(f"variable_{next(names):04d}", data=array).name)
        file.attrs["json"] = json.dumps(plain, separators=(",", ":"))


def _without_arrays(node: object, replace: Callable[[np.ndarray], object]) -> object:
    """The tree with a replacement for every array."""
    if isinstance(node, Mapping):
        return {key: _without_arrays(item, replace) for key, item in node.items()}
    if isinstance(node, list):
        return [_without_arrays(item, replace) for item in node]
    return replace(node) if isinstance(node, np.ndarray) else node
