"""Mean and spread of fields over the training data: what a model adds to and multiplies its outputs with.

Each function looks at the frames that carry the field, block by block, and gives the values of species (n_species, *shape) and
one deviation for all components, so that a vector's components stay comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from forgefield.data.species import SpeciesTable
from forgefield.data.statistics.references import BLOCK, compositions, fit_by_composition
from forgefield.data.store.table import FrameTable

Moments = tuple[np.ndarray, float]
Part = Callable[[np.ndarray], np.ndarray]
"""Of a mean (..., *shape), the part that a model may add to its output; the deviation is measured from that."""


def whole(mean: np.ndarray) -> np.ndarray:
    return mean


def no_part(mean: np.ndarray) -> np.ndarray:
    """Of vectors: any other than zero would prefer a direction."""
    return np.zeros_like(mean)


def isotropic_part(mean: np.ndarray) -> np.ndarray:
    """Of tensors (..., 3, 3): the multiple of the unit matrix."""
    return np.trace(mean, axis1=-2, axis2=-1)[..., None, None] / 3 * np.eye(3)


def intensive_moments(table: FrameTable, name: str, species: SpeciesTable, part: Part = whole) -> Moments:
    """Mean over frames, the same for every species, and the deviation from it."""
    labelled = _labelled(table, name)
    mean = part(np.asarray(sum(block.column(name).sum(axis=0) for block in _blocks(labelled)) / len(labelled)))
    square = sum(np.square(block.column(name) - mean).sum() for block in _blocks(labelled))
    rows = np.repeat(np.asarray(mean)[None], len(species), axis=0)
    return rows, float(np.sqrt(square / (len(labelled) * np.size(mean))))


def extensive_moments(table: FrameTable, name: str, species: SpeciesTable, part: Part = whole) -> Moments:
    """Values of species that fit the frames' sums best, by least squares per atom, and the deviation per atom that is left."""
    labelled = _labelled(table, name)
    fitted, _ = fit_by_composition(labelled, species, name)
    fitted = part(fitted)
    flat = fitted.reshape(len(species), -1)
    square = 0.0
    for block in _blocks(labelled):
        counts = compositions(block, species)
        left = block.column(name).reshape(len(block), -1) - counts @ flat
        square += float(np.square(left / counts.sum(axis=1, keepdims=True)).sum())
    return fitted, float(np.sqrt(square / (len(labelled) * flat.shape[1])))


def atom_moments(table: FrameTable, name: str, species: SpeciesTable, part: Part = whole) -> Moments:
    """Mean of each species' atoms (of all atoms, for a species without a value), and the deviation from it."""
    labelled, shape = _labelled(table, name), table.fields[name].shape
    sums, counts = np.zeros((len(species), *shape)), np.zeros(len(species))
    for values, kinds in _atoms(labelled, name, species):
        np.add.at(sums, kinds, values)
        counts += np.bincount(kinds, minlength=len(species))
    overall = sums.sum(axis=0) / counts.sum()
    divisor = np.maximum(counts, 1.0).reshape(-1, *[1] * len(shape))
    means = part(np.where(counts.reshape(divisor.shape) > 0, sums / divisor, overall))
    square = sum(float(np.square(values - means[kinds]).sum()) for values, kinds in _atoms(labelled, name, species))
    return means, float(np.sqrt(square / (counts.sum() * max(1, overall.size))))


def largest(table: FrameTable, name: str) -> float:
    """The largest value in size, by which rounding is told from a spread."""
    found = 0.0
    for block in _blocks(_labelled(table, name)):
        values = block.find(np.arange(len(block))).field(name)
        found = max(found, float(np.nanmax(np.abs(values), initial=0.0)))
    return found


def _labelled(table: FrameTable, name: str) -> FrameTable:
    carried = table.carries(name)
    return table if carried.all() else table.select(np.flatnonzero(carried))


def _blocks(table: FrameTable) -> Iterator[FrameTable]:
    for begin in range(0, len(table), BLOCK):
        yield table[begin : begin + BLOCK]


def _atoms(table: FrameTable, name: str, species: SpeciesTable) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Values of the atoms that have one, and their species."""
    for block in _blocks(table):
        found = block.find(np.arange(len(block)))
        values, kinds = found.field(name), species.index(found.atoms("numbers"))
        has = ~np.isnan(values.reshape(len(values), -1)).any(axis=1)
        yield values[has], kinds[has]
