"""Before the first step of a training that starts from another run: do both models predict the same?

Frames of the training data are evaluated with the model of the first run and with the new one; the largest differences are
reported, and a training whose model does not begin as the old one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.trust import Trust
from forgefield.data.dataset import GraphDataset
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolved import HEADS, PREDICTS
from forgefield.models.resolving import branch_names
from forgefield.training.problem.model_options import batches_of_frames, evenly_spaced

N_FRAMES = 8
_LARGEST = {"float64": 1e-9, "float32": 1e-3}
"""Differences up to this, eV/atom and eV/A, relative to the largest force if that is above 1 eV/A, are rounding."""


@dataclass(frozen=True)
class FirstModel:
    """The model of the first run as it is stored there: resolved options, state, and whether code that they name is trusted."""

    resolved: Mapping[str, Any]
    state: Mapping[str, Tensor]
    trust: Trust

    @property
    def forces_are_direct(self) -> bool:
        """Whether its forces are an output of a head, or it has no energy."""
        predicts = self.resolved.get(PREDICTS) or {}
        return not predicts.get("energy", True) or "forces" in predicts.get(HEADS, {})

    def build(self, at_least: str) -> Potential:
        """The model on the CPU, in the precision of its weights, or in float64 if `at_least` is that."""
        single = any(value.dtype == torch.float32 for value in self.state.values()) and at_least != "float64"
        potential = build_model(self.resolved, precision="float32" if single else "float64", seed=0, trust=self.trust)
        potential.load_state_dict(dict(self.state))
        return potential.eval()


def compare_first_predictions(first: FirstModel, potential: Potential, train: GraphDataset, whose: str) -> str:
    """A sentence with the largest differences on training frames. whose: the first run, for messages."""
    precision = "float64" if potential.interface.weight_dtype() == torch.float64 else "float32"
    source = first.build(at_least=precision)
    numbers = _branch_numbers(first.resolved, potential.interface.branches)
    training = potential.training
    potential.eval()
    energy = forces = largest = 0.0
    compared = 0
    for row in evenly_spaced(len(train), 8 * N_FRAMES):
        batch = next(iter(batches_of_frames(train, np.array([row]), potential.cutoff)))
        if compared == N_FRAMES or int(batch["species"].max()) >= len(source.species):
            continue
        before = source(batch if numbers is None else batch | {"branch": numbers[batch["branch"]]})
        after = potential(batch)
        n_atoms = float(batch["n_atoms"].sum())
        energy = max(energy, float((before["energy"] - after["energy"]).detach().abs().max()) / n_atoms)
        forces = max(forces, float((before["forces"] - after["forces"]).detach().abs().max()))
        largest = max(largest, float(before["forces"].detach().abs().max()))
        compared += 1
    potential.train(training)
    if not compared:
        return f"Step 0: no training frame consists of species of {whose} alone, so that predictions were not compared."
    found = f"by {energy:.1e} eV/atom and {forces:.1e} eV/A on {compared} training frames ({precision} weights)"
    if max(energy, forces) > _LARGEST[precision] * max(1.0, largest):
        raise ForgefieldError(f"the new model does not begin as that of {whose}: predictions differ {found}.")
    return f"Step 0: predictions differ from those of {whose} {found}."


def _branch_numbers(resolved: Mapping[str, Any], branches: Sequence[str]) -> Tensor | None:
    """For each branch of the new model the number of the branch that it started from; None without branches."""
    before = branch_names(resolved)
    if not branches or not before:
        return None
    return torch.tensor([before.index(name) if name in before else 0 for name in branches])
