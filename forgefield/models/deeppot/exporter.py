"""Writes Deep Potential models as DeePMD-kit's backend-free files (.yaml, .dp); `dp convert-backend` makes any other of them.

A model trained without `sel` gets the slots for neighbours that DeePMD-kit needs; the contribution of empty slots is subtracted
in the weights, so that predictions are the same for any sufficient number of slots.
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
from forgefield.models.deeppot.deepmd_attention import attention_tree
from forgefield.models.deeppot.deepmd_networks import Tree, fitting_tree, precision_of
from forgefield.models.deeppot.deepmd_tables import table_tree
from forgefield.models.deeppot.fitting import Fitting
from forgefield.models.deeppot.model import DeepPot
from forgefield.models.deeppot.networks import Networks
from forgefield.models.deeppot.options import EnergyFittingOptions
from forgefield.models.deeppot.se_atten import SeAtten
from forgefield.models.deeppot.se_e2 import RADIAL_SCALE, TwoBodyDescriptor
from forgefield.models.deeppot.tensor_fitting import TensorFitting
from forgefield.models.potential import Potential

SPARE = 1.1
"""Slots for neighbours, relative to the largest number in the training data: DeePMD-kit's choice."""


def write_deepmd(potential: Potential, path: str | os.PathLike[str], *, sel: Sequence[int] | None = None) -> Path:
    """Write the model to `path`. sel: slots for neighbours of each species, for a model that was trained without."""
    path = Path(path)
    writers: dict[str, Callable[[Path, Tree], None]] = {".yaml": _write_yaml, ".yml": _write_yaml, ".dp": _write_hdf5}
    if path.suffix not in writers:
        raise ForgefieldError(f"{path}: files that DeePMD-kit reads end in {', '.join(writers)}.")
    model = potential.model
    if not isinstance(model, DeepPot):
        raise ForgefieldError(f"a {type(model).__name__} cannot be exported to DeePMD-kit, only a deeppot model.")
    if potential.forces_are_direct:
        raise ForgefieldError(
            "forces of this model are not the derivative of its energy, which DeePMD-kit does not support."
        )
    if potential.extra_outputs and model.gives_energy:
        raise ForgefieldError(
            f"this model also predicts {', '.join(potential.extra_outputs)}, which DeePMD-kit does not support."
        )
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
    if options.srtab is not None and not model.descriptor.mixed_types:
        raise ForgefieldError(
            f"the model has a pair table (use_srtab) with the descriptor {model.descriptor.options.type}; DeePMD-kit's PyTorch "
            "accepts a table with se_atten only."
        )
    kind = model.descriptor.options.type
    if isinstance(model.descriptor, SeAtten):
        if sel is not None:
            raise ForgefieldError(f"a model with {kind} keeps the sel it was trained with; leave --sel out.")
        descriptor, weights = attention_tree(model.descriptor), _weights(_networks(model))
    else:
        described, embedding, weights = _with_slots(model, sel)
        descriptor = _descriptor(model, described, embedding)
    species = list(model.species)
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
    return {
        "model": standard if options.srtab is None else table_tree(standard, options, model.cutoff),
        "model_def_script": {},
        "software": "forgefield",
        "version": __version__,
    }


def _networks(model: DeepPot) -> Networks:
    """Networks of the fitting."""
    fitting = model.fitting
    return fitting.network.networks if isinstance(fitting, TensorFitting) else fitting.networks


def _fitting_and_statistics(model: DeepPot, weights: list[Weights]) -> tuple[Tree, np.ndarray, np.ndarray]:
    """The fitting with these weights, and the shifts and factors of its outputs, (n_species, size)."""
    if not isinstance(model.fitting, TensorFitting):
        bias = model.out_bias.detach().numpy().reshape(-1, 1)
        return _fitting(model, weights), bias, np.ones_like(bias)
    tree, bias, std = fitting_tree(model.fitting, model.unseen)
    for network, layers in zip(tree["nets"]["networks"], weights, strict=True):
        for layer, arrays in zip(network["layers"], layers, strict=True):
            variables = layer["@variables"]
            layer["@variables"] = variables | {
                name: value.astype(variables[name].dtype).reshape(variables[name].shape)
                for name, value in arrays.items()
            }
    return tree, bias, std


Weights = list[dict[str, np.ndarray]]
"""w, b and idt of each layer of one network."""


def _weights(networks: Networks) -> list[Weights]:
    """Weights of every network, float64."""
    result = []
    for k in range(networks.count):
        tensors = [{"w": layer.w, "b": layer.b, "idt": layer.idt} for layer in networks.layers]
        result.append(
            [{n: t[k].detach().double().numpy().copy() for n, t in x.items() if t is not None} for x in tensors]
        )
    return result


