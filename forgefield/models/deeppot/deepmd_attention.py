"""DeePMD-kit's backend-free form of the attention descriptors, reading and writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.attention import AttentionLayer
from forgefield.models.deeppot.deepmd_networks import (
    Arrays,
    Tree,
    affine_tree,
    collection_tree,
    layer_state,
    layer_tree,
    layer_weights,
    networks_of_checkpoint,
    numpy_of,
    one_per_centre,
    precision_of,
    refuse,
    stacked_state,
)
from forgefield.models.deeppot.deepmd_two_body import tree_of_rows
from forgefield.models.deeppot.repflow import Dpa3
from forgefield.models.deeppot.se_atten import SeAtten
from forgefield.models.deeppot.three_body import SeE3Tebd

TYPES = {"dpa1": "se_atten", "se_atten": "se_atten", "se_atten_v2": "se_atten_v2"}
"""Forgefield's type by DeePMD-kit's."""
_SAME = (
    "rcut_smth", "neuron", "axis_neuron", "tebd_dim", "resnet_dt", "type_one_side", "attn", "attn_layer", "attn_dotr",
    "attn_mask", "activation_function", "scaling_factor", "normalize", "temperature", "trainable_ln", "ln_eps",
    "concat_output_tebd", "use_econf_tebd", "precision", "trainable",
)  # fmt: skip
"""Settings with the same name and meaning in both forms."""


def attention_from_tree(section: Mapping[str, Any]) -> tuple[Tree, Arrays]:
    """Options and state of a descriptor of type dpa1, se_atten or se_atten_v2."""
    refuse("descriptor", section, {"spin": (), "compress": (), "lmax": (1,)})
    refuse("descriptor.env_mat", section.get("env_mat", {}), {"use_exp_switch": (False,)})
    variables = section["@variables"]
    options = {key: section[key] for key in _SAME}
    options |= {
        "type": TYPES[section["type"]],
        "sel": [int(number) for number in section["sel"]],
        "use_tebd_bias": section.get("use_tebd_bias", True),
        "exclude_types": [list(pair) for pair in section["exclude_types"]],
        "env_protection": float(section.get("env_protection", 0.0)),
        "davg": one_per_centre("davg", variables["davg"]),
        "dstd": one_per_centre("dstd", variables["dstd"]),
        # In DeePMD-kit it determines how statistics are computed, here that means are zero.
        "set_davg_zero": bool(section["set_davg_zero"]) and not np.any(variables["davg"]),
    }
    if options["type"] == "se_atten":
        options |= {key: section[key] for key in ("tebd_input_mode", "smooth_type_embedding")}
    state = stacked_state("embedding", section["embeddings"]["networks"])
    if "embeddings_strip" in section:
        state |= stacked_state("type_network", section["embeddings_strip"]["networks"])
    state |= type_embedding_state(section["type_embedding"])
    for number, layer in enumerate(section["attention_layers"]["attention_layers"]):
        state |= {f"attention.{number}.{key}": value for key, value in _attention_state(layer).items()}
    return options, state


def attention_from_checkpoint(section: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """The tree from settings of an input and arrays of a checkpoint."""
    layers: list[Tree] = []
    inside = "se_atten.dpa1_attention.attention_layers"
    while f"{inside}.{len(layers)}.attn_layer_norm.matrix" in arrays:
        one = f"{inside}.{len(layers)}"
        inner = {
            name: affine_from_checkpoint(arrays, f"{one}.attention_layer.{name}") for name in ("in_proj", "out_proj")
        }
        norm = affine_from_checkpoint(arrays, f"{one}.attn_layer_norm")
        layers.append({"attention_layer": inner, "attn_layer_norm": norm})
    tree = tree_of_rows(section, arrays, "se_atten.")
    return (
        tree
        | type_tree_of_checkpoint(section, arrays, "se_atten.")
        | {"attention_layers": {"attention_layers": layers}}
    )


def type_tree_of_checkpoint(section: Tree, arrays: Mapping[str, np.ndarray], prefix: str) -> Tree:
    """Slots for neighbours of any type, type embedding and the network that reads it. prefix: of the block's arrays."""
    sel = section["sel"]
    embedding = affine_from_checkpoint(arrays, "type_embedding.embedding.embedding_net.layers.0")
    stripped = networks_of_checkpoint(arrays, f"{prefix}filter_layers_strip.networks")
    return {
        "sel": [sel] if isinstance(sel, int) else list(sel),
        "type_embedding": {"embedding": {"layers": [embedding | {"activation_function": "linear"}]}},
        **({"embeddings_strip": {"networks": stripped}} if stripped else {}),
    }


def affine_from_checkpoint(arrays: Mapping[str, np.ndarray], name: str) -> Tree:
    """A layer among the arrays of a checkpoint."""
    return {"@variables": {"w": arrays[f"{name}.matrix"], "b": arrays.get(f"{name}.bias")}}


def type_embedding_state(section: Mapping[str, Any]) -> Arrays:
    layers = section["embedding"]["layers"]
    if len(layers) != 1 or str(layers[0]["activation_function"]).lower() not in ("linear", "none"):
        raise ForgefieldError("descriptor.type_embedding is not a single linear layer, which has no counterpart here.")
    state = layer_state(layers)
    return {f"type_embedding.{key}": value[0] for key, value in state.items()}


