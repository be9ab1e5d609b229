"""What holds atoms apart where no data says how: a table of pair energies that takes over from the network, or ZBL.

The table is DeePMD-kit's (`use_srtab`): an atom whose nearest neighbour is closer than `sw_rmin` has the energy of the table,
one whose is farther than `sw_rmax` that of the network, in between both are mixed by a smooth weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import switch
from forgefield.models.deeppot.options import DeepPotOptions
from forgefield.models.options import check_zbl
from forgefield.ops.functions import polynomial_cutoff
from forgefield.ops.graph import EdgeGraph, segment_sum
from forgefield.physics.zbl import zbl_pair_energy

SMIN_ALPHA = 0.1
"""A; DeePMD-kit's."""


def zbl_energies(
    lengths: Tensor, z: Tensor, graph: EdgeGraph, cutoff: float, zbl: bool | Mapping[str, float]
) -> Tensor:
    """(n_atoms,) half of each pair's ZBL energy, eV. lengths: (n_edges,), A; z: (n_atoms,) atomic numbers."""
    p = float(zbl.get("polynomial_cutoff_p", 6.0)) if isinstance(zbl, Mapping) else 6.0
    pair = zbl_pair_energy(lengths, z.index_select(0, graph.destination), z.index_select(0, graph.source))
    return segment_sum(0.5 * pair * polynomial_cutoff(lengths / cutoff, p), graph.by_destination)


def complete_short_range(options: DeepPotOptions, species: Sequence[str], cutoff: float) -> dict[str, Any]:
    """Options of the short range, checked and with the table read."""
    if options.zbl:
        check_zbl(options.zbl, tuple(species))
    if options.use_srtab is None and options.srtab is None:
        for key in ("smin_alpha", "sw_rmin", "sw_rmax"):
            if getattr(options, key) is not None:
                raise ForgefieldError(f"model.{key} has a meaning only with model.use_srtab, the file of a pair table.")
        return {}
    for key in ("sw_rmin", "sw_rmax"):
        if getattr(options, key) is None:
            raise ForgefieldError(f"model.use_srtab needs model.{key}, A.")
    low, high = float(options.sw_rmin or 0), float(options.sw_rmax or 0)
    if not 0 <= low < high <= cutoff:
        raise ForgefieldError(
            f"model.sw_rmin={low:g} and model.sw_rmax={high:g} must ascend and be at most data.cutoff={cutoff:g}."
        )
    alpha = SMIN_ALPHA if options.smin_alpha is None else float(options.smin_alpha)
    if alpha <= 0:
        raise ForgefieldError(f"model.smin_alpha is {alpha:g}; it must be positive.")
    table = options.srtab or read_table(str(options.use_srtab), len(species), cutoff)
    return {"smin_alpha": alpha, "srtab": table}


def complete_added_table(options: DeepPotOptions, species: Sequence[str], cutoff: float) -> dict[str, Any]:
    """Options of the table that is added, checked and with the table read."""
    if options.pair_table is None and options.added_table is None:
        if options.pair_table_cutoff is not None:
            raise ForgefieldError(
                "model.pair_table_cutoff has a meaning only with model.pair_table, the file of a table."
            )
        return {}
    end = cutoff if options.pair_table_cutoff is None else float(options.pair_table_cutoff)
    if not 0 < end <= cutoff:
        raise ForgefieldError(
            f"model.pair_table_cutoff is {end:g}; it must be positive and at most data.cutoff={cutoff:g}."
        )
    table = options.added_table or read_table(str(options.pair_table), len(species), end, key="pair_table")
    return {"pair_table_cutoff": end, "added_table": table}


