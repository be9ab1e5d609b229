"""Checks of symmetry (rotation, reflection, translation, permutation) and locality (other frames of a batch, periodic images,
isolated atoms, separate fragments)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from ase.data import atomic_numbers

from forgefield.checks.probe import (
    CheckResult,
    Outputs,
    Probe,
    boxed,
    difference,
    edited,
    exact_tolerance,
    judged,
    molecule,
)
from forgefield.data.frame import Frame


def check_rotation(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    note = "energy is invariant, forces and stress are equivariant"
    return _orthogonal("rotation", +1, note, probe, frames, random)


def check_reflection(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    note = "the same for improper rotations"
    return _orthogonal("reflection", -1, note, probe, frames, random)


def check_translation(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def moved(frame: Frame) -> tuple[Frame, Callable[[Outputs], Outputs]]:
        return edited(frame, positions=frame.positions + random.uniform(-5, 5, size=3)), lambda out: out

    note = "nothing changes when all atoms are translated"
    return _compared("translation", note, moved, probe, frames)


def check_permutation(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    def reordered(frame: Frame) -> tuple[Frame, Callable[[Outputs], Outputs]]:
        order = random.permutation(len(frame))
        other = edited(frame, positions=frame.positions[order], numbers=frame.numbers[order])
        return other, lambda out: Outputs(out.energy, out.forces[order], out.stress)

    note = "forces are reordered with the atoms"
    return _compared("permutation", note, reordered, probe, frames)


def random_orthogonal(random: np.random.Generator, determinant: int) -> np.ndarray:
    """A uniformly distributed rotation (determinant +1) or rotation with a reflection (-1), (3, 3)."""
    q, r = np.linalg.qr(random.standard_normal((3, 3)))
    q *= np.sign(np.diag(r))
    return q if np.sign(np.linalg.det(q)) == determinant else -q


def _orthogonal(
    name: str, determinant: int, note: str, probe: Probe, frames: Sequence[Frame], random: np.random.Generator
) -> CheckResult:
    def rotated(frame: Frame) -> tuple[Frame, Callable[[Outputs], Outputs]]:
        q = random_orthogonal(random, determinant)
        other = edited(frame, positions=frame.positions @ q.T, cell=frame.cell @ q.T)
        return other, lambda out: Outputs(out.energy, out.forces @ q.T, q @ out.stress @ q.T)

    return _compared(name, note, rotated, probe, frames)


def _compared(
    name: str,
    note: str,
    change: Callable[[Frame], tuple[Frame, Callable[[Outputs], Outputs]]],
    probe: Probe,
    frames: Sequence[Frame],
) -> CheckResult:
    """Compare the outputs for each changed frame with the transformed outputs of the original frame."""
    before = probe.each(frames)
    value = 0.0
    for frame, original in zip(frames, before):
        changed, expectation = change(frame)
        value = np.maximum(value, difference(probe.outputs([changed])[0], expectation(original)))
    return judged(name, value, exact_tolerance(before), note)


# ---- batches, periodic images, isolated atoms, fragments


def check_batch(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare each frame alone with the same frame in a batch with displaced copies, other frames and an isolated atom."""
    alone = probe.each(frames)
    displaced = [edited(f, positions=f.positions + 0.05 * random.standard_normal(f.positions.shape)) for f in frames]
    isolated = molecule(frames[0].numbers[:1], np.zeros((1, 3)))
    batch = [*frames, *displaced, isolated]
    order = random.permutation(len(batch))
    together = dict(zip(order.tolist(), probe.outputs([batch[i] for i in order])))
    value = np.max([difference(together[i], out) for i, out in enumerate(alone)])
    note = "outputs of a frame do not depend on the other frames of a batch"
    return judged("batch independence", value, exact_tolerance(alone), note)


