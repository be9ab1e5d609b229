"""DeePMD-kit's backend-free form of the descriptor of angles, `se_e3`, reading and writing.

DeePMD-kit numbers a network for every ordered pair of species and uses those whose first species is not after the second.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_networks import (
    Arrays,
    Tree,
    collection_tree,
    precision_of,
    refuse,
    stacked_state,
    weights_of,
)
from forgefield.models.deeppot.deepmd_two_body import FittingInputs, embedding_options, rows_tree, tree_of_rows
from forgefield.models.deeppot.se_e3 import SeE3

SAME = ("rcut_smth", "neuron", "resnet_dt", "activation_function", "set_davg_zero")
"""Settings with the same name and meaning in both forms."""


def three_body_from_tree(section: Tree, n_species: int) -> tuple[Tree, Arrays]:
    """Options and state of se_e3."""
    refuse("descriptor", section, {"compress": ()})
    options = {key: section[key] for key in SAME} | embedding_options(section)
    if any(value != 0 for row in options["davg"] for value in row[1:]):
        raise ForgefieldError("descriptor.davg is not 0 for directions, which has no counterpart here.")
    options["davg"] = [[0.0] * 4] * n_species  # that of the first number of a row has no effect
    networks = section["embeddings"]["networks"]
    used = [networks[b * n_species + a] for a, b in _pairs(n_species)]
    return {"type": "se_e3", **options}, stacked_state("networks", used)


def three_body_from_checkpoint(section: Tree, arrays: Mapping[str, np.ndarray], n_species: int) -> Tree:
    """The tree from settings of an input and arrays of a checkpoint."""
    return tree_of_rows(section, arrays, "seat.") | {"sel": np.asarray(section["sel"]).tolist()}


def three_body_tree(descriptor: SeE3, sel: list[int] | None, fitting: FittingInputs) -> Tree:
    """The descriptor as DeePMD-kit's class `Descriptor`. sel: requested slots, which are those of the model."""
    options, n = descriptor.options, len(descriptor.species)
    if sel is not None and sel != descriptor.slots:
        raise ForgefieldError(
            f"an se_e3 model divides by its numbers of slots, {descriptor.slots}, which cannot be changed; leave --sel out."
        )
    if isinstance(options.sel, list) and [max(1, number) for number in options.sel] != descriptor.slots:
        raise ForgefieldError("model.descriptor.slots is not sel, which DeePMD-kit divides by.")
    weights, numbers = weights_of(descriptor.networks), {pair: i for i, pair in enumerate(_pairs(n))}
    ordered = [weights[numbers[min(a, b), max(a, b)]] for b in range(n) for a in range(n)]
    return {
        **rows_tree(descriptor, descriptor.slots, options.davg, options.dstd),
        "@version": 2,
        "type": "se_e3",
        "set_davg_zero": options.set_davg_zero,
        "precision": precision_of(descriptor.networks),
        "embeddings": collection_tree(descriptor.networks, n, "embedding_network", ndim=2, weights=ordered),
    }


def _pairs(n_species: int) -> list[tuple[int, int]]:
    """Pairs of species in Forgefield's order of networks."""
    return [(a, b) for a in range(n_species) for b in range(a, n_species)]
