"""Energies, forces, stress and parameter gradients equal those of mace-torch 0.3.16 with the same weights, in float64."""

import numpy as np
import pytest
import torch

from forgefield.models.mace.basis import FLIPPED, full_tensor, map_of_tensor, old_sign
from forgefield.models.mace.importer import read_mace
from forgefield.models.mace.weights import contraction_weights, weight_table
from forgefield.models.module_records import tensors_of
from forgefield.untrusted.torch_files import read_torch_records
from tests.support.mace_models import CASES, batch_of, import_case, load, reference, write_module


def worst(got: torch.Tensor, expected: np.ndarray) -> float:
    return float((got.detach() - torch.from_numpy(np.asarray(expected))).abs().max())


@pytest.mark.parametrize("by_pair", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_predictions_equal_mace(case, by_pair, tmp_path, monkeypatch):
    stored, batch = reference(case), batch_of(case)
    if not by_pair:
        monkeypatch.setattr("forgefield.ops.graph._find_reverse", lambda *_: None)
        del batch["edge_reverse"]
    outputs = load(import_case(case, tmp_path))(batch, stress=True)
    assert worst(outputs["energy"], stored["energy"]) < 1e-11
    assert worst(outputs["atomic_energy"], stored["node_energy"]) < 1e-11
    assert worst(outputs["forces"], stored["forces"]) < 1e-11
    assert worst(outputs["stress"][1], stored["stress"][1]) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_parameter_gradients_of_an_energy_and_force_loss_equal_mace(case, tmp_path):
    stored, potential = reference(case), load(import_case(case, tmp_path)).train()
    outputs = potential(batch_of(case))
    errors = [outputs[key] - torch.from_numpy(stored[f"{key}_target"]) for key in ("energy", "forces")]
    loss = 0.1 * errors[0].square().sum() + errors[1].square().sum()
    assert loss.item() == pytest.approx(float(stored["loss"]), rel=1e-12)
    loss.backward()
    model, compared = potential.model, set()
    for weight in weight_table(model):
        expected, got = torch.from_numpy(stored[f"gradient/{weight.theirs}"]), model.get_parameter(weight.ours).grad
        assert worst(got, weight.read(expected).reshape(got.shape)) < 1e-9 * max(1, float(expected.abs().max()))
        compared.add(weight.ours)
    for entry in contraction_weights(model):
        if entry.ours is None:
            continue
        expected, got = torch.from_numpy(stored[f"gradient/{entry.theirs}"]), model.get_parameter(entry.ours).grad
        if model.options.use_reduced_cg and entry.degree > 1:
            got = map_of_entry(entry, torch.from_numpy(stored[f"weight/{entry.tensor}"])).T @ got
        assert worst(got, expected) < 1e-9 * max(1, float(expected.abs().max()))
        compared.add(entry.ours)
    assert compared == {name for name, _ in model.named_parameters()}


def map_of_entry(entry, tensor):
    product = entry.product
    return map_of_tensor(
        tensor,
        product.inputs,
        product.outputs,
        product.correlation,
        product.outputs[entry.output],
        entry.degree,
    )


def test_energies_with_chebyshev_polynomials_equal_mace_and_forces_are_their_derivative(tmp_path):
    """mace-torch leaves their derivative out, so that its forces are not those of its energy."""
    stored, batch, potential = reference("chebyshev"), batch_of("chebyshev"), load(import_case("chebyshev", tmp_path))
    outputs = potential(batch)
    assert worst(outputs["energy"], stored["energy"]) < 1e-11
    energies = []
    for step in (1e-4, -1e-4):
        moved = batch["positions"].clone()
        moved[0, 0] += step
        energies.append(potential(batch | {"positions": moved}, forces=False)["energy"].sum().item())
    slope = -(energies[0] - energies[1]) / 2e-4
    assert outputs["forces"][0, 0].item() == pytest.approx(slope, abs=1e-7)
    assert abs(stored["forces"][0, 0] - slope) > 1e-5


@pytest.mark.parametrize("case", ["residual", "density", "nonlinear", "reduced"])
def test_a_pickled_module_gives_the_same_model_as_its_state_dict(case, tmp_path):
    imported, expected = read_mace(write_module(case, tmp_path)), import_case(case, tmp_path)
    assert imported.resolved == expected.resolved
    assert imported.state.keys() == expected.state.keys()
    for name, value in imported.state.items():
        torch.testing.assert_close(value, expected.state[name], rtol=1e-12, atol=1e-12)


def test_the_reference_distinguishes_signs_of_couplings(tmp_path, monkeypatch):
    """With the Clebsch-Gordan coefficients of a later e3nn the same weights would be another model."""
    stored = reference("parity")
    monkeypatch.setattr("forgefield.models.mace.weights.old_sign", lambda *_: 1.0)
    outputs = load(import_case("parity", tmp_path))(batch_of("parity"))
    assert worst(outputs["energy"], stored["energy"]) > 1e-9


def test_signs_do_not_depend_on_the_order_of_degrees():
    assert (1, 2, 2) in FLIPPED
    assert old_sign(2, 1, 2) == old_sign(2, 2, 1) == old_sign(1, 2, 2) == -1
    assert old_sign(1, 1, 2) == old_sign(0, 3, 3) == 1


def test_the_full_basis_has_the_coupling_tensors_of_mace(tmp_path):
    """In the file of mace-torch, made with the coefficients of e3nn 0.4.4."""
    tensors = dict(tensors_of(read_torch_records(write_module("residual", tmp_path))))
    entries = list(contraction_weights(load(import_case("residual", tmp_path)).model))
    assert len(entries) == 9
    for entry in entries:
        own = full_tensor(entry.product.inputs, entry.product.outputs[entry.output], entry.degree)
        torch.testing.assert_close(own, tensors[entry.tensor], rtol=0, atol=1e-14)
