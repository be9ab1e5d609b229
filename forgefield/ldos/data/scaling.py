"""Scaling of inputs and outputs, kept as numbers for the model to fold into its first and last layer; data stays as it is.

scaled = (value - shift) / scale. `standard` has mean 0 and spread 1 (sample standard deviation, n - 1, as in MALA), `minmax`
lies from 0 to 1; either of all columns alike, or `feature-wise`, each column by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.moments import ColumnMoments

KINDS = ("none", "standard", "minmax", "feature-wise-standard", "feature-wise-minmax")
_ALIASES = {"normal": "minmax", "feature-wise-normal": "feature-wise-minmax"}
"""Older names in MALA."""


def scaling_kind(name: object, setting: str = "data.points.scaling") -> str:
    """The kind that `name` means; None is `none`."""
    kind = "none" if name is None else str(name).strip().lower().replace("_", "-")
    kind = _ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise ForgefieldError(
            f"{setting}={name!r} is not known; it should be one of {', '.join(KINDS)}.{did_you_mean(str(name), KINDS)}"
        )
    return kind


@dataclass(frozen=True, eq=False)
class Scaling:
    """shift, scale: (columns,) float64, no scale is 0. constant: columns whose value never changes, which become 0."""

    kind: str
    shift: Tensor
    scale: Tensor
    constant: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: str | None, moments: ColumnMoments, setting: str = "data.points.scaling") -> Scaling:
        """The scaling of that kind for columns with these moments."""
        kind = scaling_kind(kind, setting)
        columns = len(moments.offset)
        if kind == "none":
            return cls.identity(columns)
        used = moments if kind.startswith("feature-wise") else moments.over_all()
        if kind.endswith("standard"):
            shift, scale = used.mean, used.std
        else:
            shift, scale = used.low, used.high - used.low
        constant = (used.low == used.high) | ~(scale > 0)
        shift, scale = np.where(constant, used.low, shift), np.where(constant, 1.0, scale)
        wide = [torch.from_numpy(np.broadcast_to(values, columns).copy()) for values in (shift, scale)]
        flat = np.broadcast_to(constant, columns)
        return cls(kind, wide[0], wide[1], tuple(int(column) for column in np.flatnonzero(flat)))

    @classmethod
    def identity(cls, columns: int) -> Scaling:
        """Values as they are."""
        return cls("none", torch.zeros(columns, dtype=torch.float64), torch.ones(columns, dtype=torch.float64))

    def scaled(self, values: Tensor) -> Tensor:
        """Values as the network sees them, (..., columns)."""
        return (values - self.shift.to(values)) / self.scale.to(values)

    def physical(self, scaled: Tensor) -> Tensor:
        """What `scaled` was made of, (..., columns)."""
        return scaled * self.scale.to(scaled) + self.shift.to(scaled)

    def describe(self) -> str:
        """One line for a summary, which names columns that never change."""
        if not self.constant:
            return self.kind
        shown = ", ".join(map(str, self.constant[:8])) + (", ..." if len(self.constant) > 8 else "")
        return f"{self.kind}; {len(self.constant)} of {len(self.shift)} columns never change ({shown}) and become 0"

    def to_dict(self) -> dict[str, Any]:
        """Numbers and words only, exact."""
        return {
            "kind": self.kind,
            "shift": self.shift.tolist(),
            "scale": self.scale.tolist(),
            "constant": list(self.constant),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scaling:
        numbers = [torch.tensor(values[name], dtype=torch.float64) for name in ("shift", "scale")]
        return cls(scaling_kind(values["kind"]), numbers[0], numbers[1], tuple(values.get("constant", ())))
