"""Models, batches and step functions with extra outputs for the tests of engines and kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from forgefield.data.batch import batch_shapes
from forgefield.data.labels.fields import Field
from forgefield.models import build_model, resolve_model
from forgefield.models.heads.options import HeadOptions
from forgefield.models.predictor import Predictor
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import FieldTargetOptions, TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.step import StepFunction
from tests.support.engine_cases import labelled
from tests.support.structures import SPECIES, STATISTICS, TINY

FACTS = {
    "gap": {"unit": "eV", "reduce": "mean", "shift": [[1.0], [1.0]], "scale": 0.5},
    "tensor": {"shape": [3, 2], "reduce": "sum", "shift": [[0.1] * 6, [0.2] * 6], "scale": 2.0},
    "charge": {"per": "atom", "shift": [[0.3], [-0.6]], "scale": 0.1, "hidden": []},
}
FIELDS = {name: Field(fact.get("per", "frame"), tuple(fact.get("shape", []))) for name, fact in FACTS.items()}
INPUT = {"field_strength": Field("frame", (3,))}
SHAPES = batch_shapes(FIELDS | INPUT)
SMALL = {
    "nequip": TINY,
    "allegro": {"name": "allegro", "l_max": 1, "num_tensor_features": 3, "num_scalar_features": 4},
}


class Lengths(nn.Module):
    """A user's own encoder: sums of waves of the lengths, and the species; it knows no energy."""

    species, cutoff, feature_dim = SPECIES, 3.0, 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def forward(self, batch):
        lengths = batch["edge_vectors"].square().sum(1).sqrt()
        waves = torch.sin(lengths.unsqueeze(1) * self.weight) * ((1 - lengths / 3.0).clamp(min=0) ** 3).unsqueeze(1)
        rows = waves.new_zeros(batch["species"].shape[0], 4).index_add(0, batch["edge_index"][1], waves)
        return rows + batch["species"].unsqueeze(1)


def predictor(name: str, *, has_energy: bool, **changes: Any) -> Predictor:
    if name == "own":
        heads = {key: HeadOptions(**fact) for key, fact in FACTS.items()}
        return Predictor(Lengths(), heads, has_energy=False, dtype=torch.float64)
    known = {"species": SPECIES, "cutoff": 3.0, "statistics": STATISTICS}
    return build_model(
        resolve_model({**SMALL[name], **changes}, heads=FACTS, has_energy=has_energy, **known),
        precision="float64",
        seed=1,
    )


def function(potential: Predictor, targets: tuple[str, ...], **options) -> StepFunction:
    fields = {name: FieldTargetOptions(weight=1.0 + i) for i, name in enumerate(FACTS)}
    ours = {name: TargetOptions(weight=1.5 + i) for i, name in enumerate(targets)}
    task = Task(TaskOptions(**ours, fields=fields), SPECIES, potential.extra_outputs)
    return StepFunction(potential.train(), task, ErrorMetrics(task.names, SPECIES), shapes=SHAPES, **options)


def with_fields(*atoms: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every second gap and every third charge is missing, and one frame has no tensor."""
    batch = labelled(*atoms, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, field in (FIELDS | INPUT).items():
        n = batch["positions"].shape[0] if field.per == "atom" else len(atoms)
        batch[name] = torch.randn(n, *field.shape, generator=generator, dtype=torch.float64)
    batch["gap"][1::2] = float("nan")
    batch["charge"][::3] = float("nan")
    batch["tensor"][2:3] = float("nan")
    return batch
