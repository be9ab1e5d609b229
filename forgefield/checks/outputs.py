"""Checks of extra outputs: properties of frames or atoms, logits of classes.

Every output is compared in units of its scale. What is expected follows from its declaration (`ExtraOutput`): whether it
belongs to frames or atoms, whether it is extensive, and whether it is equivariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from ase.data import atomic_numbers

from forgefield.checks.derivatives import check_cutoff
from forgefield.checks.probe import CheckResult, Probe, edited, judged, molecule
from forgefield.checks.symmetry import doubled_cell, gradients_are_finite, in_a_cell, random_orthogonal
from forgefield.data.frame import Frame
from forgefield.models.interface import ExtraOutput
from forgefield.models.predictor import FORCES, Predictor

Values = dict[str, np.ndarray]
"""Outputs of one frame, in units of their scales: (*shape) or (n_atoms, *shape)."""
Expectation = Callable[[ExtraOutput, np.ndarray], np.ndarray]
"""From the declaration of an output and its value for a frame to the value expected for the changed frame."""
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
        _orthogonal(probe, frames, random, "rotation", +1, "outputs are invariant or equivariant, as declared"),
        _orthogonal(probe, frames, random, "reflection", -1, "the same for improper rotations"),
        _translation(probe, frames, random),
        _permutation(probe, frames, random),
        _batch(probe, frames, random),
        check_cutoff(probe, frames, random),
        _supercell(probe, frames, random),
        _wrapping(probe, frames, random),
        _no_edges(probe, frames),
    ]


def _orthogonal(
    probe: OutputProbe,
    frames: Sequence[Frame],
    random: np.random.Generator,
    name: str,
    determinant: int,
    note: str,
) -> CheckResult:
    def rotated(frame: Frame) -> tuple[Frame, Expectation]:
        q = random_orthogonal(random, determinant)
        other = edited(frame, positions=frame.positions @ q.T, cell=frame.cell @ q.T)
        return other, lambda output, value: _rotate(output, value, q)

    return _compared(name, note, rotated, probe, frames)


def _rotate(output: ExtraOutput, value: np.ndarray, q: np.ndarray) -> np.ndarray:
    rank = RANKS.get(output.kind, 0)
    if rank == 2:
        return q @ value @ q.T
    return value @ q.T if rank == 1 else value


def _translation(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def moved(frame: Frame) -> tuple[Frame, Expectation]:
        return edited(frame, positions=frame.positions + random.uniform(-5, 5, size=3)), _same

    return _compared("translation", "nothing changes when all atoms are translated", moved, probe, frames)


def _permutation(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def reordered(frame: Frame) -> tuple[Frame, Expectation]:
        order = random.permutation(len(frame))
        other = edited(frame, positions=frame.positions[order], numbers=frame.numbers[order])
        return other, lambda output, value: value[order] if output.per == "atom" else value

    note = "values of atoms are reordered with the atoms"
    return _compared("permutation", note, reordered, probe, frames)


def _supercell(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def expected(output: ExtraOutput, value: np.ndarray) -> np.ndarray:
        if output.per == "atom":
            return np.concatenate([value, value])
        return 2 * value if output.reduce == "sum" else value

    def twice(frame: Frame) -> tuple[Frame, Expectation]:
        return doubled_cell(frame, int(random.choice(np.flatnonzero(frame.pbc)))), expected

    note = "extensive outputs of a doubled cell double, others do not change"
    return _compared("supercell", note, twice, probe, [in_a_cell(frame, probe.cutoff) for frame in frames])


def _wrapping(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def moved(frame: Frame) -> tuple[Frame, Expectation]:
        images = random.integers(-2, 3, size=frame.positions.shape) * frame.pbc
        return edited(frame, positions=frame.positions + images @ frame.cell), _same

    note = "nothing changes when atoms are replaced by periodic images"
    return _compared("wrapping", note, moved, probe, [in_a_cell(frame, probe.cutoff) for frame in frames])


def _batch(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare each frame alone with the same frame in a batch with displaced copies, other frames and an isolated atom."""
    alone = [probe.values([frame])[0] for frame in frames]
    displaced = [edited(f, positions=f.positions + 0.05 * random.standard_normal(f.positions.shape)) for f in frames]
    batch = [*frames, *displaced, molecule(frames[0].numbers[:1], np.zeros((1, 3)))]
    order = random.permutation(len(batch))
    together = dict(zip(order.tolist(), probe.values([batch[i] for i in order])))
    note = "outputs of a frame do not depend on the other frames of a batch"
    return _judged("batch independence", note, [together[i] for i in range(len(frames))], alone)


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


def _same(output: ExtraOutput, value: np.ndarray) -> np.ndarray:
    return value


def _compared(
    name: str,
    note: str,
    change: Callable[[Frame], tuple[Frame, Expectation]],
    probe: OutputProbe,
    frames: Sequence[Frame],
) -> CheckResult:
    """Compare the outputs for each changed frame with the transformed outputs of the original frame."""
    actual, expected = [], []
    for frame in frames:
        changed, expectation = change(frame)
        before = probe.values([frame])[0]
        actual.append(probe.values([changed])[0])
        expected.append({key: expectation(probe.declared[key], value) for key, value in before.items()})
    return _judged(name, note, actual, expected)


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
