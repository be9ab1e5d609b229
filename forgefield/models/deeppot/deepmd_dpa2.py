"""DeePMD-kit's backend-free form of the descriptor dpa2, reading and writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_attention import (
    affine_from_checkpoint,
    in_all_slots,
    type_embedding_state,
    type_embedding_tree,
)
from forgefield.models.deeppot.deepmd_networks import (
    Arrays,
    Tree,
    collection_tree,
    layer_tree,
    networks_of_checkpoint,
    numpy_of,
    one_per_centre,
    precision_of,
    refuse,
    stacked_state,
)
from forgefield.models.deeppot.deepmd_three_body import env_mat_tree, pairs_state, pairs_tree
from forgefield.models.deeppot.dpa2 import Dpa2, RepinitOptions
from forgefield.models.deeppot.repformer import Affine, Norm, RepformerLayer, RepformerOptions

_SAME = (
    "concat_output_tebd", "precision", "smooth", "trainable", "add_tebd_to_repinit_out", "use_econf_tebd",
)  # fmt: skip
"""Settings with the same name and meaning in both forms."""
_FROM_DATA = ("davg", "dstd", "neighbour_norm", "max_neighbours")
REPINIT = (
    "rcut_smth", "nsel", "neuron", "axis_neuron", "tebd_dim", "tebd_input_mode", "set_davg_zero", "activation_function",
    "resnet_dt", "type_one_side", "use_three_body", "three_body_neuron", "three_body_sel", "three_body_rcut",
    "three_body_rcut_smth",
)  # fmt: skip
REPFORMER = tuple(key for key in asdict(RepformerOptions()) if key not in _FROM_DATA)
_OF_BLOCK = (
    "rcut", "rcut_smth", "nsel", "nlayers", "direct_dist", "set_davg_zero", "update_residual", "update_residual_init",
)  # fmt: skip
_OF_LAYER = tuple(key for key in REPFORMER if key not in _OF_BLOCK)
"""Settings that every layer repeats."""
_PARTS: Mapping[str, Mapping[str, str]] = {
    "attn2g_map": {"mapqk": "queries_keys"},
    "attn2_mh_apply": {"mapv": "values", "head_map": "head_map"},
    "attn2_ev_apply": {"head_map": "head_map"},
    "loc_attn": {"mapq": "queries", "mapkv": "keys_values", "head_map": "head_map"},
}
"""Affine maps in the parts of a layer: DeePMD-kit's name and Forgefield's."""
_AFFINE = ("linear1", "linear2", "g1_self_mlp", "proj_g1g2", "proj_g1g1g2")
_RESIDUALS = ("g1_residual", "g2_residual", "h2_residual")
_CLASSES = {
    "attn2g_map": "Atten2Map", "attn2_mh_apply": "Atten2MultiHeadApply", "attn2_ev_apply": "Atten2EquiVarApply",
    "loc_attn": "LocalAtten",
}  # fmt: skip

# ---- reading


def dpa2_from_tree(section: Mapping[str, Any]) -> tuple[Tree, Arrays]:
    """Options and state of a descriptor of type dpa2."""
    refuse("descriptor", section, {"compress": ()})
    first, layers = (dict(section[key]) for key in ("repinit_args", "repformer_args"))
    of_first, of_layers = section["repinit_variable"], section["repformers_variable"]
    embedding = type_embedding_state(section["type_embedding"])
    repinit = {key: first[key] for key in REPINIT} | _rows(of_first, "")
    repinit["set_davg_zero"] = bool(first["set_davg_zero"]) and not np.any(of_first["@variables"]["davg"])
    repformer = {key: layers[key] for key in REPFORMER} | _rows(of_layers, "")
    repformer["set_davg_zero"] = bool(layers["set_davg_zero"]) and not np.any(of_layers["@variables"]["davg"])
    options = {key: section[key] for key in _SAME}
    options |= {
        "type": "dpa2",
        "use_tebd_bias": "type_embedding.b" in embedding,
        "exclude_types": [list(pair) for pair in section["exclude_types"]],
        "env_protection": float(section.get("env_protection", 0.0)),
    }
    state = {f"repinit.{name}": value for name, value in embedding.items()}
    state |= stacked_state("repinit.embedding", of_first["embeddings"]["networks"])
    if "embeddings_strip" in of_first:
        state |= stacked_state("repinit.type_network", of_first["embeddings_strip"]["networks"])
    if first["use_three_body"]:
        repinit |= _rows(section["repinit_three_body_variable"], "three_body_")
        state |= pairs_state("pairs", section["repinit_three_body_variable"])
    for name, theirs in (("g1_transform", "g1_shape_tranform"), ("tebd_transform", "tebd_transform")):
        if section.get(theirs, {}).get("@variables"):
            state |= _affine_state(name, section[theirs])
    state |= _affine_state("repformer.g2_embd", of_layers["g2_embd"])
    for number, layer in enumerate(of_layers["repformer_layers"]):
        state |= _layer_state(f"repformer.layers.{number}", layer)
    return options | {"repinit": repinit, "repformer": repformer}, state


def _rows(variables: Mapping[str, Any], prefix: str) -> Tree:
    return {f"{prefix}{key}": one_per_centre(key, variables["@variables"][key]) for key in ("davg", "dstd")}


def _affine_state(name: str, layer: Mapping[str, Any]) -> Arrays:
    arrays = layer["@variables"]
    return {f"{name}.{key}": np.asarray(arrays[key]) for key in ("w", "b") if arrays.get(key) is not None}


def _layer_state(name: str, layer: Mapping[str, Any]) -> Arrays:
    state: Arrays = {}
    for key in _AFFINE:
        if key in layer:
            state |= _affine_state(f"{name}.{key}", layer[key])
    for part, maps in _PARTS.items():
        if part in layer:
            for theirs, ours in maps.items():
                state |= _affine_state(f"{name}.{part}.{ours}", layer[part][theirs])
    if "attn2_lm" in layer:
        norm = layer["attn2_lm"]["@variables"]
        state |= {f"{name}.attn2_lm.scale": np.asarray(norm["w"]), f"{name}.attn2_lm.shift": np.asarray(norm["b"])}
    for key in _RESIDUALS:
        for number, factors in enumerate(layer.get("@variables", {}).get(key, [])):
            state[f"{name}.{key}.{number}"] = np.asarray(factors)
    return state


def dpa2_from_checkpoint(section: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """The tree from settings of an input and arrays of a checkpoint."""
    first = asdict(RepinitOptions()) | {"three_body_sel": 40} | section["repinit"]
    layers = asdict(RepformerOptions()) | section["repformer"]
    embedding = affine_from_checkpoint(arrays, "type_embedding.embedding.embedding_net.layers.0")
    defaults: Tree = {"concat_output_tebd": True, "smooth": True, "trainable": True, "use_econf_tebd": False}
    defaults |= {"add_tebd_to_repinit_out": section.get("repformer_add_type_ebd_to_seq", False), "exclude_types": []}
    tree = defaults | {key: value for key, value in section.items() if key not in ("repinit", "repformer")}
    tree |= {
        "type": "dpa2",
        "repinit_args": first,
        "repformer_args": layers,
        "precision": arrays["repformers.g2_embd.matrix"].dtype.name,
        "type_embedding": {"embedding": {"layers": [embedding | {"activation_function": "linear"}]}},
        "repinit_variable": _block_of_checkpoint(arrays, "repinit"),
        "repformers_variable": {
            "@variables": {"davg": arrays["repformers.mean"], "dstd": arrays["repformers.stddev"]},
            "g2_embd": affine_from_checkpoint(arrays, "repformers.g2_embd"),
            "repformer_layers": [
                _layer_of_checkpoint(arrays, f"repformers.layers.{i}") for i in range(layers["nlayers"])
            ],
        },
    }
    if first["use_three_body"]:
        tree["repinit_three_body_variable"] = _block_of_checkpoint(arrays, "repinit_three_body")
    for name in ("g1_shape_tranform", "tebd_transform"):
        if f"{name}.matrix" in arrays:
            tree[name] = affine_from_checkpoint(arrays, name)
    return tree


def _block_of_checkpoint(arrays: Mapping[str, np.ndarray], name: str) -> Tree:
    stripped = networks_of_checkpoint(arrays, f"{name}.filter_layers_strip.networks")
    return {
        "@variables": {"davg": arrays[f"{name}.mean"], "dstd": arrays[f"{name}.stddev"]},
        "embeddings": {"networks": networks_of_checkpoint(arrays, f"{name}.filter_layers.networks")},
        **({"embeddings_strip": {"networks": stripped}} if stripped else {}),
    }


def _layer_of_checkpoint(arrays: Mapping[str, np.ndarray], name: str) -> Tree:
    layer: Tree = {
        key: affine_from_checkpoint(arrays, f"{name}.{key}")
        for key in (*_AFFINE, "attn2_lm")
        if f"{name}.{key}.matrix" in arrays
    }
    for part, maps in _PARTS.items():
        if any(key.startswith(f"{name}.{part}.") for key in arrays):
            layer[part] = {theirs: affine_from_checkpoint(arrays, f"{name}.{part}.{theirs}") for theirs in maps}
    residuals: Tree = {key: [] for key in _RESIDUALS}
    for key, factors in residuals.items():
        while f"{name}.{key}.{len(factors)}" in arrays:
            factors.append(arrays[f"{name}.{key}.{len(factors)}"])
    return layer | {"@variables": residuals}


# ---- writing


def dpa2_tree(descriptor: Dpa2) -> Tree:
    """The descriptor as DeePMD-kit's class `Descriptor`."""
    options, first, layers = descriptor.options, descriptor.options.repinit, descriptor.options.repformer
    rooms = {"repinit.nsel": first.nsel, "repformer.nsel": layers.nsel}
    if first.use_three_body:
        rooms["repinit.three_body_sel"] = first.three_body_sel
    for key, room in rooms.items():
        if room is None:
            raise ForgefieldError(
                f"the model was trained without model.descriptor.{key}, by which DeePMD-kit divides; train with it to export."
            )
    n, precision = len(descriptor.species), precision_of(descriptor.repinit.embedding)
    settings = asdict(options)
    tree: Tree = {
        "@class": "Descriptor",
        "type": "dpa2",
        "@version": 3,
        **{key: settings[key] for key in _SAME},
        "ntypes": n,
        "type_map": list(descriptor.species),
        "exclude_types": [list(pair) for pair in options.exclude_types],
        "env_protection": options.env_protection,
        "use_tebd_bias": options.use_tebd_bias,
        "precision": precision,
        "repinit_args": _repinit_args(first) | {"rcut": descriptor.cutoff},
        "repformer_args": {key: getattr(layers, key) for key in REPFORMER},
        "type_embedding": type_embedding_tree(descriptor.repinit, precision),
        "g1_shape_tranform": {"@class": "Identity", "@version": 1},
        "repinit_variable": {
            "embeddings": collection_tree(descriptor.repinit.embedding, n, "embedding_network"),
            "env_mat": env_mat_tree(descriptor.cutoff, first.rcut_smth),
            "@variables": _statistics(first.davg, first.dstd, first.nsel, precision),
        },
        "repformers_variable": {
            "g2_embd": _affine_tree(descriptor.repformer.g2_embd, precision),
            "repformer_layers": [_layer_tree(descriptor, layer, precision) for layer in descriptor.repformer.layers],
            "env_mat": env_mat_tree(options.layers_cutoff, layers.rcut_smth),
            "@variables": _statistics(layers.davg, layers.dstd, layers.nsel, precision),
        },
    }
    if descriptor.repinit.type_network is not None:
        stripped = collection_tree(descriptor.repinit.type_network, n, "embedding_network")
        tree["repinit_variable"]["embeddings_strip"] = stripped
    if descriptor.g1_transform is not None:
        tree["g1_shape_tranform"] = _affine_tree(descriptor.g1_transform, precision)
    if descriptor.tebd_transform is not None:
        tree["tebd_transform"] = _affine_tree(descriptor.tebd_transform, precision)
    if descriptor.pairs is not None:
        tree["repinit_three_body_variable"] = {
            **pairs_tree(descriptor.pairs, n),
            "env_mat": env_mat_tree(first.three_body_rcut, first.three_body_rcut_smth),
            "@variables": _statistics(first.three_body_davg, first.three_body_dstd, first.three_body_sel, precision),
        }
    return tree


