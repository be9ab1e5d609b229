"""Classes: cross-entropy, accuracy, F1 and AUROC against plain counting, and the same sums however they are divided."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.models.heads.options import HeadOptions
from forgefield.tasks.classes import auroc
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import FieldTargetOptions, TaskOptions
from forgefield.tasks.task import Task

VALUES = [1.0, 4.0, 225.0]
FURTHER = {"group": HeadOptions(classes=VALUES)}


def batch_of(labels: list[float], seed: int = 0) -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(seed)
    n = len(labels)
    logits = 2 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    weight = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
    label = torch.tensor(labels, dtype=torch.float64)
    return {"group": logits}, {"group": label, "weight": weight, "n_atoms": torch.ones(n, dtype=torch.int64)}


def test_the_loss_is_the_weighted_mean_of_cross_entropies():
    labels = [4.0, math.nan, 225.0, 1.0]
    outputs, batch = batch_of(labels)
    task = Task(TaskOptions(fields={"group": FieldTargetOptions(weight=2.0)}), ("Cu",), FURTHER)
    found = task.loss(outputs, batch)
    known, index = [0, 2, 3], torch.tensor([1, 2, 0])
    entropies = torch.nn.functional.cross_entropy(outputs["group"][known], index, reduction="none")
    weight = batch["weight"][known]
    assert float(found.total) == pytest.approx(2.0 * float((weight * entropies).sum() / weight.sum()))
    assert float(found.counts) == pytest.approx(float(weight.sum()))
    assert dict(task.describe())["group"] == "weight 2, cross-entropy of 3 classes"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([*VALUES, math.nan]), min_size=1, max_size=30), st.integers(0, 5), st.integers(0, 30))
def test_metrics_are_those_of_plain_counting_however_frames_are_divided(labels, seed, cut):
    outputs, batch = batch_of(labels, seed)
    whole, parts = (ErrorMetrics(("group",), ("Cu",), classes={"group": VALUES}) for _ in range(2))
    whole.update(outputs, batch)
    for rows in (slice(0, cut), slice(cut, None)):
        parts.update({"group": outputs["group"][rows]}, {"group": batch["group"][rows]})
    pairs = [
        (label, VALUES[int(row.argmax())]) for label, row in zip(labels, outputs["group"]) if not math.isnan(label)
    ]
    found = whole.compute()
    assert parts.compute() == pytest.approx(found)
    assert list(found) == (whole.names() if pairs else [])
    if not pairs:
        return
    assert found["group_accuracy"] == pytest.approx(np.mean([label == answer for label, answer in pairs]))
    scores = []
    for value in VALUES:
        both = sum(label == answer == value for label, answer in pairs)
        some = sum(label == value for label, _ in pairs) + sum(answer == value for _, answer in pairs)
        scores += [2 * both / some] if some else []
    assert found["group_f1"] == pytest.approx(np.mean(scores))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=25))
def test_auroc_is_the_share_of_pairs_in_the_right_order(rows):
    scores, positive = np.array([s for s, _ in rows], dtype=float), np.array([p for _, p in rows])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    found = auroc(scores, positive)
    assert (found is None) == (not pairs)
    if pairs:
        assert found == pytest.approx(np.mean(pairs))
