"""DeePMD-kit's backend-free form of perceptrons, there and back.

That form is a tree of settings and arrays, as `serialize()` of DeePMD-kit gives it. Settings that have no counterpart here are
refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.networks import Layer, Networks

Tree = dict[str, Any]
Arrays = dict[str, np.ndarray]


def refuse(where: str, section: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for settings without a counterpart, unless they ask for nothing."""
    for key, values in harmless.items():
        if section.get(key) not in (None, *values):
            raise ForgefieldError(f"{where}.{key} is {section[key]!r}, which has no counterpart here.")


def numpy_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def precision_of(networks: Networks) -> str:
    return str(networks.dtype).removeprefix("torch.")


def stacked_state(name: str, networks: Sequence[Mapping[str, Any]]) -> Arrays:
    """State of `Networks` under `name`, from the trees of networks of one shape."""
    found: Arrays = {}
    for number, same_layer in enumerate(zip(*(network["layers"] for network in networks), strict=True)):
        for key, value in layer_state(same_layer).items():
            found[f"{name}.layers.{number}.{key}"] = value
    return found


def layer_state(layers: Sequence[Mapping[str, Any]]) -> Arrays:
    """State of a `Layer`, from the trees of that layer of each network."""
    found: Arrays = {}
    for key in ("w", "b", "idt"):
        arrays = [layer["@variables"].get(key) for layer in layers]
        if any(array is not None for array in arrays):
            found[key] = np.stack([array if key == "w" else np.ravel(array) for array in arrays])
    return found


def collection_tree(networks: Networks, n_species: int, kind: str) -> Tree:
    """Networks as DeePMD-kit's class `NetworkCollection`. kind: embedding_network or fitting_network."""
    return {
        "@class": "NetworkCollection",
        "@version": 1,
        "ndim": 0 if networks.count == 1 else 1,
        "ntypes": n_species,
        "network_type": kind,
        "networks": [network_tree(networks, number, kind) for number in range(networks.count)],
    }


def network_tree(networks: Networks, number: int, kind: str) -> Tree:
    """One of the networks, as DeePMD-kit's class `EmbeddingNetwork` or `FittingNetwork`."""
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
        affine_tree(layer, number, precision, resnet=not (is_fitting and place == last))
        for place, layer in enumerate(networks.layers)
    ]
    return tree


def affine_tree(layer: Layer, number: int, precision: str, *, resnet: bool) -> Tree:
    """The layer of one of the networks, as DeePMD-kit's class `Layer`."""
    return layer_tree(
        {key: None if value is None else numpy_of(value[number]) for key, value in _weights(layer).items()},
        activation=layer.activation,
        resnet=resnet,
        precision=precision,
        trainable=layer.w.requires_grad,
    )


def _weights(layer: Layer) -> dict[str, Tensor | None]:
    return {"w": layer.w, "b": layer.b, "idt": layer.idt}


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
