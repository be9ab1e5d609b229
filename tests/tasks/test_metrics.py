"""Metrics are plain MAE and RMSE in physical units, whatever the batching and whatever the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import units as ase_units

from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.units import unit_of
from tests.support.task_batches import SPECIES, random_batch

TARGETS = ("energy", "forces", "stress")


def test_errors_equal_a_plain_numpy_calculation():
    batch, outputs = random_batch([3, 1, 4, 2], seed=5)
    metrics = ErrorMetrics(TARGETS, SPECIES, maxima=True)
    metrics.update(outputs, batch)
    values = metrics.compute()
    assert set(values) == set(metrics.names())
    error = {name: (outputs[name].detach() - batch[name]).numpy() for name in TARGETS}
    per_atom = error["energy"] / batch["n_atoms"].numpy()
    assert values["energy_mae"] == pytest.approx(1000 * np.nanmean(np.abs(per_atom)), rel=1e-12)
    assert values["energy_total_rmse"] == pytest.approx(1000 * np.sqrt(np.nanmean(error["energy"] ** 2)), rel=1e-12)
    assert values["forces_rmse"] == pytest.approx(1000 * np.sqrt(np.nanmean(error["forces"] ** 2)), rel=1e-12)
    assert values["energy_max"] == pytest.approx(1000 * np.nanmax(np.abs(per_atom)), rel=1e-12)
    assert values["stress_mae"] == pytest.approx(np.nanmean(np.abs(error["stress"])) / ase_units.GPa, rel=1e-6)
    for index, symbol in enumerate(SPECIES):
        mine = error["forces"][batch["species"].numpy() == index]
        assert values[f"forces_mae/{symbol}"] == pytest.approx(1000 * np.nanmean(np.abs(mine)), rel=1e-12)
        assert values[f"forces_max/{symbol}"] == pytest.approx(1000 * np.nanmax(np.abs(mine)), rel=1e-12)
    assert values["forces_max"] == max(values[f"forces_max/{symbol}"] for symbol in SPECIES)


def test_several_updates_equal_one():
    a, b = random_batch([2, 3], seed=6), random_batch([1, 5, 2], seed=7)
    both = ErrorMetrics(TARGETS, SPECIES, maxima=True)
    for batch, outputs in (a, b):
        both.update(outputs, batch)
    one = ErrorMetrics(TARGETS, SPECIES, maxima=True)
    joined = {key: torch.cat([a[0][key], b[0][key]]) for key in (*TARGETS, "n_atoms", "species")}
    one.update({key: torch.cat([a[1][key], b[1][key]]) for key in TARGETS}, joined)
    assert both.compute() == pytest.approx(one.compute(), rel=1e-12)


def test_what_no_frame_is_labelled_for_is_absent_not_zero():
    batch, outputs = random_batch([2, 2], seed=8, missing=0.0)
    batch["stress"][:] = float("nan")
    metrics = ErrorMetrics(TARGETS, SPECIES)
    metrics.update(outputs, batch)
    assert "stress_mae" not in metrics.compute()
    assert "stress_mae" in metrics.names()


@pytest.mark.parametrize(
    ("metric", "unit"),
    [("val/energy_mae", "meV/atom"), ("forces_rmse/Cu", "meV/A"), ("test/stress_mae", "GPa"), ("train/loss", "")],
)
def test_units_are_known_for_every_name(metric, unit):
    assert unit_of(metric) == unit


def test_a_prediction_that_is_nan_is_an_infinite_error_not_a_missing_label():
    batch, outputs = random_batch([2, 2], seed=8, missing=0.0)
    outputs = {name: value.detach().clone() for name, value in outputs.items()}
    outputs["energy"][0] = outputs["forces"][1] = float("nan")
    metrics = ErrorMetrics(TARGETS, SPECIES)
    metrics.update(outputs, batch)
    values = metrics.compute()
    assert values["energy_mae"] == float("inf")
    assert not np.isfinite(values["forces_rmse"])
    assert np.isfinite(values["stress_rmse"])
