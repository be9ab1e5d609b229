"""Small models with the interfaces of other libraries, for the tests of adapters."""

from __future__ import annotations

import torch
from torch import nn


class Dictionary(nn.Module):
    """Called like MACE: a dict of tensors with positions and shifts, to a dict. Two layers of radial messages."""

    def __init__(self, r_max: float, num_elements: int, avg_num_neighbors: float, width: int = 4, whole: bool = False):
        super().__init__()
        self.r_max, self.norm, self.whole = r_max, avg_num_neighbors, whole
        self.embedding = nn.Linear(num_elements, width, bias=False)
        self.radial = nn.Linear(5, width, bias=False)
        self.mix = nn.Linear(width, width)
        self.readout = nn.Linear(width, 1)

    def forward(self, data, training=False, compute_force=True):
        assert not compute_force  # forces are made outside
        sender, receiver = data["edge_index"]
        vectors = data["positions"][receiver] - data["positions"][sender] + data["shifts"]
        if bool(data["unit_shifts"].any()):  # both ways of giving the shift agree
            cells = data["cell"].view(-1, 3, 3)[data["batch"][sender]]
            assert torch.allclose((data["unit_shifts"][:, :, None] * cells).sum(1), data["shifts"], atol=1e-5)
        x = vectors.norm(dim=1, keepdim=True) / self.r_max
        waves = torch.sin(x * torch.arange(1, 6)) * (1 - x.clamp(max=1.0)) ** 3
        features = self.embedding(data["node_attrs"])
        for _ in range(2):
            messages = features[sender] * (waves @ self.radial.weight.T)
            summed = torch.zeros_like(features).index_add(0, receiver, messages) / self.norm
            features = features + torch.tanh(self.mix(summed))
        atomic = self.readout(features).squeeze(1)
        n_frames = data["ptr"].shape[0] - 1
        energy = atomic.new_zeros(n_frames).index_add(0, data["batch"], atomic)
        assert data["head"].shape == (n_frames,)
        return {"energy": energy, "node_feats": features} | ({} if self.whole else {"node_energy": atomic})


class GraphModel(nn.Module):
    """Called like models of Open MatSciML, with one graph object. images: whether distances take image shifts into account."""

    def __init__(self, cutoff: float, images: bool = True):
        super().__init__()
        self.cutoff, self.images = cutoff, images
        self.embedding = nn.Embedding(100, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, data):
        source, destination = data.edge_index
        vectors = data.pos[source] - data.pos[destination]
        if self.images:
            vectors = vectors + data["shift_vec"]
            assert torch.allclose(vectors, data.edge_vec, atol=1e-5)
            assert torch.allclose(vectors.norm(dim=1), data.edge_weight, atol=1e-5)
        fade = (1 - vectors.square().sum(1, keepdim=True) / self.cutoff**2).clamp(min=0) ** 3
        features = self.embedding(data.atomic_numbers)
        summed = torch.zeros_like(features).index_add(0, destination, features[source] * fade)
        atomic = self.out(torch.tanh(features + summed))
        assert data.num_graphs == len(data.natoms) == len(data.ptr) - 1
        return atomic.new_zeros(data.num_graphs, 1).index_add(0, data.batch, atomic)


class Structure(nn.Module):
    """Called with the words of ASE for one structure; sums over images itself, along axes that are periodic."""

    def __init__(self, cutoff: float):
        super().__init__()
        self.cutoff = cutoff
        self.depth = nn.Parameter(torch.tensor(0.7))

    def forward(self, *, atomic_numbers, positions, cell, pbc):
        reach = [torch.arange(-6, 7) if periodic else torch.arange(1) for periodic in pbc.tolist()]
        images = torch.cartesian_prod(*reach).to(positions.dtype) @ cell
        vectors = positions[None, :, None] - positions[:, None, None] + images
        squares = vectors.square().sum(-1)
        fade = (1 - squares / self.cutoff**2).clamp(min=0) ** 3 * (squares > 1e-8)
        charges = atomic_numbers.to(positions.dtype) ** 0.5
        pairs = charges[:, None, None] * charges[None, :, None] * fade
        return {"energy": 0.5 * self.depth * pairs.sum(), "density": pairs.sum((1, 2))[:, None]}


def not_a_module(size: int = 3) -> int:
    return size


def lying_factory(size: int = 3) -> nn.Module:
    return size


def make_structure(cutoff: float) -> nn.Module:
    return Structure(cutoff)
