"""What a model and a user want to know about the training data, in one pass, kept on disk by a hash of its inputs.

The same pass refuses absurd labels: force components above `max_force`, energies far from what the composition says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from forgefield.config.schema import DataOptions
from forgefield.data.dataset import GraphDataset
from forgefield.data.neighbours.edges import build_block, geometry_of, read_geometry
from forgefield.data.neighbours.graph import same_graph
from forgefield.data.sampling.order import seeded_permutation
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics.references import (
    References,
    compositions,
    energy_by_composition,
    resolve_references,
    robust_fit,
    unit_suspicion,
)
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder, remove_leftovers, write_atomically

FORMAT = 3
"""Raised whenever the meaning of a stored number changes."""
FITTED = 20_000
"""Frames, evenly spaced, that the fit which finds wrong energies looks at."""
LOOKED_AT, ATOMS_LOOKED_AT = 256, 20_000
"""Frames, and atoms in them, among which those without neighbours are counted."""
SAMPLED = 1000
"""Frames of which neighbours are counted, where no neighbour list is at hand."""


@dataclass(frozen=True)
class Statistics:
    """Energies eV, forces eV/A, lengths A. None where the data does not say."""

    n_frames: int
    n_atoms: int
    species_counts: dict[str, int]
    labels: dict[str, int]
    """How many frames carry each of energy, forces, stress and the fields."""
    mean_neighbours: float
    """Neighbours per atom, averaged over all atoms."""
    mean_neighbours_by_species: dict[str, float]
    neighbours_note: str
    """From how many frames they were counted, if not from all."""
    reference_energies: dict[str, float]
    reference_kind: str
    reference_note: str
    energy_residual_mean: float | None
    """Energy less the reference energies, eV/atom, averaged over frames of several atoms."""
    energy_residual_std: float | None
    forces_rms: float | None
    """Root mean square of all force components."""
    forces_rms_by_species: dict[str, float]
    """Only species whose atoms carry forces."""
    max_force: float | None
    """Largest force component in size."""
    min_distance: float | None
    """Closest pair within the cutoff."""
    lone_share: float = 0.0
    """Share of the atoms without any neighbour, in frames of several atoms; from a sample of them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Statistics:
        return cls(**json.loads(text))


def compute_statistics(dataset: GraphDataset, options: DataOptions, others: Sequence[GraphDataset] = ()) -> Statistics:
    """Statistics of the training data. Labels of `others` (validation, test) are checked together with it."""
    store = _store_path(dataset, others, options) if options.cache else None
    known = _load(store)
    if known is not None:
        return known
    tables = [part.frames for part in (dataset, *others)]
    for table in tables:
        check_forces(table, options.max_force)
    check_energies(tables, dataset.species, options.max_energy_deviation)
    statistics = _measure(dataset, options.reference_energies)
    if dataset.frames.branches in ([None], []):
        _check_residuals(dataset, statistics, options.max_energy_deviation)
    _save(store, statistics)
    return statistics


def check_forces(table: FrameTable, limit: float) -> None:
    """Refuse force components above `limit`, eV/A."""
    too_large = np.flatnonzero(table.column("max_force") > limit)
    if len(too_large):
        frame = table[int(too_large[0])]
        assert frame.forces is not None
        atom, axis = np.unravel_index(np.abs(frame.forces).argmax(), frame.forces.shape)
        raise ForgefieldError(
            f"{frame.where}: force component {'xyz'[axis]} of atom {atom} is {frame.forces[atom, axis]:.4g} eV/A, "
            f"above data.max_force={limit:g}; check data.units.forces, remove the frame, or raise the limit"
        )


def check_energies(tables: Sequence[FrameTable], species: SpeciesTable, limit: float) -> None:
    """Refuse energies over `limit`, eV/atom, off a fit to all of them; branches of a model are fitted each by itself."""
    labelled = [table.select(np.flatnonzero(table.carries("energy"))) for table in tables]
    for branch in sorted({name or "" for table in labelled for name in table.branches}):
        of_branch = [table.select(np.flatnonzero(table.branch_of_frame([branch or None]) == 0)) for table in labelled]
        _check_energies([table for table in of_branch if len(table)], species, limit)