def _attention_state(section: Mapping[str, Any]) -> Arrays:
    inner, norm = section["attention_layer"], section["attn_layer_norm"]["@variables"]
    refuse("descriptor.attention_layers", inner, {"num_heads": (1,)})
    state: Arrays = {"norm_scale": norm["w"], "norm_shift": norm["b"]}
    for name, theirs in (("project_in", "in_proj"), ("project_out", "out_proj")):
        state |= {f"{name}.{key}": value for key, value in layer_state([inner[theirs]]).items()}
    return state


def attention_tree(descriptor: SeAtten) -> Tree:
    """The descriptor as DeePMD-kit's class `Descriptor`."""
    options = descriptor.options
    if descriptor.room is None:
        raise ForgefieldError(
            "the model was trained without model.descriptor.sel, by which DeePMD-kit divides; train with sel to export."
        )
    if options.attn_mask:
        raise ForgefieldError("model.descriptor.attn_mask is true, which DeePMD-kit's files do not support.")
    n, precision = len(descriptor.species), precision_of(descriptor.embedding)
    is_v2 = options.type == "se_atten_v2"
    tree: Tree = {"@class": "Descriptor", "type": "se_atten_v2" if is_v2 else "dpa1", "@version": 2}
    settings = asdict(options)
    tree |= {key: settings[key] for key in _SAME}
    tree |= {
        "rcut": descriptor.cutoff,
        "sel": list(options.sel) if isinstance(options.sel, list) else [options.sel],
        "ntypes": n,
        "type_map": list(descriptor.species),
        "use_tebd_bias": options.use_tebd_bias,
        "exclude_types": [list(pair) for pair in options.exclude_types],
        "env_protection": options.env_protection,
        "set_davg_zero": options.set_davg_zero,
        "precision": precision,
        "spin": None,
        "embeddings": collection_tree(descriptor.embedding, n, "embedding_network"),
        "attention_layers": _attention_tree(descriptor, precision),
        "env_mat": {
            "rcut": descriptor.cutoff,
            "rcut_smth": options.rcut_smth,
            "protection": options.env_protection,
            "use_exp_switch": False,
        },
        "type_embedding": type_embedding_tree(descriptor, precision),
        "@variables": {
            "davg": in_all_slots(options.davg, descriptor.room, precision),
            "dstd": in_all_slots(options.dstd, descriptor.room, precision),
        },
    }
    if not is_v2:
        tree |= {key: settings[key] for key in ("tebd_input_mode", "smooth_type_embedding")}
    if descriptor.type_network is not None:
        tree["embeddings_strip"] = collection_tree(descriptor.type_network, n, "embedding_network")
    return tree


def in_all_slots(rows: list[list[float]] | None, slots: int, precision: str) -> np.ndarray:
    """(n_species, slots, columns) of rows (n_species, columns)."""
    return np.repeat(np.asarray(rows, dtype=precision)[:, None], slots, 1)


def type_embedding_tree(descriptor: SeAtten | SeE3Tebd | Dpa3, precision: str) -> Tree:
    options, embedding = descriptor.options, descriptor.type_embedding
    width = embedding.w.shape[1]
    arrays = {"w": numpy_of(embedding.w), "b": None if embedding.b is None else numpy_of(embedding.b), "idt": None}
    how: Tree = {"activation_function": "Linear", "resnet_dt": False, "precision": precision}
    layer = layer_tree(arrays, activation="Linear", resnet=True, precision=precision, trainable=options.trainable)
    network = {
        "@class": "EmbeddingNetwork",
        "@version": 2,
        "in_dim": embedding.w.shape[0],
        "neuron": [width],
        "bias": options.use_tebd_bias,
        "layers": [layer],
    }
    return {
        "@class": "TypeEmbedNet",
        "@version": 2,
        "ntypes": len(descriptor.species),
        "neuron": [width],
        "trainable": options.trainable,
        "padding": True,
        "use_econf_tebd": options.use_econf_tebd,
        "use_tebd_bias": options.use_tebd_bias,
        "type_map": list(descriptor.species),
        "embedding": network | how,
    } | how


def _attention_tree(descriptor: SeAtten, precision: str) -> Tree:
    options = descriptor.options
    common: Tree = {
        "nnei": descriptor.room,
        "embed_dim": options.neuron[-1],
        "hidden_dim": options.attn,
        "dotr": options.attn_dotr,
        "do_mask": False,
        "scaling_factor": options.scaling_factor,
        "normalize": options.normalize,
        "temperature": options.temperature,
        "precision": precision,
    }
    outer = common | {"trainable_ln": options.trainable_ln, "ln_eps": options.ln_eps}
    inner = common | {"num_heads": 1, "bias": True, "smooth": descriptor.smooth}
    layers = [
        outer
        | {"attention_layer": inner | _projections(layer, precision), "attn_layer_norm": _norm_tree(layer, precision)}
        for layer in descriptor.attention
    ]
    head: Tree = {"@class": "NeighborGatedAttention", "@version": 1, "layer_num": len(layers)}
    return head | outer | {"attention_layers": layers}


def _projections(layer: AttentionLayer, precision: str) -> Tree:
    parts = {"in_proj": layer.project_in, "out_proj": layer.project_out}
    return {name: affine_tree(part, layer_weights(part)[0], precision, resnet=False) for name, part in parts.items()}


def _norm_tree(layer: AttentionLayer, precision: str) -> Tree:
    return {
        "@class": "LayerNorm",
        "@version": 1,
        "eps": layer.norm_eps,
        "trainable": layer.norm_scale.requires_grad,
        "precision": precision,
        "@variables": {"w": numpy_of(layer.norm_scale), "b": numpy_of(layer.norm_shift)},
    }
