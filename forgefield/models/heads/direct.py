"""A model that gives its outputs by itself, in the unit of their labels, in place of an energy: no head is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from forgefield.models.potential import Batch, ExtraOutput, Potential, edge_vectors


@dataclass
class DirectOutput:
    """What a model gives under a name (`models.potential.ExtraOutput`). cumulative: running sums of the fitting's numbers."""

    per: str
    shape: list[int]
    reduce: str
    kind: str = "values"
    scale: float | list[float] = 1.0
    unit: str = ""
    classes: list[float] | None = None
    cumulative: bool = False
    always: bool = True
    """Given whether or not it is trained."""
    per_atom_errors: bool = False
    """Errors of frames are also measured per atom."""
    uncounted: list[int] = field(default_factory=list)
    """Numbers of the species whose atoms have no value: errors per atom are divided by the number of the other atoms."""


class DirectOutputs(Potential):
    """model: has `values(batch, names)`, outputs by name. outputs: what is said of each that is asked for."""

    has_energy = False

    def __init__(
        self, model: nn.Module, outputs: Mapping[str, ExtraOutput], *, max_neighbours: int | None = None
    ) -> None:
        super().__init__(model, max_neighbours=max_neighbours)
        self._outputs_of_model = dict(outputs)

    @property
    def extra_outputs(self) -> Mapping[str, ExtraOutput]:
        return self._outputs_of_model

    def forward(self, batch: Batch, *, forces: bool = True, stress: bool = False) -> dict[str, Tensor]:
        """Every output by its name: (n_frames, *shape) or (n_atoms, *shape), float64. It has no forces and no stress."""
        whole: dict[str, Any] = batch | {"edge_vectors": edge_vectors(batch)}
        return self.model.values(whole, tuple(self.extra_outputs))  # type: ignore[operator]
