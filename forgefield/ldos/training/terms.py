"""Gradients of loss terms on whole snapshots: two passes over their points, whatever their number, exact over ranks.

The first pass adds up the DOS, each rank its stretch of points; the derivative of the loss by it, a number for each level, is
the same on all ranks. The second pass takes that derivative back to the weights, piece by piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forgefield.ldos.loss import PointTask, SnapshotReference, SnapshotTerms
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.observables import snapshot_reference
from forgefield.ldos.training.gradient import Written
from forgefield.ldos.training.observing import SnapshotMeasure
from forgefield.parallel.ranks import Ranks


class TermGradient:
    """Adds the gradient of terms to that of a batch. measure: knows the training snapshots and what their targets give."""

    def __init__(self, model: LDOSNetwork, task: PointTask, measure: SnapshotMeasure, ranks: Ranks) -> None:
        assert model.energies is not None
        self.model, self.task, self.measure, self.ranks = model, task, measure, ranks
        self.terms = SnapshotTerms(model.energies, task)
        self._aside = Written(model, task.loss)
        self._references: dict[int, SnapshotReference] = {}

    def add_to(self, gradients: list[Tensor], names: list[str], step: int) -> Tensor:
        """Add to gradients that ranks will average; returns (2, n_terms), what the terms add to the sums of the loss (on the
        first rank: they are the same on all)."""
        values: dict[str, Tensor] = {}
        for number, together in self._snapshots(names, step).items():
            slope, found = self._slope(number, together, self._reference(number))
            values |= found
            for inputs in self.measure.rows.inputs(number, *self.measure.facts[number].stretch):
                self._aside.pull_back(inputs, slope)
                torch._foreach_add_(gradients, self._aside.gradients)
        sums = self.task.term_sums(values)
        return sums if self.ranks.is_rank_zero else torch.zeros_like(sums)

    def _snapshots(self, names: list[str], step: int) -> dict[int, list[str]]:
        """Terms by the snapshot whose turn it is: each term goes through all of them, however often it comes."""
        turns: dict[int, list[str]] = {}
        for name in names:
            number = (step // self.task.terms[name].every) % len(self.measure.facts)
            turns.setdefault(number, []).append(name)
        return turns

    def _reference(self, number: int) -> SnapshotReference:
        if number not in self._references:
            facts = self.measure.facts[number]
            self._references[number] = snapshot_reference(self.measure.reference(number), facts)
        return self._references[number]

    @torch.no_grad()
    def _slope(self, number: int, names: list[str], of: SnapshotReference) -> tuple[Tensor, dict[str, Tensor]]:
        """Derivative of the terms by each scaled output, (levels,), times the number of ranks; and the terms."""
        model, facts = self.model, self.measure.facts[number]
        sums = torch.zeros_like(model.output_scale)
        for inputs in self.measure.rows.inputs(number, *facts.stretch):
            sums = sums + model.network(inputs).to(torch.float64).sum(0)
        dos = (
            self.ranks.all_reduce(sums) * model.output_scale + facts.n_points * model.output_shift
        ) * facts.voxel_volume
        values, by_dos = self.terms.gradient(names, dos, of)
        slope = by_dos * model.output_scale * facts.voxel_volume * self.ranks.world_size
        return slope.to(model.dtype), values
