"""Inspection of data before training: contents, ranges of labels, and what looks wrong.

Values per frame are examined for all frames; atoms are read in blocks, so that stores of any size take little memory. What was
examined for a selection of frames only, or not at all, is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from ase.data import atomic_numbers, chemical_symbols

from forgefield.data.inspection.survey import Progress, Survey, row_blocks, survey_table
from forgefield.data.inspection.suspicions import LARGE_FORCES, isolated_atom_warnings, label_warnings, named
from forgefield.data.references import unit_suspicion
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics import energy_deviations, robust_energies
from forgefield.data.store.table import FrameTable
from forgefield.data.store.writer import Moments
from forgefield.errors import ForgefieldError
from forgefield.physics.units import EV_PER_A3_TO_GPA

COMPARED = 200_000
"""Largest number of frames among which duplicates are searched."""
LARGE_DEVIATION = 2.0
"""Median deviation of energies from the fit by composition, eV/atom, above which another unit is likely."""
BONDS = (0.5, 1.6)
"""Range of the median distance to the nearest neighbour, in units of the sum of covalent radii, if lengths are in A."""
RARE_GASES = ("He", "Ne", "Ar", "Kr", "Xe", "Rn")
"""Not bound to their neighbours: their distances do not indicate units."""


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
    """Smallest and largest number of atoms in a frame, and total number of atoms."""
    species: dict[str, tuple[int, int]]
    """Number of atoms of each species, and of frames that contain it."""
    periodicity: dict[str, int]
    """Number of frames by periodic axes: `xyz`, `xy`, `none`."""
    labels: list[LabelRange]
    systems: list[tuple[str, int]]
    """Sources and their numbers of frames."""
    survey: Survey
    """Neighbours and distances."""
    remarks: list[str] = field(default_factory=list)
    """What looks wrong."""
    limits: list[str] = field(default_factory=list)
    """What was not examined."""


def inspect_table(table: FrameTable, cutoff: float = 5.0, progress: Progress | None = None) -> Inspection:
    """What `forgefield data info` shows. cutoff: A. progress: called with the work done and in total."""
    if len(table) == 0:
        raise ForgefieldError("there are no frames to inspect")
    survey = survey_table(table, cutoff, _within(progress, 0.0, 0.5))
    labels, repeated, relabelled = _label_ranges_and_duplicates(table, _within(progress, 0.5, 1.0))
    remarks = [
        *named(table, survey.too_close, "with atoms closer than half the sum of their covalent radii"),
        *named(table, repeated, "identical to an earlier one"),
        *named(table, relabelled, "with the structure of an earlier one but different labels"),
        *_force_outliers(table),
        *_energy_outliers(table),
        *_partial_labels(table),
        *_unit_doubts(table, survey),
        *label_warnings(table),
        *isolated_atom_warnings(survey.lone_share, cutoff),
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


def _within(progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Report the progress of one step as the range from `begin` to `end` of all work, in thousandths."""
    if progress is None:
        return None
    return lambda done, total: progress(round(1000 * (begin + (end - begin) * done / total)), 1000)


def _limits(table: FrameTable, survey: Survey) -> list[str]:
    limits = []
    if len(survey.rows) < len(table):
        limits.append(
            f"distances and neighbours were examined in {len(survey.rows)} of {len(table)} frames, evenly spaced"
        )
    if len(table) > COMPARED:
        limits.append(f"duplicate frames were not searched, because there are more than {COMPARED} frames")
    return limits


# ---- contents


def _systems(table: FrameTable) -> list[tuple[str, int]]:
    """Sources in the order of the data and their numbers of frames; sources without frames are left out."""
    names: dict[str, int] = {}
    counts: list[int] = []
    for part, _, local in table.located(np.arange(len(table))):
        sources = part.columns.sources
        for number, count in enumerate(np.bincount(part.columns.column("source")[local], minlength=len(sources))):
            row = names.setdefault(sources[number], len(names))
            counts += [0] * (row + 1 - len(counts))
            counts[row] += int(count)
    return [(name, count) for name, count in zip(names, counts) if count]


def _species(table: FrameTable) -> dict[str, tuple[int, int]]:
    components = table.components
    atoms = np.bincount(components.number, weights=components.count).astype(np.int64)
    frames = np.bincount(components.number)
    return {chemical_symbols[z]: (int(atoms[z]), int(frames[z])) for z in np.flatnonzero(frames)}


def _periodicity(table: FrameTable) -> dict[str, int]:
    counts = np.bincount(table.column("pbc") @ np.array([1, 2, 4]), minlength=8)
    names = ["".join(axis for bit, axis in enumerate("xyz") if kind >> bit & 1) or "none" for kind in range(8)]
    return {names[kind]: int(counts[kind]) for kind in np.argsort(-counts, kind="stable") if counts[kind]}


