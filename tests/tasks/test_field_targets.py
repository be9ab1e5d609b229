"""Losses and errors of targets that are fields, against the formulas written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models.heads.options import HeadOptions
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import FieldTargetOptions, ScheduleOptions, TargetOptions, TaskOptions
from forgefield.tasks.targets import require_labels
from forgefield.tasks.task import Task

SPECIES = ("Cu", "Au")
FURTHER = {
    "gap": HeadOptions(unit="eV", reduce="mean", scale=0.5),
    "total": HeadOptions(unit="eV", reduce="sum", scale=0.25),
    "moduli": HeadOptions(shape=[3], scale=4.0),
    "charge": HeadOptions(per="atom", unit="e", scale=0.1),
}
N_ATOMS = [2, 3, 1]


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {"gap": some(3), "total": some(3), "moduli": some(3, 3), "charge": some(6), "energy": some(3)}
    made["gap"][1] = made["charge"][3] = float("nan")
    made["moduli"][0] = float("nan")
    return made | {
        "weight": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64),
        "n_atoms": torch.tensor(N_ATOMS),
        "frame": torch.tensor([0, 0, 1, 1, 1, 2]),
        "species": torch.tensor([0, 1, 0, 0, 1, 1]),
        "cell": torch.zeros(3, 3, 3, dtype=torch.float64),
    }


@pytest.fixture
def outputs(batch) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(batch[name].shape, generator=generator, dtype=torch.float64) for name in (*FURTHER, "energy")
    }


def task(**fields: FieldTargetOptions) -> Task:
    return Task(TaskOptions(fields=fields), SPECIES, FURTHER)


def test_errors_count_in_units_of_the_scale_and_missing_labels_not_at_all(batch, outputs):
    found = task(gap=FieldTargetOptions(loss="mae", weight=3.0)).loss(outputs, batch)
    error = (outputs["gap"] - batch["gap"])[[0, 2]].abs() / 0.5
    assert float(found.total) == pytest.approx(3.0 * float((error * torch.tensor([1.0, 0.5])).sum()) / 1.5)
    assert found.counts.tolist() == [1.5]


@pytest.mark.parametrize(("per_atom", "power"), [(None, 1.0), (True, 1.0), ("root", 0.5), (False, 0.0)])
def test_extensive_values_are_compared_per_atom_as_requested(per_atom, power, batch, outputs):
    found = task(total=FieldTargetOptions(per_atom=per_atom)).loss(outputs, batch)
    error = (outputs["total"] - batch["total"]) / 0.25 / torch.tensor(N_ATOMS).double() ** power
    weight = batch["weight"]
    assert float(found.total) == pytest.approx(float((weight * error**2).sum() / weight.sum()))


def test_every_component_and_every_atom_counts_with_the_weight_of_its_frame(batch, outputs):
    found = task(moduli=FieldTargetOptions(), charge=FieldTargetOptions(weight=2.0)).loss(outputs, batch)
    assert found.counts.tolist() == [1 + 1 + 2 + 2 + 0.5, 3 * (2 + 0.5)]  # by name: charge, moduli
    charge = ((outputs["charge"] - batch["charge"]) / 0.1) ** 2
    weight = torch.tensor([1.0, 1.0, 2.0, 0.0, 2.0, 0.5], dtype=torch.float64)
    moduli = ((outputs["moduli"] - batch["moduli"])[1:] / 4.0) ** 2
    expected = 2.0 * float((weight * charge.nan_to_num()).sum()) / 6.5
    expected += float((moduli.sum(1) * torch.tensor([2.0, 0.5])).sum()) / 7.5
    assert float(found.total) == pytest.approx(expected)


def test_targets_are_ordered_by_name_whatever_the_order_in_the_config():
    options = {name: FieldTargetOptions() for name in ("moduli", "gap", "charge")}
    made = Task(TaskOptions(energy=TargetOptions(), fields=options), SPECIES, FURTHER)
    assert made.names == made.outputs == ("energy", "charge", "gap", "moduli")
    assert made.units == {"charge": "e", "gap": "eV", "moduli": ""}
    assert not made.needs_forces


def test_weights_of_fields_follow_schedules():
    made = task(gap=FieldTargetOptions(weight=1.0, schedule=ScheduleOptions(kind="step", to=[5.0], at=[3])))
    assert made.is_scheduled
    assert made.reported.tolist() == [5.0]
    assert dict(made.describe())["gap"] == "weight 1 then 5 from step 3, mse, intensive, in units of 0.5 eV"


def test_metrics_are_in_the_unit_of_the_label(batch, outputs):
    metrics = ErrorMetrics(("gap", "total", "charge"), SPECIES)
    metrics.update(outputs, batch)
    found = metrics.compute()
    for name in ("gap", "total", "charge"):
        error = (outputs[name] - batch[name]).numpy()
        assert found[f"{name}_mae"] == pytest.approx(np.nanmean(np.abs(error)))
        assert found[f"{name}_rmse"] == pytest.approx(np.sqrt(np.nanmean(error**2)))
    assert list(found) == metrics.names()


def test_a_target_that_the_model_does_not_give_is_refused():
    with pytest.raises(ForgefieldError, match=r"task\.other: the model has no output of that name; .* gap"):
        task(other=FieldTargetOptions())
    with pytest.raises(ForgefieldError, match=r"task\.gap\.weight must not be negative"):
        task(gap=FieldTargetOptions(weight=-1.0))


def test_fields_without_labels_are_refused_with_the_nearest_name():
    with pytest.raises(ForgefieldError, match=r"task\.gap is set, but no training frame has gap"):
        require_labels(["energy", "gap"], {"energy": 1, "gap": 0}, "training")
    with pytest.raises(ForgefieldError, match=r"no field of that name \(it has the fields gap\).*Did you mean 'gap'"):
        require_labels(["gab"], {"energy": 1, "gap": 2}, "training")
    with pytest.raises(ForgefieldError, match=r"it has no fields\).*data\.labels\.fields=\{gap: \{\}\}"):
        require_labels(["gap"], {"energy": 1}, "training")
