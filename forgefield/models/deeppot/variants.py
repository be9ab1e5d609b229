"""Variants of a Deep Potential: several energies of one descriptor (branches), and a trained model with additional species.

Each branch has its own fitting network and its own data. The networks of all branches have one shape and are stacked in one
set of tensors, so that a batch may contain frames of any branches at no extra cost. A branch can be extracted as a separate
model.

When species are added, structures of the old species keep their energies exactly, and weights of the new species are drawn.
Statistics of rows around new species come from data that has them; so do their energies, which are fitted afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.fitting import Fitting
from forgefield.models.deeppot.options import descriptor_part, fitting_part
from forgefield.models.interface import unknown_species
from forgefield.models.resolved import TYPE_NAMES

KEYS = ("fitting_net", "out_bias", "share")
ALONE = ("seed",)
"""Options of a fitting network in which branches may differ."""
NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_branches(section: Mapping[str, Any]) -> None:
    """Raise for errors in `model.branches` that are found without data. section: the `model` section."""
    branches = section.get("branches") or {}
    if len(branches) == 1:
        raise ForgefieldError("model.branches has one branch; a model with one energy needs none.")
    for name, branch in branches.items():
        where = f"model.branches.{name}"
        if not NAME.fullmatch(str(name)):
            raise ForgefieldError(f"{where}: the name of a branch should consist of letters, digits, - and _.")
        if not isinstance(branch, Mapping):
            raise ForgefieldError(f"{where} must be a section with the keys {', '.join(KEYS)}, not {branch!r}.")
        for key in branch:
            if key not in KEYS:
                raise ForgefieldError(f"{where}.{key} is not an option of a branch.{did_you_mean(str(key), KEYS)}")
        share = branch.get("share")
        if share is not None and (share not in branches or (branches[share] or {}).get("share") or share == name):
            raise ForgefieldError(f"{where}.share is '{share}'; it should name a branch with a separate network.")
        if share is not None and branch.get("fitting_net"):
            raise ForgefieldError(f"{where} has a fitting_net and shares that of {share}; keep one.")
    if branches:
        _check_shapes(section, branches)


def _check_shapes(section: Mapping[str, Any], branches: Mapping[str, Any]) -> None:
    """Raise unless all fitting networks are of energies and differ only in their seeds."""
    common = section.get("fitting_net", {})
    first: dict[str, object] = {}
    for name in sorted(branches):
        fitting_class, options = fitting_part(fitting_section(common, branches[name], branches))
        where = f"model.branches.{name}.fitting_net"
        if not issubclass(fitting_class, Fitting) or options.type != "ener":
            raise ForgefieldError(f"{where}.type is {options.type}; branches are energies (ener).")
        if options.numb_fparam or options.numb_aparam:
            raise ForgefieldError(f"{where}: networks of branches read no fparam and no aparam.")
        shape = {key: value for key, value in dataclasses.asdict(options).items() if key not in ALONE}
        first = first or shape
        for key, value in shape.items():
            if value != first[key]:
                raise ForgefieldError(
                    f"{where}.{key} is {value}, and that of another branch {first[key]}; fitting networks of branches "
                    "may differ only in their seeds."
                )
    if section.get("out_bias"):
        raise ForgefieldError("model.out_bias does not apply to a model with branches: each has its own out_bias.")


def fitting_section(
    common: Mapping[str, Any], section: Mapping[str, Any], branches: Mapping[str, Any]
) -> dict[str, Any]:
    """The section `fitting_net` of a branch. common: that of the model."""
    share = section.get("share")
    section_of_branch = branches[share] if share is not None else section
    return {**common, **(section_of_branch.get("fitting_net") or {})}


def owners(branches: Mapping[str, Any]) -> list[int]:
    """For each branch, in the order of names, the index of its networks."""
    names = sorted(branches)
    numbers = {name: index for index, name in enumerate(n for n in names if not branches[n].get("share"))}
    return [numbers[branches[name].get("share") or name] for name in names]


def draw_branches(fitting: Fitting, branches: Mapping[str, Any]) -> None:
    """Draw the initial weights of branches whose fitting network has a seed."""
    number = owners(branches)
    for index, name in enumerate(sorted(branches)):
        seed = branches[name]["fitting_net"].get("seed")
        if seed is None or branches[name].get("share"):
            continue
        generator = torch.Generator().manual_seed(seed)
        for network in range(fitting.per_branch):
            for layer in fitting.networks.layers:
                layer.draw(number[index] * fitting.per_branch + network, generator)


def single(
    resolved: Mapping[str, Any], state: Mapping[str, Tensor] | None, name: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One branch as a separate model: its resolved options and its state (empty for None)."""
    branches: Mapping[str, Any] = resolved.get("branches") or {}
    names = sorted(branches)
    if name not in names:
        if not names:
            raise ForgefieldError(f"there is no branch '{name}': the model has one energy; leave the head out.")
        asked = "one of them has to be selected" if name is None else f"none of them is '{name}'"
        hint = "" if name is None else did_you_mean(name, names)
        raise ForgefieldError(
            f"the model has the branches {', '.join(names)}, and {asked} (head=NAME, --head NAME).{hint}"
        )
    section, index, n_species = branches[name], names.index(name), len(resolved["species"])
    fitting_net = dict(section["fitting_net"])
    if fitting_net.get("dim_case_embd"):
        fitting_net["case"] = index
    options = {**resolved, "branches": {}, "fitting_net": fitting_net, "out_bias": section["out_bias"]}
    number, n_networks = owners(branches), max(owners(branches)) + 1
    if state is None:
        return options, {}
    branch_state = dict(state)
    for key, tensor in state.items():
        if key.startswith("model.fitting.networks."):
            size = tensor.shape[0] // n_networks
            branch_state[key] = tensor[number[index] * size : (number[index] + 1) * size].clone()
    branch_state["model.out_bias"] = state["model.out_bias"][index * n_species : (index + 1) * n_species].clone()
    return options, branch_state


