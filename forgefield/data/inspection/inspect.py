"""A look at data before training on it: what is there, in which ranges, and what looks wrong.

Whatever is a number per frame is looked at for all frames; atoms are read in blocks, so that a store of any size takes little
memory. What was looked at in a part of the frames only, or not at all, is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from ase.data import atomic_numbers, chemical_symbols

from forgefield.config.starter import LARGE_FORCES
from forgefield.data.frame import Frame
from forgefield.data.inspection.survey import Progress, Survey, row_blocks, survey_table
from forgefield.data.inspection.suspicions import label_doubts, lone_atoms, named
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics.references import unit_suspicion
from forgefield.data.statistics.statistics import energy_deviations, robust_energies
from forgefield.data.store.moments import Moments
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.physics.units import EV_PER_A3_TO_GPA

COMPARED = 200_000
"""Most frames among which repeated ones are looked for."""
LARGE_SCATTER = 2.0
"""Median distance of energies from the fit by composition, eV/atom, above which another unit is likely."""
BONDS = (0.5, 1.6)
"""Distances to nearest neighbours are between these multiples of the covalent radii, in the middle, if lengths are in A."""
RARE_GASES = ("He", "Ne", "Ar", "Kr", "Xe", "Rn")
"""Not bound to their neighbours: their distances say nothing about units."""


@dataclass(frozen=True)
class LabelRange:
    name: str
    frames: int
    low: float
    high: float
    unit: str
    mean: float


@dataclass(frozen=True)
class Inspection:
    n_frames: int
    n_files: int
    atoms: tuple[int, int, int]
    """Fewest and most atoms in a frame, and all together."""
    species: dict[str, tuple[int, int]]
    """Atoms of each species, and frames that hold it."""
    periodicity: dict[str, int]
    """Frames by periodic axes: `xyz`, `xy`, `none`."""
    labels: list[LabelRange]
    systems: list[tuple[str, int]]
    """Sources and how many frames each has."""
    survey: Survey
    """Neighbours and distances."""
    remarks: list[str] = field(default_factory=list)
    """What looks wrong."""
    limits: list[str] = field(default_factory=list)
    """What was not looked at."""


def inspect_table(table: FrameTable, cutoff: float = 5.0, progress: Progress | None = None) -> Inspection:
    """All that `forgefield data info` shows. cutoff: A. progress: called with frames looked at, and frames in all."""
    if len(table) == 0:
        raise ForgefieldError("there is no frame to look at")
    survey = survey_table(table, cutoff, _within(progress, 0.0, 0.5))
    labels, repeated, relabelled = _read_all(table, _within(progress, 0.5, 1.0))
    remarks = [
        *named(table, survey.too_close, "with atoms closer than half the sum of their covalent radii"),
        *named(table, repeated, "that repeat an earlier one"),
        *named(table, relabelled, "with the structure of an earlier one but other labels"),
        *_force_outliers(table),
        *_energy_outliers(table),
        *_partial_labels(table),
        *_unit_doubts(table, survey),
        *label_doubts(table),
        *lone_atoms(survey.lone_share, cutoff),
    ]
    systems = _systems(table)
    return Inspection(
        n_frames=len(table),
        n_files=len(systems),
        atoms=(int(table.n_atoms.min()), int(table.n_atoms.max()), int(table.n_atoms.sum())),
        species=_species(table),
        periodicity=_periodicity(table),
        labels=labels,
        systems=systems,
        survey=survey,
        remarks=remarks,
        limits=_limits(table, survey),
    )


def inspect_frames(frames: Sequence[Frame], cutoff: float = 5.0) -> Inspection:
    """The same of frames held in memory."""
    return inspect_table(FrameTable.from_frames(frames), cutoff)


def _within(progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Report a part of the work as that share of all of it, in thousandths."""
    if progress is None:
        return None
    return lambda done, total: progress(round(1000 * (begin + (end - begin) * done / total)), 1000)


