"""Small LDOS networks with their tasks and rows."""

from __future__ import annotations

import torch

from forgefield.ldos.loss import PointTask
from forgefield.ldos.model import LDOSNetwork, LDOSOptions, LinearScale, PointFacts
from forgefield.ldos.options import PointTargetOptions, SnapshotTermOptions
from tests.support.snapshots import ENERGIES

DTYPE = torch.float64


def network(activation: str | list[str] = "silu", output: str | None = None, dtype: torch.dtype = DTYPE) -> LDOSNetwork:
    facts = PointFacts(
        "ldos",
        LinearScale("standard", [1.0, -2.0, 300.0], [2.0, 0.5, 30.0]),
        LinearScale("minmax", [0.01] * 7, [0.1] * 7),
        ENERGIES,
    )
    options = LDOSOptions(hidden=[9, 5], activation=activation, output_activation=output)
    return LDOSNetwork(options, facts, dtype=dtype, generator=torch.Generator().manual_seed(1))


def task(loss: str = "mse", weights: list[float] | None = None, **terms: SnapshotTermOptions) -> PointTask:
    return PointTask("ldos", PointTargetOptions(loss=loss, level_weights=weights), terms, 7)


def rows(n: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator, dtype=DTYPE), torch.rand(n, 7, generator=generator, dtype=DTYPE)