def flat_bias(branches: Mapping[str, Any]) -> list[float]:
    """Energies of species, branch by branch in the order of names."""
    values: list[Sequence[float]] = [branches[name]["out_bias"] for name in sorted(branches)]
    return [float(value) for row in values for value in row]


def require_extensible(resolved: Mapping[str, Any], new: Sequence[str], source: str) -> None:
    """Raise for models to which species cannot be added. resolved: their complete options."""
    problem = f"{unknown_species(resolved, new, source)} "
    if resolved["fitting_net"]["type"] != "ener" or resolved.get("branches"):
        raise ForgefieldError(
            f"{problem}species can be added only to Deep Potentials with one energy; train a new model."
        )
    if resolved.get("networks"):
        raise ForgefieldError(f"{problem}species cannot be added to a sum of networks; train a new model.")
    if resolved.get("spin"):
        raise ForgefieldError(f"{problem}species cannot be added to a model with spins; train a new model.")
    if resolved.get("predicts"):
        raise ForgefieldError(
            f"{problem}it has heads in addition to its energy, for its species only; train a new model."
        )
    descriptor_class, descriptor = descriptor_part(resolved["descriptor"])
    n_old = len(resolved["species"])
    refusal = descriptor_class.refuses_species(descriptor, n_old, n_old + len(new))
    if refusal is not None:
        raise ForgefieldError(f"{problem}{refusal}")
    if resolved.get("srtab") is not None or resolved.get("added_table") is not None:
        raise ForgefieldError(f"{problem}its pair table has no energies for them; train a new model.")


def extended_options(resolved: Mapping[str, Any], new: Sequence[str], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Complete options with new species after the others. measured: `environment` of data with all of them."""
    options = copy.deepcopy(dict(resolved))
    n = len(options["species"])
    options["species"] = [*options["species"], *new]
    options["out_bias"] = [*options["out_bias"], *[0.0] * len(new)]
    if options.get(TYPE_NAMES):
        options[TYPE_NAMES] = [*options[TYPE_NAMES], *new]
    descriptor_class, descriptor = descriptor_part(options["descriptor"])
    options["descriptor"] = dataclasses.asdict(descriptor_class.extended(descriptor, n, measured))
    if options["fitting_net"]["atom_ener"]:
        options["fitting_net"]["atom_ener"] = [*options["fitting_net"]["atom_ener"], *[None] * len(new)]
    return options


def extended_state(fresh: Mapping[str, Tensor], old: Mapping[str, Tensor], n_old: int, n_new: int) -> dict[str, Tensor]:
    """State of the model for n_old + n_new species. fresh: initial state for all of them. old: trained state for the first.
    Heads that are new to the model keep their initial state."""
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
        state[name][_rows_in_new_table(name, before.shape[0], n_old, n_new)] = before.to(tensor.dtype)
    return state


def _rows_in_new_table(name: str, count: int, n_old: int, n_new: int) -> list[int]:
    """Indices of the old entries along the first axis of an extended tensor."""
    of_pairs = name.startswith("model.descriptor.") and ".networks." in name
    if of_pairs and count == n_old * n_old and n_old > 1:
        return [a * (n_old + n_new) + b for a in range(n_old) for b in range(n_old)]
    return list(range(count))
