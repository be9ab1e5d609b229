"""Untrained models start near their reference energies on molecules, where bonds are short, at any size and depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ase.build import molecule

from forgefield.data.frame import Frame
from forgefield.models import build_model, resolve_model
from forgefield.models.resolving import model_class
from tests.support.structures import make_batch

SPECIES, CUTOFF = ("H", "C", "O"), 4.0
STATISTICS = {"mean_neighbours": 7.9, "forces_rms": 1.2, "reference_energies": dict.fromkeys(SPECIES, 0.0)}


def ethanol(seed: int) -> Frame:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=seed)
    labels: dict[str, Any] = {"energy": None, "forces": None, "stress": None}
    return Frame(atoms.positions, atoms.numbers.astype(np.int64), np.zeros((3, 3)), np.zeros(3, bool), **labels)


def initial_sizes(**model: Any) -> tuple[float, float]:
    """Root mean square of the predicted energies (eV/atom, without reference energies) and force components (eV/A)."""
    given = resolve_model(model, species=SPECIES, cutoff=CUTOFF, statistics=STATISTICS)
    batch = make_batch(ethanol(0), ethanol(1), cutoff=CUTOFF, species=SPECIES)
    out = build_model(given, precision="float32", seed=0)(batch)
    per_atom = out["energy"] / batch["n_atoms"]
    return float(per_atom.square().mean().sqrt().detach()), float(out["forces"].square().mean().sqrt().detach())


@pytest.mark.parametrize("name", ["schnet", "painn", "egnn", "cgcnn", "tensornet", "m3gnet", "nequip", "allegro"])
def test_every_preset_starts_within_the_spread_of_the_labels(name):
    for preset in ("S", "M", "L"):
        assert preset in model_class(name).presets
        energy, force = initial_sizes(name=name, preset=preset)
        assert energy < 1.0, preset
        assert force < 3 * STATISTICS["forces_rms"], preset


@pytest.mark.parametrize("layers", [1, 4, 8, 16])
def test_painn_does_not_grow_with_depth(layers):
    energy, force = initial_sizes(name="painn", num_layers=layers)
    assert energy < 1.0
    assert force < 3 * STATISTICS["forces_rms"]


def test_painn_stays_finite_at_the_default_learning_rate():
    """Products of vectors made the published form overflow within a few steps."""
    given = resolve_model({"name": "painn", "preset": "S"}, species=SPECIES, cutoff=CUTOFF, statistics=STATISTICS)
    potential = build_model(given, precision="float32", seed=0)
    optimiser = torch.optim.Adam(potential.parameters(), lr=0.01)
    batch = make_batch(*(ethanol(seed) for seed in range(4)), cutoff=CUTOFF, species=SPECIES)
    losses = []
    for _ in range(40):
        loss = potential(batch)["forces"].sub(1.0).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert max(losses) < 1e4
    assert losses[-1] < 100


def test_runs_recorded_without_the_option_keep_the_published_form():
    new = resolve_model({"name": "painn", "preset": "S"}, species=SPECIES, cutoff=CUTOFF, statistics=STATISTICS)
    assert new["normalise"] is True
    old = {key: value for key, value in new.items() if key != "normalise"}
    batch = make_batch(ethanol(0), cutoff=CUTOFF, species=SPECIES)
    energies = [
        float(build_model(options, precision="float64", seed=0)(batch)["energy"].detach())
        for options in (old, new | {"normalise": False}, new)
    ]
    assert energies[0] == energies[1] != energies[2]
