"""DeePMD-kit's backend-free form of perceptrons and of the fittings other than energies, reading and writing.

That form is a tree of settings and arrays, as `serialize()` of DeePMD-kit returns it. Settings that have no counterpart here
are refused, never dropped. In DeePMD-kit the outputs of a fitting are scaled and shifted by the atomic model around it; here
that is part of the fitting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.networks import Layer, Networks
from forgefield.models.deeppot.options import PropertyOptions, rcond_of
from forgefield.models.deeppot.tensor_fitting import PolarFitting, PropertyFitting, TensorFitting

Tree = dict[str, Any]
Arrays = dict[str, np.ndarray]


def refuse(where: str, section: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for settings without a counterpart, unless their values have no effect."""
    for key, values in harmless.items():
        if section.get(key) not in (None, *values):
            raise ForgefieldError(f"{where}.{key} is {section[key]!r}, which has no counterpart here.")


def one_per_centre(name: str, values: np.ndarray) -> list[list[float]]:
    """(species, slots, columns) -> (species, columns); raises unless values are the same in all slots."""
    if not np.allclose(values, values[:, :1], rtol=1e-12, atol=0):
        raise ForgefieldError(f"descriptor.{name} differs between the neighbours of a centre.")
    result: list[list[float]] = values[:, 0].astype(np.float64).tolist()
    return result


def parameter_options(section: Mapping[str, Any]) -> dict[str, list[float]]:
    """Means and deviations of fparam and aparam of a fitting."""
    options: dict[str, list[float]] = {}
    for name in ("fparam", "aparam"):
        if section[f"numb_{name}"]:
            mean, inverse = (np.ravel(section["@variables"][f"{name}_{what}"]) for what in ("avg", "inv_std"))
            options[f"{name}_avg"] = mean.astype(float).tolist()
            options[f"{name}_std"] = (1 / inverse.astype(float)).tolist()
    return options


def numpy_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def precision_of(networks: Networks) -> str:
    return str(networks.dtype).removeprefix("torch.")


def stacked_state(name: str, networks: Sequence[Mapping[str, Any]]) -> Arrays:
    """State of `Networks` under `name`, from the trees of networks of one shape."""
    state: Arrays = {}
    for number, same_layer in enumerate(zip(*(network["layers"] for network in networks), strict=True)):
        for key, value in layer_state(same_layer).items():
            state[f"{name}.layers.{number}.{key}"] = value
    return state


def networks_of_checkpoint(arrays: Mapping[str, np.ndarray], prefix: str) -> list[Tree]:
    """Networks below a prefix among the arrays of a checkpoint, each with its layers."""
    networks: dict[int, dict[int, Tree]] = {}
    names = {"matrix": "w", "bias": "b", "idt": "idt"}
    for key, value in arrays.items():
        match = re.fullmatch(re.escape(prefix) + r"\.(\d+)\.layers\.(\d+)\.(\w+)", key)
        if match and match[3] in names:
            layer = networks.setdefault(int(match[1]), {}).setdefault(int(match[2]), {"@variables": {}})
            layer["@variables"][names[match[3]]] = value
    return [{"layers": [layers[i] for i in sorted(layers)]} for _, layers in sorted(networks.items())]


def layer_state(layers: Sequence[Mapping[str, Any]]) -> Arrays:
    """State of a `Layer`, from the trees of that layer of each network."""
    state: Arrays = {}
    for key in ("w", "b", "idt"):
        arrays = [layer["@variables"].get(key) for layer in layers]
        if any(array is not None for array in arrays):
            state[key] = np.stack([array if key == "w" else np.ravel(array) for array in arrays])
    return state


Weights = list[Arrays]
"""w, b and idt of each layer of one network, float64."""


def weights_of(networks: Networks) -> list[Weights]:
    """Copies of the weights of every network."""
    return [list(layers) for layers in zip(*map(layer_weights, networks.layers))]


def layer_weights(layer: Layer) -> list[Arrays]:
    """Copies of w, b and idt of this layer of every network, float64."""
    named = {"w": layer.w, "b": layer.b, "idt": layer.idt}
    arrays = {key: numpy_of(value).astype(np.float64) for key, value in named.items() if value is not None}
    return [{key: array[number].copy() for key, array in arrays.items()} for number in range(layer.w.shape[0])]


def collection_tree(
    networks: Networks, n_species: int, kind: str, *, ndim: int | None = None, weights: Sequence[Weights] | None = None
) -> Tree:
    """Networks as DeePMD-kit's class `NetworkCollection`.

    kind: embedding_network or fitting_network. ndim: number of species that a network depends on. weights: of each network in
    DeePMD-kit's order, if they are not those of `networks`.
    """
    weights = weights_of(networks) if weights is None else weights
    return {
        "@class": "NetworkCollection",
        "@version": 1,
        "ndim": (0 if networks.count == 1 else 1) if ndim is None else ndim,
        "ntypes": n_species,
        "network_type": kind,
        "networks": [network_tree(networks, network, kind) for network in weights],
    }