def _repinit_args(first: RepinitOptions) -> Tree:
    settings = {key: getattr(first, key) for key in REPINIT}
    return settings | {"three_body_sel": 40 if first.three_body_sel is None else first.three_body_sel}


def _statistics(
    davg: list[list[float]] | None, dstd: list[list[float]] | None, room: int | str | None, precision: str
) -> Tree:
    assert isinstance(room, int)
    return {"davg": in_all_slots(davg, room, precision), "dstd": in_all_slots(dstd, room, precision)}


def _affine_tree(affine: Affine, precision: str) -> Tree:
    arrays = {"w": numpy_of(affine.w), "b": None if affine.b is None else numpy_of(affine.b), "idt": None}
    trainable = affine.w.requires_grad
    return layer_tree(arrays, activation="none", resnet=False, precision=precision, trainable=trainable)


def _layer_tree(descriptor: Dpa2, layer: RepformerLayer, precision: str) -> Tree:
    options = layer.options
    tree: Tree = {"@class": "RepformerLayer", "@version": 2, **{key: getattr(options, key) for key in _OF_LAYER}}
    tree |= {
        "rcut": options.rcut,
        "rcut_smth": options.rcut_smth,
        "sel": [options.nsel],
        "ntypes": len(descriptor.species),
        "update_chnnl_2": layer.linear2 is not None,
        "update_g2_has_g1g1": layer.has_products,
        "update_g2_has_attn": layer.has_attention,
        "update_h2": layer.has_vectors,
        "smooth": descriptor.options.smooth,
        "precision": precision,
    }
    for key in _AFFINE:
        affine = getattr(layer, key)
        if affine is not None:
            tree[key] = _affine_tree(affine, precision)
    for part, maps in _PARTS.items():
        module = getattr(layer, part)
        if module is not None:
            head: Tree = {
                "@class": _CLASSES[part],
                "@version": 1,
                **_settings(part, layer, descriptor),
                "precision": precision,
            }
            tree[part] = head | {
                theirs: _affine_tree(getattr(module, ours), precision) for theirs, ours in maps.items()
            }
    if layer.attn2_lm is not None:
        tree["attn2_lm"] = _norm_tree(layer.attn2_lm, precision)
    if options.update_style == "res_residual":
        tree["@variables"] = {key: [numpy_of(factors) for factors in getattr(layer, key)] for key in _RESIDUALS}
    return tree


def _settings(part: str, layer: RepformerLayer, descriptor: Dpa2) -> Tree:
    options, smooth = layer.options, {"smooth": descriptor.options.smooth, "attnw_shift": 20.0}
    if part == "loc_attn":
        sizes = {"input_dim": options.g1_dim, "hidden_dim": options.attn1_hidden, "head_num": options.attn1_nhead}
        return sizes | smooth
    common: Tree = {"input_dim": options.g2_dim, "head_num": options.attn2_nhead}
    if part == "attn2g_map":
        return common | {"hidden_dim": options.attn2_hidden, "has_gate": options.attn2_has_gate} | smooth
    return common


def _norm_tree(norm: Norm, precision: str) -> Tree:
    return {
        "@class": "LayerNorm",
        "@version": 1,
        "eps": norm.eps,
        "trainable": norm.scale.requires_grad,
        "precision": precision,
        "@variables": {"w": numpy_of(norm.scale), "b": numpy_of(norm.shift)},
    }
