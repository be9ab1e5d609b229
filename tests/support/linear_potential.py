"""A potential that is linear in its weights, for which uncertainties have a closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import AtomisticModel, LastLayer
from forgefield.models.potential import Potential

SPECIES = ("H", "O")
CUTOFF = 3.0


class LinearModel(AtomisticModel):
    """Sums of Gaussians of the neighbours' distances, times weights, plus a constant for each species."""

    only_edge_vectors = True

    def __init__(self, n_weights: int = 5) -> None:
        super().__init__()
        self.species, self.cutoff = SPECIES, CUTOFF
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.Parameter(torch.randn(n_weights, generator=generator, dtype=torch.float64))

    def features(self, batch: Batch, edges: EdgeContext) -> Tensor:
        centre, n_atoms = batch["edge_index"][1], len(batch["species"])
        lengths = edges.vectors.norm(dim=1, keepdim=True)
        middle = torch.linspace(0.5, CUTOFF, len(self.weights), dtype=torch.float64)
        basis = torch.exp(-2 * (lengths - middle) ** 2) * (1 - lengths / CUTOFF) ** 2
        basis = basis * (1 + batch["species"][centre].unsqueeze(1))
        return basis.new_zeros(n_atoms, len(self.weights)).index_add(0, centre, basis)

    def forward(self, batch: Batch, edges: EdgeContext) -> Tensor:
        return self.last_layer(batch, edges).energies()

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        shifts = torch.tensor([-1.0, -3.0], dtype=torch.float64).index_select(0, batch["species"])
        return LastLayer(self.features(batch, edges), self.weights.detach(), shifts)


def linear_potential(n_weights: int = 5) -> Potential:
    return Potential(LinearModel(n_weights)).eval()