def _label_ranges_and_duplicates(
    table: FrameTable, progress: Progress | None
) -> tuple[list[LabelRange], np.ndarray, np.ndarray]:
    """Ranges of labels and fields; rows of frames that are identical to an earlier one; rows of frames that have the structure
    of an earlier one but different labels."""
    moments = dict.fromkeys(("forces", "stress", *table.fields), Moments())
    frames: set[bytes] = set()
    structures: set[bytes] = set()
    repeated, relabelled = [], []
    compare = len(table) <= COMPARED
    any_forces = table.carries("forces").any()
    for rows in row_blocks(table.n_atoms):
        view = table.find(rows)
        block = {"forces": view.atoms("forces") if any_forces else np.full((0, 3), np.nan)}
        block |= {"stress": view.column("stress"), **{name: view.field(name) for name in table.fields}}
        moments = {name: moments[name].merge(Moments.of(values)) for name, values in block.items()}
        if compare:
            for row, (structure, frame) in zip(rows, _digests(table, rows, block)):
                if frame in frames:
                    repeated.append(row)
                elif structure in structures:
                    relabelled.append(row)
                frames.add(frame)
                structures.add(structure)
        if progress is not None:
            progress(int(rows[-1]) + 1, len(table))
    moments = {"energy": Moments.of(table.column("energy") / table.n_atoms), **moments}
    ranges = [span for name, numbers in moments.items() if (span := _range(table, name, numbers)) is not None]
    return ranges, np.array(repeated, dtype=np.int64), np.array(relabelled, dtype=np.int64)


def _range(table: FrameTable, name: str, moments: Moments) -> LabelRange | None:
    if moments.low is None or moments.high is None:
        return None
    factor = EV_PER_A3_TO_GPA if name == "stress" else 1.0
    unit = {"energy": "eV/atom", "forces": "eV/A", "stress": "GPa"}.get(name) or table.fields[name].unit
    frames = int(table.carries(name).sum())
    return LabelRange(name, frames, moments.low * factor, moments.high * factor, unit, moments.mean * factor)


def _digests(table: FrameTable, rows: np.ndarray, block: dict[str, np.ndarray]) -> Iterator[tuple[bytes, bytes]]:
    """For each frame a hash of its structure, and a hash of structure and labels, without weights and sources."""
    positions, numbers, forces = table.atoms("positions", rows), table.atoms("numbers", rows), block["forces"]
    cell, pbc, energy = (table.column(name, rows) for name in ("cell", "pbc", "energy"))
    cell, energy, positions = cell + 0.0, energy + 0.0, positions + 0.0  # -0.0 becomes 0.0
    ends = table.n_atoms[rows].cumsum()
    fields = [(field.per == "atom", block[name]) for name, field in table.fields.items()]
    for i, (first, end) in enumerate(zip(ends - table.n_atoms[rows], ends)):
        digest = hashlib.blake2b(numbers[first:end].data, digest_size=16)
        for values in (positions[first:end], cell[i], pbc[i]):
            digest.update(np.ascontiguousarray(values).data)
        structure = digest.digest()
        of_frame = [values[first:end] if per_atom else values[i : i + 1] for per_atom, values in fields]
        for values in (energy[i : i + 1], forces[first:end], block["stress"][i], *of_frame):
            digest.update(np.ascontiguousarray(values).data)
        yield structure, digest.digest()


# ---- what looks wrong


def _largest_first(values: np.ndarray, limit: float) -> np.ndarray:
    """Indices of the values above the limit, the largest first."""
    above = np.flatnonzero(values > limit)
    return above[np.argsort(-values[above], kind="stable")]


def _force_outliers(table: FrameTable) -> list[str]:
    """Frames whose largest force exceeds 20 times the median over frames and 10 eV/A."""
    largest = np.asarray(table.column("max_force"))
    labelled = largest[~np.isnan(largest)]
    if len(labelled) < 3:
        return []
    limit = max(10.0, 20 * float(np.median(labelled)))
    return named(table, _largest_first(largest, limit), f"with a force component above {limit:.0f} eV/A")


def _energy_outliers(table: FrameTable) -> list[str]:
    """Frames whose deviation from the fit by composition exceeds 20 times the median and 1 eV/atom."""
    labelled = table.select(np.flatnonzero(table.carries("energy") & (table.n_atoms > 1)))
    if len(labelled) < 3:
        return []
    species = SpeciesTable.from_frames(labelled)
    deviations, expected = energy_deviations(labelled, species, robust_energies([labelled], species))
    deviations = np.abs(deviations)
    median = float(np.median(deviations))
    limit = max(1.0, 20 * median)
    worst = _largest_first(deviations, limit)
    what = f"whose energy deviates from the fit by composition by more than {limit:.1f} eV/atom"
    remarks = named(labelled, worst, what)
    if remarks:
        energy = float(labelled.column("energy", worst[:1])[0])
        remarks[0] += unit_suspicion(energy, float(expected[worst[0]]))
    if median > LARGE_DEVIATION:
        remarks.append(
            f"the median deviation of energies from the fit by composition is {median:.3g} eV/atom, which is unusually large: "
            "are they total energies in eV?"
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
    """Typical forces and distances that are implausible in eV and A."""
    doubts = []
    components = table.components
    has_forces = ~np.isnan(components.force_squares)
    if has_forces.any():
        squares, count = components.force_squares[has_forces].sum(), components.count[has_forces].sum()
        rms = float(np.sqrt(squares / (3 * count)))
        if rms > LARGE_FORCES:
            doubts.append(
                f"forces have a root mean square of {rms:.3g} eV/A, which is unusually large: are they in kcal/mol/A?"
            )
    unbound = np.isin(components.number, [atomic_numbers[symbol] for symbol in RARE_GASES]).any()
    bond = survey.typical_bond
    if bond is not None and not unbound and not BONDS[0] <= bond <= BONDS[1]:
        guess = "nm" if bond < 1 else "Bohr"
        doubts.append(
            f"the median distance of nearest neighbours is {bond:.2f} times the sum of their covalent radii: are lengths in "
            f"{guess}?"
        )
    return doubts
