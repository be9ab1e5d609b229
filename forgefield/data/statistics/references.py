"""Energies per chemical species: fits of total energies by composition, and isolated atoms.

`fit_by_composition` is the least-squares answer used as reference; `robust_fit` is not moved by a few wrong frames and
serves to find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ase.data import chemical_symbols

from forgefield.data.species import SpeciesTable
from forgefield.data.store.table import FrameTable
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

BLOCK = 20_000
"""Frames that enter a fit at a time."""


@dataclass(frozen=True)
class References:
    energies: dict[str, float]
    """Energy of each species, eV."""
    kind: str
    """given, isolated, fit or none."""
    note: str = ""
    """What a user should know about how they came about."""


def compositions(table: FrameTable, species: SpeciesTable) -> np.ndarray:
    """Atoms of each species in each frame, (n_frames, n_species)."""
    counts = np.zeros((len(table), len(species)))
    found = table.components
    counts[found.frame, species.index(found.number)] = found.count
    return counts


def energy_by_composition(table: FrameTable, species: SpeciesTable, energies: np.ndarray) -> np.ndarray:
    """Sum of the energies of its atoms for each frame, eV. energies: (n_species,), eV."""
    found = table.components
    return np.bincount(found.frame, weights=found.count * energies[species.index(found.number)], minlength=len(table))


def fit_by_composition(table: FrameTable, species: SpeciesTable, label: str = "energy") -> tuple[np.ndarray, int]:
    """Values of species, (n_species, *shape of the label), that minimise the squared error per atom; rank of the problem.

    All frames carry the label. Where compositions do not tell species apart the solution of smallest norm is taken. Blocks of
    frames are reduced to triangles by orthogonal transformations, so that any number of frames takes little memory.
    """
    shape, n_species = table[:1].column(label).shape[1:], len(species)
    triangle: np.ndarray = np.zeros((0, n_species + math.prod(shape)))
    for begin in range(0, len(table), BLOCK):
        block = table[begin : begin + BLOCK]
        counts = compositions(block, species)
        n_atoms = counts.sum(axis=1, keepdims=True)
        rows = np.hstack([counts, block.column(label).reshape(len(block), -1)]) / n_atoms
        triangle = np.asarray(np.linalg.qr(np.vstack([triangle, rows]), mode="r")) if len(table) > BLOCK else rows
    solution, _, rank, _ = np.linalg.lstsq(triangle[:, :n_species], triangle[:, n_species:], rcond=None)
    return solution.reshape(n_species, *shape), int(rank)


def robust_fit(counts: np.ndarray, energies: np.ndarray, iterations: int = 30) -> np.ndarray:
    """Species energies that minimise the absolute error per atom (reweighted least squares)."""
    n_atoms = counts.sum(axis=1)
    rows, targets = counts / n_atoms[:, None], energies / n_atoms
    weights = np.ones(len(targets))
    for _ in range(iterations):
        solution = np.linalg.lstsq(rows * weights[:, None], targets * weights, rcond=1e-10)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(targets - rows @ solution), 1e-4))
    return solution


def isolated_energies(table: FrameTable, is_bound: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """Energy of each species that has a labelled frame of one atom without neighbours, eV.

    is_bound: whether each of the frames with these rows has an edge.
    """
    rows = np.flatnonzero((table.n_atoms == 1) & table.carries("energy"))
    rows = rows[~is_bound(rows)] if len(rows) else rows
    found: dict[str, tuple[float, int]] = {}
    for row, number, energy in zip(rows, table.atoms("numbers", rows), table.column("energy", rows)):
        symbol = chemical_symbols[int(number)]
        first, at = found.setdefault(symbol, (float(energy), int(row)))
        if abs(first - energy) > 1e-3:
            raise ForgefieldError(
                f"{table.where(int(row))}: the isolated {symbol} atom has energy {energy:.4f} eV, but {table.where(at)} says "
                f"{first:.4f} eV; keep one, or give data.reference_energies"
            )
    return {symbol: energy for symbol, (energy, _) in found.items()}


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
    setting: object, table: FrameTable, species: SpeciesTable, is_bound: Callable[[np.ndarray], np.ndarray]
) -> References:
    """Reference energies as `data.reference_energies` asks: a dict, isolated, fit, none or auto.

    is_bound: whether each of the frames with these rows has an edge.
    """
    if isinstance(setting, dict):
        return _given(setting, species)
    if setting is None or setting == "none":
        return References(dict.fromkeys(species.symbols, 0.0), "none")
    if setting not in ("auto", "isolated", "fit"):
        raise ForgefieldError(
            f"data.reference_energies={setting!r} should be auto, isolated, fit, none, or {{symbol: energy}}"
        )
    labelled = table.carries("energy")
    isolated = isolated_energies(table, is_bound) if setting != "fit" else {}
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
    return _fitted(table if labelled.all() else table.select(np.flatnonzero(labelled)), species)


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


def _fitted(table: FrameTable, species: SpeciesTable) -> References:
    solution, rank = fit_by_composition(table, species)
    note = ""
    if rank < len(species):
        note = (
            f"the compositions tell only {rank} of {len(species)} species apart, so the energies are the "
            "fit of smallest norm; the energy of a composition in the data is still right"
        )
    return References(dict(zip(species.symbols, map(float, solution))), "fit", note)
