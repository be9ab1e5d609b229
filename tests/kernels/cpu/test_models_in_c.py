"""A training step with C code equals one with PyTorch's operations, for batches that are large enough for radial splines."""

import numpy as np
import pytest
import torch
from ase.build import bulk

from forgefield.data.batch import batch_from_frames
from forgefield.data.readers import frames_from_atoms
from forgefield.data.species import SpeciesTable
from forgefield.kernels.cpu import splines
from forgefield.models import build_model, resolve_model
from forgefield.ops.execution import C_LATEST, C_NONE
from tests.support.engine_cases import step_function

SPECIES = ("Cu", "Au")
STATISTICS = {"mean_neighbours": 30.0, "forces_rms": 1.0, "reference_energies": {"Cu": -3.0, "Au": -4.0}}
NEQUIP = {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": 8, "radial_mlp_width": 16}
ALLEGRO = {"name": "allegro", "l_max": 1, "num_scalar_features": 8, "num_tensor_features": 4}


def alloy():
    """A rattled supercell with labels: 108 atoms, 4500 edges."""
    atoms = bulk("Cu", cubic=True).repeat(3)
    atoms.numbers[::3] = 79
    atoms.rattle(0.1, seed=0)
    batch = batch_from_frames(frames_from_atoms([atoms]), SpeciesTable(SPECIES), 4.5)
    random = np.random.default_rng(1)
    batch["forces"] = torch.from_numpy(random.normal(size=(len(atoms), 3)))
    batch["energy"] = torch.tensor([-3.0 * len(atoms)], dtype=torch.float64)
    return batch


@pytest.mark.parametrize("derivative", ["double", "tangent"])
@pytest.mark.parametrize(
    "options",
    [
        NEQUIP,
        {**NEQUIP, "bessel_trainable": True, "radial_mlp_depth": 2},
        ALLEGRO,
        {**ALLEGRO, "bessel_trainable": True},
    ],
    ids=["nequip", "nequip-deep", "allegro", "allegro-trainable"],
)
def test_gradients_equal_those_of_operations(options, derivative, monkeypatch):
    read = []
    original = splines._Form.values
    monkeypatch.setattr(splines._Form, "values", lambda form, *inputs: read.append(form) or original(form, *inputs))
    resolved = resolve_model(options, species=SPECIES, cutoff=4.5, statistics=STATISTICS)
    batch, gradients = alloy(), []
    for level in (C_NONE, C_LATEST):
        potential = build_model(resolved, precision="float32", seed=0)
        function = step_function(potential, ("energy", "forces"), derivative=derivative, c_code=level)
        targets = torch.ones(2, dtype=torch.float64)
        found = function.differentiate(function.trained_weights(), function.fixed_weights(), batch, targets, None)
        gradients.append(found.gradients)
        assert bool(read) == (level == C_LATEST)
    for value, reference in zip(*reversed(gradients)):
        assert (value - reference).norm() <= 2e-5 * reference.norm() + 1e-12
