"""Models with a pair table (`use_srtab`) in DeePMD-kit's files, where they are of type zbl: a network and a table, mixed.

In Forgefield the table is an option of the network's model. Both parts must add the same energies of species, which DeePMD-kit
does unless `srtab_add_bias` is false: Forgefield adds one set of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import CubicSpline

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_descriptors import cutoff_of_tree
from forgefield.models.deeppot.deepmd_networks import Tree
from forgefield.models.deeppot.options import DeepPotOptions
from forgefield.models.deeppot.short_range import SMIN_ALPHA


def split_table(model: Tree) -> tuple[Tree, Tree]:
    """The standard model in a model of type zbl, with the bias of the whole, and the options of the table."""
    network, table = model["models"]
    if network.get("type", "standard") != "standard" or table.get("type") != "pairtab":
        raise ForgefieldError("the model mixes other things than a network and a pair table.")
    biases = [np.asarray(part["@variables"]["out_bias"], dtype=np.float64).ravel() for part in (network, table, model)]
    inner = network["fitting"]["@variables"].get("bias_atom_e")
    if not np.array_equal(biases[0], biases[1]) or (inner is not None and np.any(inner)):
        raise ForgefieldError(
            "network and pair table add different energies of species (srtab_add_bias: false), which is not supported."
        )
    for part, name in ((table, "pair table"), (network, "network")):
        if part.get("atom_exclude_types") or part.get("pair_exclude_types"):
            raise ForgefieldError(f"the {name} of the model excludes types on its own, which is not supported.")
    bias = (biases[0] + biases[2]).reshape(1, -1, 1)
    excluded = {key: model.get(key, []) for key in ("atom_exclude_types", "pair_exclude_types")}
    standard = {**network, **excluded, "@variables": {**network["@variables"], "out_bias": bias}}
    rows = np.asarray(table["tab"]["@variables"]["vdata"], dtype=np.float64)
    options: Tree = {name: float(model[name]) for name in ("smin_alpha", "sw_rmin", "sw_rmax")}
    energies = rows[:, 1:].tolist()
    options["srtab"] = {"start": float(table["tab"]["rmin"]), "step": float(table["tab"]["hh"]), "energies": energies}
    return standard, options


def joined_table(
    standard: Tree, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any], smin_alpha: float | None
) -> Tree:
    """A model of type zbl from the arrays of a checkpoint.

    standard: its network. smin_alpha: as the file states it, A; that in `settings` is of the input, and DeePMD-kit's PyTorch
    does not use it.
    """
    table = table_of_checkpoint(arrays, "models.1.")
    return {
        "type": "zbl",
        "type_map": settings["type_map"],
        "atom_exclude_types": settings.get("atom_exclude_types", []),
        "pair_exclude_types": settings.get("pair_exclude_types", []),
        "@variables": {"out_bias": arrays["out_bias"]},
        "models": [standard | {"atom_exclude_types": [], "pair_exclude_types": []}, table],
        "sw_rmin": settings["sw_rmin"],
        "sw_rmax": settings["sw_rmax"],
        "smin_alpha": SMIN_ALPHA if smin_alpha is None else smin_alpha,
    }


def table_of_checkpoint(arrays: Mapping[str, np.ndarray], prefix: str) -> Tree:
    """The tree of a table from the arrays of a checkpoint. prefix: of their names."""
    start, step, count, n_types = (float(value) for value in np.ravel(arrays[f"{prefix}tab_info"]))
    splines = np.asarray(arrays[f"{prefix}tab_data"], dtype=np.float64).reshape(
        int(n_types), int(n_types), int(count), 4
    )
    pairs = [splines[a, b] for a in range(int(n_types)) for b in range(a, int(n_types))]
    # The constant of each piece is the energy at its beginning; the sum of the last piece that at its end.
    energies = np.stack([np.append(piece[:, 3], piece[-1].sum()) for piece in pairs], 1)
    distances = start + step * np.arange(len(energies))
    return {
        "type": "pairtab",
        "tab": {"rmin": start, "hh": step, "@variables": {"vdata": np.column_stack([distances, energies])}},
        "@variables": {"out_bias": arrays[f"{prefix}out_bias"]},
    }


def joined_sum(parts: list[Tree], arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> Tree:
    """A model of type linear from its parts and the arrays of a checkpoint."""
    return {
        "type": "linear",
        "type_map": settings["type_map"],
        "atom_exclude_types": settings.get("atom_exclude_types", []),
        "pair_exclude_types": settings.get("pair_exclude_types", []),
        "@variables": {"out_bias": arrays["out_bias"]},
        "models": parts,
        "weights": settings.get("weights", "mean"),
    }


class Sum(NamedTuple):
    """A model of type linear. standard: its first network, with the bias of the whole. weights: of the networks. others: the
    other networks. table: options of the table that is added."""

    standard: Tree
    weights: list[float]
    others: list[Tree]
    table: Tree


def split_sum(model: Tree) -> Sum:
    """The parts of a model of type linear."""
    parts, stated = model["models"], model["weights"]
    kinds = [part.get("type", "standard") for part in parts]
    factors = {"sum": [1.0] * len(parts), "mean": [1 / len(parts)] * len(parts)}
    weights = factors[stated] if isinstance(stated, str) else [float(weight) for weight in stated]
    tables = [number for number, kind in enumerate(kinds) if kind == "pairtab"]
    networks = [number for number, kind in enumerate(kinds) if kind == "standard"]
    if not networks or len(tables) > 1 or len(networks) + len(tables) != len(parts):
        raise ForgefieldError(
            f"the model is a combination of {', '.join(kinds)}; supported are sums of networks, with or without one table of "
            "pair energies."
        )
    if any(weights[number] != 1 for number in tables):
        raise ForgefieldError(f"the pair table in the model has the weight {weights[tables[0]]:g}; supported is 1.")
    if any(part["type_map"] != model["type_map"] for part in parts):
        raise ForgefieldError("the parts of the model and the model itself have different type maps.")
    if any(part.get(key) for part in parts for key in ("atom_exclude_types", "pair_exclude_types")):
        raise ForgefieldError("a part of the model excludes types on its own, which is not supported.")
    biases = [
        np.asarray(part["@variables"]["out_bias"], dtype=np.float64).reshape(1, -1, 1) for part in (*parts, model)
    ]
    bias = sum(weight * values for weight, values in zip([*weights, 1.0], biases, strict=True))
    for number in networks:  # of the first network, added by the caller
        inner = parts[number]["fitting"]["@variables"].get("bias_atom_e")
        if inner is not None and np.any(inner):
            raise ForgefieldError("a network in the model adds energies of species on its own, which is not supported.")
    excluded = {key: model.get(key, []) for key in ("atom_exclude_types", "pair_exclude_types")}
    options: Tree = {}
    reach = max(cutoff_of_tree(parts[number]["descriptor"]) for number in networks)
    for number in tables:
        table = parts[number]
        rows = np.asarray(table["tab"]["@variables"]["vdata"], dtype=np.float64)
        read = {
            "start": float(table["tab"]["rmin"]),
            "step": float(table["tab"]["hh"]),
            "energies": rows[:, 1:].tolist(),
        }
        options = {"added_table": read, "pair_table_cutoff": float(table["rcut"])}
        reach = max(reach, float(table["rcut"]))
    first, *others = (
        parts[number] | {"descriptor": _within(parts[number]["descriptor"], reach)} for number in networks
    )
    standard = {**first, **excluded, "@variables": {**first["@variables"], "out_bias": bias}}
    return Sum(standard, [weights[number] for number in networks], others, options)


def _within(descriptor: Tree, reach: float) -> Tree:
    """The descriptor, also where neighbour lists reach farther, A."""
    if cutoff_of_tree(descriptor) >= reach or descriptor["type"] == "hybrid":
        return descriptor
    return {"type": "hybrid", "list": [descriptor]}


def sum_tree(standard: Tree, others: Sequence[Tree], options: DeepPotOptions, cutoff: float) -> Tree:
    """A model of type linear for DeePMD-kit.

    standard: the tree of its first network, with the bias of the whole. others: of the other networks.
    """
    bias = standard["@variables"]["out_bias"]
    nothing: dict[str, Any] = {"atom_exclude_types": [], "pair_exclude_types": []}
    variables = {"out_bias": np.zeros_like(bias), "out_std": np.ones_like(bias)}
    common = {"rcond": None, "preset_out_bias": None, "@class": "Model", "type_map": standard["type_map"]}
    parts = [_single(network) | nothing | {"@variables": variables} for network in (standard, *others)]
    weights = [options.network_weight, *(float(section["weight"]) for section in options.networks)]
    if options.added_table is not None:
        end = cutoff if options.pair_table_cutoff is None else float(options.pair_table_cutoff)
        reach = max(1.0, end / float(parts[0]["descriptor"]["rcut"])) ** 3
        table = {
            **common,
            **nothing,
            "@version": 2,
            "type": "pairtab",
            "@variables": variables,
            "tab": _tab(options.added_table, len(standard["type_map"]), end),
            "rcut": end,
            "sel": int(np.ceil(np.sum(parts[0]["descriptor"]["sel"]) * reach)),
        }
        parts, weights = [*parts, table], [*weights, 1.0]
    return {
        **common,
        **{key: standard[key] for key in nothing},
        "@version": 3,
        "type": "linear_ener",  # DeePMD-kit 3.2 writes linear, which it does not read
        "@variables": {"out_bias": bias, "out_std": np.ones_like(bias)},
        "models": parts,
        "weights": "sum" if set(weights) == {1.0} else weights,
    }


def _single(network: Tree) -> Tree:
    """The network with its one descriptor, also where that has a shorter cutoff than the model."""
    parts = network["descriptor"].get("list", [])
    network = {**network, "descriptor": parts[0]} if len(parts) == 1 else network
    if network["descriptor"].get("sel") is None:
        raise ForgefieldError("DeePMD-kit adds to networks with one descriptor; this one has a hybrid of several.")
    return network


def table_tree(standard: Tree, options: DeepPotOptions, cutoff: float) -> Tree:
    """A model of type zbl for DeePMD-kit. standard: the tree of its network, with the bias of the whole."""
    assert options.srtab is not None
    if "sel" not in standard["descriptor"]:
        kind = standard["descriptor"]["type"]
        raise ForgefieldError(
            f"the model has a pair table (use_srtab) with the descriptor {kind}, which is not exported."
        )
    species, bias = standard["type_map"], standard["@variables"]["out_bias"]
    excluded = {key: standard[key] for key in ("atom_exclude_types", "pair_exclude_types")}
    common = {"rcond": None, "preset_out_bias": None, "@class": "Model", "@version": 2, "type_map": species}
    ones = np.ones_like(bias)
    none: dict[str, list[Any]] = {"atom_exclude_types": [], "pair_exclude_types": []}
    table = {
        **common,
        **none,
        "type": "pairtab",
        "@variables": {"out_bias": bias, "out_std": ones},
        "tab": _tab(options.srtab, len(species), cutoff),
        "rcut": cutoff,
        "sel": int(np.sum(standard["descriptor"]["sel"])),
    }
    return {
        **common,
        **excluded,
        "type": "zbl",
        "@variables": {"out_bias": np.zeros_like(bias), "out_std": ones},
        "models": [standard | none, table],
        "weights": "mean",
        **{name: float(getattr(options, name)) for name in ("sw_rmin", "sw_rmax", "smin_alpha")},
    }


def _tab(table: Mapping[str, Any], n_species: int, cutoff: float) -> Tree:
    """The table itself, and its splines: cubic polynomials in the share of a step."""
    energies = np.asarray(table["energies"], dtype=np.float64)
    start, step, count = float(table["start"]), float(table["step"]), len(energies) - 1
    distances = start + step * np.arange(count + 1)
    splines = np.zeros((n_species, n_species, count, 4))
    pairs = [(a, b) for a in range(n_species) for b in range(a, n_species)]
    for (a, b), column in zip(pairs, energies.T, strict=True):
        pieces = CubicSpline(distances, column, bc_type="clamped").c.T * step ** np.arange(3, -1, -1)
        splines[a, b] = splines[b, a] = pieces
    return {
        "@class": "PairTab",
        "@version": 1,
        "rmin": start,
        "rmax": float(distances[-1]),
        "hh": step,
        "ntypes": n_species,
        "rcut": cutoff,
        "nspline": count,
        "@variables": {
            "vdata": np.column_stack([distances, energies]),
            "tab_info": np.array([start, step, count, n_species], dtype=np.float64),
            "tab_data": splines.ravel(),
        },
    }
