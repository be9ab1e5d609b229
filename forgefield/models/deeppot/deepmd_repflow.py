"""DeePMD-kit's backend-free form of the descriptor `dpa3`, reading and writing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_attention import (
    affine_from_checkpoint,
    type_embedding_state,
    type_embedding_tree,
)
from forgefield.models.deeppot.deepmd_networks import Arrays, Tree, layer_tree, numpy_of, one_per_centre, refuse
from forgefield.models.deeppot.repflow import Dpa3
from forgefield.models.deeppot.repflow_layer import Affine, RepFlowLayer
from forgefield.models.deeppot.repflow_options import Dpa3Options

OUTER = ("activation_function", "precision", "trainable", "concat_output_tebd", "use_econf_tebd", "use_tebd_bias")
"""Settings of the descriptor with the same name and meaning in both forms."""
INNER = (
    "n_dim", "e_dim", "a_dim", "nlayers", "e_rcut_smth", "e_sel", "a_rcut", "a_rcut_smth", "a_sel", "axis_neuron",
    "a_compress_rate", "a_compress_e_rate", "a_compress_use_split", "n_multi_edge_message", "update_angle", "update_style",
    "update_residual", "update_residual_init", "sequential_update", "smooth_edge_update", "edge_init_use_dist",
    "use_exp_switch", "use_dynamic_sel", "sel_reduce_factor", "fix_stat_std",
)  # fmt: skip
"""Settings of the block `repflow`, likewise."""
LAYERS = {
    "node_self": "node_self_mlp",
    "node_sym": "node_sym_linear",
    "node_edge": "node_edge_linear",
    "edge_self": "edge_self_linear",
    "edge_angle": "edge_angle_linear1",
    "edge_angle_out": "edge_angle_linear2",
    "angle_self": "angle_self_linear",
    "compress_node": "a_compress_n_linear",
    "compress_edge": "a_compress_e_linear",
}
"""DeePMD-kit's names of the affine maps of a layer."""
STEPS = {"node": "n_residual", "edge": "e_residual", "angle": "a_residual"}
"""DeePMD-kit's names of the factors of updates."""
ABSENT = {"add_chg_spin_ebd": (False,)}
"""Settings without a counterpart, and their values that have no effect."""


def repflow_from_tree(section: Mapping[str, Any]) -> tuple[Tree, Arrays]:
    """Options and state of a descriptor of type dpa3."""
    refuse("descriptor", section, ABSENT)
    settings, block = section["repflow_args"], section["repflow_variable"]
    defaults = {field.name: field.default for field in dataclasses.fields(Dpa3Options)}
    variables = block["@variables"]
    if np.any(variables["davg"]):
        raise ForgefieldError("descriptor.davg is not zero, which has no counterpart here.")
    options = {key: settings.get(key, defaults[key]) for key in INNER} | {key: section[key] for key in OUTER}
    options |= {
        "type": "dpa3",
        "exclude_types": [list(pair) for pair in section["exclude_types"]],
        "env_protection": float(section.get("env_protection", 0.0)),
        "dstd": one_per_centre("dstd", variables["dstd"]),
    }
    state = type_embedding_state(section["type_embedding"])
    state |= _affine_state("edge_embedding", block["edge_embd"])
    state |= _affine_state("angle_embedding", block["angle_embd"])
    for number, layer in enumerate(block["repflow_layers"]):
        state |= {f"layers.{number}.{key}": value for key, value in _layer_state(layer).items()}
    return options, state


def _affine_state(name: str, section: Mapping[str, Any]) -> Arrays:
    variables = section["@variables"]
    state = {f"{name}.w": variables["w"]}
    if variables.get("b") is not None:
        state[f"{name}.b"] = np.ravel(variables["b"])
    return state


def _layer_state(section: Mapping[str, Any]) -> Arrays:
    state: Arrays = {}
    for name, theirs in LAYERS.items():
        if section.get(theirs) is not None:
            state |= _affine_state(name, section[theirs])
    variables = section.get("@variables") or {}
    for name, theirs in STEPS.items():
        for number, values in enumerate(variables.get(theirs) or section.get(theirs) or ()):
            state[f"{name}_steps.{number}"] = np.ravel(values)
    return state


