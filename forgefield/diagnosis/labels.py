"""Labels of a training, for `TrainingHelper`: all of them where Forgefield loads the data, otherwise those in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import lightning as L
import numpy as np
from torch import Tensor

from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.statistics.statistics import energy_deviations, robust_energies
from forgefield.diagnosis import rules
from forgefield.training.probing import probed

USUAL_NAMES = ("y", "target", "targets", "label", "labels")


def label_tensors(batch: object, names: Sequence[str] | None) -> dict[str, Tensor]:
    """Floating-point labels in a batch: those named, else `y` or the like of a mapping or graph; the last entry of a tuple."""
    names = names if names is not None else USUAL_NAMES
    if isinstance(batch, Mapping):
        found = {name: batch[name] for name in names if name in batch}
    elif isinstance(batch, (tuple, list)):
        found = {"labels": batch[-1]} if len(batch) > 1 else {}
    else:
        found = {name: getattr(batch, name, None) for name in names}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
    }


@dataclass(frozen=True)
class Labels:
    """The labels of all training frames.

    values: of each target, one number per frame, NaN where missing. Of energies, the deviation from a fit to the composition
    in eV/atom, without those of single atoms, which differ from all others; of forces, the logarithm of the largest component.
    spreads: standard deviation of the labels (of energies, about the fit), in eV/atom, eV/A or the unit of the label.
    where: describes the origin of a frame.
    """

    ENOUGH: ClassVar[int] = 256
    """Number of labels in batches that is enough to judge them."""

    values: dict[str, np.ndarray]
    spreads: dict[str, float]
    where: Callable[[int], str]

    @classmethod
    def of_training(cls, trainer: L.Trainer, pl_module: L.LightningModule) -> Labels | None:
        """The labels of all trained targets; None where the loader or the module is not Forgefield's."""
        loader, inspected = trainer.train_dataloader, probed(pl_module)
        if not isinstance(loader, FrameLoader) or inspected is None:
            return None
        frames, species = loader.dataset.frames, loader.dataset.species
        values: dict[str, np.ndarray] = {}
        spreads: dict[str, float] = {}
        for target in inspected.task.targets:
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
        """Constant labels and outliers; None for each rule that does not apply."""
        found = []
        for name, values in self.values.items():
            if name != "forces":
                found.append(rules.constant_label(name, values))
            shown = f"{name} (logarithm of the largest component, eV/A)" if name == "forces" else name
            found.append(rules.outliers(shown, values, self.where))
        return found
