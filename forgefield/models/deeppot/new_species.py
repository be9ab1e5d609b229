"""A trained Deep Potential for further species: what it has learnt stays, the parts of the new species begin fresh.

Structures of the old species keep their energies exactly. Statistics of rows around new species come from data that has them;
so do their energies, which are fitted afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.interface import unknown_species


def require_extensible(resolved: Mapping[str, Any], new: Sequence[str], source: str) -> None:
    """Refuse models that cannot take up species. resolved: their options in full."""
    said = f"{unknown_species(resolved, new, source)} "
    if resolved["fitting_net"]["type"] != "ener" or resolved.get("branches"):
        raise ForgefieldError(f"{said}only Deep Potentials with one energy take up new species; train a new model.")
    if resolved.get("predicts"):
        raise ForgefieldError(
            f"{said}it has heads beside its energy, which are made for its own species; train a new model."
        )
    descriptor = resolved["descriptor"]
    if descriptor["type"].startswith("se_e2") and isinstance(descriptor["sel"], list):
        raise ForgefieldError(
            f"{said}its descriptor {descriptor['type']} has room for neighbours of its own species alone (sel); train a new "
            "model, without sel or with se_atten."
        )
    counts = (len(resolved["species"]), len(resolved["species"]) + len(new))
    if descriptor["type"].startswith("se_atten") and not descriptor["use_econf_tebd"]:
        width = descriptor["tebd_dim"]
        if any(width in (n, 2 * n) for n in counts):
            raise ForgefieldError(
                f"{said}its type embedding of width {width} cannot go from {counts[0]} to {counts[1]} species; train a new "
                "model."
            )
    if resolved.get("srtab") is not None:
        raise ForgefieldError(f"{said}its pair table has no energies for them; train a new model.")


def extended_options(resolved: Mapping[str, Any], new: Sequence[str], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Options in full with further species behind the others. measured: `environment` of data with all of them."""
    options = copy.deepcopy(dict(resolved))
    n = len(options["species"])
    options["species"] = [*options["species"], *new]
    options["out_bias"] = [*options["out_bias"], *[0.0] * len(new)]
    descriptor = options["descriptor"]
    for key in ("davg", "dstd"):
        rows = [list(row) for row in measured[key][n:]]
        if key == "davg" and descriptor.get("set_davg_zero"):
            rows = [[0.0] * len(row) for row in rows]
        descriptor[key] = [*descriptor[key], *rows]
    if descriptor.get("most_neighbours"):
        descriptor["most_neighbours"] = [*descriptor["most_neighbours"], *measured["max_neighbours"][n:]]
    if options["fitting_net"]["atom_ener"]:
        options["fitting_net"]["atom_ener"] = [*options["fitting_net"]["atom_ener"], *[None] * len(new)]
    return options


def extended_state(fresh: Mapping[str, Tensor], old: Mapping[str, Tensor], n_old: int, n_new: int) -> dict[str, Tensor]:
    """State of the model for n_old + n_new species. fresh: as drawn for all of them. old: what was learnt for the first.
    Heads that are new to the model stay as drawn."""
    state = {}
    for name, tensor in fresh.items():
        if name.startswith("heads.") and name not in old:
            state[name] = tensor
            continue
        before = old[name]
        if tensor.shape == before.shape:
            state[name] = before
            continue
        state[name] = tensor.clone()
        state[name][_places(name, before.shape[0], n_old, n_new)] = before.to(tensor.dtype)
    return state


def _places(name: str, count: int, n_old: int, n_new: int) -> list[int]:
    """Where the first axis of a grown tensor holds what was there."""
    if count == n_old * n_old and name.startswith("model.descriptor.networks.") and n_old > 1:
        return [a * (n_old + n_new) + b for a in range(n_old) for b in range(n_old)]
    return list(range(count))
