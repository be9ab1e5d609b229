"""What a model and a user want to know about the training data, in one pass, kept on disk by a hash of its inputs.

The same pass refuses absurd labels: force components above `max_force`, energies far from what the composition says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.config.schema import DataOptions
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.neighbours import edge_vectors, squared_lengths
from forgefield.data.readers import plain
from forgefield.data.references import References, compositions, resolve_references, robust_fit, unit_suspicion
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.files import write_whole

FORMAT = 1
"""Raised whenever the meaning of a stored number changes."""


@dataclass(frozen=True)
class Statistics:
    """Energies eV, forces eV/A, lengths A. None where the data does not say."""

    n_frames: int
    n_atoms: int
    species_counts: dict[str, int]
    labels: dict[str, int]
    """How many frames carry each of energy, forces, stress."""
    mean_neighbours: float
    """Neighbours per atom, averaged over all atoms."""
    mean_neighbours_by_species: dict[str, float]
    reference_energies: dict[str, float]
    reference_kind: str
    reference_note: str
    energy_residual_mean: float | None
    """Energy less the reference energies, eV/atom, averaged over frames."""
    energy_residual_std: float | None
    forces_rms: float | None
    """Root mean square of all force components."""
    forces_rms_by_species: dict[str, float]
    """Only species whose atoms carry forces."""
    max_force: float | None
    """Largest force component in size."""
    min_distance: float | None
    """Closest pair within the cutoff."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Statistics:
        return cls(**json.loads(text))


def compute_statistics(dataset: GraphDataset, options: DataOptions, others: Sequence[GraphDataset] = ()) -> Statistics:
    """Statistics of the training data. Labels of `others` (validation, test) are checked together with it."""
    frames = [frame for part in (dataset, *others) for frame in part.frames]
    store = _store_path(dataset, frames, options) if options.cache else None
    known = _load(store)
    if known is not None:
        return known
    check_labels(frames, dataset.species, options.max_force, options.max_energy_deviation)
    statistics = _measure(dataset, plain(options.reference_energies))
    _check_residuals(dataset, statistics, options.max_energy_deviation)
    _save(store, statistics)
    return statistics


def check_labels(frames: Sequence[Frame], species: SpeciesTable, max_force: float, max_energy_deviation: float) -> None:
    """Refuse force components above `max_force`, eV/A, and energies over `max_energy_deviation`, eV/atom, off a fit."""
    for frame in frames:
        if frame.forces is not None and np.abs(frame.forces).max() > max_force:
            atom, axis = np.unravel_index(np.abs(frame.forces).argmax(), frame.forces.shape)
            raise ForgefieldError(
                f"{frame.where}: force component {'xyz'[axis]} of atom {atom} is {frame.forces[atom, axis]:.4g} eV/A, "
                f"above data.max_force={max_force:g}; check data.units.forces, remove the frame, or raise the limit"
            )
    labelled = [frame for frame in frames if frame.energy is not None]
    if not labelled:
        return
    deviations, expected = energy_deviations(labelled, species)
    worst = int(np.abs(deviations).argmax())
    if abs(deviations[worst]) > max_energy_deviation:
        frame = labelled[worst]
        hint = unit_suspicion(float(frame.energy), float(expected[worst]))  # type: ignore[arg-type]
        raise ForgefieldError(
            f"{frame.where}: its energy {frame.energy:.6g} eV is {abs(deviations[worst]):.4g} eV/atom away from what "
            f"its composition says ({expected[worst]:.6g} eV), above data.max_energy_deviation={max_energy_deviation:g}"
            f"{hint}"
        )


def energy_deviations(frames: Sequence[Frame], species: SpeciesTable) -> tuple[np.ndarray, np.ndarray]:
    """(energy less fit) per atom, eV/atom, and the fit by composition, eV, of frames that all carry an energy."""
    counts = compositions(frames, species)
    energies = np.array([frame.energy for frame in frames])
    expected = counts @ robust_fit(counts, energies)
    return (energies - expected) / counts.sum(axis=1), expected


