"""Energies per chemical species: fits of total energies by composition, and isolated atoms.

`fit_by_composition` is the least-squares answer used as reference; `robust_fit` is not moved by a few wrong frames and
serves to find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ase.data import chemical_symbols

from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError

UNIT_RATIOS = {
    "eV and Ha": 27.211386,
    "eV and Ry": 13.605693,
    "eV and kcal/mol": 23.060548,
    "eV and kJ/mol": 96.485332,
    "Ha and kcal/mol": 627.509474,
    "Ha and kJ/mol": 2625.499639,
    "eV and meV": 1000.0,
}


@dataclass(frozen=True)
class References:
    energies: dict[str, float]
    """Energy of each species, eV."""
    kind: str
    """given, isolated, fit or none."""
    note: str = ""
    """What a user should know about how they came about."""


def compositions(frames: Sequence[Frame], species: SpeciesTable) -> np.ndarray:
    """Atoms of each species in each frame, (n_frames, n_species)."""
    return np.stack(
        [np.bincount(species.index(frame.numbers, frame.where), minlength=len(species)) for frame in frames]
    ).astype(np.float64)


def fit_by_composition(counts: np.ndarray, energies: np.ndarray) -> tuple[np.ndarray, int]:
    """Species energies, (n_species,) eV, that minimise the squared error per atom, and the rank of the problem.

    Where compositions do not tell species apart the solution of smallest norm is taken.
    """
    n_atoms = counts.sum(axis=1, keepdims=True)
    solution, _, rank, _ = np.linalg.lstsq(counts / n_atoms, energies / n_atoms[:, 0], rcond=None)
    return solution, int(rank)


def robust_fit(counts: np.ndarray, energies: np.ndarray, iterations: int = 30) -> np.ndarray:
    """Species energies that minimise the absolute error per atom (reweighted least squares)."""
    n_atoms = counts.sum(axis=1)
    rows, targets = counts / n_atoms[:, None], energies / n_atoms
    weights = np.ones(len(targets))
    for _ in range(iterations):
        solution = np.linalg.lstsq(rows * weights[:, None], targets * weights, rcond=1e-10)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(targets - rows @ solution), 1e-4))
    return solution


def isolated_energies(frames: Sequence[Frame], has_neighbours: np.ndarray) -> dict[str, float]:
    """Energy of each species that has a labelled frame of one atom without neighbours, eV."""
    found: dict[str, Frame] = {}
    for frame, bound in zip(frames, has_neighbours):
        if len(frame) != 1 or bound or frame.energy is None:
            continue
        symbol = chemical_symbols[int(frame.numbers[0])]
        first = found.setdefault(symbol, frame)
        if abs(first.energy - frame.energy) > 1e-3:  # type: ignore[operator]
            raise ForgefieldError(
                f"{frame.where}: the isolated {symbol} atom has energy {frame.energy:.4f} eV, but {first.where} says "
                f"{first.energy:.4f} eV; keep one, or give data.reference_energies"
            )
    return {symbol: float(frame.energy) for symbol, frame in found.items()}  # type: ignore[arg-type]


def unit_suspicion(value: float, expected: float) -> str:
    """A sentence on mixed units where `value` and `expected` differ by a known factor; else empty."""
    if value == 0 or expected == 0 or value * expected < 0:
        return ""
    ratio = abs(value / expected)
    ratio = max(ratio, 1 / ratio)
    for pair, factor in UNIT_RATIOS.items():
        if abs(ratio / factor - 1) < 0.03:
            return f"; the ratio {ratio:.2f} is close to {factor:.2f}: are {pair} mixed?"
    return ""


def resolve_references(
    setting: object, frames: Sequence[Frame], species: SpeciesTable, has_neighbours: np.ndarray, counts: np.ndarray
) -> References:
    """Reference energies as `data.reference_energies` asks: a dict, isolated, fit, none or auto."""
    if isinstance(setting, dict):
        return _given(setting, species)
    if setting is None or setting == "none":
        return References(dict.fromkeys(species.symbols, 0.0), "none")
    if setting not in ("auto", "isolated", "fit"):
        raise ForgefieldError(
            f"data.reference_energies={setting!r} should be auto, isolated, fit, none, or {{symbol: energy}}"
        )
    labelled = np.array([frame.energy is not None for frame in frames], dtype=bool)
    isolated = isolated_energies(frames, has_neighbours) if setting != "fit" else {}
    missing = [symbol for symbol in species.symbols if symbol not in isolated]
    if setting == "isolated" or (setting == "auto" and not missing):
        if missing:
            raise ForgefieldError(
                "data.reference_energies=isolated: no training frame is a single atom without neighbours (within "
                f"data.cutoff) that carries an energy, for {', '.join(missing)}; add it, or use fit or numbers"
            )
        return References({symbol: isolated[symbol] for symbol in species.symbols}, "isolated")
    if not labelled.any():
        if setting == "fit":
            raise ForgefieldError("data.reference_energies=fit: no training frame carries an energy")
        return References(dict.fromkeys(species.symbols, 0.0), "none", "no training frame carries an energy")
    return _fitted(frames, species, counts, labelled)


def _given(setting: dict, species: SpeciesTable) -> References:
    missing = [symbol for symbol in species.symbols if symbol not in setting]
    if missing:
        raise ForgefieldError(
            f"data.reference_energies gives no energy for {', '.join(missing)}; the species are "
            f"{', '.join(species.symbols)}"
        )
    unused = [str(symbol) for symbol in setting if symbol not in species.symbols]
    if unused:
        raise ForgefieldError(
            f"data.reference_energies names {', '.join(unused)}, which the model does not know; the species are "
            f"{', '.join(species.symbols)} (data.species adds to them)"
        )
    for symbol, value in setting.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise ForgefieldError(f"data.reference_energies.{symbol}={value!r} should be a number in eV")
    return References({symbol: float(setting[symbol]) for symbol in species.symbols}, "given")


def _fitted(frames: Sequence[Frame], species: SpeciesTable, counts: np.ndarray, labelled: np.ndarray) -> References:
    energies = np.array([frame.energy for frame in frames if frame.energy is not None])
    solution, rank = fit_by_composition(counts[labelled], energies)
    note = ""
    if rank < len(species):
        note = (
            f"the compositions tell only {rank} of {len(species)} species apart, so the energies are the "
            "fit of smallest norm; the energy of a composition in the data is still right"
        )
    return References(dict(zip(species.symbols, map(float, solution))), "fit", note)