def network_tree(networks: Networks, weights: Weights, kind: str) -> Tree:
    """A network of this shape, as DeePMD-kit's class `EmbeddingNetwork` or `FittingNetwork`."""
    precision, sizes, is_fitting = precision_of(networks), networks.sizes, kind == "fitting_network"
    last = len(networks.layers) - 1
    tree: Tree = {
        "@class": "FittingNetwork" if is_fitting else "EmbeddingNetwork",
        "@version": 1 if is_fitting else 2,
        "in_dim": sizes[0],
        "neuron": list(sizes[1:-1] if is_fitting else sizes[1:]),
        "activation_function": networks.layers[0].activation,
        "resnet_dt": networks.resnet_dt,
        "precision": precision,
    }
    tree |= {"out_dim": sizes[-1], "bias_out": True} if is_fitting else {"bias": True}
    tree["layers"] = [
        affine_tree(layer, arrays, precision, resnet=not (is_fitting and index == last))
        for index, (layer, arrays) in enumerate(zip(networks.layers, weights, strict=True))
    ]
    return tree


def affine_tree(layer: Layer, arrays: Arrays, precision: str, *, resnet: bool) -> Tree:
    """A layer of this shape, as DeePMD-kit's class `Layer`."""
    return layer_tree(
        {key: None if key not in arrays else arrays[key].astype(precision) for key in ("w", "b", "idt")},
        activation=layer.activation,
        resnet=resnet,
        precision=precision,
        trainable=layer.w.requires_grad,
    )


def layer_tree(
    arrays: Mapping[str, np.ndarray | None], *, activation: str, resnet: bool, precision: str, trainable: bool
) -> Tree:
    """arrays: w, b and idt."""
    return {
        "@class": "Layer",
        "@version": 2,
        "bias": arrays["b"] is not None,
        "use_timestep": arrays["idt"] is not None,
        "activation_function": activation,
        "resnet": resnet,
        "precision": precision,
        "trainable": trainable,
        "@variables": dict(arrays),
    }


TYPES = ("dipole", "polar", "dos", "property")
SAME = ("neuron", "resnet_dt", "numb_fparam", "numb_aparam", "activation_function", "precision")
"""Settings with the same name and meaning in both forms."""
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "dim_case_embd": (0,),
    "tot_ener_zero": (False,),
    "use_aparam_as_mask": (False,),
    "spin": (),
    "layer_name": (),
}
"""Settings of fittings without a counterpart, and their values that have no effect."""


class _Applied(NamedTuple):
    """How the outputs of the network are transformed, float64: `inner` (n_species, dim_out) is added to them, then they are
    multiplied by `std` and shifted by `bias`, each (n_species, numbers) or None."""

    inner: np.ndarray
    bias: np.ndarray | None
    std: np.ndarray | None


def fitting_from_tree(
    section: Mapping[str, Any],
    out_bias: np.ndarray | None = None,
    out_std: np.ndarray | None = None,
    excluded: Sequence[int] = (),
) -> tuple[Tree, Arrays]:
    """Options and state of a fitting of type dipole, polar, dos or property.

    out_bias, out_std: (n_species, numbers), shifts and factors that the atomic model applies to the fitting's outputs.
    excluded: species without a value in that model.
    """
    kind = section["type"]
    if kind not in TYPES:
        raise ForgefieldError(f"fitting.type is {kind}; supported are {', '.join(TYPES)}.")
    refuse("fitting", section, {**HARMLESS, "exclude_types": ([], list(excluded))})
    variables = section["@variables"]
    trainable = section.get("trainable")
    options = {key: section[key] for key in SAME} | parameter_options(section)
    options |= {"type": kind, "trainable": True if trainable is None else trainable}
    options["default_fparam"] = section.get("default_fparam")
    state = stacked_state("network.networks", section["nets"]["networks"])
    inner = np.asarray(variables["bias_atom_e"], dtype=np.float64).reshape(int(section["ntypes"]), -1)
    more, numbers = _READERS[kind](section, state, _Applied(inner, out_bias, out_std))
    return options | more, state | numbers


