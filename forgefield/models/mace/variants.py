"""Models made from a trained MACE: one of its branches alone, and the same model with more branches or
species.

Several maps are divided by the root of a number of species or branches, so that weights have unit variance; where that number
changes, weights are multiplied such that the map stays the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.edges import Batch

_READOUTS = "model.readouts."
_SCALED_BY_BRANCHES = (".leave", ".middle")
"""Weights of readouts that are divided by the root of the number of branches."""


def one_branch(
    resolved: Mapping[str, Any], state: Mapping[str, Tensor] | None, name: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One branch as a model with one energy: its resolved options and its state (empty for None)."""
    names: Sequence[str] = resolved.get("branches") or []
    if name not in names:
        if not names:
            raise ForgefieldError(f"there is no branch '{name}': the model has one energy; leave the head out.")
        asked = "one of them has to be selected" if name is None else f"none of them is '{name}'"
        hint = "" if name is None else did_you_mean(name, names)
        raise ForgefieldError(
            f"the model has the branches {', '.join(names)}, and {asked} (head=NAME, --head NAME).{hint}"
        )
    options = {**resolved, "branches": None}
    options |= {key: resolved[key][name] for key in ("energy_scales", "energy_shifts")}
    if state is None:
        return options, {}
    number, count, n_species = names.index(name), len(names), len(resolved["species"])
    own = dict(state)
    for key, value in state.items():
        if key.startswith(_READOUTS):
            axis = 1 if key.endswith(".weight") else 0
            part = value.narrow(axis, number, 1).clone()
            own[key] = part / count**0.5 if key.endswith(_SCALED_BY_BRANCHES) else part
    own["model.energy_scales"] = state["model.energy_scales"][number : number + 1].clone()
    own["model.energy_shifts"] = state["model.energy_shifts"][number * n_species : (number + 1) * n_species].clone()
    return options, own


def more_branches(
    resolved: Mapping[str, Any], state: Mapping[str, Tensor], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options and state with the branches `names`; new ones are copies of the first branch, or of the only energy."""
    before: Sequence[str] = resolved.get("branches") or []
    missing = [name for name in before if name not in names]
    if missing or len(names) < 2 or len(set(names)) < len(names):
        kept = f", and all of {', '.join(before)}" if before else ""
        raise ForgefieldError(f"model.branches is {', '.join(names)}; it needs at least two different names{kept}.")
    options = copy.deepcopy(dict(resolved))
    options["branches"] = list(names)
    for key in ("energy_scales", "energy_shifts"):
        table = resolved[key] if before else {names[0]: resolved[key]}
        options[key] = {
            name: copy.deepcopy(table.get(name, table[before[0] if before else names[0]])) for name in names
        }
    numbers = torch.tensor([before.index(name) if name in before else 0 for name in names])
    gain = (len(names) / max(1, len(before))) ** 0.5
    own = dict(state)
    for key, value in state.items():
        if key.startswith(_READOUTS):
            chosen = value.index_select(1 if key.endswith(".weight") else 0, numbers)
            own[key] = chosen * gain if key.endswith(_SCALED_BY_BRANCHES) else chosen
    own["model.energy_scales"] = state["model.energy_scales"].index_select(0, numbers)
    shifts = state["model.energy_shifts"].view(-1, len(resolved["species"]))
    own["model.energy_shifts"] = shifts.index_select(0, numbers).flatten()
    return options, own


def extended_options(resolved: Mapping[str, Any], new: Sequence[str]) -> dict[str, Any]:
    """Resolved options with new species after the others; their energy shifts are zero until they are fitted."""
    options = copy.deepcopy(dict(resolved))
    options["species"] = [*options["species"], *new]
    shifts = options["energy_shifts"]
    for table in shifts.values() if options.get("branches") else [shifts]:
        table |= dict.fromkeys(new, 0.0)
    return options


def extended_state(
    fresh: Mapping[str, Tensor], trained: Mapping[str, Tensor], n_old: int, n_new: int
) -> dict[str, Tensor]:
    """State of the model for n_old + n_new species. fresh: initial state for all of them. trained: for the first n_old."""
    channels = trained["model.embedding"].shape[1]
    gain = ((n_old + n_new) / n_old) ** 0.5
    state = {}
    for name, value in fresh.items():
        if name.startswith("heads.") and name not in trained:
            state[name] = value
            continue
        before = trained[name]
        if value.shape == before.shape:
            state[name] = before
        elif name.endswith("by_species.weight"):  # one tensor (channels, species, channels) after another
            views = [
                part.view(-1, channels, n, channels).clone() for part, n in ((value, n_old + n_new), (before, n_old))
            ]
            views[0][:, :, :n_old] = views[1] * gain
            state[name] = views[0].flatten()
        elif name == "model.energy_shifts":
            table = value.view(-1, n_old + n_new).clone()
            table[:, :n_old] = before.view(-1, n_old)
            state[name] = table.flatten()
        else:
            state[name] = value.clone()
            state[name][:n_old] = before.to(value.dtype) * (gain if name.endswith("embedding") else 1.0)
    return state


def branch_shifts(
    names: Sequence[str], batches: Callable[[], Iterable[Batch]], species: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Energy of each species, eV, by branch: least squares of the energies of its frames on their compositions."""
    n_species = len(species)
    counts: list[list[np.ndarray]] = [[] for _ in names]
    energies: list[list[np.ndarray]] = [[] for _ in names]
    for batch in batches():
        n_frames = batch["n_atoms"].shape[0]
        table = torch.bincount(batch["frame"] * n_species + batch["species"], minlength=n_frames * n_species)
        rows, values = table.view(n_frames, n_species).double().numpy(), batch["energy"].numpy()
        for number in range(len(names)):
            chosen = (batch["branch"].numpy() == number) & np.isfinite(values)
            counts[number].append(rows[chosen])
            energies[number].append(values[chosen])
    result = {}
    for number, name in enumerate(names):
        found = np.concatenate([np.zeros(0), *energies[number]])
        if len(found):
            matrix = np.concatenate(counts[number])
            result[name] = dict(zip(species, np.linalg.lstsq(matrix, found, rcond=None)[0].tolist()))
    return result
