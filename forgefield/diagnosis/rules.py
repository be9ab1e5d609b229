"""The rules of `TrainingHelper`, functions from numbers to findings, and the labels they are applied to.

Each rule returns (kind, observation, advice), or None if it does not apply. The limits are wide: what is reported is wrong, not
merely unusual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import lightning as L
import numpy as np
from torch import Tensor

from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.statistics import energy_deviations, robust_energies
from forgefield.training.probing import join_names, probed

Rule = tuple[str, str, str]

HUGE = 1e4
"""Root mean square of an embedding above which it explodes."""
GROWTH = 100.0
"""Growth since the first inspection above which it explodes, if it is above 10."""
OUTLIER = 20.0
"""Distance from the median, in robust standard deviations."""
UPDATE_HIGH, UPDATE_LOW = 0.2, 1e-6
"""Relative change of the weights by one step."""
DIVERGED = 10.0
"""Loss above which a training has diverged, in units of the first loss."""
FEW = 16
"""Fewer labels than this are not judged."""


def exploding(first: Mapping[str, float], now: Mapping[str, float]) -> Rule | None:
    """first, now: root mean square of the output of each module, at the first inspection and now."""
    bad = [
        name
        for name, size in now.items()
        if not size < HUGE or (size > 10 and size > GROWTH * first.get(name, float("inf")))
    ]
    if not bad:
        return None
    name = bad[0]
    before = f", {first[name]:.3g} at first" if first.get(name, now[name]) != now[name] else ""
    return (
        f"exploding embedding: {name}",
        f"the output of {join_names(bad)} explodes (root mean square {now[name]:.3g}{before}).",
        "Lower the learning rate, clip gradients (training.clip_norm), or add a normalisation after this layer.",
    )


def dead(zero_counts: Mapping[str, int], limit: int) -> Rule | None:
    """zero_counts: number of consecutive inspections in which the output of each module was zero everywhere."""
    bad = [name for name, times in zero_counts.items() if times >= limit]
    if not bad:
        return None
    return (
        f"dead layer: {bad[0]}",
        f"the output of {join_names(bad)} is zero for every sample: the layer is dead, and nothing before it learns.",
        "Lower the learning rate, use an activation that does not saturate (silu for relu), or change the initialisation.",
    )


def collapsed(name: str, times: int, limit: int) -> Rule | None:
    """times: number of consecutive inspections in which all samples had the same embedding."""
    if times < limit:
        return None
    return (
        "collapsed embedding",
        f"the embedding ({name}) is the same for every sample, so no output can depend on the structure.",
        "Check the inputs of the encoder (positions, neighbours, units of the cutoff), and lower the learning rate.",
    )


def constant_label(name: str, values: np.ndarray) -> Rule | None:
    """values: of the label, NaN where it is missing."""
    values = values[np.isfinite(values)]
    if len(values) < FEW or np.ptp(values) > 1e-10 * max(float(np.abs(values).max()), 1e-300):
        return None
    return (
        f"constant target: {name}",
        f"the target {name} is {values[0]:.6g} in all {len(values)} labels that were checked: there is nothing to learn.",
        "Check the name of the label, its unit and how it was read; a missing label must be missing, not zero.",
    )


def outliers(name: str, values: np.ndarray, where: Callable[[int], str] | None = None) -> Rule | None:
    """values: NaN where missing. where: describes the origin of a row."""
    labelled = np.flatnonzero(np.isfinite(values))
    labels = values[labelled]
    if len(labels) < FEW:
        return None
    middle = float(np.median(labels))
    spread = 1.4826 * float(np.median(np.abs(labels - middle)))
    if spread <= 0:
        return None
    far = np.abs(labels - middle) / spread
    bad = labelled[np.argsort(-far, kind="stable")][: int((far > OUTLIER).sum())]
    if not len(bad):
        return None
    origin = f" ({join_names([str(where(int(i))) for i in bad], 3)})" if where is not None else ""
    return (
        f"outliers: {name}",
        f"{len(bad)} of {len(labels)} labels of {name} are outliers{origin}: {values[bad[0]]:.6g}, where {middle:.6g} is the "
        f"median and {spread:.3g} the usual spread.",
        "Check these frames (units, unconverged calculations) and leave them out, or use a huber or mae loss.",
    )


def not_reached(encoder: float, rest: float, name: str) -> Rule | None:
    """encoder, rest: norms of the gradient in the encoder and in everything else."""
    if encoder > 1e-7 * rest or rest == 0:
        return None
    amount = (
        "no gradient reaches"
        if encoder == 0
        else f"hardly any gradient ({encoder / rest:.1e} of that of the rest) reaches"
    )
    return (
        "encoder not reached",
        f"{amount} the encoder ({name}), while the layers after it get one.",
        "Look for a detach(), a no_grad(), a dead layer or frozen parameters between the two.",
    )


def unused(without: Sequence[str], zero: Sequence[str]) -> Rule | None:
    """without: parameters that never had a gradient. zero: parameters whose gradient was zero at every inspection."""
    if not without and not zero:
        return None
    parts = [f"{join_names(without)} never had a gradient"] if without else []
    parts += [f"the gradient of {join_names(zero)} was zero at every inspection"] if zero else []
    return (
        "unused parameters",
        f"{'; '.join(parts)}: {'it is' if len(without) + len(zero) == 1 else 'they are'} not trained.",
        "Remove what is not used, or connect it to the loss; with Lightning's ddp unused parameters also need "
        "find_unused_parameters.",
    )


def rate_too_high(update: float, losses: Sequence[float]) -> Rule | None:
    """update: at the last inspection. losses: of single batches at all inspections; two have to agree."""
    loss, first_loss = losses[-1], max(losses[:2], key=abs)
    diverged = len(losses) > 3 and not min(losses[-2:]) < DIVERGED * abs(first_loss)
    limit = UPDATE_HIGH if len(losses) > 1 else 1.0  # a first step may be large
    if not update > limit and not diverged:
        return None
    observation = f"one step changes the weights by {update:.2g} of their size" if update > limit else ""
    grown = f"the loss is {loss:.3g}, {first_loss:.3g} at first" if diverged else ""
    return (
        "learning rate too high",
        f"the learning rate is too high: {' and '.join(filter(None, (observation, grown)))}.",
        "Divide the learning rate by 10 or more; usual changes are 0.0001 to 0.01 a step. A warm-up helps at the beginning.",
    )


def rate_too_low(updates: Sequence[float], loss: float, first_loss: float) -> Rule | None:
    """updates: at the last inspections."""
    if not updates or not all(update < UPDATE_LOW for update in updates) or loss < 0.5 * first_loss:
        return None
    return (
        "learning rate too low",
        f"the learning rate is too low: one step changes the weights by {max(updates):.2g} of their size, and the loss stays "
        f"at {loss:.3g}.",
        "Multiply the learning rate by 10 or more; usual changes are 0.0001 to 0.01 a step.",
    )


def output_is_mean(name: str, error: float, spread: float, unit: str = "") -> Rule:
    """error: root mean square error. spread: standard deviation of the labels."""
    return (
        f"output is the mean: {name}",
        f"the prediction of {name} is hardly more than the mean: its error ({error:.4g}{unit}) is as large as the spread of "
        f"the labels ({spread:.4g}{unit}).",
        "Check that the label belongs to the frame it is read with, that the loss has a weight for it, and that the learning "
        "rate is neither too low nor too high; `forgefield check --overfit` tests whether the model can learn one batch.",
    )


# ---- labels of the training data


USUAL_NAMES = ("y", "target", "targets", "label", "labels")


def label_tensors(batch: object, names: Sequence[str] | None) -> dict[str, Tensor]:
    """Floating-point labels in a batch: entries with these (or the usual) names, or the last entry of a tuple."""
    names = names if names is not None else USUAL_NAMES
    if isinstance(batch, Mapping):
        candidates = {name: batch[name] for name in names if name in batch}
    elif isinstance(batch, (tuple, list)):
        candidates = {"labels": batch[-1]} if len(batch) > 1 else {}
    else:
        candidates = {name: getattr(batch, name, None) for name in names}
    return {
        name: value
        for name, value in candidates.items()
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

    def judge(self) -> list[Rule | None]:
        """Constant labels and outliers; None for each rule that does not apply."""
        findings = []
        for name, values in self.values.items():
            if name != "forces":
                findings.append(constant_label(name, values))
            shown = f"{name} (logarithm of the largest component, eV/A)" if name == "forces" else name
            findings.append(outliers(shown, values, self.where))
        return findings
