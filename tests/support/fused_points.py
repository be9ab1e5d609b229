"""Networks and rows for the tests of fused kernels for grid points."""

from __future__ import annotations

import importlib.util
import os

import torch

from forgefield.ldos.model import LDOSNetwork, LDOSOptions, LinearScale, PointFacts
from forgefield.ldos.training.data import RowLayout
from forgefield.ldos.training.fused import Tiles
from tests.support.snapshots import ENERGIES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""What factors are rounded to: the interpreter has no products of bfloat16, and float16 takes the same way."""
SMALL = Tiles(points=64, columns=64, depth=32, rounds=False)


def network(activation: str = "relu", output: str | None = None, hidden: tuple[int, ...] = (37, 70)) -> LDOSNetwork:
    facts = PointFacts(
        "ldos", LinearScale("none", [0.0] * 11, [1.0] * 11), LinearScale("none", [0.0] * 7, [1.0] * 7), ENERGIES
    )
    options = LDOSOptions(hidden=list(hidden), activation=activation, output_activation=output)
    generator = torch.Generator().manual_seed(1)
    return LDOSNetwork(options, facts, dtype=torch.float32, generator=generator).to(DEVICE)


class Rows:
    """Stands for `ResidentRows`."""

    def __init__(self, n: int) -> None:
        self.layout = RowLayout(11, 7)
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.zeros(n, self.layout.width, device=DEVICE)
        for room in self.layout.split(self.rows):
            room.copy_(torch.randn(room.shape, generator=generator))