def repflow_from_checkpoint(section: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """The tree from settings of an input and arrays of a checkpoint."""
    settings = dict(section["repflow"])
    if settings.pop("skip_stat", False):
        settings["fix_stat_std"] = 0.3
    prefix = "repflows."
    layers: list[Tree] = []
    while f"{prefix}layers.{len(layers)}.node_self_mlp.matrix" in arrays:
        inside = f"{prefix}layers.{len(layers)}."
        layer: Tree = {
            theirs: affine_from_checkpoint(arrays, f"{inside}{theirs}")
            for theirs in LAYERS.values()
            if f"{inside}{theirs}.matrix" in arrays
        }
        steps = {theirs: _numbered(arrays, f"{inside}{theirs}") for theirs in STEPS.values()}
        layers.append({**layer, "@variables": steps})
    embedding = affine_from_checkpoint(arrays, "type_embedding.embedding.embedding_net.layers.0")
    return {
        **section,
        "repflow_args": settings,
        "type_embedding": {"embedding": {"layers": [embedding | {"activation_function": "linear"}]}},
        "repflow_variable": {
            "edge_embd": affine_from_checkpoint(arrays, f"{prefix}edge_embd"),
            "angle_embd": affine_from_checkpoint(arrays, f"{prefix}angle_embd"),
            "repflow_layers": layers,
            "@variables": {"davg": arrays[f"{prefix}mean"], "dstd": arrays[f"{prefix}stddev"]},
        },
    }


def _numbered(arrays: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    while f"{name}.{len(found)}" in arrays:
        found.append(arrays[f"{name}.{len(found)}"])
    return found


def repflow_tree(descriptor: Dpa3) -> Tree:
    """The descriptor as DeePMD-kit's class `Descriptor`."""
    options = descriptor.options
    settings, n = dataclasses.asdict(options), len(descriptor.species)
    precision = str(descriptor.edge_embedding.w.dtype).removeprefix("torch.")
    inner = {key: settings[key] for key in INNER} | {"e_rcut": descriptor.cutoff, "optim_update": True}
    slots = np.asarray(options.dstd, dtype=precision)[:, None]
    assert isinstance(options.e_sel, int)
    outer = {key: settings[key] for key in OUTER} | {"precision": precision}
    return outer | {
        "@class": "Descriptor",
        "type": "dpa3",
        "@version": 2,
        "ntypes": n,
        "repflow_args": inner,
        "exclude_types": [list(pair) for pair in options.exclude_types],
        "env_protection": options.env_protection,
        "use_loc_mapping": True,
        "add_chg_spin_ebd": False,
        "default_chg_spin": None,
        "type_map": list(descriptor.species),
        "type_embedding": type_embedding_tree(descriptor, precision),
        "repflow_variable": {
            "edge_embd": _affine_tree(descriptor.edge_embedding, precision),
            "angle_embd": _affine_tree(descriptor.angle_embedding, precision),
            "repflow_layers": [_layer_tree(layer, inner, outer, n, precision) for layer in descriptor.layers],
            "env_mat": {
                "rcut": descriptor.cutoff,
                "rcut_smth": options.e_rcut_smth,
                "protection": 0.0,
                "use_exp_switch": False,
            },
            "@variables": {
                "davg": np.zeros((n, options.e_sel, 4), dtype=precision),
                "dstd": np.repeat(slots, options.e_sel, 1),
            },
        },
    }


def _layer_tree(layer: RepFlowLayer, inner: Tree, outer: Tree, n_species: int, precision: str) -> Tree:
    left_out = ("nlayers", "edge_init_use_dist", "use_exp_switch", "fix_stat_std")
    tree: Tree = {key: value for key, value in inner.items() if key not in left_out}
    tree |= {"@class": "RepFlowLayer", "@version": 2, "ntypes": n_species, "precision": precision}
    tree |= {"e_sel": [inner["e_sel"]], "activation_function": outer["activation_function"]}
    for name, theirs in LAYERS.items():
        part = getattr(layer, name, None)
        if isinstance(part, Affine):
            tree[theirs] = _affine_tree(part, precision)
    if layer.residual:
        steps = {theirs: [numpy_of(step) for step in layer.steps_of(name)] for name, theirs in STEPS.items()}
        tree["@variables"] = steps
    return tree


def _affine_tree(affine: Affine, precision: str) -> Tree:
    arrays = {"w": numpy_of(affine.w), "b": None if affine.b is None else numpy_of(affine.b), "idt": None}
    return layer_tree(arrays, activation="linear", resnet=False, precision=precision, trainable=affine.w.requires_grad)
