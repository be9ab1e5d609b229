"""Each check passes a lawful model and fails for a model that breaks its law, and names no law that is kept."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from ase import Atoms
from rich.console import Console

from forgefield.checks import CheckResult, print_checks, run_checks
from forgefield.checks.derivatives import derivative
from forgefield.checks.transformations import random_orthogonal
from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.potential import Potential, float64_copy
from forgefield.models.resolving import resolve_model
from tests.support import toy_models as toys
from tests.support.check_structures import SPECIES, as_frame, structures


def failing(potential: torch.nn.Module, frames: list[Frame] | None = None) -> set[str]:
    results = run_checks(
        potential,
        frames or structures(),
        SPECIES,
        4.0,
        generator=np.random.default_rng(0),
        reference_energies=toys.REFERENCE,
    )
    return {result.name for result in results if not result.passed}


@pytest.mark.parametrize("model", [toys.Morse, toys.CosineCutoff])
def test_lawful_model_passes_every_check(model):
    assert failing(Potential(model())) == set()


@pytest.mark.parametrize(
    ("potential", "broken"),
    [
        (Potential(toys.PrefersAnAxis()), {"rotation", "reflection"}),
        (Potential(toys.Handed()), {"reflection"}),
        (Potential(toys.KnowsAtomNumbers()), {"permutation", "supercell", "separate fragments"}),
        (toys.WrongForces(toys.Morse()), {"forces = -dE/dx"}),
        (toys.WrongStress(toys.Morse()), {"stress = dE/dstrain"}),
        (Potential(toys.HardCutoff()), {"cutoff smoothness"}),
        (Potential(toys.ForceJumpsAtCutoff()), {"cutoff smoothness"}),
        (Potential(toys.HardInnerCutoff()), {"cutoff smoothness"}),
        (Potential(toys.DistinguishesImages()), {"supercell", "wrapping"}),
        (Potential(toys.CountsAtoms()), {"supercell", "separate fragments"}),
        (Potential(toys.ShiftedLoneAtoms()), {"isolated atom"}),
    ],
    ids=lambda value: type(getattr(value, "model", value)).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_broken_law_is_found_and_no_other_is_blamed(potential, broken):
    assert failing(potential) == broken


@pytest.mark.parametrize(
    ("model", "broken"),
    [
        (toys.KnowsItsPlace, {"translation", "wrapping"}),
        (toys.SeesBatchMates, {"batch independence"}),
        (toys.GradientsNeedNeighbours, {"no neighbours"}),
        (toys.NoneWithoutNeighbours, {"no neighbours", "isolated atom"}),
    ],
)
def test_law_whose_breach_breaks_others_too(model, broken):
    assert failing(Potential(model())) >= broken


def test_molecules_alone_can_be_checked_completely():
    """A source without any cell: the stress and supercell checks put the atoms into a box."""
    cluster = [structures()[2]]
    assert failing(Potential(toys.Morse()), cluster) == set()
    assert failing(toys.WrongStress(toys.Morse()), cluster) == {"stress = dE/dstrain"}


def test_single_atom_frames_can_be_checked():
    lone = Frame(np.zeros((1, 3)), np.array([29]), np.zeros((3, 3)), np.zeros(3, dtype=bool))
    assert failing(Potential(toys.Morse()), [lone]) == set()


def test_model_and_frames_are_left_alone():
    potential = Potential(toys.Morse()).train()
    before = copy.deepcopy(potential.state_dict())
    frames = structures()
    positions = [frame.positions.copy() for frame in frames]
    failing(potential, frames)
    assert potential.training
    assert all(p.grad is None for p in potential.parameters())
    assert all(torch.equal(before[key], value) for key, value in potential.state_dict().items())
    assert all(np.array_equal(old, frame.positions) for old, frame in zip(positions, frames))


def test_same_generator_state_gives_the_same_table():
    runs = [
        run_checks(Potential(toys.Morse()), structures()[:1], SPECIES, 4.0, generator=np.random.default_rng(3))
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_without_reference_energies_lone_atoms_are_compared_with_a_box():
    results = run_checks(
        Potential(toys.ShiftedLoneAtoms()), structures()[:1], SPECIES, 4.0, generator=np.random.default_rng(0)
    )
    assert next(r for r in results if r.name == "isolated atom").passed


def test_no_frames_is_an_error():
    with pytest.raises(ForgefieldError, match="no frame"):
        run_checks(Potential(toys.Morse()), [], SPECIES, 4.0, generator=np.random.default_rng(0))


def test_derivative_is_sixth_order_and_its_error_estimate_holds():
    slope, error = derivative(lambda t: np.exp(3 * t), 0.02)
    assert abs(slope - 3) < 1e-10
    assert abs(slope - 3) <= error < 1e-5


@pytest.mark.parametrize("determinant", [1, -1])
def test_random_orthogonal_matrices(determinant):
    q = random_orthogonal(np.random.default_rng(1), determinant)
    assert np.allclose(q @ q.T, np.eye(3), atol=1e-14)
    assert np.isclose(np.linalg.det(q), determinant)


def test_table_names_the_failures():
    results = [
        CheckResult("rotation", True, 1e-13, 1e-9, "turned"),
        CheckResult("wrapping", False, float("nan"), 1e-9, "images"),
    ]
    text = io.StringIO()
    print_checks(Console(file=text, width=120), results)
    assert "1.0e-13" in text.getvalue()
    assert "nan" in text.getvalue()
    assert "1 of 2 checks failed: wrapping" in text.getvalue()


# ---- the copy that is checked


@pytest.fixture(scope="module")
def adaptive() -> Potential:
    """A NequIP whose cutoff grows where an atom would be alone."""
    resolved = resolve_model(
        {
            "name": "nequip",
            "num_layers": 1,
            "l_max": 1,
            "num_features": 4,
            "radial_mlp_width": 8,
            "avg_num_neighbours": 8.0,
            "energy_scales": 1.0,
            "energy_shifts": toys.REFERENCE,
        },
        species=SPECIES.symbols,
        cutoff=2.2,
        adaptive_cutoff=4.0,
    )
    return build_model(resolved, precision="float32", seed=1)


def test_the_checked_copy_is_the_model_itself_adaptive_cutoff_included(adaptive):
    far_apart = as_frame(Atoms("CuAu", positions=[[0, 0, 0], [3.0, 0, 0]]))
    batch = batch_from_frames([far_apart], SPECIES, GraphOptions(2.2, adaptive_cutoff=4.0))
    twin = float64_copy(adaptive)
    energies = [float(model.eval()(batch)["energy"].detach()[0]) for model in (adaptive, twin)]
    alone = sum(toys.REFERENCE[symbol] for symbol in ("Cu", "Au"))
    assert energies[1] == pytest.approx(energies[0], rel=1e-6)
    assert abs(energies[1] - alone) > 1e-4


def test_an_adaptive_model_keeps_all_laws(adaptive):
    results = run_checks(
        adaptive,
        structures(),
        SPECIES,
        2.2,
        generator=np.random.default_rng(0),
        reference_energies=toys.REFERENCE,
    )
    assert [result for result in results if not result.passed] == []
