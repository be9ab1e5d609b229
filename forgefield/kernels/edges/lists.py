"""Neighbour lists built on the device into tensors of fixed size, without waiting for it: a build can be captured.

The pairs are those of `forgefield.ops.neighbour_lists`, which is the reference, in the same order. Atoms are moved into their
cell and sorted into bins; the bins around that of an atom, of its cell and of images, have its neighbours. Where the lists do
not fit, or a cell is so small that too many images would be searched, the status says so, and the lists are not valid.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from forgefield.kernels.edges.near import SkinLists
from forgefield.ops.neighbour_lists import SLACK, complete_lattice

BINS_PER_ATOM, BINS_PER_SYSTEM = 4, 8
"""Maximum numbers of bins, per atom and in addition per system; where there would be more, bins are made wider."""
MOST_BINS_AWAY = 32
"""Bins along one direction within reach of an atom; a cell that is so small that there are more is not supported."""
ATOMS = 128
"""Atoms of one program that processes each by itself."""
STEPS = 20
"""Steps of a bisection: an atom may have a million neighbours."""


class ListBuilder:
    """Builds lists of systems whose atoms and cells are in tensors of fixed addresses.

    positions: (n_atoms, 3), A; cell, pbc: (n_systems, 3, 3), A, and (n_systems, 3) bool; system: (n_atoms,) int64, ascending;
    first_atoms: (n_systems + 1,) int64. The atoms of the last system are blank and have no neighbours. lists: where lists are
    written to. reach: A.
    """

    def __init__(
        self,
        positions: Tensor,
        cell: Tensor,
        pbc: Tensor,
        system: Tensor,
        first_atoms: Tensor,
        lists: SkinLists,
        reach: float,
    ) -> None:
        self.positions, self.cell, self.pbc, self.system, self.first_atoms = positions, cell, pbc, system, first_atoms
        self.lists, self.reach = lists, reach
        device, (n_atoms, n_systems) = positions.device, (positions.shape[0], cell.shape[0])
        self.status = torch.zeros(1, dtype=torch.int64, device=device)
        """Not zero where the lists of the last build are not valid."""
        self._most_bins = BINS_PER_ATOM * n_atoms + BINS_PER_SYSTEM * n_systems
        self._keys, self._ordered = (torch.zeros(len(lists.source), dtype=torch.int64, device=device) for _ in range(2))
        self._bins = torch.arange(self._most_bins + 2, dtype=torch.int32, device=device)

    def build(self) -> None:
        """Build the lists for the present positions and cells."""
        n_atoms, lists = self.positions.shape[0], self.lists
        self.status.zero_()
        periodic = self.pbc.to(torch.int32)
        first_blank = self.first_atoms[-2:-1]
        inverse, heights = inverse_and_heights(complete_lattice(self.cell, self.pbc))
        along = torch.empty((n_atoms, 3), dtype=torch.float64, device=self.positions.device)
        cells, bins = (torch.empty((n_atoms, 3), dtype=torch.int32, device=along.device) for _ in range(2))
        grid = (-(-n_atoms // ATOMS),)
        common = {"system": self.system, "along": along, "first_blank": first_blank, "n_atoms": n_atoms, "block": ATOMS}
        _kernels().place_atoms[grid](
            positions=self.positions, inverse=inverse, heights=heights, periodic=periodic, cells=cells, **common
        )
        low, width, n_bins = self._grid(along, heights)
        reach_bins = torch.ceil((self.reach + SLACK) / width)
        self.status.add_((reach_bins > MOST_BINS_AWAY).any())
        reach_bins = reach_bins.clamp(1, MOST_BINS_AWAY).to(torch.int32)
        per_system = n_bins.prod(1)
        first_bin = torch.cumsum(per_system, 0) - per_system
        bin_of = torch.empty(n_atoms, dtype=torch.int32, device=along.device)
        _kernels().bin_atoms[grid](
            low=low,
            width=width,
            n_bins=n_bins,
            first_bin=first_bin,
            last_bin=self._most_bins,
            bins=bins,
            bin_of=bin_of,
            **common,
        )
        filled, order = torch.sort(bin_of, stable=True)
        counts = torch.empty(n_atoms, dtype=torch.int64, device=along.device)
        search = {
            "positions": self.positions,
            "cell": self.cell,
            "system": self.system,
            "cells": cells,
            "bins": bins,
            "n_bins": n_bins,
            "first_bin": first_bin,
            "reach_bins": reach_bins,
            "periodic": periodic,
            "order": order,
            "bin_pointers": torch.searchsorted(filled, self._bins),
            "first_blank": first_blank,
            "pointers": lists.pointers,
            "counts": counts,
            "keys": self._keys,
            "status": self.status,
            "reach": self.reach,
            "capacity": len(lists.source),
            "block": 32,
            "num_warps": 1,
        }
        _kernels().list_atoms[(n_atoms,)](**search, fill=False)
        ends = torch.cumsum(counts, 0)
        self.status.add_(ends[-1:] > len(lists.source))
        torch.clamp(ends, max=len(lists.source), out=lists.pointers[1:])
        _kernels().list_atoms[(n_atoms,)](**search, fill=True)
        segments = {"pointers": lists.pointers, "ordered": self._ordered}
        _kernels().sort_listed[(n_atoms,)](
            **segments, keys=self._keys, source=lists.source, shift=lists.shift, block=32, num_warps=1
        )
        _kernels().reverse_listed[(n_atoms,)](**segments, reverse=lists.reverse, steps=STEPS, block=32, num_warps=1)
        lists.positions.copy_(self.positions)
        lists.cell.copy_(self.cell)
        lists.inverse.copy_(torch.where(self.pbc.all(1).view(-1, 1, 1), inverse, torch.zeros_like(inverse)))

    def _grid(self, along: Tensor, heights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Begin of the bins of each system along each axis and their width, (n_systems, 3), A; their number, int32."""
        n_systems = heights.shape[0]
        where = self.system.unsqueeze(1).expand_as(along)
        blank = along.new_zeros(n_systems, 3)
        low = blank.scatter_reduce(0, where, along, "amin", include_self=False)
        high = blank.scatter_reduce(0, where, along, "amax", include_self=False)
        low = torch.where(self.pbc, torch.zeros_like(low), low)
        extent = torch.where(self.pbc, heights, (high - low).clamp(min=self.reach))
        most = (self.first_atoms.diff() * BINS_PER_ATOM + BINS_PER_SYSTEM).double()
        counts = []
        for axis in range(3):
            count = torch.floor(extent[:, axis] / (self.reach + SLACK)).clamp(min=1.0).minimum(most)
            most = torch.floor(most / count)
            counts.append(count)
        n_bins = torch.stack(counts, 1)
        return low, extent / n_bins, n_bins.to(torch.int32)


def inverse_and_heights(box: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of cells (n, 3, 3), and the distances between their faces (n, 3). Without a solver, which would wait for the
    device."""
    a, b, c = box.unbind(1)
    normals = torch.stack([torch.linalg.cross(*pair) for pair in ((b, c), (c, a), (a, b))], dim=2)
    volume = (a * normals[:, :, 0]).sum(1).view(-1, 1, 1)
    inverse = normals / volume
    return inverse, 1 / torch.linalg.vector_norm(inverse, dim=1)


@cache
def _kernels() -> ModuleType:
    from forgefield.kernels.edges import lists_source

    return lists_source
