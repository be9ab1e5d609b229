"""Rules for labels and cells that are read without an error but are probably wrong: other units, energies per atom, constants.

Each rule examines columns of a table and returns messages, none if nothing is wrong. `forgefield data info` shows them, and so
does the start of a training. The limits are generous: what a rule reports is beyond what occurs in materials.
"""

from __future__ import annotations

import numpy as np

from forgefield.data.references import compositions
from forgefield.data.species import SpeciesTable
from forgefield.data.store.table import FrameTable
from forgefield.physics.units import EV_PER_A3_TO_GPA

SHOWN = 5
"""Number of frames that a message lists."""
MOST_FRAMES = 500_000
"""Largest number of frames whose columns are read."""
FEWEST_FRAMES = 10
"""Frames required to test how energies grow with the number of atoms."""
SIZE_RATIO = 1.5
"""Ratio of largest and smallest number of atoms required for that test."""
FITTED = 5000
"""Largest number of frames, evenly spaced, used in that test."""
EXTENSIVE = 0.05
"""Relative deviation of energies per atom from a fit by composition below which they are regarded as total energies."""
BETTER = 3.0
"""Factor by which another law must fit better."""
LARGE_FORCES = 8.0
"""Root mean square force, eV/A, above which another unit is likely."""
LARGE_STRESS = 1000.0
"""Component of the stress, GPa, that training data does not reach; the centre of the earth has 364."""
USUAL_STRESS = 100.0
"""Largest plausible median over frames, GPa."""
BINDING = 2 * 20.8
"""Twice the energy of all electrons of a neutral atom is about this times Z^(7/3), eV (Thomas-Fermi theory)."""
OUTLIER = 8.0
"""Deviation of an energy from the median of its composition, in robust standard deviations, above which it is an outlier."""
OUTLIER_ENERGY = 0.2
"""Smallest deviation of an outlier, eV/atom."""
OUTLIER_GAP = 2.0
"""Outliers deviate at least this many times as much as all other frames: the tail of a broad distribution does not."""
OUTLIER_SHARE = 0.05
"""Largest share of outliers among the frames of a composition; more are a part of the data."""
SMALL_VOLUME = 1.0
"""Volume per atom, A^3: hydrogen at 500 GPa has 1.2."""
LONE_SHARE = 0.25
"""Share of atoms without neighbours above which there is a warning."""
LARGE_CUTOFF = 15.0
"""A."""


