"""Neighbours and distances of the atoms in a data set, and histograms of its quantities.

All frames of a small table are examined, and an evenly spaced selection of a large one; memory holds one block of frames at a
time. Where a store has the shortest distance of every frame, the frames with the shortest are always included. Histograms of
values per frame use all frames, those of values per atom up to 5000, evenly spaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from ase.data import chemical_symbols, covalent_radii

from forgefield.data.neighbours.graph import neighbour_pairs
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics import energy_deviations, robust_energies
from forgefield.data.store.table import FrameTable
from forgefield.physics.units import EV_PER_A3_TO_GPA

FRAMES = 5000
"""Largest number of frames that are examined."""
ATOMS = 1_000_000
"""Largest number of their atoms, approximately."""
CLOSEST = 100
"""Number of frames with the shortest distances that are examined in addition, if these are stored."""
BLOCK_ATOMS = 100_000
"""Atoms read at a time."""
TOO_CLOSE = 0.5
"""Share of the sum of covalent radii below which two atoms are too close."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Survey:
    rows: np.ndarray
    """Rows of the examined frames, ascending."""
    cutoff: float
    """A."""
    neighbours: tuple[int, float, int]
    """Smallest, mean and largest number of neighbours of an atom."""
    most_by_element: dict[str, int]
    """Largest number of neighbours of each element that an atom has: the `sel` of DeePMD-kit."""
    closest: tuple[float, str] | None
    """Distance, A, of the closest pair within the cutoff, and a description of it."""
    too_close: np.ndarray
    """Rows of frames with atoms closer than half the sum of their covalent radii."""
    nearest: np.ndarray
    """Distance to the nearest neighbour, A, of all atoms that have one."""
    lone_share: float
    """Share of the atoms without any neighbour, in frames of several atoms."""
    typical_bond: float | None
    """Median over atoms: distance to the nearest neighbour over the sum of the two covalent radii."""


@dataclass(frozen=True)
class _FrameNeighbours:
    """Neighbours of the atoms of one frame."""

    degree: np.ndarray
    most_by_number: dict[int, int]
    """Largest number of neighbours of each atomic number in the frame."""
    nearest: np.ndarray
    bond: np.ndarray
    """Shortest distance of each atom, in units of the sum of covalent radii."""
    pair: tuple[float, str] | None


def row_blocks(n_atoms: np.ndarray, limit: int = BLOCK_ATOMS) -> Iterator[np.ndarray]:
    """Indices of `n_atoms`, (n,), in blocks of about `limit` atoms and at least one frame."""
    block = (np.cumsum(n_atoms) - 1) // limit
    for indices in np.split(np.arange(len(n_atoms)), np.flatnonzero(np.diff(block)) + 1):
        if len(indices):
            yield indices


def even_rows(table: FrameTable, frames: int, atoms: int) -> np.ndarray:
    """Evenly spaced rows of the table: all, or at most `frames` with about `atoms` atoms."""
    n = len(table)
    mean = max(float(table.n_atoms.mean()), 1.0) if n else 1.0
    n_rows = max(1, min(n, frames, int(atoms / mean)))
    return np.arange(n) if n_rows >= n else np.unique(np.linspace(0, n - 1, n_rows).round().astype(np.int64))


