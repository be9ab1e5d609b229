"""Random splits that leave every species in training: a model cannot be tested on elements that it has never seen.

A split is changed only where it would take the last frames of a species out of training; all others stay as drawn.
"""

from __future__ import annotations

import numpy as np
from ase.data import chemical_symbols

from forgefield.data.sampling.order import seeded_permutation
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError

TRAIN = 0
"""Number of the training part; the others are what was drawn."""


def keep_species_in_training(
    frames: FrameTable, part: np.ndarray, candidates: np.ndarray, seed: int
) -> tuple[np.ndarray, list[str]]:
    """Parts with every species in training, and the symbols of the species for which frames were exchanged.

    For each species that training lacks, a frame that holds it goes back to training, and a frame whose species are all held
    by others takes its place, so that sizes stay the same; where there is no such frame the part is smaller by one.

    frames: of which `part` is a division. part: (n_frames,) int, `TRAIN` or the number of a drawn part, -1 for frames that are
    not used. candidates: rows that may be drawn. seed: frames are looked through in the order that it fixes.
    """
    part, components = part.copy(), frames.components
    where = part[components.frame]
    missing = np.setdiff1d(components.number[where > TRAIN], components.number[where == TRAIN])
    if not len(missing):
        return part, []
    order = seeded_permutation(len(frames), seed)
    may_leave = np.zeros(len(frames), dtype=bool)
    may_leave[candidates] = True
    may_leave &= part == TRAIN
    left: list[int] = []
    for number in missing:
        holders = np.zeros(len(frames), dtype=bool)
        holders[components.frame[components.number == number]] = True
        if not (holders & (part == TRAIN)).any():
            row = _first(order, holders & (part > TRAIN))
            left.append(int(part[row]))
            part[row] = TRAIN
    for number_of_part in left:
        row = _first(order, may_leave & (part == TRAIN) & _dispensable(frames, part))
        if row is not None:
            part[row] = number_of_part
    return part, [chemical_symbols[number] for number in missing]


def refuse_empty(part: np.ndarray, names: dict[int, str], symbols: list[str]) -> None:
    """Refuse a part of which nothing is left. names: settings of the drawn parts by their number."""
    for number, name in names.items():
        if symbols and not (part == number).any():
            raise ForgefieldError(
                f"data.{name}: no frame can be set aside, because training needs the only frames with {', '.join(symbols)}; "
                f"give more data, name files for data.{name}, or set data.{name}=null"
            )


def _first(order: np.ndarray, chosen: np.ndarray) -> int | None:
    """The first of the chosen rows in this order; None where none is chosen."""
    places = np.flatnonzero(chosen[order])
    return int(order[places[0]]) if len(places) else None


def _dispensable(frames: FrameTable, part: np.ndarray) -> np.ndarray:
    """(n_frames,) whether each species of a frame is held by at least two frames of the training part."""
    components = frames.components
    holders = np.bincount(components.number[part[components.frame] == TRAIN], minlength=len(chemical_symbols))
    fewest = np.full(len(frames), np.iinfo(np.int64).max)
    np.minimum.at(fewest, components.frame, holders[components.number])
    return fewest >= 2
