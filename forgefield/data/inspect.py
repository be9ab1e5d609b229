"""A look at data before training on it: what is there, in which ranges, and what looks wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ase.data import chemical_symbols, covalent_radii

from forgefield.data.frame import Frame
from forgefield.data.neighbours import edge_vectors, neighbour_list, squared_lengths
from forgefield.data.references import unit_suspicion
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics import content_hash, energy_deviations
from forgefield.physics.units import EV_PER_A3_TO_GPA

SHOWN = 5
"""How many frames a remark names."""


@dataclass(frozen=True)
class LabelRange:
    name: str
    frames: int
    low: float
    high: float
    unit: str


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
    closest: tuple[float, str] | None
    """Distance, A, and a description of the closest pair within the cutoff."""
    neighbours: tuple[int, float, int]
    """Fewest, mean and most neighbours of an atom."""
    cutoff: float
    remarks: list[str] = field(default_factory=list)


def inspect_frames(frames: Sequence[Frame], cutoff: float = 5.0) -> Inspection:
    """All that `forgefield data info` shows. `cutoff`: A."""
    sizes = np.array([len(frame) for frame in frames])
    closest, neighbours, too_close = _distances(frames, cutoff)
    remarks = [
        *_named(too_close, "with atoms closer than half the sum of their covalent radii"),
        *_named(_duplicates(frames), "that repeat an earlier one"),
        *_force_outliers(frames),
        *_energy_outliers(frames),
        *_partial_labels(frames),
    ]
    return Inspection(
        n_frames=len(frames),
        n_files=len({frame.source for frame in frames}),
        atoms=(int(sizes.min()), int(sizes.max()), int(sizes.sum())),
        species=_species(frames),
        periodicity=dict(Counter(_axes(frame) for frame in frames).most_common()),
        labels=_ranges(frames),
        closest=closest,
        neighbours=neighbours,
        cutoff=cutoff,
        remarks=remarks,
    )


def _axes(frame: Frame) -> str:
    return "".join(axis for axis, periodic in zip("xyz", frame.pbc) if periodic) or "none"


def _species(frames: Sequence[Frame]) -> dict[str, tuple[int, int]]:
    atoms = np.zeros(len(chemical_symbols), dtype=np.int64)
    holders = np.zeros_like(atoms)
    for frame in frames:
        counts = np.bincount(frame.numbers, minlength=len(atoms))
        atoms += counts
        holders += counts > 0
    return {chemical_symbols[z]: (int(atoms[z]), int(holders[z])) for z in np.flatnonzero(atoms)}


def _ranges(frames: Sequence[Frame]) -> list[LabelRange]:
    columns = {
        ("energy", "eV/atom"): [np.array([f.energy / len(f)]) for f in frames if f.energy is not None],
        ("forces", "eV/A"): [f.forces.reshape(-1) for f in frames if f.forces is not None],
        ("stress", "GPa"): [f.stress.reshape(-1) * EV_PER_A3_TO_GPA for f in frames if f.stress is not None],
    }
    ranges = []
    for (name, unit), values in columns.items():
        if values:
            low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
            ranges.append(LabelRange(name, len(values), low, high, unit))
    return ranges


def _distances(
    frames: Sequence[Frame], cutoff: float
) -> tuple[tuple[float, str] | None, tuple[int, float, int], list[Frame]]:
    best, closest, too_close = np.inf, None, []
    fewest, most, edges, atoms = np.inf, 0, 0, 0
    for frame in frames:
        source, destination, shifts = neighbour_list(frame.positions, frame.cell, frame.pbc, cutoff)
        counts = np.bincount(destination, minlength=len(frame))
        fewest, most = min(fewest, counts.min()), max(most, counts.max())
        edges, atoms = edges + len(source), atoms + len(frame)
        if not len(source):
            continue
        lengths = np.sqrt(squared_lengths(edge_vectors(frame.positions, frame.cell, source, destination, shifts)))
        z_source, z_destination = frame.numbers[source], frame.numbers[destination]
        if (lengths < 0.5 * (covalent_radii[z_source] + covalent_radii[z_destination])).any():
            too_close.append(frame)
        at = int(lengths.argmin())
        if lengths[at] < best:
            best = float(lengths[at])
            pair = sorted((chemical_symbols[z_source[at]], chemical_symbols[z_destination[at]]))
            closest = (best, f"{'-'.join(pair)}, {frame.where}")
    return closest, (int(fewest), edges / atoms, int(most)), too_close


def _named(frames: Sequence[Frame], what: str) -> list[str]:
    if not frames:
        return []
    shown = "; ".join(frame.where for frame in frames[:SHOWN]) + (" ..." if len(frames) > SHOWN else "")
    noun = "frame" if len(frames) == 1 else "frames"
    return [f"{len(frames)} {noun} {what}: {shown}"]


def _duplicates(frames: Sequence[Frame]) -> list[Frame]:
    seen: set[str] = set()
    repeated = []
    for frame in frames:
        key = content_hash([replace(frame, weight=1.0)])
        if key in seen:
            repeated.append(frame)
        seen.add(key)
    return repeated


def _force_outliers(frames: Sequence[Frame]) -> list[str]:
    """Frames whose largest force is far beyond the usual one: 20 times the median over frames, and above 10 eV/A."""
    with_forces = [frame for frame in frames if frame.forces is not None]
    if len(with_forces) < 3:
        return []
    largest = np.array([np.abs(frame.forces).max() for frame in with_forces])  # type: ignore[arg-type]
    limit = max(10.0, 20 * float(np.median(largest)))
    order = np.argsort(-largest)
    return _named(
        [with_forces[i] for i in order if largest[i] > limit], f"with a force component above {limit:.0f} eV/A"
    )


def _energy_outliers(frames: Sequence[Frame]) -> list[str]:
    """Frames far from the fit by composition: 20 times the median deviation, and above 1 eV/atom."""
    labelled = [frame for frame in frames if frame.energy is not None and len(frame) > 1]
    if len(labelled) < 3:
        return []
    deviations, expected = energy_deviations(labelled, SpeciesTable.from_frames(labelled))
    deviations = np.abs(deviations)
    limit = max(1.0, 20 * float(np.median(deviations)))
    order = np.argsort(-deviations)
    what = f"with an energy more than {limit:.1f} eV/atom off the fit by composition"
    remarks = _named([labelled[i] for i in order if deviations[i] > limit], what)
    worst = order[0]
    return [remark + unit_suspicion(labelled[worst].energy or 0.0, float(expected[worst])) for remark in remarks]


def _partial_labels(frames: Sequence[Frame]) -> list[str]:
    remarks = []
    for name in ("energy", "forces", "stress"):
        without = [frame for frame in frames if getattr(frame, name) is None]
        if 0 < len(without) < len(frames):
            remarks += _named(without, f"without {name}")
    return remarks
