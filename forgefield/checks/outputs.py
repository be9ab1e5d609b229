"""The laws for outputs beside energies and forces, whatever they are: properties of frames, of atoms, logits of classes.

Every output is compared in units of its own scale. What is expected follows from what is said of it (`ExtraOutput`): whether
frames or atoms have it, whether it grows with the frame, and how it turns with the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ase.data import atomic_numbers

from forgefield.checks.locality import doubled_cell, gradients_are_finite, in_a_cell
from forgefield.checks.probe import CheckResult, Probe, edited, judged, molecule
from forgefield.checks.smoothness import check_cutoff
from forgefield.checks.symmetry import random_orthogonal
from forgefield.data.frame import Frame
from forgefield.models.interface import ExtraOutput
from forgefield.models.predictor import FORCES, Predictor

Values = dict[str, np.ndarray]
"""Of one frame, in units of the scales: () or (n_atoms,), each with the shape of the output behind it."""
Expectation = Callable[[str, ExtraOutput, np.ndarray], np.ndarray]
"""From an output's name, what is said of it and its value for a frame to that for the changed frame."""
TURNING = {"vector": 1, "symmetric": 2, "tensor": 2}
"""Kinds of values that turn with the structure, and along how many of their last axes."""
TOLERANCE = 1e-9
"""Of rounding in float64, relative to the scale of an output."""


class KeyedProbe(Probe):
    """Evaluates models with dropout too: its batches carry the keys that decide what is dropped in training mode."""

    def batch(self, frames: Sequence[Frame]) -> dict[str, torch.Tensor]:
        batch = super().batch(frames)
        return (
            batch | {"frame_key": torch.arange(len(frames), device=self.device)} if self.potential.needs_keys else batch
        )


class OutputProbe(KeyedProbe):
    """Evaluates the further outputs of a float64 copy of a model, and its direct forces where no energy is beside them."""

    @property
    def said(self) -> Mapping[str, ExtraOutput]:
        potential, said = self.potential, dict(self.potential.extra_outputs)
        if isinstance(potential, Predictor) and potential.forces_are_direct and not potential.has_energy:
            said[FORCES] = potential.head(FORCES).options
        return said

    def values(self, frames: Sequence[Frame]) -> list[Values]:
        """Outputs of each frame, evaluated together in one batch."""
        with torch.no_grad():
            found = self.potential(self.batch(frames), forces=False, stress=False)
        ends = np.cumsum([len(frame) for frame in frames])[:-1]
        result: list[Values] = [{} for _ in frames]
        for name, output in self.said.items():
            value = found[name].detach().cpu().numpy() / np.asarray(output.scale)
            parts = np.split(value, ends) if output.per == "atom" else list(value)
            for one, part in zip(result, parts):
                one[name] = part
        return result

    def rows(self, frames: Sequence[Frame]) -> np.ndarray:
        """All values one after the other, (n_frames, n); a zero in front takes the place of an energy."""
        return np.array([np.concatenate([[0.0], *(v.ravel() for v in one.values())]) for one in self.values(frames)])