def _two_body(model: DeepPot) -> TwoBodyDescriptor[Any]:
    assert isinstance(model.descriptor, TwoBodyDescriptor)
    return model.descriptor


def _with_slots(model: DeepPot, sel: list[int] | None) -> tuple[Tree, list[Weights], list[Weights]]:
    """Settings of the descriptor with `sel`, and the corresponding weights of embedding and fitting."""
    descriptor = _two_body(model)
    options = descriptor.options
    settings = {
        "sel": options.sel,
        "davg": options.davg,
        "dstd": options.dstd,
        "type_one_side": options.type_one_side,
        "set_davg_zero": options.set_davg_zero,
    }
    embedding, fitting = _weights(descriptor.networks), _weights(_networks(model))
    if options.sel is not None:
        if sel is not None and sel != options.sel:
            raise ForgefieldError(f"the model was trained with sel {options.sel}, which cannot be changed.")
        if options.neighbour_norm != float(sum(options.sel)):
            raise ForgefieldError("model.descriptor.neighbour_norm is not the sum of sel, which DeePMD-kit divides by.")
        return settings, embedding, fitting
    settings["sel"] = sel = _enough(sel, options.most_neighbours, model.species)
    if options.type == "se_e2_a":
        return _fold_into_embedding(model, settings, embedding), embedding, fitting
    _fold_into_fitting(model, sel, embedding, fitting)
    return settings, embedding, fitting


def _enough(sel: list[int] | None, most: list[int] | None, species: Sequence[str]) -> list[int]:
    if sel is None:
        if most is None:
            raise ForgefieldError(
                f"DeePMD-kit needs slots for neighbours: set the number of {', '.join(species)} neighbours of an atom with "
                "--sel."
            )
        sel = [int(np.ceil(SPARE * number / 4)) * 4 for number in most]
    if len(sel) != len(species):
        raise ForgefieldError(f"sel has {len(sel)} numbers for {len(species)} species ({', '.join(species)}).")
    return [max(1, number) for number in sel]


def _fold_into_embedding(model: DeepPot, settings: Tree, embedding: list[Weights]) -> Tree:
    """se_e2_a: rows are still zero at the cutoff; shift and scale of the networks' inputs move into their first layer."""
    descriptor = _two_body(model)
    options, n = descriptor.options, len(model.species)
    ratio = sum(settings["sel"]) / options.neighbour_norm
    if descriptor.networks.layers[0].repeats:
        raise ForgefieldError(
            f"an embedding network that begins with {options.neuron[0]} neurons needs a model with sel."
        )
    means, deviations = np.array(options.davg)[:, 0], np.array(options.dstd)[:, 0]
    if options.type_one_side and np.ptp(means / deviations) > 0:
        settings["type_one_side"] = False
        embedding[:] = [[dict(layer) for layer in embedding[b]] for _ in range(n) for b in range(n)]
    for number, network in enumerate(embedding):
        centre = 0 if settings["type_one_side"] else number // n
        first = network[0]
        first["b"] = first["b"] - (means / deviations)[centre] * first["w"][0]
        first["w"] = first["w"] / ratio
    settings["davg"] = [[0.0] * 4] * n
    settings["dstd"] = (np.array(options.dstd) / ratio).tolist()
    settings["set_davg_zero"] = True
    return settings


def _fold_into_fitting(model: DeepPot, sel: list[int], embedding: list[Weights], fitting: list[Weights]) -> None:
    """se_e2_r: the first layer of the fitting network subtracts the constant that empty slots add to a descriptor."""
    descriptor = _two_body(model)
    options, n = descriptor.options, len(model.species)
    if _networks(model).layers[0].repeats or options.exclude_types:
        what = "exclude_types" if options.exclude_types else f"{_networks(model).sizes[1]} fitting neurons"
        raise ForgefieldError(f"an se_e2_r model with {what} can be exported to DeePMD-kit only if it has sel.")
    total = sum(sel)
    at_end = descriptor.empty_embedding().detach().double().numpy()
    constants = RADIAL_SCALE / total * np.einsum("b,abm->am", np.array(sel, dtype=float), at_end.reshape(n, n, -1))
    ratio, width = total / options.neighbour_norm, at_end.shape[1]
    for number, network in enumerate(fitting):
        first = network[0]
        first["w"][:width] *= ratio
        first["b"] = first["b"] - constants[number] @ first["w"][:width]


