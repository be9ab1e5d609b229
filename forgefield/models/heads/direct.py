"""A model whose outputs are not energies but the labels themselves, in their units; it needs no heads."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from forgefield.models.edges import Batch, EdgeContext, StepMemory
from forgefield.models.interface import ExtraOutput
from forgefield.models.potential import Potential


class DirectOutputs(Potential):
    """model: has `values`. outputs: description of each requested output, by name."""

    has_energy = False

    def __init__(
        self, model: nn.Module, outputs: Mapping[str, ExtraOutput], *, max_neighbours: int | None = None
    ) -> None:
        super().__init__(model, max_neighbours=max_neighbours)
        self._outputs_of_model = dict(outputs)

    @property
    def extra_outputs(self) -> Mapping[str, ExtraOutput]:
        return self._outputs_of_model

    def forward(
        self, batch: Batch, *, forces: bool = True, stress: bool = False, memory: StepMemory | None = None
    ) -> dict[str, Tensor]:
        """Every output by its name: (n_frames, *shape) or (n_atoms, *shape), float64. There are no forces and no stress."""
        return self.interface.values(batch, EdgeContext.of(batch), tuple(self.extra_outputs))