def check_outputs(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> list[CheckResult]:
    """All laws, each for every output."""
    return [
        _orthogonal(probe, frames, random, "rotation", +1, "turned at random: outputs stay, or turn too"),
        _orthogonal(probe, frames, random, "reflection", -1, "mirrored and turned: outputs stay, or follow"),
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
    def turned(frame: Frame) -> tuple[Frame, Expectation]:
        q = random_orthogonal(random, determinant)
        other = edited(frame, positions=frame.positions @ q.T, cell=frame.cell @ q.T)
        return other, lambda _, output, value: _turn(output, value, q)

    return _compared(name, note, turned, probe, frames)


def _turn(output: Any, value: np.ndarray, q: np.ndarray) -> np.ndarray:
    axes = TURNING.get(getattr(output, "kind", "values"), 0)
    if axes == 2:
        return q @ value @ q.T
    return value @ q.T if axes == 1 else value


def _translation(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def moved(frame: Frame) -> tuple[Frame, Expectation]:
        return edited(frame, positions=frame.positions + random.uniform(-5, 5, size=3)), _same

    return _compared("translation", "moved as a whole: nothing changes", moved, probe, frames)


def _permutation(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def reordered(frame: Frame) -> tuple[Frame, Expectation]:
        order = random.permutation(len(frame))
        other = edited(frame, positions=frame.positions[order], numbers=frame.numbers[order])
        return other, lambda _, output, value: value[order] if output.per == "atom" else value

    note = "atoms listed in another order: their values follow them"
    return _compared("permutation", note, reordered, probe, frames)


def _supercell(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def expected(_: str, output: ExtraOutput, value: np.ndarray) -> np.ndarray:
        if output.per == "atom":
            return np.concatenate([value, value])
        return 2 * value if output.reduce == "sum" else value

    def twice(frame: Frame) -> tuple[Frame, Expectation]:
        return doubled_cell(frame, int(random.choice(np.flatnonzero(frame.pbc)))), expected

    note = "two cells side by side: extensive outputs double, the rest stays"
    return _compared("supercell", note, twice, probe, [in_a_cell(frame, probe.cutoff) for frame in frames])


def _wrapping(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def moved(frame: Frame) -> tuple[Frame, Expectation]:
        images = random.integers(-2, 3, size=frame.positions.shape) * frame.pbc
        return edited(frame, positions=frame.positions + images @ frame.cell), _same

    note = "atoms replaced by their periodic images: nothing changes"
    return _compared("wrapping", note, moved, probe, [in_a_cell(frame, probe.cutoff) for frame in frames])


def _batch(probe: OutputProbe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Each frame alone, and the same frame among shaken copies, other frames and a lone atom, in another order."""
    alone = [probe.values([frame])[0] for frame in frames]
    shaken = [edited(f, positions=f.positions + 0.05 * random.standard_normal(f.positions.shape)) for f in frames]
    mates = [*frames, *shaken, molecule(frames[0].numbers[:1], np.zeros((1, 3)))]
    order = random.permutation(len(mates))
    together = dict(zip(order.tolist(), probe.values([mates[i] for i in order])))
    found = [together[i] for i in range(len(frames))]
    return _judged("batch independence", "a frame alone and among others: the same numbers", found, alone)


def _no_edges(probe: OutputProbe, frames: Sequence[Frame]) -> CheckResult:
    """Atoms without neighbours: finite outputs, the same in empty space and in a large box, finite weight gradients."""
    symbols = probe.species.symbols
    lone = [molecule(np.array([atomic_numbers[symbol]]), np.zeros((1, 3))) for symbol in symbols]
    cell, pbc = 3 * probe.cutoff * np.eye(3), np.ones(3, dtype=bool)
    boxes = [edited(atom, cell=cell, pbc=pbc) for atom in lone]
    note = "lone atoms: finite outputs, boxed or not, and finite weight gradients"
    result = _judged("no neighbours", note, probe.values(boxes), probe.values(lone))
    if gradients_are_finite(probe, lone) and gradients_are_finite(probe, [*lone, frames[0]]):
        return result
    return judged(result.name, float("nan"), result.tolerance, note)


def _same(_: str, output: ExtraOutput, value: np.ndarray) -> np.ndarray:
    return value


def _compared(
    name: str,
    note: str,
    change: Callable[[Frame], tuple[Frame, Expectation]],
    probe: OutputProbe,
    frames: Sequence[Frame],
) -> CheckResult:
    """The outputs for each changed frame, and the change applied to those for the original."""
    found, expected = [], []
    for frame in frames:
        changed, expectation = change(frame)
        before = probe.values([frame])[0]
        found.append(probe.values([changed])[0])
        expected.append({key: expectation(key, probe.said[key], value) for key, value in before.items()})
    return _judged(name, note, found, expected)


def _judged(name: str, note: str, found: Sequence[Values], expected: Sequence[Values]) -> CheckResult:
    """The worst output decides; those that fail are named."""
    value, tolerance, failed = 0.0, TOLERANCE, []
    for key in expected[0]:
        off = np.max([np.max(np.abs(one[key] - other[key])) for one, other in zip(found, expected)])
        size = np.max([np.max(np.abs(other[key])) for other in expected])
        allowed = TOLERANCE * np.maximum(1.0, 1e-3 * size)
        if not off <= allowed:
            failed.append(key)
        if not off / allowed <= value / tolerance:
            value, tolerance = off, allowed
    return judged(name, value, tolerance, f"{note} (not so: {', '.join(failed)})" if failed else note)
