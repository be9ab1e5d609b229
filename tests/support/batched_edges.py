"""Neighbour lists of batches compared with those of the host, on any device."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from forgefield.data.neighbours.graph import GraphOptions, build_edges
from forgefield.ops.neighbour_lists import batched_neighbours


def random_frame(rng: np.random.Generator, n: int, pbc, skew: float, size: float, blank: bool, spread: float):
    """Positions inside and outside a cell that may be skewed, left-handed, or without its rows that are not periodic."""
    cell = np.zeros((3, 3))
    while abs(np.linalg.det(cell)) < 0.15 * size**3:
        cell = size * (np.diag(rng.uniform(0.5, 1.5, 3)) + skew * rng.normal(size=(3, 3)))
    pbc = np.array(pbc)
    positions = rng.uniform(-spread, 1 + spread, (n, 3)) @ cell
    return positions, np.where(pbc[:, None], cell, 0.0) if blank else cell, pbc


def as_tensors(frames, device="cpu"):
    positions, cells, pbcs = zip(*frames)
    return (
        torch.from_numpy(np.concatenate(positions)).to(device),
        torch.tensor([len(p) for p in positions], device=device),
        torch.from_numpy(np.stack(cells)).to(device),
        torch.from_numpy(np.stack(pbcs)).to(device),
    )


def on_the_host(frames, cutoff: float):
    """Frame by frame, atoms and edges renumbered."""
    index, shifts, reverse, atoms, edges = [], [], [], 0, 0
    for positions, cell, pbc in frames:
        found = build_edges(positions, cell, pbc, GraphOptions(cutoff))
        index.append(np.stack([found.source, found.destination]) + atoms)
        shifts.append(found.shifts)
        reverse.append(found.reverse + edges)
        atoms, edges = atoms + len(positions), edges + len(found)
    return np.concatenate(index, axis=1), np.concatenate(shifts), np.concatenate(reverse)


def assert_same_edges(frames, cutoff: float, device="cpu", **options) -> int:
    ours = batched_neighbours(*as_tensors(frames, device), cutoff, **options)
    for found, expected in zip(ours, on_the_host(frames, cutoff)):
        assert found.dtype == torch.int64
        assert found.device.type == torch.device(device).type
        np.testing.assert_array_equal(found.cpu().numpy(), expected)
    return ours[0].shape[1]


def brute_force(positions, cell, pbc, cutoff):
    """Every image that could be within reach, one by one."""
    lattice = cell[pbc]
    reach = np.zeros(3, dtype=int)
    if pbc.any():
        dual = np.linalg.pinv(lattice)  # columns: how fast each coordinate grows per A
        spread = np.ptp(positions @ dual, axis=0)
        reach[pbc] = np.ceil(cutoff * np.linalg.norm(dual, axis=0) + spread).astype(int) + 1
    edges = []
    for shift in itertools.product(*(range(-r, r + 1) for r in reach)):
        moved = positions + np.array(shift) @ np.where(pbc[:, None], cell, 0.0)
        for i, j in itertools.product(range(len(positions)), repeat=2):
            if (i != j or any(shift)) and np.linalg.norm(moved[j] - positions[i]) <= cutoff:
                edges.append((i, j, *shift))
    return sorted(edges)
