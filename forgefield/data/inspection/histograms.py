"""The numbers behind the figure of a data set: for each quantity that is there, a histogram of bounded size.

Numbers per frame come from all frames; numbers per atom from up to 5000 frames, evenly spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forgefield.data.inspection.survey import Survey, even_rows, row_blocks
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics.statistics import energy_deviations, robust_energies
from forgefield.data.store.table import FrameTable
from forgefield.physics.units import EV_PER_A3_TO_GPA

FRAMES = 5000
"""Most frames of which atoms are read."""
ATOMS = 500_000
"""Most atoms in them, about."""
BINS = 60
TAIL = 1e-3
"""Share of the values at either end that may lie beyond the axis where it would otherwise be mostly empty."""


@dataclass(frozen=True)
class Histogram:
    title: str
    axis: str
    """What is on the axis, with its unit."""
    summary: str
    edges: np.ndarray
    """(n_bins + 1,)."""
    counts: np.ndarray
    """(n_bins,)."""
    beyond: int
    """Values outside of the edges."""
    median: float | None
    """Where the summary names it."""
    whole: bool = False
    """Whether values are whole numbers."""
    tails: bool = False
    """Whether rare values matter: shown on a logarithmic axis."""

    @property
    def n_values(self) -> int:
        return int(self.counts.sum()) + self.beyond


def histograms(table: FrameTable, survey: Survey) -> list[Histogram]:
    """Sizes, energies, forces, stresses and nearest neighbours, as far as they are there."""
    return [found for found in _all(table, survey) if found is not None]


def _all(table: FrameTable, survey: Survey) -> Iterator[Histogram | None]:
    sizes = table.n_atoms.astype(np.float64)
    yield _of(sizes, "Atoms per frame", "atoms", "{low:.0f} to {high:.0f}, {mean:.4g} on average", whole=True)
    energy = "standard deviation {std:.3g} meV/atom"
    yield _of(1000 * _residuals(table), "Energy less fit by composition", "energy, meV/atom", energy)
    rows = even_rows(table, FRAMES, ATOMS)
    forces = [table.atoms("forces", rows[places]) for places in row_blocks(table.n_atoms[rows])]
    force = "root mean square {rms:.3g} eV/Å, largest {largest:.3g}"
    yield _of(np.concatenate(forces).reshape(-1), "Force components", "force, eV/Å", force, tails=True)
    stresses = table.column("stress", even_rows(table, FRAMES * 20, ATOMS * 20)).reshape(-1) * EV_PER_A3_TO_GPA
    stress = "root mean square {rms:.3g} GPa, largest {largest:.3g}"
    yield _of(stresses, "Stress components", "stress, GPa", stress, tails=True)
    distance = "median {median:.3f} Å, shortest {low:.3f}"
    yield _of(survey.nearest, "Distance to nearest neighbour", "distance, Å", distance)


def _residuals(table: FrameTable) -> np.ndarray:
    """Energy less the robust fit by composition, eV/atom; frames of one atom, which the fit is not for, are left out."""
    labelled = table.select(np.flatnonzero(table.carries("energy") & (table.n_atoms > 1)))
    if len(labelled) < 3:
        return np.zeros(0)
    species = SpeciesTable.from_frames(labelled)
    return energy_deviations(labelled, species, robust_energies([labelled], species))[0]


def _of(
    values: np.ndarray, title: str, axis: str, summary: str, *, whole: bool = False, tails: bool = False
) -> Histogram | None:
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    numbers = {
        "low": values.min(),
        "high": values.max(),
        "mean": values.mean(),
        "median": np.median(values),
        "std": values.std(),
        "rms": np.sqrt((values**2).mean()),
        "largest": np.abs(values).max(),
    }
    if whole and numbers["low"] == numbers["high"]:
        summary = "{low:.0f} in all frames"
    edges = whole_edges(values) if whole else real_edges(values)
    counts = np.histogram(values, edges)[0]
    beyond = len(values) - int(counts.sum())
    median = float(numbers["median"]) if "{median" in summary else None
    return Histogram(title, axis, summary.format(**numbers), edges, counts, beyond, median, whole, tails)


def whole_edges(values: np.ndarray) -> np.ndarray:
    """Edges halfway between whole numbers, at most about `BINS` bins of one width."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // BINS)
    return np.arange(low, high + width + 1, width) - 0.5


def real_edges(values: np.ndarray) -> np.ndarray:
    """Even edges over all values, or over all but the outermost few where those lie far out."""
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = (float(q) for q in np.quantile(values, (TAIL, 1 - TAIL)))
    width = inner_high - inner_low
    if width > 0:
        low, high = max(low, inner_low - width), min(high, inner_high + width)
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-12):
        margin = max(abs(low) * 1e-3, 1e-3)
        low, high = low - margin, high + margin
    bins = min(BINS, 8 + int(len(values) ** 0.5))
    return np.linspace(low, high, bins + 1)
