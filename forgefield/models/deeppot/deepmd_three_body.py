"""DeePMD-kit's backend-free form of the descriptor se_e3_tebd, reading and writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_attention import (
    in_all_slots,
    type_embedding_state,
    type_embedding_tree,
    type_tree_of_checkpoint,
)
from forgefield.models.deeppot.deepmd_networks import (
    Arrays,
    Tree,
    collection_tree,
    one_per_centre,
    precision_of,
    refuse,
    stacked_state,
)
from forgefield.models.deeppot.deepmd_two_body import tree_of_rows
from forgefield.models.deeppot.three_body import SeE3Tebd, ThreeBody

_SAME = (
    "rcut_smth", "neuron", "tebd_dim", "tebd_input_mode", "resnet_dt", "set_davg_zero", "activation_function",
    "env_protection", "precision", "trainable", "concat_output_tebd", "use_econf_tebd", "smooth",
)  # fmt: skip
"""Settings with the same name and meaning in both forms."""


def three_body_from_tree(section: Mapping[str, Any]) -> tuple[Tree, Arrays]:
    """Options and state of a descriptor of type se_e3_tebd."""
    refuse("descriptor", section, {"compress": ()})
    variables, sel = section["@variables"], section["sel"]
    embedding = type_embedding_state(section["type_embedding"])
    options = {key: section[key] for key in _SAME}
    options |= {
        "type": "se_e3_tebd",
        "sel": [int(number) for number in (sel if isinstance(sel, (list, tuple)) else [sel])],
        "use_tebd_bias": "type_embedding.b" in embedding,
        "exclude_types": [list(pair) for pair in section["exclude_types"]],
        "davg": one_per_centre("davg", variables["davg"]),
        "dstd": one_per_centre("dstd", variables["dstd"]),
    }
    options["set_davg_zero"] = bool(section["set_davg_zero"]) and not np.any(variables["davg"])
    return options, pairs_state("pairs", section) | embedding


def pairs_state(name: str, section: Mapping[str, Any]) -> Arrays:
    """State of `ThreeBody` under `name`."""
    state = stacked_state(f"{name}.embedding", section["embeddings"]["networks"])
    if "embeddings_strip" in section:
        state |= stacked_state(f"{name}.type_network", section["embeddings_strip"]["networks"])
    return state


def three_body_from_checkpoint(section: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """The tree from settings of an input and arrays of a checkpoint."""
    return tree_of_rows(section, arrays, "se_ttebd.") | type_tree_of_checkpoint(section, arrays, "se_ttebd.")


def three_body_tree(descriptor: SeE3Tebd) -> Tree:
    """The descriptor as DeePMD-kit's class `Descriptor`."""
    options, precision = descriptor.options, precision_of(descriptor.pairs.embedding)
    if descriptor.room is None:
        raise ForgefieldError(
            "the model was trained without model.descriptor.sel, by which DeePMD-kit divides; train with sel to export."
        )
    settings = asdict(options)
    return {
        "@class": "Descriptor",
        "type": "se_e3_tebd",
        "@version": 1,
        **{key: settings[key] for key in _SAME},
        "rcut": descriptor.cutoff,
        "sel": list(options.sel) if isinstance(options.sel, list) else [options.sel],
        "ntypes": len(descriptor.species),
        "type_map": list(descriptor.species),
        "exclude_types": [list(pair) for pair in options.exclude_types],
        "precision": precision,
        "env_mat": env_mat_tree(descriptor.cutoff, options.rcut_smth),
        "type_embedding": type_embedding_tree(descriptor, precision),
        "@variables": {
            "davg": in_all_slots(options.davg, descriptor.room, precision),
            "dstd": in_all_slots(options.dstd, descriptor.room, precision),
        },
        **pairs_tree(descriptor.pairs, len(descriptor.species)),
    }


def pairs_tree(pairs: ThreeBody, n_species: int) -> Tree:
    """Networks of the sum over pairs."""
    tree = {"embeddings": collection_tree(pairs.embedding, n_species, "embedding_network")}
    if pairs.type_network is not None:
        tree["embeddings_strip"] = collection_tree(pairs.type_network, n_species, "embedding_network")
    return tree


def env_mat_tree(cutoff: float, start: float) -> Tree:
    """Cutoff and beginning of the switch, A."""
    return {"rcut": cutoff, "rcut_smth": start}
