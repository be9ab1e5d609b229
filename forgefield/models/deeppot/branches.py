"""Several energies of one descriptor: branches of a Deep Potential, each with its own fitting network and its own data.

Networks of all branches have one shape and stand side by side in one set of tensors, so that a batch may hold frames of any
branches at no further cost. A branch can be taken out as a model of its own, which knows nothing of the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.fitting import Fitting
from forgefield.models.deeppot.options import fitting_part

KEYS = ("fitting_net", "out_bias", "share")
ALONE = ("seed",)
"""Options of a fitting network in which branches may differ."""
NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_branches(given: Mapping[str, Any]) -> None:
    """Raise for what can be seen to be wrong in `model.branches`. given: the `model` section."""
    branches = given.get("branches") or {}
    if len(branches) == 1:
        raise ForgefieldError("model.branches has one branch; a model with one energy needs none.")
    for name, section in branches.items():
        where = f"model.branches.{name}"
        if not NAME.fullmatch(str(name)):
            raise ForgefieldError(f"{where}: the name of a branch is made of letters, digits, - and _.")
        if not isinstance(section, Mapping):
            raise ForgefieldError(f"{where} is {section!r}; it should be a section with the keys {', '.join(KEYS)}.")
        for key in section:
            if key not in KEYS:
                raise ForgefieldError(f"{where}.{key} is not an option of a branch.{did_you_mean(str(key), KEYS)}")
        share = section.get("share")
        if share is not None and (share not in branches or (branches[share] or {}).get("share") or share == name):
            raise ForgefieldError(f"{where}.share is '{share}'; it should name a branch that has a network of its own.")
        if share is not None and section.get("fitting_net"):
            raise ForgefieldError(f"{where} has a fitting_net and shares that of {share}; keep one.")
    if branches:
        _check_shapes(given, branches)


def _check_shapes(given: Mapping[str, Any], branches: Mapping[str, Any]) -> None:
    """All fitting networks are of energies and alike but for their seeds."""
    common = given.get("fitting_net", {})
    first: Any = None
    for name in sorted(branches):
        kind, options = fitting_part(fitting_section(common, branches[name], branches))
        where = f"model.branches.{name}.fitting_net"
        if not issubclass(kind, Fitting) or options.type != "ener":
            raise ForgefieldError(f"{where}.type is {options.type}; branches are energies (ener).")
        if options.numb_fparam or options.numb_aparam:
            raise ForgefieldError(f"{where}: networks of branches read no fparam and no aparam.")
        own = {key: value for key, value in dataclasses.asdict(options).items() if key not in ALONE}
        first = own if first is None else first
        for key, value in own.items():
            if value != first[key]:
                raise ForgefieldError(
                    f"{where}.{key} is {value}, and that of another branch {first[key]}; fitting networks of branches are "
                    "alike but for their seeds."
                )
    if given.get("out_bias"):
        raise ForgefieldError("model.out_bias does not apply to a model with branches: each has its own out_bias.")


def fitting_section(
    common: Mapping[str, Any], section: Mapping[str, Any], branches: Mapping[str, Any]
) -> dict[str, Any]:
    """The section `fitting_net` of a branch. common: that of the model."""
    share = section.get("share")
    own = branches[share] if share is not None else section
    return {**common, **(own.get("fitting_net") or {})}


def owners(branches: Mapping[str, Any]) -> list[int]:
    """For each branch, in the order of names, the number of its networks."""
    names = sorted(branches)
    numbers = {name: place for place, name in enumerate(n for n in names if not branches[n].get("share"))}
    return [numbers[branches[name].get("share") or name] for name in names]


def draw_again(fitting: Fitting, branches: Mapping[str, Any]) -> None:
    """Networks of branches whose fitting has a seed of its own begin with its weights."""
    number = owners(branches)
    for place, name in enumerate(sorted(branches)):
        seed = branches[name]["fitting_net"].get("seed")
        if seed is None or branches[name].get("share"):
            continue
        generator = torch.Generator().manual_seed(seed)
        for network in range(fitting.per_branch):
            for layer in fitting.networks.layers:
                layer.draw(number[place] * fitting.per_branch + network, generator)


def single(
    resolved: Mapping[str, Any], state: Mapping[str, Tensor] | None, name: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One branch as a model of its own: its resolved options and its state (nothing for None)."""
    branches: Mapping[str, Any] = resolved.get("branches") or {}
    known = sorted(branches)
    if name not in known:
        if not known:
            raise ForgefieldError(f"there is no branch '{name}': the model has one energy; leave the head out.")
        asked = "it has to be said which one is meant" if name is None else f"none of them is '{name}'"
        hint = "" if name is None else did_you_mean(name, known)
        raise ForgefieldError(
            f"the model has the branches {', '.join(known)}, and {asked} (head=NAME, --head NAME).{hint}"
        )
    section, place, n_species = branches[name], known.index(name), len(resolved["species"])
    options = {**resolved, "branches": {}, "fitting_net": section["fitting_net"], "out_bias": section["out_bias"]}
    number, n_networks = owners(branches), max(owners(branches)) + 1
    if state is None:
        return options, {}
    own = dict(state)
    for key, tensor in state.items():
        if key.startswith("model.fitting.networks."):
            size = tensor.shape[0] // n_networks
            own[key] = tensor[number[place] * size : (number[place] + 1) * size].clone()
    own["model.out_bias"] = state["model.out_bias"][place * n_species : (place + 1) * n_species].clone()
    return options, own


def flat_bias(branches: Mapping[str, Any]) -> list[float]:
    """Energies of species, branch by branch in the order of names."""
    values: list[Sequence[float]] = [branches[name]["out_bias"] for name in sorted(branches)]
    return [float(value) for row in values for value in row]
