"""A user's own model, named by import path in the tests."""

import torch
from torch import nn


class Springs(nn.Module):
    def __init__(self, stiffness: float, species, cutoff: float, statistics, width: int = 3) -> None:
        super().__init__()
        self.stiffness, self.cutoff, self.shifts = stiffness, cutoff, statistics["reference_energies"]
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, batch):
        lengths = batch["edge_vectors"].norm(dim=1)
        pair = self.stiffness * (self.cutoff - lengths).clamp(min=0) ** 3 * self.weight.sum().double()
        return torch.zeros(len(batch["species"]), dtype=torch.float64).index_add(0, batch["edge_index"][1], pair)


class NotAModel:
    pass


class Pairs(nn.Module):
    """Knows nothing of the data: no statistics, no reference energies."""

    def __init__(self, stiffness: float = 0.1) -> None:
        super().__init__()
        self.stiffness = nn.Parameter(torch.tensor(stiffness, dtype=torch.float64))

    def forward(self, batch):
        pair = self.stiffness * torch.exp(-batch["edge_vectors"].norm(dim=1))
        return torch.zeros(len(batch["species"]), dtype=torch.float64).index_add(0, batch["edge_index"][1], pair)


class Referenced(Pairs):
    """Adds the reference energies itself."""

    def __init__(self, reference_energies, species) -> None:
        super().__init__()
        self.species = tuple(species)
        self.references = torch.tensor([reference_energies[s] for s in species], dtype=torch.float64)

    def forward(self, batch):
        return super().forward(batch) + self.references[batch["species"]]
