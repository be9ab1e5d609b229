"""What `TrainingHelper` takes for a defect: pure functions from numbers to findings in plain words.

Each returns (kind, what was seen, what to do) or None. The limits are wide: what they name is wrong, not merely unusual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from forgefield.training.probing import listed

Rule = tuple[str, str, str]

HUGE = 1e4
"""Root mean square of an embedding above which it explodes."""
GROWTH = 100.0
"""Or so many times as large as at the first look, and above 10."""
OUTLIER = 20.0
"""Robust standard deviations from the median."""
UPDATE_HIGH, UPDATE_LOW = 0.2, 1e-6
"""Change of the weights by one step, relative to them."""
DIVERGED = 10.0
"""Times the first loss."""
FEW = 16
"""Labels below this number are not judged."""


def exploding(first: Mapping[str, float], now: Mapping[str, float]) -> Rule | None:
    """first, now: root mean square of the output of each module, at the first look and now."""
    bad = [
        name
        for name, size in now.items()
        if not size < HUGE or (size > 10 and size > GROWTH * first.get(name, float("inf")))
    ]
    if not bad:
        return None
    name = bad[0]
    before = f", {first[name]:.3g} at the first look" if first.get(name, now[name]) != now[name] else ""
    return (
        f"exploding embedding: {name}",
        f"the output of {listed(bad)} explodes (root mean square {now[name]:.3g}{before}).",
        "Lower the learning rate, clip gradients (training.clip_norm), or add a normalisation behind this layer.",
    )


def dead(zero_looks: Mapping[str, int], looks: int) -> Rule | None:
    """zero_looks: how often in a row the output of each module was zero everywhere."""
    bad = [name for name, times in zero_looks.items() if times >= looks]
    if not bad:
        return None
    return (
        f"dead layer: {bad[0]}",
        f"the output of {listed(bad)} is zero for every sample: the layer is dead, and nothing before it learns.",
        "Lower the learning rate, use an activation that does not saturate (silu instead of relu), or another initialisation.",
    )


def collapsed(name: str, times: int, looks: int) -> Rule | None:
    if times < looks:
        return None
    return (
        "collapsed embedding",
        f"the embedding ({name}) is the same for every sample, so no output can depend on the structure.",
        "Check what the encoder is given (positions, neighbours, units of the cutoff), and lower the learning rate.",
    )


def constant_label(name: str, values: np.ndarray) -> Rule | None:
    """values: of the label, NaN where it is missing."""
    values = values[np.isfinite(values)]
    if len(values) < FEW or np.ptp(values) > 1e-10 * max(float(np.abs(values).max()), 1e-300):
        return None
    return (
        f"constant target: {name}",
        f"the target {name} is {values[0]:.6g} in all of the {len(values)} labels looked at: there is nothing to learn.",
        "Check the name of the label, its unit and how it was read; a missing label must be missing, not zero.",
    )


def outliers(name: str, values: np.ndarray, where: Sequence[str] | None = None) -> Rule | None:
    """values: NaN where missing. where: words that name each."""
    known = np.flatnonzero(np.isfinite(values))
    found = values[known]
    if len(found) < FEW:
        return None
    middle = float(np.median(found))
    spread = 1.4826 * float(np.median(np.abs(found - middle)))
    if spread <= 0:
        return None
    far = np.abs(found - middle) / spread
    bad = known[np.argsort(-far, kind="stable")][: int((far > OUTLIER).sum())]
    if not len(bad):
        return None
    place = f" ({listed([where[i] for i in bad], 3)})" if where is not None else ""
    return (
        f"outliers: {name}",
        f"{len(bad)} of {len(found)} labels of {name} are outliers{place}: {values[bad[0]]:.6g}, where {middle:.6g} is the "
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
        f"{amount} the encoder ({name}), while the layers behind it get one.",
        "Look for a detach(), a no_grad(), a dead layer or a frozen part between the two.",
    )


def unused(without: Sequence[str], zero: Sequence[str]) -> Rule | None:
    """without: parameters that never had a gradient; zero: whose gradient was zero at every look."""
    if not without and not zero:
        return None
    parts = [f"{listed(without)} never had a gradient"] if without else []
    parts += [f"the gradient of {listed(zero)} was zero at every look"] if zero else []
    return (
        "unused parameters",
        f"{'; '.join(parts)}: {'it is' if len(without) + len(zero) == 1 else 'they are'} not trained.",
        "Remove what is not used, or connect it to the loss; with Lightning's ddp unused parameters also need "
        "find_unused_parameters.",
    )


def rate_too_high(update: float, losses: Sequence[float]) -> Rule | None:
    """update: of the last look. losses: of single batches at all looks; two that agree are believed."""
    loss, first_loss = losses[-1], max(losses[:2], key=abs)
    diverged = len(losses) > 3 and not min(losses[-2:]) < DIVERGED * abs(first_loss)
    limit = UPDATE_HIGH if len(losses) > 1 else 1.0  # a first step may be large
    if not update > limit and not diverged:
        return None
    seen = f"one step changes the weights by {update:.2g} of their size" if update > limit else ""
    grown = f"the loss is {loss:.3g}, {first_loss:.3g} at the first look" if diverged else ""
    return (
        "learning rate too high",
        f"the learning rate is too high: {' and '.join(filter(None, (seen, grown)))}.",
        "Divide the learning rate by 10 or more; usual changes are 0.0001 to 0.01 a step. A warm-up helps at the beginning.",
    )


def rate_too_low(updates: Sequence[float], loss: float, first_loss: float) -> Rule | None:
    """updates: of the last looks."""
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
        "rate is neither too low nor too high; `forgefield check --overfit` tells whether the model can learn one batch.",
    )