def read_table(path: str, n_species: int, cutoff: float, key: str = "use_srtab") -> dict[str, Any]:
    """A table that reaches the cutoff: {start, step, energies: rows of n (n + 1) / 2 numbers}, A and eV."""
    if not Path(path).is_file():
        raise ForgefieldError(f"model.{key}: {path} does not exist.")
    try:
        rows = np.loadtxt(path, dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise ForgefieldError(f"model.{key}: {path} is not a table of numbers: {error}.") from error
    columns = 1 + n_species * (n_species + 1) // 2
    if rows.shape[1] != columns or len(rows) < 3:
        raise ForgefieldError(
            f"model.{key}: {path} has {len(rows)} rows of {rows.shape[1]} columns; {n_species} species need at least 3 "
            f"rows of {columns} columns, the distance and an energy for each pair of species."
        )
    steps = np.diff(rows[:, 0])
    if not (steps > 0).all() or not np.allclose(steps, steps[0], rtol=1e-6):
        raise ForgefieldError(f"model.{key}: the distances in {path} must ascend in equal steps.")
    energies = _reaching(rows, float(steps[0]), cutoff)
    return {"start": float(rows[0, 0]), "step": float(steps[0]), "energies": energies.tolist()}


def _reaching(rows: np.ndarray, step: float, cutoff: float) -> np.ndarray:
    """Energies of the table, continued to the cutoff: by zeros, or by one cubic that ends at zero, as DeePMD-kit does."""
    start, end, energies = rows[0, 0], rows[-1, 0], rows[:, 1:]
    missing = int(np.ceil(cutoff / step - start / step)) - (len(rows) - 1)
    if cutoff <= end or missing < 1:
        return energies
    if not energies[-1].any():
        return np.concatenate([energies, np.zeros((missing, energies.shape[1]))])
    points = end + step * np.arange(1, missing + 1)
    early = points[-1] / step - end / step >= 2
    points = points[:-1] if early else points
    slope = energies[-1] - energies[-2]  # per step, not per A: DeePMD-kit's convention
    ends = np.stack([energies[-1], np.zeros_like(slope)])
    cubic = CubicSpline([end, points[-1]], ends, bc_type=((1, slope), (1, np.zeros_like(slope))))
    return np.concatenate([energies, cubic(points)])


class PairEnergies(nn.Module):
    """Energies of a table by splines. table: {start, step, energies}, A and eV. cutoff: where they end, A."""

    splines: Tensor

    def __init__(self, table: Mapping[str, Any], n_species: int, cutoff: float) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.start, self.step = float(table["start"]), float(table["step"])
        energies = np.asarray(table["energies"], dtype=np.float64)
        self.count = len(energies) - 1
        splines = np.zeros((n_species, n_species, self.count, 4))
        pairs = [(a, b) for a in range(n_species) for b in range(a, n_species)]
        nodes = self.start + self.step * np.arange(len(energies))
        for (a, b), column in zip(pairs, energies.T):
            splines[a, b] = splines[b, a] = CubicSpline(nodes, column, bc_type="clamped").c.T
        self.register_buffer("splines", torch.from_numpy(splines).flatten(0, 2).t().contiguous(), persistent=False)

    def energies(self, lengths: Tensor, kinds: Tensor, graph: EdgeGraph, mask: Tensor | None) -> Tensor:
        """(n_atoms,) half of each pair's energy, eV.

        lengths: (n_edges,), A; kinds: (n_edges,) species of centre times number of species plus that of the neighbour.
        """
        number = ((lengths.detach() - self.start) / self.step).long().clamp(0, self.count - 1)
        inside = lengths - (self.start + self.step * number.to(lengths.dtype))
        a, b, c, d = (part.index_select(0, kinds * self.count + number) for part in self.splines.unbind(0))
        pair = 0.5 * (((a * inside + b) * inside + c) * inside + d)
        end = min(self.cutoff, self.start + self.step * self.count)
        is_real = lengths < end if mask is None else (lengths < end) & (mask > 0)
        return segment_sum(torch.where(is_real, pair, torch.zeros_like(pair)), graph.by_destination)


class PairTable(PairEnergies):
    """Energies of the table by splines, and the weight that they have against the network's."""

    def __init__(self, options: DeepPotOptions, n_species: int, cutoff: float) -> None:
        assert options.srtab is not None
        super().__init__(options.srtab, n_species, cutoff)
        self.options = options

    def forward(self, lengths: Tensor, kinds: Tensor, graph: EdgeGraph, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Energies (n_atoms,), eV, and weights (n_atoms,) of the table. Arguments as for `energies`."""
        return self.energies(lengths, kinds, graph, mask), self._weights(lengths, graph, mask)

    def _weights(self, lengths: Tensor, graph: EdgeGraph, mask: Tensor | None) -> Tensor:
        """1 where the nearest neighbour is closer than sw_rmin, 0 where it is farther than sw_rmax or there is none."""
        options = self.options
        nearness = torch.exp(-lengths / float(options.smin_alpha or SMIN_ALPHA))
        nearness = nearness if mask is None else nearness * mask
        total = segment_sum(nearness, graph.by_destination)
        alone = total == 0
        nearest = segment_sum(lengths * nearness, graph.by_destination) / torch.where(
            alone, torch.ones_like(total), total
        )
        weights = switch(nearest, float(options.sw_rmin or 0), float(options.sw_rmax or 0))
        return torch.where(alone, torch.zeros_like(weights), weights)
