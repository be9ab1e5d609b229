"""Targets that are classes: labels are values of a list, and the model predicts a logit for each of them.

Metrics are computed from sums over labels, like any other error: correct predictions, cross-entropies, and for each class the
numbers of true positives, false positives and false negatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def one_hot(labels: Tensor, values: Tensor) -> Tensor:
    """(n, n_classes): one at the class of each label (n,), all zero where it is missing. values: of the classes."""
    return (labels.unsqueeze(1) == values).to(labels.dtype)


def cross_entropy(logits: Tensor, chosen: Tensor) -> Tensor:
    """(n,): minus the logarithm of the probability that logits (n, n_classes) give to the chosen class."""
    return -(chosen * torch.log_softmax(logits, 1)).sum(1)


def class_sums(logits: Tensor, labels: Tensor, values: Tensor) -> list[Tensor]:
    """(3,) each: correct predictions, sum of cross-entropies, labels; then for each class true positives, false positives and
    false negatives."""
    chosen = one_hot(labels, values)
    labelled = chosen.sum(1, keepdim=True)
    predicted = torch.nn.functional.one_hot(logits.argmax(1), values.shape[0]).to(chosen.dtype) * labelled
    correct = (chosen * predicted).sum(0)
    total = torch.stack([correct.sum(), cross_entropy(logits, chosen).sum(), labelled.sum()])
    by_class = torch.stack([correct, predicted.sum(0) - correct, chosen.sum(0) - correct], dim=1)
    return [total, *by_class.unbind(0)]


def class_metrics(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Accuracy, mean of the F1 scores of the classes that occur, and mean cross-entropy. rows: added-up `class_sums`."""
    (right, entropy, count), *classes = rows
    scores = [2 * hits / (2 * hits + wrong + missed) for hits, wrong, missed in classes if hits + wrong + missed > 0]
    return {"accuracy": right / count, "f1": sum(scores) / len(scores), "cross_entropy": entropy / count}


def auroc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Probability that a positive has a higher score than a negative, ties counting half; None where one kind is missing."""
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        return None
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))
