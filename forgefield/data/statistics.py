"""Statistics of the training data: what models are initialised with and what users are shown, cached by a hash of the inputs.

The same pass refuses absurd labels: force components above `max_force`, and energies far from those expected from the
composition. Statistics of fields are the values per species (n_species, *shape) and one deviation for all components, so that
the components of a vector stay comparable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from forgefield.data.dataset import GraphDataset
from forgefield.data.neighbours.edges import build_block, geometry_of, read_geometry
from forgefield.data.neighbours.graph import same_graph
from forgefield.data.options import DataOptions
from forgefield.data.references import (
    BLOCK,
    References,
    compositions,
    energy_by_composition,
    fit_by_composition,
    resolve_references,
    robust_fit,
    unit_suspicion,
)
from forgefield.data.sampling.order import seeded_permutation
from forgefield.data.species import SpeciesTable
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder, remove_leftovers, write_atomically

FORMAT = 3
"""Raised whenever the meaning of a stored number changes."""
FITTED = 20_000
"""Number of frames, evenly spaced, in the fit that detects wrong energies."""
LONE_FRAMES, LONE_ATOMS = 256, 20_000
"""Number of frames, and of their atoms, among which atoms without neighbours are counted."""
SAMPLED = 1000
"""Number of frames whose neighbours are counted, if there are no neighbour lists yet."""


@dataclass(frozen=True)
class Statistics:
    """Energies in eV, forces in eV/A, lengths in A. None for quantities that the data does not have."""

    n_frames: int
    n_atoms: int
    species_counts: dict[str, int]
    labels: dict[str, int]
    """Number of frames with each of energy, forces, stress and the fields."""
    mean_neighbours: float
    """Neighbours per atom, averaged over all atoms."""
    mean_neighbours_by_species: dict[str, float]
    neighbours_note: str
    """Number of frames they were counted in, if not all."""
    reference_energies: dict[str, float]
    reference_kind: str
    reference_note: str
    energy_residual_mean: float | None
    """Energy minus the reference energies, eV/atom, averaged over frames of several atoms."""
    energy_residual_std: float | None
    forces_rms: float | None
    """Root mean square of all force components."""
    forces_rms_by_species: dict[str, float]
    """Only species whose atoms have forces."""
    max_force: float | None
    """Largest absolute force component."""
    min_distance: float | None
    """Closest pair within the cutoff."""
    lone_share: float = 0.0
    """Share of the atoms without neighbours in frames of several atoms, from a sample of frames."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Statistics:
        return cls(**json.loads(text))


def compute_statistics(dataset: GraphDataset, options: DataOptions, others: Sequence[GraphDataset] = ()) -> Statistics:
    """Statistics of the training data. Labels of `others` (validation, test) are checked as well."""
    cache_file = _cache_file(dataset, others, options) if options.cache else None
    cached = _load(cache_file)
    if cached is not None:
        return cached
    tables = [part.frames for part in (dataset, *others)]
    for table in tables:
        check_forces(table, options.max_force)
    check_energies(tables, dataset.species, options.max_energy_deviation)
    statistics = _compute(dataset, options.reference_energies)
    if dataset.frames.branches in ([None], []):
        _check_residuals(dataset, statistics, options.max_energy_deviation)
    _save(cache_file, statistics)
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
    """Refuse energies that deviate from a fit by composition by more than `limit`, eV/atom. Branches of a model are fitted
    separately."""
    labelled = [table.select(np.flatnonzero(table.carries("energy"))) for table in tables]
    for branch in sorted({name or "" for table in labelled for name in table.branches}):
        of_branch = [table.select(np.flatnonzero(table.branch_of_frame([branch or None]) == 0)) for table in labelled]
        _check_energies([table for table in of_branch if len(table)], species, limit)


def _check_energies(labelled: Sequence[FrameTable], species: SpeciesTable, limit: float) -> None:
    """The same for frames of one branch that all have an energy."""
    if not labelled:
        return
    energies = robust_energies(labelled, species)
    for table in labelled:
        deviations, expected = energy_deviations(table, species, energies)
        worst = int(np.abs(deviations).argmax())
        if abs(deviations[worst]) > limit:
            energy = float(table.column("energy")[worst])
            raise ForgefieldError(
                f"{table.where(worst)}: the energy {energy:.6g} eV deviates by {abs(deviations[worst]):.4g} eV/atom from the "
                f"fit by composition ({expected[worst]:.6g} eV), above data.max_energy_deviation={limit:g}"
                f"{unit_suspicion(energy, float(expected[worst]))}"
            )


