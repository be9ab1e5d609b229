"""The labels of a training, for `TrainingHelper`: all of them at the start where the loader is ours, else those in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.statistics import energy_deviations, robust_energies
from forgefield.diagnosis import helper_rules as rules

USUAL_NAMES = ("y", "target", "targets", "label", "labels")


def label_tensors(batch: Any, names: Sequence[str] | None) -> dict[str, Tensor]:
    """Labels in a batch: those named, else `y` or the like of a dictionary or a graph, or the last entry of a tuple."""
    if isinstance(batch, Mapping):
        wanted = names if names is not None else USUAL_NAMES
        found = {name: batch[name] for name in wanted if name in batch}
    elif isinstance(batch, (tuple, list)):
        found = {"labels": batch[-1]} if len(batch) > 1 else {}
    else:
        wanted = names if names is not None else USUAL_NAMES
        found = {name: getattr(batch, name) for name in wanted if getattr(batch, name, None) is not None}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
    }


@dataclass(frozen=True)
class Labels:
    """values: of each target, one for each frame, NaN where missing; energies less what composition says, eV/atom, without
    those of single atoms, which differ from all others; of forces the largest component, as logarithm. spreads:
    standard deviation of the labels about what composition says, in eV/atom, eV/A or the label's own unit."""

    ENOUGH: ClassVar[int] = 256
    """Labels from which on those in batches are judged."""

    values: dict[str, np.ndarray]
    spreads: dict[str, float]
    where: Any

    @classmethod
    def of_training(cls, trainer: Any, pl_module: Any) -> Labels | None:
        """All labels that are trained, where the loader and the task are ours; else None."""
        loader, task = trainer.train_dataloader, getattr(pl_module, "task", None)
        if not isinstance(loader, FrameLoader) or task is None:
            return None
        frames, species = loader.dataset.frames, loader.dataset.species
        values: dict[str, np.ndarray] = {}
        spreads: dict[str, float] = {}
        for target in task.targets:
            if target.name == "energy":
                labelled = np.flatnonzero(
                    frames.carries("energy") & ((frames.n_atoms > 1) | (frames.n_atoms.max() == 1))
                )
                if not len(labelled):
                    continue
                table = frames.select(labelled)
                deviations = energy_deviations(table, species, robust_energies([table], species))[0]
                values["energy"] = np.full(len(frames), np.nan)
                values["energy"][labelled] = deviations
                spreads["energy"] = float(deviations.std())
            elif target.name == "forces":
                largest = np.asarray(frames.column("max_force"), dtype=np.float64)
                with np.errstate(divide="ignore", invalid="ignore"):
                    values["forces"] = np.where(largest > 0, np.log(largest), np.nan)
                parts = frames.components
                labelled_rows = np.isfinite(parts.force_squares)
                count = 3 * parts.count[labelled_rows].sum()
                spreads["forces"] = float(np.sqrt(parts.force_squares[labelled_rows].sum() / max(count, 1)))
            elif target.name in loader.dataset.fields and target.per == "frame" and target.classes is None:
                field = np.asarray(frames.column(target.name), dtype=np.float64)
                values[target.name] = field.reshape(len(frames), -1)[:, 0]
                spreads[target.name] = float(np.nanstd(values[target.name]))
        return cls(values, spreads, frames.where)

    def judge(self) -> list[rules.Rule | None]:
        found = []
        for name, values in self.values.items():
            if name == "energy" or name not in ("forces",):
                found.append(rules.constant_label(name, values))
            names = _Names(self.where)
            shown = f"{name} (logarithm of the largest component, eV/A)" if name == "forces" else name
            found.append(rules.outliers(shown, values, names))  # type: ignore[arg-type]
        return found


class _Names:
    """Words for a row, made when asked for."""

    def __init__(self, where: Any) -> None:
        self._where = where

    def __getitem__(self, row: int) -> str:
        return str(self._where(int(row)))
