"""DeePMD-kit's backend-free form of the two-body descriptors, reading and writing.

DeePMD-kit needs slots for neighbours. A descriptor that was trained without gets them; the contribution of empty slots is
subtracted in the weights, so that predictions are the same for any sufficient number of slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_networks import (
    Arrays,
    Tree,
    Weights,
    collection_tree,
    networks_of_checkpoint,
    one_per_centre,
    precision_of,
    refuse,
    stacked_state,
    weights_of,
)
from forgefield.models.deeppot.networks import Networks
from forgefield.models.deeppot.options import SeE2AOptions
from forgefield.models.deeppot.se_e2 import RADIAL_SCALE, TwoBodyDescriptor

SPARE = 1.1
"""Slots for neighbours, relative to the largest number in the training data: DeePMD-kit's choice."""
SAME = ("rcut_smth", "neuron", "resnet_dt", "type_one_side", "set_davg_zero", "activation_function", "trainable")
"""Settings with the same name and meaning in both forms."""


@dataclass
class FittingInputs:
    """The fitting networks behind a descriptor, which may absorb constants that slots add to it.

    networks: their shape. weights: of each, changed in place. first: index of the descriptor's first number among their inputs.
    """

    networks: Networks
    weights: list[Weights]
    first: int = 0


# ---- reading


def two_body_from_tree(section: Tree, n_species: int) -> tuple[Tree, Arrays]:
    """Options and state of se_e2_a and se_e2_r."""
    refuse("descriptor", section, {"spin": (), "compress": ()})
    options = {key: section[key] for key in SAME} | embedding_options(section)
    options["type"] = {"se_a": "se_e2_a", "se_r": "se_e2_r"}.get(section["type"], section["type"])
    if options["type"] == "se_e2_a":
        options["axis_neuron"] = section["axis_neuron"]
    networks = section["embeddings"]["networks"]
    if not section["type_one_side"]:  # here they are numbered by centre, then neighbour
        networks = [networks[b * n_species + a] for a in range(n_species) for b in range(n_species)]
    return options, stacked_state("networks", networks)


def embedding_options(section: Tree) -> Tree:
    """Options of the rows and networks of descriptors with slots for each species."""
    variables = section["@variables"]
    return {
        "sel": [int(number) for number in section["sel"]],
        "precision": section["precision"],
        "trainable": bool(np.all(section["trainable"])),
        "exclude_types": [list(pair) for pair in section["exclude_types"]],
        "env_protection": float(section.get("env_protection", 0.0)),
        "davg": one_per_centre("davg", variables["davg"]),
        "dstd": one_per_centre("dstd", variables["dstd"]),
    }


def two_body_from_checkpoint(section: Tree, arrays: Mapping[str, np.ndarray], n_species: int) -> Tree:
    """The tree from settings of an input and arrays of a checkpoint."""
    prefix = "sea." if "sea.mean" in arrays else ""
    tree = tree_of_rows(section, arrays, prefix)
    networks = tree["embeddings"]["networks"]
    if len(networks) not in (n_species, n_species**2):
        raise ForgefieldError(f"the descriptor has {len(networks)} networks for {n_species} types.")
    return tree | {"type_one_side": len(networks) == n_species}


def tree_of_rows(section: Tree, arrays: Mapping[str, np.ndarray], prefix: str) -> Tree:
    """The tree of a descriptor with one set of embedding networks. prefix: of its arrays."""
    networks = networks_of_checkpoint(arrays, f"{prefix}filter_layers.networks")
    return {
        **section,
        "@variables": {"davg": arrays[f"{prefix}mean"], "dstd": arrays[f"{prefix}stddev"]},
        "embeddings": {"networks": networks},
        "precision": networks[0]["layers"][0]["@variables"]["w"].dtype.name,
    }


# ---- writing


def two_body_tree(descriptor: TwoBodyDescriptor[Any], sel: list[int] | None, fitting: FittingInputs) -> Tree:
    """The descriptor as DeePMD-kit's class `Descriptor`.

    sel: slots for neighbours of each species, for a model that was trained without; None: from its training data. fitting: what
    reads it.
    """
    options = descriptor.options
    settings: Tree = {
        "sel": options.sel,
        "davg": options.davg,
        "dstd": options.dstd,
        "type_one_side": options.type_one_side,
        "set_davg_zero": options.set_davg_zero,
    }
    embedding = weights_of(descriptor.networks)
    if options.sel is not None:
        require_slots_of_training(options, sel)
    else:
        settings["sel"] = slots = enough_slots(sel, options.most_neighbours, descriptor.species)
        if isinstance(options, SeE2AOptions):
            _fold_into_embedding(descriptor, settings, embedding)
        else:
            _fold_into_fitting(descriptor, slots, embedding, fitting)
    return _tree(descriptor, settings, embedding)