def robust_energies(tables: Sequence[FrameTable], species: SpeciesTable) -> np.ndarray:
    """Species energies, eV, from a fit that is insensitive to a few wrong frames. All frames must have an energy."""
    counts, energies = [], []
    total = sum(len(table) for table in tables)
    every = -(-total // FITTED)
    for table in tables:
        part = table[::every]
        counts.append(compositions(part, species))
        energies.append(part.column("energy"))
    return robust_fit(np.concatenate(counts), np.concatenate(energies))


def energy_deviations(table: FrameTable, species: SpeciesTable, energies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(energy - fit) per atom, eV/atom, and the fit, eV. All frames must have an energy."""
    expected = energy_by_composition(table, species, energies)
    return (table.column("energy") - expected) / table.n_atoms, expected


def _compute(dataset: GraphDataset, setting: object) -> Statistics:
    table, species = dataset.frames, dataset.species
    symbols, n_species = species.symbols, len(species)
    components = table.components
    row = species.index(components.number)

    def by_species(values: np.ndarray, chosen: slice | np.ndarray = slice(None)) -> np.ndarray:
        return np.bincount(row[chosen], weights=values[chosen], minlength=n_species)

    atoms = by_species(components.count).astype(np.int64)
    neighbours, neighbour_atoms, closest, note = _neighbours(dataset, by_species)
    with_forces = ~np.isnan(components.force_squares)
    force_atoms = by_species(components.count, with_forces)
    force_squares = by_species(components.force_squares, with_forces)
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


def _neighbours(
    dataset: GraphDataset, by_species: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, float, str]:
    """Number of neighbours and of atoms of each species, shortest distance, and a note if not all frames were examined."""
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
    """Share of atoms without neighbours in a sample of evenly spaced frames with several atoms."""
    rows = np.flatnonzero(dataset.frames.n_atoms > 1)
    rows = rows[:: -(-len(rows) // LONE_FRAMES)] if len(rows) else rows
    rows = rows[: max(1, int(np.searchsorted(dataset.frames.n_atoms[rows].cumsum(), LONE_ATOMS)))]
    lone = atoms = 0
    for begin in range(0, len(rows), 64):
        chosen = rows[begin : begin + 64]
        view = dataset.frames.find(chosen)
        geometry = geometry_of(view)
        block = dataset.edges.read(view, geometry)
        if block is None:
            block, _ = build_block(geometry, dataset.graph, partial(_where, dataset.frames, chosen))
        lone, atoms = lone + int((np.asarray(block.degree) == 0).sum()), atoms + len(block.degree)
    return lone / max(atoms, 1)


def _where(table: FrameTable, rows: np.ndarray, i: int) -> str:
    return table.where(int(rows[i]))


def _is_bound(dataset: GraphDataset, rows: np.ndarray) -> np.ndarray:
    """Whether these frames of one atom have edges, to periodic images of the atom."""
    if dataset.n_edges is not None:
        return dataset.n_edges[rows] > 0
    bound = np.zeros(len(rows), dtype=bool)
    periodic = np.flatnonzero(dataset.frames.column("pbc", rows).any(axis=1))
    for begin in range(0, len(periodic), 256):
        indices = periodic[begin : begin + 256]
        geometry = read_geometry(dataset.frames, rows[indices])
        block, _ = build_block(geometry, dataset.graph, partial(_where, dataset.frames, rows[indices]))
        bound[indices] = block.n_edges > 0
    return bound


def _residuals(table: FrameTable, species: SpeciesTable, references: References) -> np.ndarray:
    """(energy - references) per atom, eV/atom, of the frames with an energy.

    Isolated atoms are left out if there are other frames: they are references, not samples of structures.
    """
    energies = np.array([references.energies[symbol] for symbol in species.symbols])
    residuals = (table.column("energy") - energy_by_composition(table, species, energies)) / table.n_atoms
    labelled = ~np.isnan(residuals)
    structures = labelled & (table.n_atoms > 1)
    return residuals[structures if structures.any() else labelled]


def _check_residuals(dataset: GraphDataset, statistics: Statistics, limit: float) -> None:
    mean = statistics.energy_residual_mean
    if mean is None or statistics.reference_kind not in ("given", "isolated") or abs(mean) <= limit:
        return
    table = dataset.frames
    row = int(np.where(table.carries("energy"), table.n_atoms, 0).argmax())
    energy = float(table.column("energy", np.array([row]))[0])
    energies = np.array([statistics.reference_energies[symbol] for symbol in dataset.species.symbols])
    expected = float(energy_by_composition(table[row : row + 1], dataset.species, energies)[0])
    raise ForgefieldError(
        f"the {statistics.reference_kind} reference energies do not match the data: energies deviate from them by {mean:.4g} "
        f"eV/atom on average, above data.max_energy_deviation={limit:g} ({table.where(row)}: {energy:.6g} eV instead of "
        f"{expected:.6g} eV){unit_suspicion(energy, expected)}"
    )


def _cache_file(dataset: GraphDataset, others: Sequence[GraphDataset], options: DataOptions) -> Path:
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


def _load(cache_file: Path | None) -> Statistics | None:
    """Cached statistics; None if there are none or the file is damaged."""
    try:
        return None if cache_file is None else Statistics.from_json(cache_file.read_text())
    except (OSError, ValueError, TypeError):
        return None


def _save(cache_file: Path | None, statistics: Statistics) -> None:
    """Write the cache atomically. A cache folder that cannot be written is not an error."""
    if cache_file is None:
        return
    with suppress(ForgefieldError, OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(cache_file.parent)
        write_atomically(cache_file, statistics.to_json())


Moments = tuple[np.ndarray, float]
AllowedMean = Callable[[np.ndarray], np.ndarray]
"""Returns the part of a mean (..., *shape) that a model may add to its output; the deviation is measured from that."""


def full_mean(mean: np.ndarray) -> np.ndarray:
    """For scalars: all of the mean."""
    return mean


def zero_mean(mean: np.ndarray) -> np.ndarray:
    """For vectors: zero, because any other vector would distinguish a direction."""
    return np.zeros_like(mean)


def isotropic_mean(mean: np.ndarray) -> np.ndarray:
    """For tensors (..., 3, 3): the isotropic part, a multiple of the unit matrix."""
    return np.trace(mean, axis1=-2, axis2=-1)[..., None, None] / 3 * np.eye(3)


def intensive_moments(table: FrameTable, name: str, species: SpeciesTable, allowed: AllowedMean = full_mean) -> Moments:
    """Mean over frames, the same for every species, and the deviation from it."""
    labelled = _labelled(table, name)
    mean = allowed(np.asarray(sum(block.column(name).sum(axis=0) for block in _blocks(labelled)) / len(labelled)))
    square = sum(np.square(block.column(name) - mean).sum() for block in _blocks(labelled))
    rows = np.repeat(np.asarray(mean)[None], len(species), axis=0)
    return rows, float(np.sqrt(square / (len(labelled) * np.size(mean))))


def extensive_moments(table: FrameTable, name: str, species: SpeciesTable, allowed: AllowedMean = full_mean) -> Moments:
    """Values of species from a least-squares fit of the values per atom, and the deviation per atom from the fit."""
    labelled = _labelled(table, name)
    fitted, _ = fit_by_composition(labelled, species, name)
    fitted = allowed(fitted)
    flat = fitted.reshape(len(species), -1)
    square = 0.0
    for block in _blocks(labelled):
        counts = compositions(block, species)
        residuals = block.column(name).reshape(len(block), -1) - counts @ flat
        square += float(np.square(residuals / counts.sum(axis=1, keepdims=True)).sum())
    return fitted, float(np.sqrt(square / (len(labelled) * flat.shape[1])))


def atom_moments(table: FrameTable, name: str, species: SpeciesTable, allowed: AllowedMean = full_mean) -> Moments:
    """Mean over the atoms of each species (over all atoms, for a species without values), and the deviation from it."""
    labelled, shape = _labelled(table, name), table.fields[name].shape
    sums, counts = np.zeros((len(species), *shape)), np.zeros(len(species))
    for values, kinds in _atoms(labelled, name, species):
        np.add.at(sums, kinds, values)
        counts += np.bincount(kinds, minlength=len(species))
    overall = sums.sum(axis=0) / counts.sum()
    divisor = np.maximum(counts, 1.0).reshape(-1, *[1] * len(shape))
    means = allowed(np.where(counts.reshape(divisor.shape) > 0, sums / divisor, overall))
    square = sum(float(np.square(values - means[kinds]).sum()) for values, kinds in _atoms(labelled, name, species))
    return means, float(np.sqrt(square / (counts.sum() * max(1, overall.size))))


def largest_magnitude(table: FrameTable, name: str) -> float:
    """The largest absolute value, which sets the scale of rounding errors."""
    magnitude = 0.0
    for block in _blocks(_labelled(table, name)):
        values = block.find(np.arange(len(block))).field(name)
        magnitude = max(magnitude, float(np.nanmax(np.abs(values), initial=0.0)))
    return magnitude


def _labelled(table: FrameTable, name: str) -> FrameTable:
    carried = table.carries(name)
    return table if carried.all() else table.select(np.flatnonzero(carried))


def _blocks(table: FrameTable) -> Iterator[FrameTable]:
    for begin in range(0, len(table), BLOCK):
        yield table[begin : begin + BLOCK]


def _atoms(table: FrameTable, name: str, species: SpeciesTable) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Values of the atoms that have one, and their species."""
    for block in _blocks(table):
        view = block.find(np.arange(len(block)))
        values, kinds = view.field(name), species.index(view.atoms("numbers"))
        has_value = ~np.isnan(values.reshape(len(values), -1)).any(axis=1)
        yield values[has_value], kinds[has_value]
