"""Checks that it does not matter how a structure was written down: orientation, handedness, origin, atom order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forgefield.checks.probe import CheckResult, Outputs, Probe, difference, edited, exact_tolerance, judged
from forgefield.data.frame import Frame


def check_rotation(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    note = "turned at random: energy stays, forces and stress turn too"
    return _orthogonal("rotation", +1, note, probe, frames, random)


def check_reflection(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    note = "mirrored and turned: energy stays, the rest follows"
    return _orthogonal("reflection", -1, note, probe, frames, random)


def check_translation(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def moved(frame: Frame) -> tuple[Frame, Callable[[Outputs], Outputs]]:
        return edited(frame, positions=frame.positions + random.uniform(-5, 5, size=3)), lambda out: out

    note = "moved as a whole: nothing changes"
    return _compared("translation", note, moved, probe, frames)


def check_permutation(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def reordered(frame: Frame) -> tuple[Frame, Callable[[Outputs], Outputs]]:
        order = random.permutation(len(frame))
        other = edited(frame, positions=frame.positions[order], numbers=frame.numbers[order])
        return other, lambda out: Outputs(out.energy, out.forces[order], out.stress)

    note = "atoms listed in another order: forces follow their atoms"
    return _compared("permutation", note, reordered, probe, frames)


def random_orthogonal(random: np.random.Generator, determinant: int) -> np.ndarray:
    """A uniformly distributed rotation (determinant +1) or rotation with a reflection (-1), (3, 3)."""
    q, r = np.linalg.qr(random.standard_normal((3, 3)))
    q *= np.sign(np.diag(r))
    return q if np.sign(np.linalg.det(q)) == determinant else -q


def _orthogonal(
    name: str, determinant: int, note: str, probe: Probe, frames: Sequence[Frame], random: np.random.Generator
) -> CheckResult:
    def turned(frame: Frame) -> tuple[Frame, Callable[[Outputs], Outputs]]:
        q = random_orthogonal(random, determinant)
        other = edited(frame, positions=frame.positions @ q.T, cell=frame.cell @ q.T)
        return other, lambda out: Outputs(out.energy, out.forces @ q.T, q @ out.stress @ q.T)

    return _compared(name, note, turned, probe, frames)


def _compared(
    name: str,
    note: str,
    change: Callable[[Frame], tuple[Frame, Callable[[Outputs], Outputs]]],
    probe: Probe,
    frames: Sequence[Frame],
) -> CheckResult:
    """Compare the model on each changed frame with the change applied to its outputs on the original."""
    before = probe.each(frames)
    value = 0.0
    for frame, original in zip(frames, before):
        changed, expectation = change(frame)
        value = np.maximum(value, difference(probe.outputs([changed])[0], expectation(original)))
    return judged(name, value, exact_tolerance(before), note)
