"""The energies at which a density of states is known: evenly spaced, or several windows of different spacing.

Between two levels the density of states is linear, and beyond the first and last it falls to zero over one more spacing:
`EnergyGrid.nodes` are the levels and those two additional energies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError


@dataclass(frozen=True)
class EnergyWindow:
    """Evenly spaced energies: the first one and the spacing in eV, and their number."""

    first: float
    spacing: float
    levels: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.first) and math.isfinite(self.spacing) and self.spacing > 0):
            raise ForgefieldError(
                f"an energy grid needs a finite first energy and a spacing above zero, in eV; "
                f"these are first = {self.first}, spacing = {self.spacing}"
            )
        if int(self.levels) != self.levels or self.levels < 2:
            raise ForgefieldError(f"an energy grid needs at least two levels; levels = {self.levels}")

    @property
    def last(self) -> float:
        """The highest energy, eV."""
        return self.first + self.spacing * (self.levels - 1)


@dataclass(frozen=True)
class EnergyGrid:
    """Energies of a density of states, eV.

    `EnergyGrid(-5.0, 2.5, 11)` is -5, -2.5, ..., 20 eV. Where the spacing changes, `EnergyGrid.from_segments` joins several
    windows; `first` is then the lowest energy, `spacing` that of the lowest window and `levels` the number of all levels.
    """

    first: float
    spacing: float
    levels: int
    windows: tuple[EnergyWindow, ...] = ()

    def __post_init__(self) -> None:
        EnergyWindow(self.first, self.spacing, self.levels)  # validates the numbers

    @classmethod
    def from_segments(
        cls, segments: Sequence[Mapping[str, Any] | tuple[float, float, int] | EnergyWindow]
    ) -> EnergyGrid:
        """One grid of several windows in rising order.

        A window may end where the next begins: that energy belongs to the upper one and is counted once: 10 levels and 5
        levels that share one are 14 levels.
        """
        windows = [_window(segment) for segment in segments]
        if not windows:
            raise ForgefieldError("an energy grid of several windows needs at least one of them")
        trimmed = []
        for lower, upper in itertools.pairwise(windows):
            shared = abs(lower.last - upper.first) < 1e-6 * min(lower.spacing, upper.spacing)
            if shared and lower.levels == 2:
                raise ForgefieldError(
                    f"the window of energies from {lower.first} eV needs three levels, the last one shared"
                )
            if not shared and lower.last >= upper.first:
                raise ForgefieldError(
                    f"windows of energies overlap: one ends at {lower.last:g} eV, the next begins at {upper.first:g} eV; "
                    "they must be in rising order and share at most one energy"
                )
            trimmed.append(EnergyWindow(lower.first, lower.spacing, lower.levels - shared))
        trimmed.append(windows[-1])
        if len(trimmed) == 1:
            return cls(**asdict(trimmed[0]))
        return cls(trimmed[0].first, trimmed[0].spacing, sum(w.levels for w in trimmed), tuple(trimmed))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EnergyGrid:
        """From the result of `to_dict`: {first, spacing, levels} or {segments: [...]}."""
        if set(values) == {"segments"}:
            return cls.from_segments(values["segments"])
        return cls.from_segments([values])

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values."""
        if self.windows:
            return {"segments": [asdict(window) for window in self.windows]}
        return {"first": self.first, "spacing": self.spacing, "levels": self.levels}

    @property
    def last(self) -> float:
        """The highest energy, eV."""
        return self._windows[-1].last

    @property
    def uniform(self) -> bool:
        """Whether all levels are one spacing apart."""
        return not self.windows

    def energies(self, device: torch.device | str | None = None) -> Tensor:
        """(levels,) eV, float64."""
        return torch.cat([_ramp(window.first, window.spacing, window.levels, device) for window in self._windows])

    def nodes(self, device: torch.device | str | None = None) -> Tensor:
        """(levels + 2,) eV, float64: the levels, and at either end the energy where the density of states reaches zero."""
        windows = list(self._windows)
        top = windows[-1]
        windows[-1] = EnergyWindow(top.first, top.spacing, top.levels + 1)
        bottom = windows[0]
        windows[0] = EnergyWindow(bottom.first - bottom.spacing, bottom.spacing, windows[0].levels + 1)
        return torch.cat([_ramp(window.first, window.spacing, window.levels, device) for window in windows])

    @property
    def _windows(self) -> tuple[EnergyWindow, ...]:
        return self.windows or (EnergyWindow(self.first, self.spacing, self.levels),)

    def __str__(self) -> str:
        return " and ".join(f"{w.levels} levels from {w.first:g} to {w.last:g} eV" for w in self._windows)


def _window(segment: Mapping[str, Any] | tuple[float, float, int] | EnergyWindow) -> EnergyWindow:
    if isinstance(segment, EnergyWindow):
        return segment
    if not isinstance(segment, Mapping):
        return EnergyWindow(*segment)
    names = [field.name for field in fields(EnergyWindow)]
    if set(segment) != set(names):
        raise ForgefieldError(
            f"an energy grid is described by {', '.join(names)}; these are {', '.join(map(str, segment))}"
        )
    return EnergyWindow(**segment)


def _ramp(first: float, spacing: float, levels: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(levels, dtype=torch.float64, device=device) * spacing + first