def check_supercell(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare with a cell doubled along a random periodic axis: twice the energy, the same forces and stress."""
    periodic = [in_a_cell(frame, probe.cutoff) for frame in frames]
    single = probe.each(periodic)
    value = 0.0
    for frame, out in zip(periodic, single):
        axis = int(random.choice(np.flatnonzero(frame.pbc)))
        doubled = probe.outputs([doubled_cell(frame, axis)])[0]
        expected = Outputs(2 * out.energy, np.concatenate([out.forces, out.forces]), out.stress)
        value = np.maximum(value, difference(doubled, expected))
    note = "a doubled cell has twice the energy and the same forces"
    return judged("supercell", value, exact_tolerance(single), note)


def check_wrapping(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Replace each atom by a random periodic image."""
    periodic = [in_a_cell(frame, probe.cutoff) for frame in frames]
    before = probe.each(periodic)
    value = 0.0
    for frame, out in zip(periodic, before):
        images = random.integers(-2, 3, size=frame.positions.shape) * frame.pbc
        moved = edited(frame, positions=frame.positions + images @ frame.cell)
        value = np.maximum(value, difference(probe.outputs([moved])[0], out))
    note = "nothing changes when atoms are replaced by periodic images"
    return judged("wrapping", value, exact_tolerance(before), note)


def check_isolated_atoms(probe: Probe, reference_energies: Mapping[str, float] | None) -> CheckResult:
    """Compare an isolated atom with its reference energy or, without reference energies, with one in a large box."""
    symbols = probe.species.symbols
    atoms = [molecule(np.array([atomic_numbers[symbol]]), np.zeros((1, 3))) for symbol in symbols]
    energies = probe.energies(atoms)
    if reference_energies is not None:
        expected = np.array([reference_energies[symbol] for symbol in symbols])
        note = "an isolated atom has its reference energy"
    else:
        cell, pbc = 3 * probe.cutoff * np.eye(3), np.ones(3, dtype=bool)
        expected = probe.energies([edited(atom, cell=cell, pbc=pbc) for atom in atoms])
        note = "an isolated atom has the same energy in vacuum and in a large box"
    tolerance = 1e-9 * max(1.0, float(np.max(np.abs(expected))))
    return judged("isolated atom", np.max(np.abs(energies - expected)), tolerance, note)


def check_fragments(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare two clusters far apart with each of them alone."""
    clusters = [molecule(frame.numbers, frame.positions) for frame in frames]
    alone = probe.each(clusters)
    value = 0.0
    for index, (one, first) in enumerate(zip(clusters, alone)):
        other, second = clusters[index - 1], alone[index - 1]
        far = _far_apart(one.positions, other.positions, probe.cutoff, random)
        pair = molecule(np.concatenate([one.numbers, other.numbers]), np.concatenate([one.positions, far]))
        forces = np.concatenate([first.forces, second.forces])
        expected = Outputs(first.energy + second.energy, forces, np.full((3, 3), np.nan))
        value = np.maximum(value, difference(probe.outputs([pair])[0], expected))
    note = "energies of separate clusters are additive, forces are unchanged"
    return judged("separate fragments", value, exact_tolerance(alone), note)


def check_no_edges(probe: Probe, frames: Sequence[Frame]) -> CheckResult:
    """Check that atoms without neighbours have finite energies, zero forces and finite gradients of the parameters."""
    lone = [molecule(np.array([atomic_numbers[symbol]]), np.zeros((1, 3))) for symbol in probe.species.symbols]
    apart = molecule(np.repeat(lone[0].numbers, 2), np.array([[0.0, 0, 0], [5 * probe.cutoff, 0, 0]]))
    empty = [*lone, apart]
    value = 0.0
    for batch in (empty, [*empty, frames[0]]):
        outputs = probe.outputs(batch)
        finite = all(np.isfinite(out.energy) and np.isfinite(out.forces).all() for out in outputs)
        largest = np.max([np.max(np.abs(out.forces)) for out in outputs[: len(empty)]])
        value = np.maximum(value, largest if finite and gradients_are_finite(probe, batch) else np.nan)
    note = "isolated atoms have no forces, and gradients of the weights are finite"
    return judged("no neighbours", value, 1e-12, note)


def gradients_are_finite(probe: Probe, frames: Sequence[Frame]) -> bool:
    """Whether a loss on energies, forces, available stresses and all extra outputs has finite parameter gradients."""
    parameters = [p for p in probe.potential.parameters() if p.is_floating_point()]
    if not parameters:
        return True
    required = [p.requires_grad for p in parameters]
    probe.potential.train()
    try:
        for p in parameters:
            p.requires_grad_(True)
        out = dict(probe.potential(probe.batch(frames), forces=True, stress=True))
        has_volume = torch.tensor([frame.volume > 0 for frame in frames], device=probe.device)
        if "stress" in out:
            out["stress"] = out["stress"][has_volume]
        loss = torch.stack([value.square().sum() for value in out.values()]).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()
        return all(bool(g.isfinite().all()) for g in gradients if g is not None)
    finally:
        probe.potential.eval()
        for p, before in zip(parameters, required):
            p.requires_grad_(before)


def in_a_cell(frame: Frame, cutoff: float) -> Frame:
    """The frame if it is periodic, otherwise its atoms in a periodic box."""
    if frame.pbc.any():
        return edited(frame)
    return boxed(molecule(frame.numbers, frame.positions), cutoff)


def doubled_cell(frame: Frame, axis: int) -> Frame:
    cell = frame.cell.copy()
    cell[axis] *= 2
    positions = np.concatenate([frame.positions, frame.positions + frame.cell[axis]])
    return edited(frame, positions=positions, numbers=np.concatenate([frame.numbers] * 2), cell=cell)


def _far_apart(one: np.ndarray, other: np.ndarray, cutoff: float, random: np.random.Generator) -> np.ndarray:
    """`other` moved in a random direction until every atom is more than three cutoffs from every atom of `one`."""
    direction = random.standard_normal(3)
    direction /= np.linalg.norm(direction)
    gap = np.max(one @ direction) - np.min(other @ direction) + 3 * cutoff
    return other + gap * direction