def _measure(dataset: GraphDataset, setting: Any) -> Statistics:
    symbols = dataset.species.symbols
    n_species = len(symbols)
    atoms = np.zeros(n_species, dtype=np.int64)
    neighbours = np.zeros(n_species, dtype=np.int64)
    force_atoms = np.zeros(n_species, dtype=np.int64)
    force_squares = np.zeros(n_species)
    max_force, closest = None, np.inf
    counts = np.zeros((len(dataset), n_species))
    for row, frame in enumerate(dataset.frames):
        sample = dataset[row]
        species = sample["species"].numpy()
        source, destination = sample["edge_index"].numpy()
        counts[row] = np.bincount(species, minlength=n_species)
        atoms += np.bincount(species, minlength=n_species)
        neighbours += np.bincount(species[destination], minlength=n_species)
        if len(source):
            vectors = edge_vectors(frame.positions, frame.cell, source, destination, sample["edge_shift"].numpy())
            closest = min(closest, float(squared_lengths(vectors).min()))
        if frame.forces is not None:
            force_atoms += np.bincount(species, minlength=n_species)
            force_squares += np.bincount(species, weights=(frame.forces**2).sum(axis=1), minlength=n_species)
            max_force = max(max_force or 0.0, float(np.abs(frame.forces).max()))
    references = resolve_references(setting, dataset.frames, dataset.species, dataset.n_edges > 0, counts)
    residuals = _residuals(dataset.frames, counts, references, symbols)
    return Statistics(
        n_frames=len(dataset),
        n_atoms=int(atoms.sum()),
        species_counts=dict(zip(symbols, map(int, atoms))),
        labels={
            name: sum(getattr(frame, name) is not None for frame in dataset.frames)
            for name in ("energy", "forces", "stress")
        },
        mean_neighbours=float(neighbours.sum() / atoms.sum()),
        mean_neighbours_by_species={s: float(k / n) if n else 0.0 for s, k, n in zip(symbols, neighbours, atoms)},
        reference_energies=references.energies,
        reference_kind=references.kind,
        reference_note=references.note,
        energy_residual_mean=float(residuals.mean()) if residuals.size else None,
        energy_residual_std=float(residuals.std()) if residuals.size else None,
        forces_rms=float(np.sqrt(force_squares.sum() / (3 * force_atoms.sum()))) if force_atoms.any() else None,
        forces_rms_by_species={
            s: float(np.sqrt(total / (3 * n))) for s, total, n in zip(symbols, force_squares, force_atoms) if n
        },
        max_force=max_force,
        min_distance=float(np.sqrt(closest)) if np.isfinite(closest) else None,
    )


def _residuals(
    frames: Sequence[Frame], counts: np.ndarray, references: References, symbols: tuple[str, ...]
) -> np.ndarray:
    """(energy less references) per atom of the frames that carry an energy, eV/atom."""
    per_species = np.array([references.energies[symbol] for symbol in symbols])
    rows = [row for row, frame in enumerate(frames) if frame.energy is not None]
    energies = np.array([frames[row].energy for row in rows], dtype=np.float64)
    return (energies - counts[rows] @ per_species) / counts[rows].sum(axis=1)


def _check_residuals(dataset: GraphDataset, statistics: Statistics, limit: float) -> None:
    mean = statistics.energy_residual_mean
    if mean is None or statistics.reference_kind not in ("given", "isolated") or abs(mean) <= limit:
        return
    labelled = max((frame for frame in dataset.frames if frame.energy is not None), key=len)
    rows = dataset.species.index(labelled.numbers)
    expected = sum(statistics.reference_energies[dataset.species.symbols[row]] for row in rows)
    raise ForgefieldError(
        f"the {statistics.reference_kind} reference energies do not match the data: energies are on average {mean:.4g} "
        f"eV/atom away from them, above data.max_energy_deviation={limit:g} ({labelled.where}: {labelled.energy:.6g} "
        f"eV against {expected:.6g} eV){unit_suspicion(float(labelled.energy), float(expected))}"  # type: ignore[arg-type]
    )


def content_hash(frames: Sequence[Frame]) -> str:
    """Hash of structures, labels and weights, in order; file names do not enter."""
    digest = hashlib.blake2b(digest_size=16)
    for frame in frames:
        structure = (frame.numbers, frame.positions, frame.cell, frame.pbc)
        for value in (*structure, frame.energy, frame.forces, frame.stress, float(frame.weight)):
            data = b"-" if value is None else np.ascontiguousarray(value).tobytes()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _store_path(dataset: GraphDataset, frames: Sequence[Frame], options: DataOptions) -> Path:
    settings = {
        "format": FORMAT,
        "frames": content_hash(frames),
        "n_train": len(dataset),
        "species": dataset.species.symbols,
        "cutoff": dataset.cutoff,
        "reference_energies": plain(options.reference_energies),
        "max_force": options.max_force,
        "max_energy_deviation": options.max_energy_deviation,
    }
    name = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    folder = os.environ.get("FORGEFIELD_CACHE") or "~/.cache/forgefield"
    return Path(folder).expanduser() / "statistics" / f"{name}.json"


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
        write_whole(store, statistics.to_json())
