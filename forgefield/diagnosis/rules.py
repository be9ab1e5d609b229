"""The rules of `TrainingHelper`: pure functions from numbers to findings.

Each returns (kind, observation, advice), or None where the rule does not apply. The limits are wide: what they report is
wrong, not merely unusual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from forgefield.training.probing import join_names

Rule = tuple[str, str, str]

HUGE = 1e4
"""Root mean square of an embedding above which it explodes."""
GROWTH = 100.0
"""Or this many times as large as at the first inspection, and above 10."""
OUTLIER = 20.0
"""Distance from the median, in robust standard deviations."""
UPDATE_HIGH, UPDATE_LOW = 0.2, 1e-6
"""Relative change of the weights by one step."""
DIVERGED = 10.0
"""In units of the first loss."""
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
    seen = f"one step changes the weights by {update:.2g} of their size" if update > limit else ""
    grown = f"the loss is {loss:.3g}, {first_loss:.3g} at first" if diverged else ""
    return (
        "learning rate too high",
        f"the learning rate is too high: {' and '.join(filter(None, (seen, grown)))}.",
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
