"""Models, batches and engines that the tests of engines share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forgefield.models import Potential, build_model, resolve_model
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import largest_difference
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame, make_potential

Batch = dict[str, Tensor]
ALL = ("energy", "forces", "stress")


def labelled(*atoms: int, seed: int = 0, periodic: bool = True, box: float = 4.0) -> Batch:
    """A batch of frames of so many atoms with random labels; every third energy and force is missing."""
    batch = make_batch(*(make_frame(n, seed=seed + i, periodic=periodic, box=box) for i, n in enumerate(atoms)))
    generator = torch.Generator().manual_seed(seed)
    for name in ALL:
        batch[name] = torch.randn(batch[name].shape, generator=generator, dtype=torch.float64)
    batch["energy"][2::3] = float("nan")
    batch["forces"][2::3] = float("nan")
    return batch


def learnt(potential: Potential, batch: Batch) -> Batch:
    """The batch with labels that the model has learnt, but for a hundred thousandth."""
    generator = torch.Generator().manual_seed(3)
    outputs = potential(batch, stress=True)
    labels = {}
    for name in ALL:
        off = 1e-5 * torch.randn(batch[name].shape, generator=generator, dtype=torch.float64).to(batch[name])
        labels[name] = outputs[name].detach().double() + off
    return {**batch, **labels}


def step_function(potential: Potential, targets: tuple[str, ...] = ALL, **options: Any) -> StepFunction:
    task = Task(TaskOptions(**{name: TargetOptions(weight=1.0 + i) for i, name in enumerate(targets)}), SPECIES)
    return StepFunction(potential.train(), task, ErrorMetrics(task.names, SPECIES), **options)


def difference(engine: Any, reference: Any, batch: Batch) -> float:
    """Largest relative difference of loss, errors and gradients; also of what an evaluation gives."""
    training, _ = largest_difference(
        engine.differentiate(batch), reference.differentiate(batch), engine.function.trained
    )
    found, expected = engine.evaluate(batch), reference.evaluate(batch)
    scale = 1e-12 + max(float(expected.sums.abs().max()), float(expected.errors.abs().max()))
    evaluation = max(float((a - b).abs().max()) / scale for a, b in zip(found, expected))
    return max(training, evaluation)


class ReadsAValue(nn.Module):
    """Asks for a number of the device in the middle of a step, as no compiled step can."""

    species, cutoff = ("H", "O"), 3.0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, batch):
        squares = batch["edge_vectors"].square().sum(1)
        if self.how == "value" and squares.max().item() > 1.0:
            squares = squares * 0.5
        if self.how == "size":
            squares = squares * torch.arange(int(squares.shape[0]) + 0 * len(range(squares.shape[0])))
        atomic = squares.new_zeros(batch["species"].shape[0])
        return atomic.index_add(0, batch["edge_index"][1], squares) * self.weight.sum()


class Angular(nn.Module):
    """A model of positions and cells, not of edge vectors alone: three-body terms and a term of the volume."""

    species, cutoff = ("H", "O"), 3.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3))

    def forward(self, batch):
        vectors, (source, centre) = batch["edge_vectors"], batch["edge_index"]
        fade = (1 - vectors.square().sum(1) / 9.0).clamp(min=0) ** 3
        kinds = self.weight.index_select(0, batch["species"].index_select(0, source))
        moments = batch["positions"].new_zeros(batch["species"].shape[0], 3, 3)
        moments = moments.index_add(0, centre, (fade.unsqueeze(1) * kinds).unsqueeze(2) * vectors.unsqueeze(1))
        wave = torch.sin(batch["positions"] @ torch.ones(3, dtype=torch.float64))
        size = torch.linalg.det(batch["cell"]).index_select(0, batch["frame"])
        return moments.square().sum((1, 2)) + self.weight.sum() * (wave * fade.new_ones(()) + 1e-3 * size)


MODELS = {
    "nequip": {},
    "nequip with both parities": {"l_max": 2, "parity": True, "num_features": [3, 2, 2]},
    "nequip with all that can be trained": {
        "bessel_trainable": True,
        "energy_scales_trainable": True,
        "energy_shifts_trainable": True,
        "zbl": True,
    },
    "nequip of norms": {"nonlinearity": "norm"},
    "allegro": {
        "name": "allegro",
        "num_features": None,
        "radial_mlp_width": None,
        "l_max": 2,
        "num_tensor_features": 3,
        "num_scalar_features": 4,
    },
    "mace": {
        "name": "mace",
        "hidden_irreps": "3x0e + 3x1o",
        "max_ell": 2,
        "radial_mlp": [8],
        "mlp_irreps": "4x0e",
    },
    "mace with gates": {
        "name": "mace",
        "hidden_irreps": "3x0e + 3x1o",
        "max_ell": 1,
        "correlation": 2,
        "interaction": "nonlinear",
        "interaction_first": "density",
        "apply_cutoff": False,
        "distance_transform": "Agnesi",
        "pair_repulsion": True,
        "readout_bias": True,
        "use_reduced_cg": False,
        "radial_mlp": [8],
    },
    "own": None,
}


def potential_of(name: str, precision: str = "float64", **changes: Any) -> Potential:
    if MODELS[name] is None:
        return Potential(Angular())
    options = {**MODELS[name], **changes}
    if "name" in options:
        given = {key: value for key, value in options.items() if value is not None}
        return build_model(
            resolve_model(given, species=("H", "O"), cutoff=3.0, statistics=STATISTICS), precision=precision, seed=1
        )
    return make_potential(precision, **options)
