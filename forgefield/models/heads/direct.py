"""A model whose outputs are not energies but the labels themselves, in their units; it needs no heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from forgefield.models.edges import Batch, EdgeContext, StepMemory
from forgefield.models.interface import ExtraOutput
from forgefield.models.potential import Potential


@dataclass
class DirectOutput:
    """An output of a model (`models.interface.ExtraOutput`). cumulative: running sums of the values of the fitting network."""

    per: str
    shape: list[int]
    reduce: str
    kind: str = "values"
    scale: float | list[float] = 1.0
    unit: str = ""
    classes: list[float] | None = None
    cumulative: bool = False
    always: bool = True
    """Whether it is an output also where it is not trained."""
    per_atom_errors: bool = False
    """Whether errors of frames are also measured per atom."""
    uncounted: list[int] = field(default_factory=list)
    """Indices of the species whose atoms have no value: errors per atom are divided by the number of the other atoms."""


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
