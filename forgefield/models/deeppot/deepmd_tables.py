"""Models with a pair table (`use_srtab`) in DeePMD-kit's files, where they are of type zbl: a network and a table, mixed.

In Forgefield the table is an option of the network's model. Both parts must add the same energies of species, which DeePMD-kit
does unless `srtab_add_bias` is false: Forgefield adds one set of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.interpolate import CubicSpline

from forgefield.errors import ForgefieldError
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


def split_sum(model: Tree) -> tuple[Tree, Tree]:
    """The network in a model of type linear, with the bias of the whole, and the options of the table that is added."""
    parts, weights = model["models"], model["weights"]
    kinds = [part.get("type", "standard") for part in parts]
    if sorted(kinds) != ["pairtab", "standard"] or (weights != "sum" and list(weights) != [1.0, 1.0]):
        raise ForgefieldError(
            f"the model is a combination of {', '.join(kinds)} with the weights {weights}; supported is the sum of one network "
            "and one table of pair energies."
        )
    network, table = parts[kinds.index("standard")], parts[kinds.index("pairtab")]
    if any(part["type_map"] != model["type_map"] for part in parts):
        raise ForgefieldError("network, pair table and the model with both have different type maps.")
    if any(part.get(key) for part in parts for key in ("atom_exclude_types", "pair_exclude_types")):
        raise ForgefieldError("network or pair table exclude types on their own, which is not supported.")
    bias = sum(
        np.asarray(part["@variables"]["out_bias"], dtype=np.float64).reshape(1, -1, 1) for part in (*parts, model)
    )
    excluded = {key: model.get(key, []) for key in ("atom_exclude_types", "pair_exclude_types")}
    standard = {**network, **excluded, "@variables": {**network["@variables"], "out_bias": bias}}
    rows = np.asarray(table["tab"]["@variables"]["vdata"], dtype=np.float64)
    read = {"start": float(table["tab"]["rmin"]), "step": float(table["tab"]["hh"]), "energies": rows[:, 1:].tolist()}
    end = float(table["rcut"])
    if end > float(standard["descriptor"].get("rcut", np.inf)):  # the network sees less than the table
        standard["descriptor"] = {"type": "hybrid", "list": [standard["descriptor"]]}
    return standard, {"added_table": read, "pair_table_cutoff": end}


def sum_tree(standard: Tree, options: DeepPotOptions, cutoff: float) -> Tree:
    """A model of type linear for DeePMD-kit. standard: the tree of its network, with the bias of the whole."""
    assert options.added_table is not None
    end = cutoff if options.pair_table_cutoff is None else float(options.pair_table_cutoff)
    network, bias = dict(standard), standard["@variables"]["out_bias"]
    parts = network["descriptor"].get("list", [])
    if len(parts) == 1:
        (network["descriptor"],) = parts
    sel = network["descriptor"].get("sel")
    if sel is None:
        raise ForgefieldError(
            "DeePMD-kit adds a table to a network with one descriptor; this one has a hybrid of several."
        )
    nothing: dict[str, Any] = {"atom_exclude_types": [], "pair_exclude_types": []}
    variables = {"out_bias": np.zeros_like(bias), "out_std": np.ones_like(bias)}
    common = {"rcond": None, "preset_out_bias": None, "@class": "Model", "type_map": standard["type_map"]}
    reach = max(1.0, end / float(network["descriptor"]["rcut"])) ** 3
    table = {
        **common,
        **nothing,
        "@version": 2,
        "type": "pairtab",
        "@variables": variables,
        "tab": _tab(options.added_table, len(standard["type_map"]), end),
        "rcut": end,
        "sel": int(np.ceil(np.sum(sel) * reach)),
    }
    return {
        **common,
        **{key: standard[key] for key in nothing},
        "@version": 3,
        "type": "linear_ener",  # DeePMD-kit 3.2 writes linear, which it does not read
        "@variables": {"out_bias": bias, "out_std": np.ones_like(bias)},
        "models": [network | nothing | {"@variables": variables}, table],
        "weights": "sum",
    }


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
