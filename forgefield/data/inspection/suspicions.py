"""Rules for labels and cells that are read without error and are hardly right: other units, energies per atom, constants.

Each rule looks at columns of a table and returns sentences, none where nothing is wrong. `forgefield data info` shows them, and
so does the start of a training. Rules are wide: what they name is beyond what materials do, not merely unusual.
"""

from __future__ import annotations

import numpy as np

from forgefield.data.species import SpeciesTable
from forgefield.data.statistics.references import compositions
from forgefield.data.store.table import FrameTable
from forgefield.physics.units import EV_PER_A3_TO_GPA

SHOWN = 5
"""How many frames a remark names."""
LOOKED_AT = 500_000
"""Most frames whose columns are read."""
FEWEST_FRAMES = 10
"""Frames that it takes to see how energies grow with the number of atoms."""
SIZE_RATIO = 1.5
"""Largest over smallest number of atoms from which on that can be seen."""
FITTED = 5000
"""Most frames, evenly spaced, in which it is looked at."""
EXTENSIVE = 0.05
"""Energies per atom scatter by less than this share of themselves about a fit by composition, if they are total energies."""
BETTER = 3.0
"""How many times better another law must fit."""
LARGE_STRESS = 1000.0
"""Component of the stress, GPa, that no calculation for a potential reaches; the centre of the earth has 364."""
USUAL_STRESS = 100.0
"""The same for the median over frames."""
BINDING = 2 * 20.8
"""Twice the energy of all electrons of a neutral atom is about this times Z^(7/3), eV (Thomas and Fermi)."""
SMALL_VOLUME = 1.0
"""Volume per atom, A^3: hydrogen at 500 GPa has 1.2."""
LONE_SHARE = 0.25
"""Share of atoms without neighbours that is worth a warning."""
LARGE_CUTOFF = 15.0
"""A."""


def label_doubts(table: FrameTable) -> list[str]:
    """What is suspicious about energies, forces, stresses and cells; of a large table, in frames spread evenly over it."""
    if len(table) > LOOKED_AT:
        table = table[:: -(-len(table) // LOOKED_AT)]
    return [
        *_not_extensive(table),
        *_impossible_energies(table),
        *_constant_labels(table),
        *_large_stress(table),
        *_small_cells(table),
    ]


def lone_atoms(share: float, cutoff: float) -> list[str]:
    """A warning where many atoms have no neighbour. share: of the atoms in frames of several atoms. cutoff: A."""
    if share < LONE_SHARE:
        return []
    return [
        f"{100 * share:.0f} % of the atoms have no neighbour within {cutoff:g} A, so that a model learns nothing about where "
        "they are: is the cutoff (data.cutoff) too short, or are lengths in another unit (data.units.length)?"
    ]


def cutoff_doubts(cutoff: float) -> list[str]:
    """A warning where the cutoff, A, is unusually long."""
    if cutoff <= LARGE_CUTOFF:
        return []
    return [
        f"data.cutoff is {cutoff:g} A: time and memory grow with its third power, and most models use 4 to 8 A; is it in A?"
    ]


def named(table: FrameTable, rows: np.ndarray, what: str) -> list[str]:
    """One remark on these frames, the first few by file and index; none where there are none."""
    if not len(rows):
        return []
    shown = "; ".join(table.where(int(row)) for row in rows[:SHOWN]) + (" ..." if len(rows) > SHOWN else "")
    noun = "frame" if len(rows) == 1 else "frames"
    return [f"{len(rows)} {noun} {what}: {shown}"]


def _not_extensive(table: FrameTable) -> list[str]:
    """Total energies are about proportional to the number of atoms. Energies per atom are about constant."""
    rows = np.flatnonzero(table.carries("energy") & (table.n_atoms > 1))
    labelled = table.select(rows[:: -(-len(rows) // FITTED)] if len(rows) else rows)
    n, energy = labelled.n_atoms.astype(np.float64), np.asarray(labelled.column("energy"))
    if len(n) < FEWEST_FRAMES or n.max() < SIZE_RATIO * n.min() or table.branches not in ([None], []):
        return []
    shares = compositions(labelled, SpeciesTable.from_frames(labelled)) / n[:, None]
    if len(n) <= 2 * np.linalg.matrix_rank(shares):
        return []
    scatter = {power: _scatter(shares, energy / n**power) for power in (0, 1, 2)}
    small, large = n.min(), n.max()
    seen = (
        f"frames of {small:.0f} atoms have {np.median(energy[n == small]):.4g} eV, frames of {large:.0f} atoms "
        f"{np.median(energy[n == large]):.4g} eV (medians)"
    )
    if scatter[1] < EXTENSIVE:
        return []
    if BETTER * scatter[0] < scatter[1]:
        return [
            f"energies do not grow with the number of atoms: {seen}; if they are energies per atom, set "
            "data.units.energy=eV/atom (--energy-unit eV/atom)"
        ]
    if BETTER * scatter[2] < scatter[1]:
        return [
            f"energies grow with the square of the number of atoms: {seen}; are they total energies, although "
            "data.units.energy says that they are per atom?"
        ]
    return []


def _scatter(shares: np.ndarray, values: np.ndarray) -> float:
    """Root mean square deviation of `values`, (n,), from a fit by `shares`, (n, n_species), over their root mean square."""
    size = float(np.sqrt(np.mean(values**2)))
    if size == 0:
        return np.inf
    solution = np.linalg.lstsq(shares, values, rcond=None)[0]
    return float(np.sqrt(np.mean((values - shares @ solution) ** 2))) / size


def _impossible_energies(table: FrameTable) -> list[str]:
    """Energies, of either sign, beyond the binding of all electrons."""
    energy, components = np.abs(table.column("energy")), table.components
    binding = components.count * components.number.astype(np.float64) ** (7 / 3)
    limit = BINDING * np.bincount(components.frame, weights=binding, minlength=len(table))
    beyond = np.flatnonzero(energy > limit)
    worst = beyond[np.argsort(-(energy / limit)[beyond], kind="stable")]
    what = "with an energy beyond that of all electrons together (are energies in kcal/mol or another unit?)"
    return named(table, worst, what)


def _constant_labels(table: FrameTable) -> list[str]:
    """Labels that are the same in all frames, which is what a reader makes of something else."""
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
        f"stresses are large: up to {largest[worst]:.6g} GPa ({table.where(worst)}), {median:.4g} GPa in the middle of all "
        "frames; are they in kbar or GPa (data.units.stress, --stress-unit), or virials (data.labels.virial)?"
    ]


def _small_cells(table: FrameTable) -> list[str]:
    """Fully periodic cells with too little room for their atoms."""
    volume = np.abs(np.linalg.det(np.asarray(table.column("cell"), dtype=np.float64))) / table.n_atoms
    rows = np.flatnonzero(table.column("pbc").all(axis=1) & (volume < SMALL_VOLUME))
    what = f"with a cell of less than {SMALL_VOLUME:g} A^3 per atom (are lengths in nm? data.units.length)"
    return named(table, rows[np.argsort(volume[rows], kind="stable")], what)