def _descriptor(model: DeepPot, settings: Tree, embedding: list[Weights]) -> Tree:
    descriptor = _two_body(model)
    options, networks, n = descriptor.options, descriptor.networks, len(model.species)
    if options.type == "se_e2_r" and not settings["type_one_side"]:
        raise ForgefieldError("DeePMD-kit's se_e2_r has one network per species (type_one_side: true) only.")
    slots, precision = sum(settings["sel"]), precision_of(networks)
    if not settings["type_one_side"]:  # DeePMD-kit's are numbered by neighbour, then centre
        embedding = [embedding[a * n + b] for b in range(n) for a in range(n)]
    trees = [_network("EmbeddingNetwork", 2, weights, networks, precision) | {"bias": True} for weights in embedding]
    tree = {
        "@class": "Descriptor",
        "@version": 2,
        "type": "se_e2_a" if options.type == "se_e2_a" else "se_r",
        "rcut": model.cutoff,
        "rcut_smth": options.rcut_smth,
        "sel": settings["sel"],
        "neuron": list(options.neuron),
        "resnet_dt": options.resnet_dt,
        "trainable": options.trainable,
        "type_one_side": settings["type_one_side"],
        "exclude_types": [list(pair) for pair in options.exclude_types],
        "env_protection": options.env_protection,
        "set_davg_zero": settings["set_davg_zero"],
        "activation_function": options.activation_function,
        "precision": precision,
        "spin": None,
        "type_map": list(model.species),
        "env_mat": {"rcut": model.cutoff, "rcut_smth": options.rcut_smth},
        "embeddings": _collection("embedding_network", 1 if settings["type_one_side"] else 2, n, trees),
        "@variables": {key: np.repeat(np.array(settings[key])[:, None], slots, 1) for key in ("davg", "dstd")},
    }
    return tree | ({"axis_neuron": options.axis_neuron} if options.type == "se_e2_a" else {})


def _fitting(model: DeepPot, weights: list[Weights]) -> Tree:
    fitting, n, mixed = model.fitting, len(model.species), model.descriptor.mixed_types
    assert isinstance(fitting, Fitting)
    options, precision = fitting.options, precision_of(fitting.networks)
    assert isinstance(options, EnergyFittingOptions)
    layers = len(options.neuron) + 1
    trees = [
        _network("FittingNetwork", 1, network, fitting.networks, precision) | {"bias_out": True, "out_dim": 1}
        for network in weights
    ]
    variables: Tree = {"bias_atom_e": np.zeros((n, 1))}
    for name, (count, mean, deviation) in options.parameters.items():
        variables[f"{name}_avg"] = np.array(mean) if count else None
        variables[f"{name}_inv_std"] = 1 / np.array(deviation) if count else None
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
        "exclude_types": list(model.options.atom_exclude_types),
        "type_map": list(model.species),
        "atom_ener": list(options.atom_ener) or None,
        "tot_ener_zero": False,
        "trainable": [options.trainable] * layers if isinstance(options.trainable, bool) else list(options.trainable),
        "layer_name": None,
        "use_aparam_as_mask": False,
        "spin": None,
        "nets": _collection("fitting_network", 0 if mixed else 1, n, trees),
        "@variables": variables,
        **default,
    }


def _collection(kind: str, ndim: int, n: int, networks: list[Tree]) -> Tree:
    return {
        "@class": "NetworkCollection",
        "@version": 1,
        "ndim": ndim,
        "ntypes": n,
        "network_type": kind,
        "networks": networks,
    }


def _network(kind: str, version: int, weights: Weights, networks: Networks, precision: str) -> Tree:
    first = networks.layers[0]
    n_hidden = len(weights) if kind == "EmbeddingNetwork" else len(weights) - 1
    layers = [
        {
            "@class": "Layer",
            "@version": 1,
            "bias": True,
            "use_timestep": "idt" in arrays,
            "activation_function": layer.activation if number < n_hidden else "none",
            "resnet": number < n_hidden,
            "precision": precision,
            "@variables": {key: _cast(arrays.get(key), precision) for key in ("w", "b", "idt")},
        }
        for number, (arrays, layer) in enumerate(zip(weights, networks.layers))
    ]
    return {
        "@class": kind,
        "@version": version,
        "in_dim": networks.sizes[0],
        "neuron": list(networks.sizes[1 : n_hidden + 1]),
        "activation_function": first.activation,
        "resnet_dt": networks.resnet_dt,
        "precision": precision,
        "layers": layers,
    }


def _cast(array: np.ndarray | None, precision: str) -> np.ndarray | None:
    return None if array is None else array.astype(precision)


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
