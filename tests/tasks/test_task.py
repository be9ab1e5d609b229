"""The loss is a weighted mean over existing labels, and sums add up to the same mean however frames are batched."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.config.option import limits_of
from forgefield.errors import ForgefieldError
from forgefield.tasks.losses import LOSSES
from forgefield.tasks.options import TargetOptions, TaskOptions, targets_of
from forgefield.tasks.targets import default_task, require_labels
from forgefield.tasks.task import Task
from tests.support.task_batches import NAN, SPECIES, random_batch


def obvious_loss(batch: dict, outputs: dict, weights: dict, species_weights: dict) -> float:
    """The definition, with loops over single numbers."""
    total = 0.0
    for name, weight in weights.items():
        numerator = denominator = 0.0
        label, prediction = batch[name].numpy(), outputs[name].detach().numpy()
        for row in range(len(label)):
            frame = int(batch["frame"][row]) if name == "forces" else row
            w = float(batch["weight"][frame])
            if name == "forces":
                w *= species_weights.get(SPECIES[int(batch["species"][row])], 1.0)
            n = int(batch["n_atoms"][frame]) if name == "energy" else 1
            for a, b in zip(np.ravel(label[row]), np.ravel(prediction[row])):
                if not np.isnan(a):
                    numerator += w * ((a - b) / n) ** 2
                    denominator += w
        total += weight * (numerator / denominator if denominator else 0.0)
    return total


def make_task() -> Task:
    options = TaskOptions(
        energy=TargetOptions(weight=2.0),
        forces=TargetOptions(weight=3.0, species_weights={"O": 5.0}),
        stress=TargetOptions(weight=0.5),
    )
    return Task(options, SPECIES)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 1000))
def test_loss_is_the_weighted_mean_over_existing_labels(sizes, seed):
    batch, outputs = random_batch(sizes, seed)
    expected = obvious_loss(batch, outputs, {"energy": 2.0, "forces": 3.0, "stress": 0.5}, {"O": 5.0})
    assert float(make_task().loss(outputs, batch).total) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("per_atom", "power"), [(True, 2), ("root", 1), (False, 0)])
def test_energies_and_virials_are_divided_by_the_requested_power_of_the_number_of_atoms(per_atom, power):
    """`root` is what DeePMD-kit minimises: the square of an extensive error over the number of atoms."""
    batch, outputs = random_batch([2, 5, 1], seed=3, missing=0.0)
    batch["cell"] = torch.diag_embed(torch.tensor([[2.0, 3, 4], [1, 1, 5], [3, 3, 3]], dtype=torch.float64))
    volume, n = torch.tensor([24.0, 5, 27]).double(), batch["n_atoms"].double()
    options = TaskOptions(
        energy=TargetOptions(weight=2.0, per_atom=per_atom), virial=TargetOptions(weight=3.0, per_atom=per_atom)
    )
    weight = batch["weight"]
    energy = (weight * (outputs["energy"] - batch["energy"]) ** 2 / n**power).sum() / weight.sum()
    squares = ((outputs["stress"] - batch["stress"]) * volume.view(-1, 1, 1)).square().mean((1, 2))
    virial = (weight * squares / n**power).sum() / weight.sum()
    expected = float(2.0 * energy + 3.0 * virial)
    task = Task(options, SPECIES)
    assert float(task.loss(outputs, batch).total) == pytest.approx(expected, rel=1e-12)
    assert (task.outputs, task.needs_stress) == (("energy", "stress"), True)


def root_of_squares(prediction, target):
    """|error|, as many write it: its slope at zero is 0/0."""
    return (prediction - target).square().sqrt()


def test_missing_labels_get_no_gradient_from_a_loss_that_has_none_at_zero():
    batch, outputs = random_batch([2, 1, 3], 0, missing=0.0)
    batch["energy"][1] = NAN
    batch["forces"][2] = NAN
    loss = TargetOptions(loss=f"{__name__}.root_of_squares")
    Task(TaskOptions(energy=loss, forces=loss), SPECIES).loss(outputs, batch).total.backward()
    for name in ("energy", "forces"):
        gradient, missing = outputs[name].grad, batch[name].isnan()
        assert bool((gradient[missing] == 0).all())
        assert bool(gradient.isfinite().all())
        assert bool((gradient[~missing] != 0).all())


def test_missing_labels_get_no_gradient_and_no_nan():
    batch, outputs = random_batch([2, 3, 1], seed=0, missing=0.5)
    batch["energy"][0] = NAN
    make_task().loss(outputs, batch).total.backward()
    for name in ("energy", "forces", "stress"):
        gradient = outputs[name].grad
        assert torch.isfinite(gradient).all()
        assert (gradient[batch[name].isnan()] == 0).all()
        assert (gradient[~batch[name].isnan()] != 0).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=6), st.integers(0, 100))
def test_added_sums_of_single_frames_give_the_loss_of_the_whole_batch(sizes, seed):
    """What makes epoch averages exact, and parallel training equal to serial training."""
    task = make_task()
    batch, outputs = random_batch(sizes, seed)
    whole = task.loss(outputs, batch)
    sums, counts = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for i in range(len(sizes)):
        atoms = batch["frame"] == i
        pick = {
            key: value[atoms] if key in ("frame", "species", "forces") else value[i : i + 1]
            for key, value in batch.items()
        }
        pick["frame"] = torch.zeros(sizes[i], dtype=torch.int64)
        part = task.loss(
            {key: value[atoms] if key == "forces" else value[i : i + 1] for key, value in outputs.items()}, pick
        )
        sums, counts = sums + part.sums, counts + part.counts
    assert float(task.combine(sums, counts)) == pytest.approx(float(whole.total), rel=1e-12, abs=1e-14)


def test_total_energy_loss_differs_from_per_atom_by_the_square_of_the_size():
    batch, outputs = random_batch([4, 4], seed=1, missing=0.0)
    per_atom = Task(TaskOptions(energy=TargetOptions(per_atom=True)), SPECIES).loss(outputs, batch).total
    total = Task(TaskOptions(energy=TargetOptions(per_atom=False)), SPECIES).loss(outputs, batch).total
    assert float(total) == pytest.approx(16 * float(per_atom), rel=1e-12)


def test_a_huber_loss_by_magnitude_is_that_of_nequip():
    """Numbers of NequIP 0.19.1: StratifiedHuberForceLoss with these deltas and vectors."""
    generator = torch.Generator().manual_seed(0)
    prediction, target = (6 * torch.randn(200, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    for strata, expected in (
        ([[0, 0.5], [5.0, 1.0], [10.0, 3.0]], 11.9149341564701),
        ([[4.0, 0.2], [8.0, 0.9]], 5.964760582460968),
    ):
        options = TaskOptions(forces=TargetOptions(loss="huber", huber_deltas=strata))
        (forces,) = Task(options, SPECIES).targets
        assert float(forces.loss(prediction, target).mean()) == pytest.approx(expected, rel=1e-12)
        zero = target.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(forces.loss(zero, target).sum(), zero)
        assert not slope.any()


def test_huber_is_quadratic_inside_and_linear_outside():
    batch, outputs = random_batch([1, 1], seed=2, missing=0.0)
    batch["weight"][:] = 1.0
    outputs["energy"] = batch["energy"] + torch.tensor([0.05, -3.0], dtype=torch.float64)
    task = Task(TaskOptions(energy=TargetOptions(loss="huber", huber_delta=0.1)), SPECIES)
    expected = (0.5 * 0.05**2 + 0.1 * (3.0 - 0.05)) / 2
    assert float(task.loss(outputs, batch).total) == pytest.approx(expected, rel=1e-12)


def fourth_power(prediction, target):
    return (prediction - target) ** 4


def test_user_loss_is_named_by_import_path():
    batch, outputs = random_batch([1, 2], seed=3, missing=0.0)
    batch["weight"][:] = 1.0
    task = Task(TaskOptions(stress=TargetOptions(loss="tests.tasks.test_task.fourth_power")), SPECIES)
    expected = ((outputs["stress"] - batch["stress"]) ** 4).mean()
    assert float(task.loss(outputs, batch).total) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TaskOptions(), "there is no target"),
        (TaskOptions(energy=TargetOptions(weight=0.0)), "every weight is zero"),
        (TaskOptions(forces=TargetOptions(weight=-1.0)), r"task\.forces\.weight"),
        (TaskOptions(forces=TargetOptions(species_weights={"Xe": 2.0})), "Xe"),
        (TaskOptions(energy=TargetOptions(loss="msee")), r"task\.energy\.loss.*msee"),
        (TaskOptions(energy=TargetOptions(loss="huber", huber_delta=0.0)), "huber_delta"),
        (TaskOptions(energy=TargetOptions(loss="huber", huber_deltas=[[0, 0.1]])), "huber_deltas is for forces"),
        (TaskOptions(forces=TargetOptions(loss="huber", huber_deltas=[[5, 0.1], [0, 0.2]])), "ascending"),
        (TaskOptions(forces=TargetOptions(loss="huber", huber_deltas=[[5, "a"]])), "must be a list"),
    ],
)
def test_impossible_tasks_are_refused_with_the_setting_named(options, message):
    with pytest.raises(ForgefieldError, match=message):
        Task(options, SPECIES)


def test_default_task_follows_the_labels():
    def weights(task):
        return {name: target.weight for name, target in targets_of(task).items()}

    assert weights(default_task({"energy": 3, "forces": 2, "stress": 0})) == {"energy": 1, "forces": 1}
    assert weights(default_task({"energy": 3, "forces": 2, "stress": 1})) == {"energy": 1, "forces": 10, "stress": 100}
    before = default_task({"energy": 3, "forces": 2, "stress": 1}, stress=False)  # of runs of earlier versions
    assert weights(before) == {"energy": 1, "forces": 1}
    assert default_task({"energy": 3, "forces": 0}).forces is None
    with pytest.raises(ForgefieldError, match="neither energies nor forces"):
        default_task({"energy": 0, "forces": 0})


def test_a_target_without_labels_is_refused():
    with pytest.raises(ForgefieldError, match=r"task\.stress is set"):
        require_labels(make_task().names, {"energy": 1, "forces": 1, "stress": 0}, "training")


def test_every_registered_loss_is_a_choice_of_the_config():
    loss = next(field for field in dataclasses.fields(TargetOptions) if field.name == "loss")
    assert limits_of(loss).choices == tuple(LOSSES)


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name](0.3).kernel is not None])
def test_kernel_formula_of_a_loss_is_its_reference_formula_and_derivative(name):
    """Triton's expressions evaluated with PyTorch's functions of the same names."""
    loss = LOSSES[name](0.3)
    difference = torch.linspace(-1, 1, 41, dtype=torch.float64).requires_grad_()
    reference = loss(difference, torch.zeros_like(difference))
    (slope,) = torch.autograd.grad(reference.sum(), difference)
    functions = {"tl": SimpleNamespace(abs=torch.abs, where=torch.where), "d": difference.detach()}
    torch.testing.assert_close(eval(loss.kernel.error, functions), reference.detach())
    torch.testing.assert_close(eval(loss.kernel.slope, functions), slope)