def _read_dipole(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    return {}, _into_last_layer(state, applied.inner)


def _read_polar(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    variables, n = section["@variables"], len(applied.inner)
    diagonal = np.ravel(variables["constant_matrix"]).astype(float)
    if applied.bias is not None:
        diagonal = diagonal + np.reshape(applied.bias, (n, 3, 3)).trace(axis1=1, axis2=2) / 3
    scale = np.ravel(variables["scale"]).astype(float)
    options = {"scale": scale.tolist(), "out_bias": diagonal.tolist()}
    options |= {key: section[key] for key in ("fit_diag", "shift_diag")}
    return options, _into_last_layer(state, applied.inner) | {"scale": scale, "out_bias": diagonal}


def _read_dos(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    total = applied.inner
    if applied.bias is not None:
        total = total + np.reshape(applied.bias, total.shape)
    options = {"numb_dos": section["dim_out"], "rcond": section["rcond"], "out_bias": total.tolist()}
    return options, {"out_bias": total}


def _read_property(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    """If species are not distinguished, the values of the first are used for all."""
    inner = applied.inner
    bias = np.zeros_like(inner) if applied.bias is None else np.reshape(applied.bias, inner.shape).astype(float)
    std = np.ones_like(inner) if applied.std is None else np.reshape(applied.std, inner.shape).astype(float)
    if not section.get("distinguish_types", False):
        bias, std = (np.repeat(values[:1], len(inner), 0) for values in (bias, std))
    bias = bias + inner * std
    apart = bool(np.ptp(bias, axis=0).any() or np.ptp(std, axis=0).any())
    options = {"property_name": section["var_name"], "out_bias": bias.tolist(), "out_std": std.tolist()}
    options |= {"distinguish_types": apart or bool(section.get("distinguish_types", False))}
    options |= {key: section[key] for key in ("task_dim", "intensive")}
    return options, {"out_bias": bias, "out_std": std}


_READERS = {"dipole": _read_dipole, "polar": _read_polar, "dos": _read_dos, "property": _read_property}


def _into_last_layer(state: Arrays, inner: np.ndarray) -> Arrays:
    """The constants of the last layer plus `inner`, of the network of each species or of the only one."""
    name = max((key for key in state if key.endswith(".b")), key=lambda key: int(key.split(".")[-2]))
    b = state[name]
    if len(b) == 1 and np.ptp(inner, axis=0).any():
        raise ForgefieldError(
            "fitting.bias_atom_e differs between species of one network, which has no counterpart here."
        )
    return {name: b + inner[: len(b)].astype(b.dtype)}


def fitting_tree(
    fitting: TensorFitting[Any], excluded: Sequence[int] = (), weights: Sequence[Weights] | None = None
) -> tuple[Tree, np.ndarray, np.ndarray]:
    """The fitting as DeePMD-kit's class `Fitting`, and the shifts and factors that the atomic model around it has to apply to
    its outputs: out_bias and out_std, each (n_species, numbers).

    excluded: species without a value. weights: of its networks, if they are not its own.
    """
    options, network, networks = fitting.options, fitting.network, fitting.network.networks
    n, kind = len(fitting.species), options.type
    variables: Tree = {"bias_atom_e": np.zeros((n, networks.sizes[-1])), "case_embd": None}
    for name, (count, _, _) in options.parameters.items():
        variables[f"{name}_avg"] = numpy_of(network.get_buffer(f"{name}_avg")) if count else None
        variables[f"{name}_inv_std"] = 1 / numpy_of(network.get_buffer(f"{name}_std")) if count else None
    settings = asdict(options)
    tree: Tree = {"@class": "Fitting", "type": kind, "@version": {"polar": 5, "property": 6}.get(kind, 4)}
    tree |= {key: settings[key] for key in SAME}
    tree |= {
        "var_name": "polar" if kind == "polar" else fitting.outputs[0].name,
        "ntypes": n,
        "dim_descrpt": network.dim_descriptor,
        "dim_case_embd": 0,
        "default_fparam": options.default_fparam,
        "rcond": rcond_of(options),
        "precision": precision_of(networks),
        "mixed_types": networks.count == 1,
        "exclude_types": list(excluded),
        "nets": collection_tree(networks, n, "fitting_network", weights=weights),
        "type_map": list(fitting.species),
        "tot_ener_zero": False,
        "trainable": [layer.w.requires_grad for layer in networks.layers],
        "layer_name": None,
        "use_aparam_as_mask": False,
        "spin": None,
        "@variables": variables,
    }
    return tree | _extra_settings(fitting, variables), *_shifts_and_factors(fitting)


def _extra_settings(fitting: TensorFitting[Any], variables: Tree) -> Tree:
    """Settings that only fittings of this type have; their arrays are added to `variables`."""
    tree: Tree = {}
    options, kind = fitting.options, fitting.options.type
    if kind in ("dipole", "polar"):
        tree["embedding_width"] = fitting.dim_rotation
    else:
        tree |= {"dim_out": fitting.network.networks.sizes[-1], "atom_ener": None}
    if kind == "dipole":
        tree |= {"r_differentiable": True, "c_differentiable": True}
    if isinstance(options, PropertyOptions):
        tree |= {"task_dim": options.task_dim, "intensive": options.intensive}
        tree["distinguish_types"] = options.distinguish_types
    if isinstance(fitting, PolarFitting):
        n = len(fitting.species)
        tree |= {"fit_diag": options.fit_diag, "shift_diag": options.shift_diag}
        variables |= {"scale": numpy_of(fitting.scale).reshape(n, 1), "constant_matrix": np.zeros(n)}
    return tree


def _shifts_and_factors(fitting: TensorFitting[Any]) -> tuple[np.ndarray, np.ndarray]:
    n, size = len(fitting.species), int(np.prod(fitting.outputs[0].shape))
    bias, std = np.zeros((n, size)), np.ones((n, size))
    if isinstance(fitting, PolarFitting):
        bias = (numpy_of(fitting.out_bias).reshape(n, 1, 1) * np.eye(3)).reshape(n, size)
    elif fitting.has_bias:
        bias = numpy_of(fitting.out_bias).reshape(n, size)
    if isinstance(fitting, PropertyFitting):
        std = numpy_of(fitting.out_std).reshape(n, size)
    return bias, std
