"""Evaluates batches of different structures by the evaluation engine, for predictions and errors of many frames.

Batches of similar sizes use one captured program, into whose tensors each of them is written; neighbour lists are built on the
device. Edges that a batch carries are not used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from forgefield.inference.engine.comparison import Deviation, compare
from forgefield.inference.engine.device import DeviceEngine, Room, Systems
from forgefield.models.edges import Batch
from forgefield.models.potential import Potential

SKIN = 0.05
"""A. Lists are used once; with this skin it does not matter how distances next to the cutoff are rounded in them."""
ROOM = Room(edges=0.15, atoms=0.15)


class BatchEngine:
    """potential: one that the engine supports, in evaluation mode on `device`, with weights that do not change.

    captured: as of `DeviceEngine`. notify: receives the deviation from the eager model in float64, on the first batch.
    """

    def __init__(
        self,
        potential: Potential,
        device: torch.device,
        *,
        captured: bool | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._engine = DeviceEngine(potential, device, skin=SKIN, room=ROOM, captured=captured, notify=notify)
        self.deviation: Deviation | None = None
        """Deviation of the engine from the eager model in float64, on the first batch."""

    @property
    def captures(self) -> int:
        """How many programs have been made."""
        return self._engine.captures

    def evaluate(self, batch: Batch, *, forces: bool, stress: bool) -> Batch:
        """Outputs as of `Potential`, in new tensors. batch: on the device."""
        engine, cell = self._engine, batch["cell"]
        systems = Systems(batch["species"], batch["n_atoms"], batch["pbc"])
        if self.deviation is None:
            engine.set_systems(systems)
            self.deviation = compare(engine, systems, batch["positions"], cell)
            engine.notify(f"Evaluation engine, {engine.describe()}: {self.deviation}.")
        engine.replace_systems(systems)
        found = engine.evaluate(batch["positions"], cell, gradients=forces or stress)
        outputs = {"energy": found.energy, "atomic_energy": found.atomic_energy}
        if forces and found.forces is not None:
            outputs["forces"] = found.forces
        if stress and found.stress is not None:
            outputs["stress"] = found.stress
        return {name: value.clone() for name, value in outputs.items()}

    def release(self) -> None:
        """Release memory on the device, after it has run out."""
        self._engine.forget_programs()
