"""The loss, its slopes and the errors by kernels against the task and the metrics, which make them by plain operations."""

import pytest
import torch

from forgefield.ops.execution import execution
from forgefield.tasks.loss_kernels import ROWS, kernels_support, loss_by_kernels
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from tests.support.kernels import DEVICE, assert_same, draw, needs_kernels

pytestmark = needs_kernels
SPECIES = ("H", "O")
TASKS = {
    "energy and forces": TaskOptions(energy=TargetOptions(), forces=TargetOptions()),
    "stress, huber, weights of species": TaskOptions(
        energy=TargetOptions(loss="huber", huber_delta=0.2, per_atom=False, weight=3.0),
        forces=TargetOptions(loss="mae", species_weights={"O": 0.25}),
        stress=TargetOptions(loss="huber", huber_delta=1.0, weight=0.5),
    ),
    "virial": TaskOptions(
        forces=TargetOptions(loss="huber", huber_delta=0.7),
        energy=TargetOptions(loss="mae", per_atom="root"),
        virial=TargetOptions(),
    ),
    "virial in total": TaskOptions(virial=TargetOptions(loss="mae", per_atom=False)),
}


def labelled_batch(sizes: list[int]) -> tuple[dict, dict]:
    """Labels with gaps, and outputs."""
    n_frames, n_atoms = len(sizes), sum(sizes)
    frame = torch.repeat_interleave(torch.arange(n_frames), torch.tensor(sizes)).to(DEVICE)
    shapes = {"energy": (n_frames,), "forces": (n_atoms, 3), "stress": (n_frames, 3, 3)}
    outputs, batch = ({key: draw(seed, *shape) for key, shape in shapes.items()} for seed in (1, 2))
    batch |= {"n_atoms": torch.tensor(sizes, device=DEVICE), "frame": frame, "species": (draw(3, n_atoms) > 0).long()}
    batch |= {"weight": draw(4, n_frames).abs() + 0.1, "cell": draw(5, n_frames, 3, 3)}
    batch["energy"][draw(6, n_frames) > 1] = torch.nan
    batch["forces"][(draw(7, n_frames) > 1)[frame]] = torch.nan
    batch["forces"][2, 1] = torch.nan  # one number alone
    batch["stress"][draw(8, n_frames) > 1] = torch.nan
    batch["stress"][0], batch["cell"][0], outputs["stress"][0] = torch.nan, 0, torch.nan  # a frame without a volume
    outputs["forces"][1] = batch["forces"][1]
    return batch, outputs


@pytest.mark.parametrize("external_denominators", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_loss_slopes_and_errors(name, external_denominators):
    task = Task(TASKS[name], SPECIES)
    errors, weights = task.error_metrics(SPECIES), task.weights_on(torch.device(DEVICE))
    for sizes in ([4, 1, 3], [1] * (ROWS + 1) + [2 * ROWS]):
        batch, outputs = labelled_batch(sizes)
        leaves = {key: outputs[key].detach().requires_grad_() for key in task.outputs}
        sums, counts = task.sums(leaves, batch)
        denominators = 0.5 * counts + 1 if external_denominators else None
        expected = task.combine(sums, counts if denominators is None else denominators)
        slopes = dict(zip(leaves, torch.autograd.grad(expected, list(leaves.values()))))
        with execution(kernels=True):
            assert kernels_support(task, errors, batch)
        found = loss_by_kernels(task, errors, outputs, batch, weights, denominators)
        assert_same(found.loss, expected.detach())
        assert_same(found.sums, torch.stack([sums, counts]).detach())
        assert_same(found.errors, errors.measure(outputs, batch))
        for key, slope in slopes.items():
            # Autograd makes NaN of an output that is none, also where the label that it would be compared with is missing.
            assert_same(found.slopes[key], torch.where(batch[key].isnan(), 0.0, slope))


def test_nan_predictions_are_detected():
    task = Task(TASKS["energy and forces"], SPECIES)
    batch, outputs = labelled_batch([2, 2])
    batch["energy"][1], outputs["energy"][1] = 1.0, torch.nan
    found = loss_by_kernels(
        task, task.error_metrics(SPECIES), outputs, batch, task.weights_on(torch.device(DEVICE)), None
    )
    assert found.loss.isnan()
    assert found.slopes["energy"][1].isnan()


@pytest.mark.parametrize("targets", [{"energy": {}, "forces": {"loss": "rmse"}}, {"stress": {}, "virial": {}}])
def test_unsupported_losses_are_left_to_reference_operations(targets):
    task = Task(TaskOptions(**{key: TargetOptions(**options) for key, options in targets.items()}), SPECIES)
    batch, _ = labelled_batch([2, 2])
    with execution(kernels=True):
        assert not kernels_support(task, task.error_metrics(SPECIES), batch)
        known = Task(TASKS["energy and forces"], SPECIES)
        assert not kernels_support(known, ErrorMetrics(("energy",), SPECIES), batch)
    assert not kernels_support(known, known.error_metrics(SPECIES), batch)
