"""Checks of extra outputs: properties of frames or atoms, logits of classes.

Every output is compared in units of its scale. What is expected follows from its declaration (`ExtraOutput`): whether it
belongs to frames or atoms, whether it is extensive, and whether it is equivariant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from ase.data import atomic_numbers

from forgefield.checks.derivatives import check_cutoff
from forgefield.checks.probe import CheckResult, Probe, edited, judged, molecule
from forgefield.checks.symmetry import gradients_are_finite
from forgefield.checks.transformations import (
    PERMUTATION,
    REFLECTION,
    ROTATION,
    SUPERCELL,
    TRANSLATION,
    WRAPPING,
    Symmetry,
    Transformed,
    mixed_batch,
)
from forgefield.data.frame import Frame
from forgefield.models.interface import ExtraOutput
from forgefield.models.predictor import Predictor
from forgefield.models.resolved import FORCES

Values = dict[str, np.ndarray]
"""Outputs of one frame, in units of their scales: (*shape) or (n_atoms, *shape)."""
RANKS = {"vector": 1, "symmetric": 2, "tensor": 2}
"""Kinds of equivariant outputs, and the number of their axes that are rotated."""
TOLERANCE = 1e-9
"""Rounding error in float64, relative to the scale of an output."""


class KeyedProbe(Probe):
    """A probe for models with dropout: batches contain the keys that decide what is dropped in training mode."""

    def batch(self, frames: Sequence[Frame]) -> dict[str, torch.Tensor]:
        batch = super().batch(frames)
        return (
            batch | {"frame_key": torch.arange(len(frames), device=self.device)} if self.potential.needs_keys else batch
        )


class OutputProbe(KeyedProbe):
    """Evaluates the extra outputs of a float64 copy of a model, and direct forces of a model without an energy."""

    @property
    def declared(self) -> Mapping[str, ExtraOutput]:
        """The outputs that are checked, by name."""
        potential, declared = self.potential, dict(self.potential.extra_outputs)
        if isinstance(potential, Predictor) and potential.forces_are_direct and not potential.has_energy:
            declared[FORCES] = potential.head(FORCES).options
        return declared

    def values(self, frames: Sequence[Frame]) -> list[Values]:
        """Outputs of each frame, evaluated together in one batch."""
        with torch.no_grad():
            outputs = self.potential(self.batch(frames), forces=False, stress=False)
        ends = np.cumsum([len(frame) for frame in frames])[:-1]
        result: list[Values] = [{} for _ in frames]
        for name, output in self.declared.items():
            value = outputs[name].detach().cpu().numpy() / np.asarray(output.scale)
            parts = np.split(value, ends) if output.per == "atom" else list(value)
            for one, part in zip(result, parts):
                one[name] = part
        return result

    def rows(self, frames: Sequence[Frame]) -> np.ndarray:
        """All values of each frame, (n_frames, 1 + n); the first column, which is the energy in other probes, is zero."""
        return np.array([np.concatenate([[0.0], *(v.ravel() for v in one.values())]) for one in self.values(frames)])


def check_outputs(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> list[CheckResult]:
    """Results of all checks, each for all outputs."""
    return [
        *(_symmetry(law, probe, frames, random) for law in (ROTATION, REFLECTION, TRANSLATION, PERMUTATION)),
        _batch(probe, frames, random),
        check_cutoff(probe, frames, random),
        *(_symmetry(law, probe, frames, random) for law in (SUPERCELL, WRAPPING)),
        _no_edges(probe, frames),
    ]


def _symmetry(
    symmetry: Symmetry, probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator
) -> CheckResult:
    """Compare the outputs of each transformed frame with those that follow from the original frame."""
    actual, expected = [], []
    for original in frames:
        frame = symmetry.frame(original, probe.cutoff)
        transformed = symmetry.apply(frame, random, probe.vectors)
        before = probe.values([frame])[0]
        actual.append(probe.values([transformed.frame])[0])
        expected.append({name: _expected(probe.declared[name], value, transformed) for name, value in before.items()})
    return _judged(symmetry.name, symmetry.outputs_note, actual, expected)


def _expected(output: ExtraOutput, value: np.ndarray, transformed: Transformed) -> np.ndarray:
    value = transformed.rotated(value, RANKS.get(output.kind, 0))
    if output.per == "atom":
        return transformed.of_atoms(value)
    return transformed.copies * value if output.reduce == "sum" else value


def _batch(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare each frame alone with the same frame in a batch with displaced copies, other frames and an isolated atom."""
    alone = [probe.values([frame])[0] for frame in frames]
    batch, where = mixed_batch(list(frames), random)
    together = probe.values(batch)
    note = "outputs of a frame do not depend on the other frames of a batch"
    return _judged("batch independence", note, [together[i] for i in where], alone)


def _no_edges(probe: OutputProbe, frames: Sequence[Frame]) -> CheckResult:
    """Check that isolated atoms have finite outputs, the same in vacuum and in a large box, and finite gradients of the
    parameters."""
    symbols = probe.species.symbols
    isolated = [molecule(np.array([atomic_numbers[symbol]]), np.zeros((1, 3))) for symbol in symbols]
    cell, pbc = 3 * probe.cutoff * np.eye(3), np.ones(3, dtype=bool)
    boxes = [edited(atom, cell=cell, pbc=pbc) for atom in isolated]
    note = "isolated atoms have finite outputs, and gradients of the weights are finite"
    result = _judged("no neighbours", note, probe.values(boxes), probe.values(isolated))
    if gradients_are_finite(probe, isolated) and gradients_are_finite(probe, [*isolated, frames[0]]):
        return result
    return judged(result.name, float("nan"), result.tolerance, note)


def _judged(name: str, note: str, actual: Sequence[Values], expected: Sequence[Values]) -> CheckResult:
    """The result of the output with the largest deviation; the note names the outputs that fail."""
    value, tolerance, failed = 0.0, TOLERANCE, []
    for key in expected[0]:
        deviation = np.max([np.max(np.abs(one[key] - other[key])) for one, other in zip(actual, expected)])
        size = np.max([np.max(np.abs(other[key])) for other in expected])
        allowed = TOLERANCE * np.maximum(1.0, 1e-3 * size)
        if not deviation <= allowed:
            failed.append(key)
        if not deviation / allowed <= value / tolerance:
            value, tolerance = deviation, allowed
    return judged(name, value, tolerance, f"{note} (failed: {', '.join(failed)})" if failed else note)