def _limits(table: FrameTable, survey: Survey) -> list[str]:
    limits = []
    if len(survey.rows) < len(table):
        limits.append(
            f"distances and neighbours: looked at in {len(survey.rows)} of {len(table)} frames, evenly spread"
        )
    if len(table) > COMPARED:
        limits.append(f"repeated frames: not looked for among more than {COMPARED} frames")
    return limits


# ---- what is there


def _systems(table: FrameTable) -> list[tuple[str, int]]:
    """By source, in the order of the data; those of which no frame is here are left out."""
    names: dict[str, int] = {}
    counts: list[int] = []
    for part, _, local in table.located(np.arange(len(table))):
        sources = part.columns.sources
        for number, count in enumerate(np.bincount(part.columns.column("source")[local], minlength=len(sources))):
            place = names.setdefault(sources[number], len(names))
            counts += [0] * (place + 1 - len(counts))
            counts[place] += int(count)
    return [(name, count) for name, count in zip(names, counts) if count]


def _species(table: FrameTable) -> dict[str, tuple[int, int]]:
    found = table.components
    atoms = np.bincount(found.number, weights=found.count).astype(np.int64)
    holders = np.bincount(found.number)
    return {chemical_symbols[z]: (int(atoms[z]), int(holders[z])) for z in np.flatnonzero(holders)}


def _periodicity(table: FrameTable) -> dict[str, int]:
    counts = np.bincount(table.column("pbc") @ np.array([1, 2, 4]), minlength=8)
    names = ["".join(axis for bit, axis in enumerate("xyz") if kind >> bit & 1) or "none" for kind in range(8)]
    return {names[kind]: int(counts[kind]) for kind in np.argsort(-counts, kind="stable") if counts[kind]}


def _read_all(table: FrameTable, progress: Progress | None) -> tuple[list[LabelRange], np.ndarray, np.ndarray]:
    """Ranges of labels and fields, frames that repeat an earlier one, frames that repeat its structure with other labels."""
    moments = dict.fromkeys(("forces", "stress", *table.fields), Moments())
    seen: set[bytes] = set()
    structures: set[bytes] = set()
    repeated, relabelled = [], []
    compare = len(table) <= COMPARED
    any_forces = table.carries("forces").any()
    for rows in row_blocks(table.n_atoms):
        found = table.find(rows)
        block = {"forces": found.atoms("forces") if any_forces else np.full((0, 3), np.nan)}
        block |= {"stress": found.column("stress"), **{name: found.field(name) for name in table.fields}}
        moments = {name: moments[name].merge(Moments.of(values)) for name, values in block.items()}
        if compare:
            for row, (structure, whole) in zip(rows, _digests(table, rows, block)):
                if whole in seen:
                    repeated.append(row)
                elif structure in structures:
                    relabelled.append(row)
                seen.add(whole)
                structures.add(structure)
        if progress is not None:
            progress(int(rows[-1]) + 1, len(table))
    moments = {"energy": Moments.of(table.column("energy") / table.n_atoms), **moments}
    ranges = [span for name, numbers in moments.items() if (span := _range(table, name, numbers)) is not None]
    return ranges, np.array(repeated, dtype=np.int64), np.array(relabelled, dtype=np.int64)


def _range(table: FrameTable, name: str, found: Moments) -> LabelRange | None:
    if found.low is None or found.high is None:
        return None
    factor = EV_PER_A3_TO_GPA if name == "stress" else 1.0
    unit = {"energy": "eV/atom", "forces": "eV/A", "stress": "GPa"}.get(name) or table.fields[name].unit
    frames = int(table.carries(name).sum())
    return LabelRange(name, frames, found.low * factor, found.high * factor, unit, found.mean * factor)


