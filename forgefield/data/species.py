"""The chemical species of a model, and the conversion of atomic numbers to rows of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from ase.data import atomic_numbers, chemical_symbols

from forgefield.data.frame import Frame
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError


class SpeciesTable:
    """Chemical symbols in a fixed order; `index` turns atomic numbers into positions in that order."""

    def __init__(self, symbols: Iterable[str], *, whose: str | None = None, trained: bool = False) -> None:
        """whose: the run whose model determines the species, for messages; None: data.species or the data. trained: whether
        they are those of a model that has been trained."""
        self.symbols: tuple[str, ...] = tuple(symbols)
        self.whose, self.trained = whose, trained
        if not self.symbols:
            raise ForgefieldError("data.species is empty; it should list at least one chemical element")
        for symbol in self.symbols:
            if symbol not in atomic_numbers or symbol == "X":
                raise ForgefieldError(f"{symbol!r} in data.species is not a chemical element such as 'Cu'")
        if len(set(self.symbols)) != len(self.symbols):
            raise ForgefieldError(f"data.species lists an element twice: {', '.join(self.symbols)}")
        self.numbers = np.array([atomic_numbers[s] for s in self.symbols], dtype=np.int64)
        self._row_of_number = np.full(len(chemical_symbols), -1, dtype=np.int64)
        self._row_of_number[self.numbers] = np.arange(len(self.symbols))

    @classmethod
    def from_frames(cls, frames: FrameTable | Sequence[Frame]) -> SpeciesTable:
        """The species that occur in `frames`, by atomic number."""
        table = frames if isinstance(frames, FrameTable) else FrameTable.from_frames(frames)
        return cls(chemical_symbols[z] for z in np.flatnonzero(np.bincount(table.components.number)))

    def __len__(self) -> int:
        return len(self.symbols)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpeciesTable) and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash(self.symbols)

    def __repr__(self) -> str:
        return f"SpeciesTable({', '.join(self.symbols)})"

    def index(self, numbers: np.ndarray, where: str = "frame") -> np.ndarray:
        """Rows of this table, (n_atoms,) int64, for atomic `numbers`; `where` names the frame in the error."""
        rows = self._row_of_number[numbers]
        if rows.size and rows.min() < 0:
            symbol = chemical_symbols[int(np.asarray(numbers)[rows < 0][0])]
            if self.whose is not None:
                raise ForgefieldError(
                    f"{where}: it contains {symbol}, which the model of {self.whose} does not support (only "
                    f"{', '.join(self.symbols)}); leave such frames out, or train a new model"
                )
            raise ForgefieldError(
                f"{where}: it contains {symbol}, which is not one of the species of the model ({', '.join(self.symbols)}); "
                + (
                    f"to predict it, train or fine-tune a model with frames that contain {symbol}"
                    if self.trained
                    else "add training frames with it, or list it in data.species"
                )
            )
        return rows
