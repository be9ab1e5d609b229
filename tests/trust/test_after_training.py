"""Uncertainties at the end of a training, in `test`, in predictions and in the report."""

import ase.io
import numpy as np
import pytest

import forgefield
from forgefield import api
from forgefield.api import predict, train
from forgefield.inference.uncertainty import has_uncertainty, load_uncertainty
from forgefield.models.interface import AtomisticModel
from forgefield.runs import Run
from forgefield.tasks.calibration import calibration_metrics
from forgefield.trust.uncertainty import fit_uncertainty
from tests.support.helpers import emt_frames, tiny_config, write_emt


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return train(tiny_config(tmp_path_factory.mktemp("trained")))


def test_a_training_ends_with_uncertainties(run) -> None:
    assert has_uncertainty(run)
    report = (run.path / "report.html").read_text()
    assert 'id="uncertainty"' in report
    assert "Forces: calibration" in report


def test_the_same_training_without_uncertainties_has_the_same_checkpoints(run, tmp_path) -> None:
    other = train(tiny_config(tmp_path, training={"lr": 0.01, "ema": 0.9, "tensorboard": 0, "uncertainty": False}))
    assert not other.uncertainty_path().exists()
    assert 'id="uncertainty"' not in (other.path / "report.html").read_text()
    for which in ("best", "last"):
        assert other.read_weights(which).sha256 == run.read_weights(which).sha256


def test_uncertainties_are_computed_again_after_more_training(tmp_path) -> None:
    config = tiny_config(tmp_path)
    first = train(config)
    before = load_uncertainty(first).about["weights_sha256"]
    again = train(config, "trainer.max_epochs=6")
    assert load_uncertainty(again).about["weights_sha256"] != before


def test_a_model_without_a_last_layer_is_trained_without(tmp_path, capfd, monkeypatch) -> None:
    from forgefield.models.nequip.model import NequIP

    monkeypatch.setattr(NequIP, "last_layer", AtomisticModel.last_layer)
    trained = train(tiny_config(tmp_path))
    assert not trained.uncertainty_path().exists()
    printed = " ".join(capfd.readouterr().out.split())
    assert "No uncertainties were computed (training.uncertainty): NequIP does not define its last layer" in printed


def test_metrics_of_a_test_are_those_of_its_predictions(run, tmp_path) -> None:
    data = write_emt(tmp_path / "test.extxyz", 6, seed=31)
    errors = api.test(run, str(data), uncertainty="forces")
    (stored,) = (run.path / "predictions").glob("test*.npz")
    with np.load(stored) as arrays:
        n_atoms = arrays["n_atoms"]
        of_energy = (arrays["energy_pred"] - arrays["energy_ref"]) / n_atoms, arrays["energy_uncertainty"] / n_atoms
        of_forces = [arrays[f"forces_{kind}"].ravel() for kind in ("pred", "ref", "uncertainty")]
    for name, values in (("energy", of_energy), ("forces", (of_forces[0] - of_forces[1], of_forces[2]))):
        for metric, value in calibration_metrics(*values).items():
            assert errors[f"{name}_{metric}"] == pytest.approx(value)
    plain = api.test(run, str(data))
    assert "energy_nll" in plain
    assert "forces_nll" not in plain


def test_predictions_carry_uncertainties(run, tmp_path) -> None:
    source = write_emt(tmp_path / "new.extxyz", 3, seed=32)
    out = predict(run, source, tmp_path / "out.extxyz", uncertainty="forces")
    calculator = forgefield.Calculator(run, uncertainty="forces")
    for atoms in ase.io.read(out, ":"):
        calculator.get_forces(atoms)
        assert atoms.info["energy_uncertainty"] == pytest.approx(calculator.results["energy_uncertainty"], rel=1e-6)
        for name in ("energies_uncertainty", "forces_uncertainty"):
            np.testing.assert_allclose(atoms.arrays[name], calculator.results[name], rtol=1e-5, atol=1e-9)


def test_torch_sim_gets_uncertainties(run) -> None:
    torch_sim = pytest.importorskip("torch_sim")
    from forgefield.torchsim import Model

    frames = emt_frames(2, seed=33)
    model = Model(run, device="cpu", uncertainty="energy")
    results = model(torch_sim.io.atoms_to_state(frames, "cpu", model.dtype))
    calculator = forgefield.Calculator(run, uncertainty="energy")
    for number, atoms in enumerate(frames):
        calculator.get_potential_energy(atoms)
        expected = calculator.results["energy_uncertainty"]
        assert float(results["energy_uncertainty"][number]) == pytest.approx(expected, rel=1e-6)


def test_evenly_spaced_frames_give_similar_uncertainties(run) -> None:
    exact = fit_uncertainty(run, directions=0)
    assert exact.about["training_energies"] == 10
    fewer = fit_uncertainty(run, most_frames=4)
    assert fewer.about["training_energies"] == 4
    assert fewer.about["validation_energies"] == 4