def _digests(table: FrameTable, rows: np.ndarray, block: dict[str, np.ndarray]) -> Iterator[tuple[bytes, bytes]]:
    """For each frame a hash of its structure, and one of structure and labels; weights and names do not count."""
    positions, numbers, forces = table.atoms("positions", rows), table.atoms("numbers", rows), block["forces"]
    cell, pbc, energy = (table.column(name, rows) for name in ("cell", "pbc", "energy"))
    cell, energy, positions = cell + 0.0, energy + 0.0, positions + 0.0  # zero has one sign
    ends = table.n_atoms[rows].cumsum()
    fields = [(field.per == "atom", block[name]) for name, field in table.fields.items()]
    for i, (first, end) in enumerate(zip(ends - table.n_atoms[rows], ends)):
        digest = hashlib.blake2b(numbers[first:end].data, digest_size=16)
        for values in (positions[first:end], cell[i], pbc[i]):
            digest.update(np.ascontiguousarray(values).data)
        structure = digest.digest()
        own = [values[first:end] if each else values[i : i + 1] for each, values in fields]
        for values in (energy[i : i + 1], forces[first:end], block["stress"][i], *own):
            digest.update(np.ascontiguousarray(values).data)
        yield structure, digest.digest()


# ---- what looks wrong


def _largest_first(values: np.ndarray, limit: float) -> np.ndarray:
    """Places of the values above the limit, the largest first."""
    above = np.flatnonzero(values > limit)
    return above[np.argsort(-values[above], kind="stable")]


def _force_outliers(table: FrameTable) -> list[str]:
    """Frames whose largest force is far beyond the usual one: 20 times the median over frames, and above 10 eV/A."""
    largest = np.asarray(table.column("max_force"))
    known = largest[~np.isnan(largest)]
    if len(known) < 3:
        return []
    limit = max(10.0, 20 * float(np.median(known)))
    return named(table, _largest_first(largest, limit), f"with a force component above {limit:.0f} eV/A")


def _energy_outliers(table: FrameTable) -> list[str]:
    """Frames far from the fit by composition: 20 times the median deviation, and above 1 eV/atom."""
    labelled = table.select(np.flatnonzero(table.carries("energy") & (table.n_atoms > 1)))
    if len(labelled) < 3:
        return []
    species = SpeciesTable.from_frames(labelled)
    deviations, expected = energy_deviations(labelled, species, robust_energies([labelled], species))
    deviations = np.abs(deviations)
    median = float(np.median(deviations))
    limit = max(1.0, 20 * median)
    worst = _largest_first(deviations, limit)
    what = f"with an energy more than {limit:.1f} eV/atom off the fit by composition"
    remarks = named(labelled, worst, what)
    if remarks:
        energy = float(labelled.column("energy", worst[:1])[0])
        remarks[0] += unit_suspicion(energy, float(expected[worst[0]]))
    if median > LARGE_SCATTER:
        remarks.append(
            f"energies are {median:.3g} eV/atom off the fit by composition in the middle, which is much: are they in eV, "
            "and total energies of frames?"
        )
    return remarks


def _partial_labels(table: FrameTable) -> list[str]:
    remarks = []
    for name in ("energy", "forces", "stress", *table.fields):
        without = np.flatnonzero(~table.carries(name))
        if 0 < len(without) < len(table):
            remarks += named(table, without, f"without {name}")
    return remarks


def _unit_doubts(table: FrameTable, survey: Survey) -> list[str]:
    """Typical sizes that are strange in eV and A."""
    doubts = []
    found = table.components
    known = ~np.isnan(found.force_squares)
    if known.any():
        rms = float(np.sqrt(found.force_squares[known].sum() / (3 * found.count[known].sum())))
        if rms > LARGE_FORCES:
            doubts.append(f"forces have a root mean square of {rms:.3g} eV/A, which is much: are they in kcal/mol/A?")
    unbound = np.isin(found.number, [atomic_numbers[symbol] for symbol in RARE_GASES]).any()
    bond = survey.typical_bond
    if bond is not None and not unbound and not BONDS[0] <= bond <= BONDS[1]:
        guess = "nm" if bond < 1 else "Bohr"
        doubts.append(
            f"nearest neighbours are {bond:.2f} times the sum of their covalent radii apart in the middle: are lengths "
            f"in {guess}?"
        )
    return doubts