def survey_table(table: FrameTable, cutoff: float, progress: Progress | None = None) -> Survey:
    """Neighbours within `cutoff`, A, in up to 5000 frames."""
    rows = np.union1d(even_rows(table, FRAMES, ATOMS), _stored_closest(table))
    fewest, most, edges, atoms = np.inf, 0, 0, 0
    lone, with_others = 0, 0
    most_by_number: dict[int, int] = {}
    best: tuple[float, str] | None = None
    too_close, nearest, bonds = [], [], []
    for indices in row_blocks(table.n_atoms[rows]):
        for row, frame in zip(rows[indices], _block(table, rows[indices], cutoff)):
            fewest, most = min(fewest, frame.degree.min()), max(most, frame.degree.max())
            edges, atoms = edges + int(frame.degree.sum()), atoms + len(frame.degree)
            for number, count in frame.most_by_number.items():
                most_by_number[number] = max(most_by_number.get(number, 0), count)
            if len(frame.degree) > 1:
                lone, with_others = lone + int((frame.degree == 0).sum()), with_others + len(frame.degree)
            nearest.append(frame.nearest)
            bonds.append(frame.bond)
            if frame.bond.min(initial=np.inf) < TOO_CLOSE:
                too_close.append(row)
            if frame.pair is not None and (best is None or frame.pair[0] < best[0]):
                best = (frame.pair[0], f"{frame.pair[1]}, {table.where(int(row))}")
        if progress is not None:
            progress(int(indices[-1]) + 1, len(rows))
    distances, ratios = np.concatenate(nearest), np.concatenate(bonds)
    return Survey(
        rows=rows,
        cutoff=cutoff,
        neighbours=(int(fewest), edges / atoms, int(most)),
        most_by_element={chemical_symbols[number]: most_by_number[number] for number in sorted(most_by_number)},
        closest=best,
        too_close=np.array(too_close, dtype=np.int64),
        nearest=distances,
        lone_share=lone / max(with_others, 1),
        typical_bond=float(np.median(ratios)) if len(ratios) else None,
    )


def _stored_closest(table: FrameTable) -> np.ndarray:
    """Rows with the shortest of the distances that a store contains."""
    if not all(part.columns.has("closest") for part in table.parts):
        return np.zeros(0, dtype=np.int64)
    shortest = np.empty(len(table))
    for part, indices, local in table.located(np.arange(len(table))):
        shortest[indices] = part.columns.column("closest")[local]
    return np.argsort(shortest, kind="stable")[:CLOSEST]


def _block(table: FrameTable, rows: np.ndarray, cutoff: float) -> Iterator[_FrameNeighbours]:
    positions, numbers = table.atoms("positions", rows), table.atoms("numbers", rows)
    cell, pbc = table.column("cell", rows), table.column("pbc", rows)
    ends = table.n_atoms[rows].cumsum()
    for i, (first, end) in enumerate(zip(ends - table.n_atoms[rows], ends)):
        yield _frame_neighbours(positions[first:end], numbers[first:end], cell[i], pbc[i], cutoff)


def _frame_neighbours(
    positions: np.ndarray, numbers: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float
) -> _FrameNeighbours:
    n = len(numbers)
    pairs = neighbour_pairs(positions, cell, pbc, cutoff)
    ends = np.concatenate([pairs.source, pairs.destination])
    others = np.concatenate([pairs.destination, pairs.source])
    degree = np.bincount(ends, minlength=n)
    of_number = {
        int(number): int(np.bincount(ends[numbers[others] == number], minlength=n).max())
        for number in np.unique(numbers)
    }
    if len(ends) == 0:
        return _FrameNeighbours(degree, of_number, np.zeros(0), np.zeros(0), None)
    lengths = np.sqrt(pairs.squares)
    radii = covalent_radii[numbers]
    ratios = lengths / (radii[pairs.source] + radii[pairs.destination])
    nearest, bond = np.full(n, np.inf), np.full(n, np.inf)
    np.minimum.at(nearest, ends, np.tile(lengths, 2))
    np.minimum.at(bond, ends, np.tile(ratios, 2))
    shortest = int(lengths.argmin())
    symbols = sorted(chemical_symbols[numbers[atom]] for atom in (pairs.source[shortest], pairs.destination[shortest]))
    has_any = degree > 0
    pair = (float(lengths[shortest]), "-".join(symbols))
    return _FrameNeighbours(degree, of_number, nearest[has_any], bond[has_any], pair)