def require_slots_of_training(options: Any, sel: list[int] | None) -> None:
    """Raise if a model with `sel` is to be written with another one, or divides by another number."""
    if sel is not None and sel != options.sel:
        raise ForgefieldError(f"the model was trained with sel {options.sel}, which cannot be changed.")
    if options.neighbour_norm != float(sum(options.sel)):
        raise ForgefieldError("model.descriptor.neighbour_norm is not the sum of sel, which DeePMD-kit divides by.")


def enough_slots(sel: list[int] | None, most: list[int] | None, species: Sequence[str]) -> list[int]:
    """Slots for neighbours of each species. most: largest number of each in the training data."""
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


def _fold_into_embedding(descriptor: TwoBodyDescriptor[Any], settings: Tree, embedding: list[Weights]) -> None:
    """se_e2_a: rows are still zero at the cutoff; shift and scale of the networks' inputs move into their first layer."""
    options, n = descriptor.options, len(descriptor.species)
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


def _fold_into_fitting(
    descriptor: TwoBodyDescriptor[Any], sel: list[int], embedding: list[Weights], fitting: FittingInputs
) -> None:
    """se_e2_r: the first layer of the fitting network subtracts the constant that empty slots add to a descriptor."""
    options, n = descriptor.options, len(descriptor.species)
    problem = "exclude_types" if options.exclude_types else ""
    if fitting.networks.layers[0].repeats:
        problem = f"{fitting.networks.sizes[1]} fitting neurons"
    if len(fitting.weights) != n:
        problem = "one fitting network for all species"
    if problem:
        raise ForgefieldError(f"an se_e2_r model with {problem} can be exported to DeePMD-kit only if it has sel.")
    total = sum(sel)
    at_end = descriptor.empty_embedding().detach().double().numpy()
    constants = RADIAL_SCALE / total * np.einsum("b,abm->am", np.array(sel, dtype=float), at_end.reshape(n, n, -1))
    ratio, rows = total / options.neighbour_norm, slice(fitting.first, fitting.first + at_end.shape[1])
    for number, network in enumerate(fitting.weights):
        first = network[0]
        first["w"][rows] *= ratio
        first["b"] = first["b"] - constants[number] @ first["w"][rows]


def _tree(descriptor: TwoBodyDescriptor[Any], settings: Tree, embedding: list[Weights]) -> Tree:
    options, networks, n = descriptor.options, descriptor.networks, len(descriptor.species)
    if options.type == "se_e2_r" and not settings["type_one_side"]:
        raise ForgefieldError("DeePMD-kit's se_e2_r has one network per species (type_one_side: true) only.")
    if not settings["type_one_side"]:  # DeePMD-kit's are numbered by neighbour, then centre
        embedding = [embedding[a * n + b] for b in range(n) for a in range(n)]
    ndim = 1 if settings["type_one_side"] else 2
    tree = {
        **rows_tree(descriptor, settings["sel"], settings["davg"], settings["dstd"]),
        "@version": 2,
        "type": "se_e2_a" if options.type == "se_e2_a" else "se_r",
        "type_one_side": settings["type_one_side"],
        "set_davg_zero": settings["set_davg_zero"],
        "precision": precision_of(networks),
        "spin": None,
        "embeddings": collection_tree(networks, n, "embedding_network", ndim=ndim, weights=embedding),
    }
    return tree | ({"axis_neuron": options.axis_neuron} if options.type == "se_e2_a" else {})


def rows_tree(descriptor: Any, sel: list[int], davg: list[list[float]] | None, dstd: list[list[float]] | None) -> Tree:
    """Settings of the rows of a descriptor with slots for each species, and of the shape of its networks."""
    options = descriptor.options
    values = {"davg": davg, "dstd": dstd}
    return {
        "@class": "Descriptor",
        "rcut": descriptor.cutoff,
        "rcut_smth": options.rcut_smth,
        "sel": sel,
        "neuron": list(options.neuron),
        "resnet_dt": options.resnet_dt,
        "trainable": options.trainable,
        "exclude_types": [list(pair) for pair in options.exclude_types],
        "env_protection": options.env_protection,
        "activation_function": options.activation_function,
        "type_map": list(descriptor.species),
        "env_mat": {"rcut": descriptor.cutoff, "rcut_smth": options.rcut_smth},
        "@variables": {key: np.repeat(np.array(rows)[:, None], sum(sel), 1) for key, rows in values.items()},
    }