def label_warnings(table: FrameTable) -> list[str]:
    """Suspicious energies, forces, stresses and cells; of a large table, evenly spaced frames are examined."""
    if len(table) > MOST_FRAMES:
        table = table[:: -(-len(table) // MOST_FRAMES)]
    return [
        *_not_extensive(table),
        *_impossible_energies(table),
        *_energy_outliers(table),
        *_constant_labels(table),
        *_large_stress(table),
        *_small_cells(table),
    ]


def isolated_atom_warnings(share: float, cutoff: float) -> list[str]:
    """A warning if many atoms have no neighbour. share: of the atoms in frames of several atoms. cutoff: A."""
    if share < LONE_SHARE:
        return []
    return [
        f"{100 * share:.0f} % of the atoms have no neighbour within {cutoff:g} A, so a model learns nothing about their "
        "positions: is the cutoff (data.cutoff) too short, or are lengths in another unit (data.units.length)?"
    ]


def cutoff_warnings(cutoff: float) -> list[str]:
    """A warning if the cutoff, A, is unusually long."""
    if cutoff <= LARGE_CUTOFF:
        return []
    return [
        f"data.cutoff is {cutoff:g} A: time and memory grow with its third power, and most models use 4 to 8 A; is it in A?"
    ]


def named(table: FrameTable, rows: np.ndarray, what: str) -> list[str]:
    """A message that lists the first of these frames; none without frames. what: follows the number of frames."""
    if not len(rows):
        return []
    shown = "; ".join(table.where(int(row)) for row in rows[:SHOWN]) + (" ..." if len(rows) > SHOWN else "")
    noun = "frame" if len(rows) == 1 else "frames"
    return [f"{len(rows)} {noun} {what}: {shown}"]


def _not_extensive(table: FrameTable) -> list[str]:
    """Total energies are roughly proportional to the number of atoms, energies per atom roughly constant."""
    rows = np.flatnonzero(table.carries("energy") & (table.n_atoms > 1))
    labelled = table.select(rows[:: -(-len(rows) // FITTED)] if len(rows) else rows)
    n, energy = labelled.n_atoms.astype(np.float64), np.asarray(labelled.column("energy"))
    if len(n) < FEWEST_FRAMES or n.max() < SIZE_RATIO * n.min() or table.branches not in ([None], []):
        return []
    shares = compositions(labelled, SpeciesTable.from_frames(labelled)) / n[:, None]
    if len(n) <= 2 * np.linalg.matrix_rank(shares):
        return []
    deviation = {power: _relative_deviation(shares, energy / n**power) for power in (0, 1, 2)}
    small, large = n.min(), n.max()
    medians = (
        f"frames of {small:.0f} atoms have {np.median(energy[n == small]):.4g} eV, frames of {large:.0f} atoms "
        f"{np.median(energy[n == large]):.4g} eV (medians)"
    )
    if deviation[1] < EXTENSIVE:
        return []
    if BETTER * deviation[0] < deviation[1]:
        return [
            f"energies do not grow with the number of atoms: {medians}; if they are energies per atom, set "
            "data.units.energy=eV/atom (--energy-unit eV/atom)"
        ]
    if BETTER * deviation[2] < deviation[1]:
        return [
            f"energies grow with the square of the number of atoms: {medians}; are they total energies, although "
            "data.units.energy is per atom?"
        ]
    return []


def _relative_deviation(shares: np.ndarray, values: np.ndarray) -> float:
    """Root mean square deviation of `values`, (n,), from a fit by `shares`, (n, n_species), over their root mean square."""
    size = float(np.sqrt(np.mean(values**2)))
    if size == 0:
        return np.inf
    solution = np.linalg.lstsq(shares, values, rcond=None)[0]
    return float(np.sqrt(np.mean((values - shares @ solution) ** 2))) / size


def _impossible_energies(table: FrameTable) -> list[str]:
    """Energies, of either sign, beyond the binding energy of all electrons."""
    energy, components = np.abs(table.column("energy")), table.components
    binding = components.count * components.number.astype(np.float64) ** (7 / 3)
    limit = BINDING * np.bincount(components.frame, weights=binding, minlength=len(table))
    beyond = np.flatnonzero(energy > limit)
    worst = beyond[np.argsort(-(energy / limit)[beyond], kind="stable")]
    what = "with an energy beyond the total energy of all electrons (are energies in kcal/mol or another unit?)"
    return named(table, worst, what)


def _energy_outliers(table: FrameTable) -> list[str]:
    """Single energies far from those of all other frames of the same composition."""
    labelled = np.flatnonzero(table.carries("energy") & (table.n_atoms > 1))
    if len(labelled) < FEWEST_FRAMES or table.branches not in ([None], []):
        return []
    part = table.select(labelled)
    n = part.n_atoms.astype(np.float64)
    shares = np.round(compositions(part, SpeciesTable.from_frames(part)) / n[:, None], 6)
    per_atom = np.asarray(part.column("energy"), dtype=np.float64) / n
    group = np.unique(shares, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(group, kind="stable")
    deviation, isolated = np.zeros(len(n)), []
    for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        deviation[rows] = np.abs(per_atom[rows] - np.median(per_atom[rows]))
        isolated.append(_isolated(rows, deviation[rows]))
    outliers = np.concatenate(isolated)
    outliers = outliers[np.argsort(-deviation[outliers], kind="stable")]
    if not len(outliers):
        return []
    what = (
        f"with an energy that deviates by up to {deviation[outliers[0]]:.3g} eV/atom from the median of its composition, far "
        "more than all others (did the calculation converge?)"
    )
    return named(table, labelled[outliers], what)


def _isolated(rows: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Those of the rows (n,) of one composition whose deviations (n,), eV/atom, are outliers."""
    if len(rows) < FEWEST_FRAMES:
        return rows[:0]
    far = deviation > max(OUTLIER * 1.4826 * float(np.median(deviation)), OUTLIER_ENERGY)
    few = 0 < far.sum() <= max(1, OUTLIER_SHARE * len(rows))
    isolated = few and deviation[far].min() > OUTLIER_GAP * deviation[~far].max()
    return rows[far] if isolated else rows[:0]


def _constant_labels(table: FrameTable) -> list[str]:
    """Labels that are the same in all frames, as happens when something else is read as a label."""
    doubts = []
    energy = table.column("energy")[table.carries("energy") & (table.n_atoms > 1)]
    if len(energy) >= FEWEST_FRAMES and (energy == energy[0]).all():
        doubts.append(f"all {len(energy)} frames have the same energy, {energy[0]:g} eV: is it a label?")
    largest = table.column("max_force")[table.carries("forces") & (table.n_atoms > 1)]
    if len(largest) >= FEWEST_FRAMES and not largest.any():
        doubts.append(f"all forces of {len(largest)} frames are zero: are they labels?")
    return doubts


def _large_stress(table: FrameTable) -> list[str]:
    if not table.carries("stress").any():
        return []
    largest = np.abs(table.column("stress")).reshape(len(table), -1).max(axis=1) * EV_PER_A3_TO_GPA
    worst, median = int(np.nanargmax(largest)), float(np.nanmedian(largest))
    if largest[worst] <= LARGE_STRESS and median <= USUAL_STRESS:
        return []
    return [
        f"stresses are large: up to {largest[worst]:.6g} GPa ({table.where(worst)}), the median of all frames is "
        f"{median:.4g} GPa; are they in kbar or GPa (data.units.stress, --stress-unit), or virials (data.labels.virial)?"
    ]


def _small_cells(table: FrameTable) -> list[str]:
    """Fully periodic cells that are too small for their atoms."""
    volume = np.abs(np.linalg.det(np.asarray(table.column("cell"), dtype=np.float64))) / table.n_atoms
    rows = np.flatnonzero(table.column("pbc").all(axis=1) & (volume < SMALL_VOLUME))
    what = f"with a cell of less than {SMALL_VOLUME:g} A^3 per atom (are lengths in nm? data.units.length)"
    return named(table, rows[np.argsort(volume[rows], kind="stable")], what)