HISTOGRAM_FRAMES = 5000
"""Largest number of frames whose atoms are read for histograms."""
HISTOGRAM_ATOMS = 500_000
"""Largest number of their atoms, approximately."""
BINS = 60
TAIL = 1e-3
"""Share of the values at either end that may be outside of the axis, if it would be mostly empty otherwise."""


@dataclass(frozen=True)
class Histogram:
    title: str
    axis: str
    """Label of the axis, with the unit."""
    summary: str
    edges: np.ndarray
    """(n_bins + 1,)."""
    counts: np.ndarray
    """(n_bins,)."""
    beyond: int
    """Values outside of the edges."""
    median: float | None
    """If the summary contains it."""
    is_integer: bool = False
    """Whether values are integers."""
    tails: bool = False
    """Whether rare values matter, so that counts are shown on a logarithmic axis."""

    @property
    def n_values(self) -> int:
        return int(self.counts.sum()) + self.beyond


def histograms(table: FrameTable, survey: Survey) -> list[Histogram]:
    """Histograms of sizes, energies, forces, stresses and nearest neighbours, of the quantities that are present."""
    return [histogram for histogram in _all(table, survey) if histogram is not None]


def _all(table: FrameTable, survey: Survey) -> Iterator[Histogram | None]:
    sizes = table.n_atoms.astype(np.float64)
    yield _histogram(
        sizes, "Atoms per frame", "atoms", "{low:.0f} to {high:.0f}, {mean:.4g} on average", is_integer=True
    )
    energy = "standard deviation {std:.3g} meV/atom"
    yield _histogram(1000 * _residuals(table), "Energy minus fit by composition", "energy, meV/atom", energy)
    rows = even_rows(table, HISTOGRAM_FRAMES, HISTOGRAM_ATOMS)
    forces = [table.atoms("forces", rows[places]) for places in row_blocks(table.n_atoms[rows])]
    force = "root mean square {rms:.3g} eV/Å, largest {largest:.3g}"
    yield _histogram(np.concatenate(forces).reshape(-1), "Force components", "force, eV/Å", force, tails=True)
    stresses = (
        table.column("stress", even_rows(table, HISTOGRAM_FRAMES * 20, HISTOGRAM_ATOMS * 20)).reshape(-1)
        * EV_PER_A3_TO_GPA
    )
    stress = "root mean square {rms:.3g} GPa, largest {largest:.3g}"
    yield _histogram(stresses, "Stress components", "stress, GPa", stress, tails=True)
    distance = "median {median:.3f} Å, shortest {low:.3f}"
    yield _histogram(survey.nearest, "Distance to nearest neighbour", "distance, Å", distance)


def _residuals(table: FrameTable) -> np.ndarray:
    """Energy minus the robust fit by composition, eV/atom, of frames with several atoms."""
    labelled = table.select(np.flatnonzero(table.carries("energy") & (table.n_atoms > 1)))
    if len(labelled) < 3:
        return np.zeros(0)
    species = SpeciesTable.from_frames(labelled)
    return energy_deviations(labelled, species, robust_energies([labelled], species))[0]


def _histogram(
    values: np.ndarray, title: str, axis: str, summary: str, *, is_integer: bool = False, tails: bool = False
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
    if is_integer and numbers["low"] == numbers["high"]:
        summary = "{low:.0f} in all frames"
    edges = integer_edges(values) if is_integer else real_edges(values)
    counts = np.histogram(values, edges)[0]
    beyond = len(values) - int(counts.sum())
    median = float(numbers["median"]) if "{median" in summary else None
    return Histogram(title, axis, summary.format(**numbers), edges, counts, beyond, median, is_integer, tails)


def integer_edges(values: np.ndarray) -> np.ndarray:
    """Edges halfway between integers, about `BINS` bins of equal width at most."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // BINS)
    return np.arange(low, high + width + 1, width) - 0.5


def real_edges(values: np.ndarray) -> np.ndarray:
    """Evenly spaced edges over all values, or over all but a few outliers."""
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
