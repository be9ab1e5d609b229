"""Uncertainties from the last layer: the closed form of linear regression, calibration, files and calculators."""

import numpy as np
import pytest
import torch

from forgefield import Calculator
from forgefield.api import train
from forgefield.errors import ForgefieldError
from forgefield.inference.uncertainty import (
    MOST_PASSES,
    LastLayerUncertainty,
    has_uncertainty,
    load_uncertainty,
)
from forgefield.models.edges import EdgeContext
from forgefield.runs import Run
from forgefield.trust.uncertainty import (
    EDGES_TOGETHER,
    Curvature,
    Residuals,
    accumulate,
    calibrate,
    fit_uncertainty,
    residuals,
)
from forgefield.weights import write_weights
from tests.support.helpers import emt_frames, tiny_config
from tests.support.linear_potential import linear_potential
from tests.support.structures import make_batch, make_frame


def labelled(*atoms: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Frames of these numbers of atoms, with random labels."""
    batch = make_batch(*(make_frame(n, seed + i, box=5.0) for i, n in enumerate(atoms)))
    generator = torch.Generator().manual_seed(seed)
    for name in ("energy", "forces"):
        batch[name] = torch.randn(batch[name].shape, generator=generator, dtype=torch.float64)
    return batch


def design(potential, batch, energy_error: float, forces_error: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of a linear regression: features of energies, of atomic energies, and derivatives by coordinates.

    Energies are divided by the number of atoms, all by their errors.
    """

    def of_frames(positions: torch.Tensor) -> torch.Tensor:
        moved = batch | {"positions": positions}
        features = potential.last_layer(moved, EdgeContext.of(moved)).features
        return features.new_zeros(len(batch["n_atoms"]), features.shape[1]).index_add(0, batch["frame"], features)

    jacobian = torch.autograd.functional.jacobian(lambda x: of_frames(x).sum(0), batch["positions"])
    energies = of_frames(batch["positions"]) / batch["n_atoms"].unsqueeze(1) / energy_error
    forces = -jacobian.flatten(1).T / forces_error
    return energies.detach().numpy(), forces.numpy(), jacobian.numpy()


def test_uncertainties_of_a_linear_model_are_those_of_bayesian_linear_regression() -> None:
    potential, train_set, new = linear_potential(), labelled(5, 3, 6, 4), labelled(4, 5, seed=9)
    curvature = accumulate(potential, [train_set], 5, directions=None)
    energies, forces, _ = design(potential, train_set, 0.02, 0.3)
    rows = np.concatenate([energies, forces])
    np.testing.assert_allclose(curvature.precision(0.02, 0.3), rows.T @ rows, rtol=1e-10)

    covariance = np.linalg.inv(rows.T @ rows + 1e-3 * np.eye(5))  # a prior of variance 1000
    values, vectors = torch.linalg.eigh(curvature.precision(0.02, 0.3))
    uncertainty = LastLayerUncertainty(vectors / (values + 1e-3).sqrt(), energy_scale=1.0, forces_scale=1.0)
    found = uncertainty.evaluate(potential, new, forces=True)
    per_atom, _, jacobian = design(potential, new, 1.0, 1.0)
    total = per_atom * np.array([[4], [5]])
    np.testing.assert_allclose(
        found["energy_uncertainty"], np.sqrt(np.einsum("ij,jk,ik->i", total, covariance, total)), rtol=1e-8
    )
    variance = np.einsum("wac,wv,vac->ac", jacobian, covariance, jacobian)
    np.testing.assert_allclose(found["forces_uncertainty"], np.sqrt(variance), rtol=1e-8)
    assert found["energies_uncertainty"].shape == (9,)


def test_the_uncertainty_of_stress_follows_from_derivatives_of_the_features_in_the_strain() -> None:
    potential, batch = linear_potential(), labelled(4, 5, seed=9)
    factor = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = LastLayerUncertainty(factor, energy_scale=1.0, forces_scale=2.0).evaluate(potential, batch, stress=True)
    assert set(found) == {"energy_uncertainty", "energies_uncertainty", "stress_uncertainty"}

    def combinations(strain: torch.Tensor) -> torch.Tensor:
        deformation = torch.eye(3, dtype=torch.float64) + strain
        moved = batch | {"positions": batch["positions"] @ deformation, "cell": batch["cell"] @ deformation}
        features = potential.last_layer(moved, EdgeContext.of(moved)).features
        return torch.zeros(2, 5, dtype=torch.float64).index_add(0, batch["frame"], features) @ factor

    for i, j in ((0, 0), (1, 2), (2, 0)):
        strain = torch.zeros(3, 3, dtype=torch.float64)
        strain[i, j] = strain[j, i] = 1e-4 if i == j else 0.5e-4
        slopes = (combinations(strain) - combinations(-strain)) / 2e-4
        expected = 2.0 * slopes.norm(dim=1) / torch.linalg.det(batch["cell"]).abs()
        torch.testing.assert_close(found["stress_uncertainty"][:, i, j], expected.detach(), rtol=1e-5, atol=0)


def test_frames_without_labels_do_not_count() -> None:
    potential, batch = linear_potential(), labelled(5, 3)
    batch["energy"][1], batch["forces"][:5] = torch.nan, torch.nan
    curvature = accumulate(potential, [batch], 5, directions=None)
    energies, forces, _ = design(potential, batch, 1.0, 1.0)
    np.testing.assert_allclose(curvature.energies, energies[:1].T @ energies[:1], rtol=1e-10)
    np.testing.assert_allclose(curvature.forces, forces[15:].T @ forces[15:], rtol=1e-10)
    assert (curvature.n_energies, curvature.n_forces) == (1, 9)


def test_random_directions_have_the_exact_sum_as_their_expectation() -> None:
    potential, batch = linear_potential(), labelled(5, 3, 6)
    exact = accumulate(potential, [batch], 5, directions=None).forces
    drawn = accumulate(potential, [batch], 5, directions=3000).forces
    assert torch.linalg.matrix_norm(drawn - exact) < 0.05 * torch.linalg.matrix_norm(exact)
    other = accumulate(potential, [batch], 5, directions=1).forces
    assert torch.linalg.matrix_norm(other - exact) > 0.05 * torch.linalg.matrix_norm(exact)


def test_force_residuals_are_those_of_the_drawn_components() -> None:
    potential, batch = linear_potential(), labelled(5, 3)
    _, forces, _ = design(potential, batch, 1.0, 1.0)
    errors = (potential(batch)["forces"] - batch["forces"]).flatten().detach().numpy()
    for number in (None, 4):
        found = residuals(potential, [batch], 5, coordinates=number)
        assert len(found.forces) == (24 if number is None else 8)
        for row, error in zip(found.force_features.numpy(), found.forces.numpy()):
            component = int(np.abs(forces + row).sum(1).argmin())
            np.testing.assert_allclose(-row, forces[component], atol=1e-10)
            assert error == pytest.approx(errors[component], abs=1e-10)


def test_passes_over_many_directions_are_those_along_single_ones(monkeypatch) -> None:
    potential, batch = linear_potential(), labelled(5, 1, 4)

    def computed() -> list[torch.Tensor]:
        curvature = accumulate(potential, [batch], 5, directions=6)
        found = residuals(potential, [batch], 5, coordinates=None)
        return [curvature.energies, curvature.forces, found.energy_features, found.force_features, found.forces]

    sizes: list[int] = []
    together = type(potential).moved_last_layer

    def limited(self, part, direction):
        """As on a device with memory for three copies of the batch."""
        sizes.append(len(part["n_atoms"]) // 3)
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError
        return together(self, part, direction)

    monkeypatch.setattr(type(potential), "moved_last_layer", limited)
    in_parts = computed()
    assert max(sizes) > 3
    assert {1, 3} & set(sizes)
    monkeypatch.setitem(EDGES_TOGETHER, "cpu", 1)
    sizes.clear()
    for one, other in zip(computed(), in_parts):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert set(sizes) == {1}


def test_calibration_recovers_the_scale_of_normally_distributed_errors() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    spread = torch.logspace(0, -2, 6, dtype=torch.float64)
    trained, energies, forces = normal(500, 6) * spread, normal(20000, 6) * spread, normal(20000, 6) * spread
    curvature = Curvature(trained.T @ trained, trained.T @ trained, 500, 500)
    # What the errors are drawn with: the scales that are to be recovered are 3 and 0.5.
    known = torch.linalg.inv(trained.T @ trained)
    errors = Residuals(energies, torch.zeros(20000, dtype=torch.float64), torch.ones(20000), forces, torch.zeros(20000))
    for features, scale, name in ((energies, 3.0, "energies"), (forces, 0.5, "forces")):
        deviation = scale * torch.einsum("ij,jk,ik->i", features, known, features).sqrt()
        setattr(errors, name, deviation * normal(20000))
    uncertainty = calibrate(curvature, errors)
    for features, scale, factor in ((energies, 3.0, uncertainty.energy_scale), (forces, 0.5, uncertainty.forces_scale)):
        found = factor * torch.linalg.vector_norm(features @ uncertainty.factor, dim=1)
        expected = scale * torch.einsum("ij,jk,ik->i", features, known, features).sqrt()
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def test_many_weights_are_combined_at_random_within_the_stated_error() -> None:
    potential, batch = linear_potential(3 * MOST_PASSES), labelled(6, 6)
    curvature = accumulate(potential, [labelled(5, 3, 6, 4, seed=20)], 3 * MOST_PASSES, directions=None)
    values, vectors = torch.linalg.eigh(curvature.precision(0.02, 0.3))
    uncertainty = LastLayerUncertainty(vectors / (values.clamp(min=0) + 1.0).sqrt(), 1.0, 1.0)
    _, _, jacobian = design(potential, batch, 1.0, 1.0)
    exact = np.linalg.norm(np.einsum("wac,wv->vac", jacobian, uncertainty.factor.numpy()), axis=0)
    found = uncertainty.evaluate(potential, batch, forces=True)["forces_uncertainty"].numpy()
    ratio = found / exact
    assert 0.02 < np.sqrt(np.mean((ratio - 1) ** 2)) < 0.18  # 0.09 expected
    again = uncertainty.evaluate(potential, batch, forces=True)["forces_uncertainty"].numpy()
    np.testing.assert_array_equal(found, again)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("uncertain")
    return train(tiny_config(folder))


def test_uncertainties_of_a_run_are_stored_and_reach_the_calculator(run) -> None:
    made = fit_uncertainty(run)
    loaded = load_uncertainty(run)
    assert loaded.energy_scale == made.energy_scale
    assert torch.equal(loaded.factor, made.factor)
    atoms = emt_frames(1, seed=5)[0]
    atoms.calc = Calculator(run, uncertainty="forces")
    forces = atoms.get_forces()
    results = atoms.calc.results
    assert results["forces_uncertainty"].shape == forces.shape
    assert results["energies_uncertainty"].shape == (len(atoms),)
    assert results["stress_uncertainty"].shape == (6,)
    assert (results["stress_uncertainty"] > 0).all()
    assert 0 < results["energy_uncertainty"] <= results["energies_uncertainty"].sum() * (1 + 1e-9)
    plain = Calculator(run)
    np.testing.assert_array_equal(plain.get_forces(atoms), forces)
    assert "energy_uncertainty" not in plain.results


def test_uncertainty_grows_away_from_the_training_data(run) -> None:
    fit_uncertainty(run)
    atoms = emt_frames(1, seed=5)[0]
    atoms.calc = Calculator(run, uncertainty="energy")
    atoms.get_potential_energy()
    near = atoms.calc.results["energies_uncertainty"].mean()
    squeezed = atoms.copy()
    squeezed.set_cell(0.85 * atoms.cell, scale_atoms=True)
    squeezed.calc = atoms.calc
    squeezed.get_potential_energy()
    assert squeezed.calc.results["energies_uncertainty"].mean() > 2 * near


def test_a_run_without_uncertainties_names_the_command(run, tmp_path) -> None:
    run.uncertainty_path().unlink(missing_ok=True)
    with pytest.raises(ForgefieldError, match="forgefield uncertainty"):
        Calculator(run, uncertainty="energy")
    with pytest.raises(ForgefieldError, match="choose one of energy, forces"):
        Calculator(run, uncertainty="stress")


def test_uncertainties_of_other_weights_are_refused(run) -> None:
    fit_uncertainty(run)
    path = run.weights_path("best")
    content, weights = path.read_bytes(), run.read_weights("best")
    try:
        write_weights(path, {name: 1.01 * tensor for name, tensor in weights.state.items()}, {})
        with pytest.raises(ForgefieldError, match="computed for other weights"):
            load_uncertainty(run)
    finally:
        path.write_bytes(content)


def test_a_damaged_file_is_reported_and_computed_again(run) -> None:
    fit_uncertainty(run)
    content = run.uncertainty_path().read_bytes()
    run.uncertainty_path().write_bytes(content[:-8] + bytes(8))
    with pytest.raises(ForgefieldError, match=r"uncertainty\.safetensors is damaged"):
        load_uncertainty(run)
    assert not has_uncertainty(run)
    fit_uncertainty(run)
    assert has_uncertainty(run)


def test_training_data_that_is_gone_is_reported(tmp_path) -> None:
    run = train(tiny_config(tmp_path))
    (tmp_path / "frames.extxyz").unlink()
    with pytest.raises(ForgefieldError, match=r"The training data of run tiny is not available: .*frames\.extxyz"):
        fit_uncertainty(run)
