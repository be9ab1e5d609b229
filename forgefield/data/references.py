"""Energies per chemical species: fits of total energies by composition, and isolated atoms.

`fit_by_composition` is a least-squares fit, used for reference energies; `robust_fit` is insensitive to a few wrong frames
and used to detect them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
"""Number of frames added to a fit at a time."""


@dataclass(frozen=True)
class References:
    energies: dict[str, float]
    """Energy of each species, eV."""
    kind: str
    """given, isolated, fit, mean or none."""
    note: str = ""
    """Note for the user on how they were determined."""


def compositions(table: FrameTable, species: SpeciesTable) -> np.ndarray:
    """Number of atoms of each species in each frame, (n_frames, n_species)."""
    counts = np.zeros((len(table), len(species)))
    components = table.components
    counts[components.frame, species.index(components.number)] = components.count
    return counts


def energy_by_composition(table: FrameTable, species: SpeciesTable, energies: np.ndarray) -> np.ndarray:
    """Sum of the species energies of the atoms of each frame, (n_frames,), eV. energies: (n_species,), eV."""
    components = table.components
    weights = components.count * energies[species.index(components.number)]
    return np.bincount(components.frame, weights=weights, minlength=len(table))


def fit_by_composition(table: FrameTable, species: SpeciesTable, label: str = "energy") -> tuple[np.ndarray, int]:
    """Values of species, (n_species, *shape of the label), that minimise the squared error per atom, and the rank of the fit.

    All frames must carry the label. If compositions do not distinguish all species, the solution of smallest norm is returned.
    Blocks of frames are reduced by QR decomposition, so that any number of frames takes little memory.
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

    is_bound: returns whether frames, given by their rows, have edges.
    """
    rows = np.flatnonzero((table.n_atoms == 1) & table.carries("energy"))
    rows = rows[~is_bound(rows)] if len(rows) else rows
    energies: dict[str, tuple[float, int]] = {}
    for row, number, energy in zip(rows, table.atoms("numbers", rows), table.column("energy", rows)):
        symbol = chemical_symbols[int(number)]
        first, first_row = energies.setdefault(symbol, (float(energy), int(row)))
        if abs(first - energy) > 1e-3:
            raise ForgefieldError(
                f"{table.where(int(row))}: the isolated {symbol} atom has the energy {energy:.4f} eV, but it is {first:.4f} eV "
                f"in {table.where(first_row)}; keep one, or set data.reference_energies"
            )
    return {symbol: energy for symbol, (energy, _) in energies.items()}


def unit_suspicion(value: float, expected: float) -> str:
    """A hint at mixed units if `value` and `expected` differ by the ratio of two energy units; else empty."""
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
    """Reference energies from `data.reference_energies`: a dict, isolated, fit, mean, none or auto.

    is_bound: returns whether frames, given by their rows, have edges.
    """
    if isinstance(setting, dict):
        return _from_setting(setting, species)
    if setting is None or setting == "none":
        return References(dict.fromkeys(species.symbols, 0.0), "none")
    if setting not in ("auto", "isolated", "fit", "mean"):
        raise ForgefieldError(
            f"data.reference_energies must be auto, isolated, fit, mean, none or {{symbol: energy}}, not {setting!r}"
        )
    labelled = table.carries("energy")
    isolated = isolated_energies(table, is_bound) if setting in ("auto", "isolated") else {}
    missing = [symbol for symbol in species.symbols if symbol not in isolated]
    if setting == "isolated" or (setting == "auto" and not missing):
        if missing:
            raise ForgefieldError(
                "data.reference_energies=isolated: the training frames contain no single atom without neighbours (within "
                f"data.cutoff) and with an energy for {', '.join(missing)}; add it, or use fit or numbers"
            )
        return References({symbol: isolated[symbol] for symbol in species.symbols}, "isolated")
    if not labelled.any():
        if setting in ("fit", "mean"):
            raise ForgefieldError(f"data.reference_energies={setting}: no training frame has an energy")
        return References(dict.fromkeys(species.symbols, 0.0), "none", "no training frame has an energy")
    if setting == "mean":
        return _mean(table, species, labelled)
    return _fitted(table if labelled.all() else table.select(np.flatnonzero(labelled)), species)


def _from_setting(setting: Mapping[str, object], species: SpeciesTable) -> References:
    missing = [symbol for symbol in species.symbols if symbol not in setting]
    if missing:
        raise ForgefieldError(
            f"data.reference_energies has no energy for {', '.join(missing)}; the species are {', '.join(species.symbols)}"
        )
    unused = [str(symbol) for symbol in setting if symbol not in species.symbols]
    if unused:
        raise ForgefieldError(
            f"data.reference_energies has {', '.join(unused)}, which the model does not have; the species are "
            f"{', '.join(species.symbols)} (data.species adds to them)"
        )
    energies = {}
    for symbol, value in setting.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise ForgefieldError(f"data.reference_energies.{symbol} must be a number in eV, not {value!r}")
        energies[symbol] = float(value)
    return References({symbol: energies[symbol] for symbol in species.symbols}, "given")


def _mean(table: FrameTable, species: SpeciesTable, labelled: np.ndarray) -> References:
    """The mean over frames of the energy per atom, for all species."""
    rows = np.flatnonzero(labelled)
    energies = table.column("energy", rows) / table.n_atoms[rows]
    return References(dict.fromkeys(species.symbols, float(energies.mean())), "mean")


def _fitted(table: FrameTable, species: SpeciesTable) -> References:
    solution, rank = fit_by_composition(table, species)
    note = ""
    if rank < len(species):
        note = (
            f"the compositions distinguish only {rank} of {len(species)} species, so the energies are the fit of smallest "
            "norm; the energies of compositions in the data are still correct"
        )
    return References(dict(zip(species.symbols, map(float, solution))), "fit", note)
