"""A small correct model and one broken relative for each law it can break."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forgefield.models.potential import Potential

REFERENCE = {"Cu": -1.25, "Au": 0.5}


class Morse(nn.Module):
    """Pair potential with a smooth cutoff and a square-root embedding, so that it is more than a sum over pairs."""

    species = ("Cu", "Au")
    cutoff = 4.0

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Parameter(torch.tensor([[0.34, 0.40], [0.40, 0.47]], dtype=torch.float64))
        self.shift = nn.Parameter(torch.tensor([REFERENCE[s] for s in self.species], dtype=torch.float64))

    def envelope(self, r: Tensor) -> Tensor:
        x = (r / self.cutoff).clamp(max=1.0)
        return 1 - 10 * x**3 + 15 * x**4 - 6 * x**5

    def sum_over_neighbours(self, batch: dict, values: Tensor) -> Tensor:
        total = torch.zeros((len(batch["species"]), *values.shape[1:]), dtype=values.dtype)
        return total.index_add(0, batch["edge_index"][1], values)

    def forward(self, batch: dict) -> Tensor:
        source, destination = batch["edge_index"]
        r = batch["edge_vectors"].norm(dim=1)
        depth = self.depth[batch["species"][destination], batch["species"][source]]
        bond = torch.exp(-1.4 * (r - 2.7))
        pair = self.sum_over_neighbours(batch, 0.5 * depth * (bond**2 - 2 * bond) * self.envelope(r))
        density = self.sum_over_neighbours(batch, bond * self.envelope(r))
        return pair - 0.3 * (torch.sqrt(density + 1) - 1) + self.shift[batch["species"]]


class CosineCutoff(Morse):
    """Also lawful: the force is continuous, though its slope is not."""

    def envelope(self, r):
        return 0.5 * (1 + torch.cos(torch.pi * (r / self.cutoff).clamp(max=1.0)))


class HardCutoff(Morse):
    def envelope(self, r):
        return torch.ones_like(r)


class ForceJumpsAtCutoff(Morse):
    def envelope(self, r):
        return (1 - r / self.cutoff).clamp(min=0.0)


class HardInnerCutoff(Morse):
    """Smooth at the cutoff, with a jump of its own at a shorter distance."""

    def envelope(self, r):
        return super().envelope(r) * torch.where(r < 3.3, 1.0, 0.99)


class PrefersAnAxis(Morse):
    def forward(self, batch):
        vectors = batch["edge_vectors"]
        along_x = 1e-5 * vectors[:, 0] ** 2 * self.envelope(vectors.norm(dim=1))
        return super().forward(batch) + self.sum_over_neighbours(batch, along_x)


class Handed(Morse):
    """Tells left from right by a triple product of three neighbour sums."""

    def forward(self, batch):
        vectors = batch["edge_vectors"]
        r = vectors.norm(dim=1, keepdim=True)
        kind = batch["species"][batch["edge_index"][0]][:, None]
        weights = (torch.ones_like(r), torch.exp(-r), torch.exp(-2 * r) * (1 + kind))
        a, b, c = (self.sum_over_neighbours(batch, w * self.envelope(r) * vectors) for w in weights)
        return super().forward(batch) + (a * torch.linalg.cross(b, c)).sum(dim=1)


class KnowsItsPlace(Morse):
    def forward(self, batch):
        return super().forward(batch) + 1e-6 * batch["positions"][:, 1]


class KnowsAtomNumbers(Morse):
    def forward(self, batch):
        start = torch.cumsum(batch["n_atoms"], 0) - batch["n_atoms"]
        order = torch.arange(len(batch["frame"])) - start[batch["frame"]]
        return super().forward(batch) * (1 + 1e-6 * order)


class SeesBatchMates(Morse):
    """Like a batch normalisation left in training mode."""

    def forward(self, batch):
        energies = super().forward(batch)
        return energies - 1e-6 * energies.mean()


class DistinguishesImages(Morse):
    """Neighbours across a cell boundary count a little more."""

    def forward(self, batch):
        r = batch["edge_vectors"].norm(dim=1)
        outside = batch["edge_shift"].abs().sum(dim=1) > 0
        return super().forward(batch) + self.sum_over_neighbours(batch, 1e-5 * outside * self.envelope(r))


class CountsAtoms(Morse):
    """The energy per atom depends on how many atoms there are."""

    def forward(self, batch):
        return super().forward(batch) * (1 + 1e-6 * (batch["n_atoms"][batch["frame"]] - 1))


class ShiftedLoneAtoms(Morse):
    """Like a network whose bias is added also where there is nothing to see."""

    def forward(self, batch):
        return super().forward(batch) + 0.01


class NoneWithoutNeighbours(Morse):
    """A mean over neighbours is 0 / 0 where there are none."""

    def forward(self, batch):
        neighbours = self.sum_over_neighbours(batch, torch.ones_like(batch["edge_shift"][:, 0]))
        return super().forward(batch) * neighbours / neighbours


class GradientsNeedNeighbours(Morse):
    """The length of a sum that is empty: the value is fine, its derivative is not."""

    def forward(self, batch):
        r = batch["edge_vectors"].norm(dim=1)
        density = self.sum_over_neighbours(batch, self.envelope(r)) * self.depth.mean()
        return super().forward(batch) + 0.1 * torch.sqrt(density**2)


class WrongForces(Potential):
    """Forces a per mille too large: covariant, but no derivative of the energy."""

    def forward(self, batch, *, forces=True, stress=False):
        out = super().forward(batch, forces=forces, stress=stress)
        return {**out, "forces": 1.001 * out["forces"]} if forces else out


class WrongStress(Potential):
    """The virial's sign instead of the stress's."""

    def forward(self, batch, *, forces=True, stress=False):
        out = super().forward(batch, forces=forces, stress=stress)
        return {**out, "stress": -out["stress"]} if stress else out