def _check_energies(labelled: Sequence[FrameTable], species: SpeciesTable, limit: float) -> None:
    """The same for frames that all carry an energy and are computed alike."""
    if not labelled:
        return
    energies = robust_energies(labelled, species)
    for table in labelled:
        deviations, expected = energy_deviations(table, species, energies)
        worst = int(np.abs(deviations).argmax())
        if abs(deviations[worst]) > limit:
            found = float(table.column("energy")[worst])
            raise ForgefieldError(
                f"{table.where(worst)}: its energy {found:.6g} eV is {abs(deviations[worst]):.4g} eV/atom away from what "
                f"its composition says ({expected[worst]:.6g} eV), above data.max_energy_deviation={limit:g}"
                f"{unit_suspicion(found, float(expected[worst]))}"
            )


def robust_energies(tables: Sequence[FrameTable], species: SpeciesTable) -> np.ndarray:
    """Species energies, eV, that a few wrong frames do not move, from frames that all carry an energy."""
    counts, energies = [], []
    total = sum(len(table) for table in tables)
    every = -(-total // FITTED)
    for table in tables:
        part = table[::every]
        counts.append(compositions(part, species))
        energies.append(part.column("energy"))
    return robust_fit(np.concatenate(counts), np.concatenate(energies))


def energy_deviations(table: FrameTable, species: SpeciesTable, energies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(energy less fit) per atom, eV/atom, and the fit, eV, of frames that all carry an energy."""
    expected = energy_by_composition(table, species, energies)
    return (table.column("energy") - expected) / table.n_atoms, expected


def _measure(dataset: GraphDataset, setting: object) -> Statistics:
    table, species = dataset.frames, dataset.species
    symbols, n_species = species.symbols, len(species)
    found = table.components
    row = species.index(found.number)

    def by_species(values: np.ndarray, chosen: slice | np.ndarray = slice(None)) -> np.ndarray:
        return np.bincount(row[chosen], weights=values[chosen], minlength=n_species)

    atoms = by_species(found.count).astype(np.int64)
    neighbours, neighbour_atoms, closest, note = _surroundings(dataset, by_species)
    with_forces = ~np.isnan(found.force_squares)
    force_atoms, force_squares = by_species(found.count, with_forces), by_species(found.force_squares, with_forces)
    references = resolve_references(setting, table, species, lambda rows: _is_bound(dataset, rows))
    residuals = _residuals(table, species, references)
    return Statistics(
        n_frames=len(dataset),
        n_atoms=int(atoms.sum()),
        species_counts=dict(zip(symbols, map(int, atoms))),
        labels={name: int(table.carries(name).sum()) for name in ("energy", "forces", "stress", *table.fields)},
        mean_neighbours=float(neighbours.sum() / neighbour_atoms.sum()),
        mean_neighbours_by_species={
            s: float(k / n) if n else 0.0 for s, k, n in zip(symbols, neighbours, neighbour_atoms)
        },
        neighbours_note=note,
        reference_energies=references.energies,
        reference_kind=references.kind,
        reference_note=references.note,
        energy_residual_mean=float(residuals.mean()) if residuals.size else None,
        energy_residual_std=float(residuals.std()) if residuals.size else None,
        forces_rms=float(np.sqrt(force_squares.sum() / (3 * force_atoms.sum()))) if force_atoms.any() else None,
        forces_rms_by_species={
            s: float(np.sqrt(total / (3 * n))) for s, total, n in zip(symbols, force_squares, force_atoms) if n
        },
        max_force=float(np.nanmax(table.column("max_force"))) if force_atoms.any() else None,
        min_distance=float(closest) if np.isfinite(closest) else None,
        lone_share=_lone_share(dataset),
    )


def _surroundings(
    dataset: GraphDataset, by_species: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, float, str]:
    """Neighbours of all atoms of each species, atoms of each, closest pair, and a note if not all frames were looked at."""
    edges = dataset.edges
    if edges.neighbours is not None and edges.closest is not None:
        return by_species(edges.neighbours), by_species(dataset.frames.components.count), float(edges.closest.min()), ""
    n = min(len(dataset), SAMPLED)
    rows = np.sort(seeded_permutation(len(dataset), 0)[:n])
    neighbours, atoms, closest = np.zeros(len(dataset.species)), np.zeros(len(dataset.species)), np.inf
    for begin in range(0, n, 64):
        chosen = rows[begin : begin + 64]
        geometry = read_geometry(dataset.frames, chosen)
        block, shortest = build_block(geometry, dataset.graph, partial(_where, dataset.frames, chosen))
        species = dataset.species.index(dataset.frames.atoms("numbers", chosen))
        neighbours += np.bincount(species, weights=block.degree, minlength=len(neighbours))
        atoms += np.bincount(species, minlength=len(atoms))
        closest = min(closest, float(shortest.min()))
    return neighbours, atoms, closest, "" if n == len(dataset) else f"from {n} frames drawn at random"


def _lone_share(dataset: GraphDataset) -> float:
    """Share of the atoms of some frames, evenly spaced, that have no neighbour; frames of one atom do not count."""
    rows = np.flatnonzero(dataset.frames.n_atoms > 1)
    rows = rows[:: -(-len(rows) // LOOKED_AT)] if len(rows) else rows
    rows = rows[: max(1, int(np.searchsorted(dataset.frames.n_atoms[rows].cumsum(), ATOMS_LOOKED_AT)))]
    lone = atoms = 0
    for begin in range(0, len(rows), 64):
        chosen = rows[begin : begin + 64]
        found = dataset.frames.find(chosen)
        geometry = geometry_of(found)
        block = dataset.edges.read(found, geometry)
        if block is None:
            block, _ = build_block(geometry, dataset.graph, partial(_where, dataset.frames, chosen))
        lone, atoms = lone + int((np.asarray(block.degree) == 0).sum()), atoms + len(block.degree)
    return lone / max(atoms, 1)


def _where(table: FrameTable, rows: np.ndarray, i: int) -> str:
    return table.where(int(rows[i]))


def _is_bound(dataset: GraphDataset, rows: np.ndarray) -> np.ndarray:
    """Whether these frames of one atom have an edge: to images of that atom."""
    if dataset.n_edges is not None:
        return dataset.n_edges[rows] > 0
    bound = np.zeros(len(rows), dtype=bool)
    periodic = np.flatnonzero(dataset.frames.column("pbc", rows).any(axis=1))
    for begin in range(0, len(periodic), 256):
        places = periodic[begin : begin + 256]
        geometry = read_geometry(dataset.frames, rows[places])
        block, _ = build_block(geometry, dataset.graph, partial(_where, dataset.frames, rows[places]))
        bound[places] = block.n_edges > 0
    return bound


def _residuals(table: FrameTable, species: SpeciesTable, references: References) -> np.ndarray:
    """(energy less references) per atom of the frames that carry an energy, eV/atom.

    Isolated atoms are left out, unless there is nothing else: they are references, and say nothing about the energies of
    structures.
    """
    energies = np.array([references.energies[symbol] for symbol in species.symbols])
    residuals = (table.column("energy") - energy_by_composition(table, species, energies)) / table.n_atoms
    known = ~np.isnan(residuals)
    structures = known & (table.n_atoms > 1)
    return residuals[structures if structures.any() else known]


def _check_residuals(dataset: GraphDataset, statistics: Statistics, limit: float) -> None:
    mean = statistics.energy_residual_mean
    if mean is None or statistics.reference_kind not in ("given", "isolated") or abs(mean) <= limit:
        return
    table = dataset.frames
    row = int(np.where(table.carries("energy"), table.n_atoms, 0).argmax())
    found = float(table.column("energy", np.array([row]))[0])
    energies = np.array([statistics.reference_energies[symbol] for symbol in dataset.species.symbols])
    expected = float(energy_by_composition(table[row : row + 1], dataset.species, energies)[0])
    raise ForgefieldError(
        f"the {statistics.reference_kind} reference energies do not match the data: energies are on average {mean:.4g} "
        f"eV/atom away from them, above data.max_energy_deviation={limit:g} ({table.where(row)}: {found:.6g} "
        f"eV against {expected:.6g} eV){unit_suspicion(found, expected)}"
    )


def _store_path(dataset: GraphDataset, others: Sequence[GraphDataset], options: DataOptions) -> Path:
    settings = {
        "format": FORMAT,
        "frames": [part.frames.fingerprint for part in (dataset, *others)],
        "species": dataset.species.symbols,
        "graph": asdict(same_graph(dataset.graph)),
        "all_neighbours": dataset.edges.neighbours is not None,
        "reference_energies": options.reference_energies,
        "max_force": options.max_force,
        "max_energy_deviation": options.max_energy_deviation,
    }
    name = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / "statistics" / f"{name}.json"


def _load(store: Path | None) -> Statistics | None:
    """What was kept; None where there is nothing or where it is damaged, which only costs computing it again."""
    try:
        return None if store is None else Statistics.from_json(store.read_text())
    except (OSError, ValueError, TypeError):
        return None


def _save(store: Path | None, statistics: Statistics) -> None:
    """Keep it, through a temporary file, so that nobody ever reads half of one. No place to keep it is no error."""
    if store is None:
        return
    with suppress(ForgefieldError, OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(store.parent)
        write_atomically(store, statistics.to_json())
