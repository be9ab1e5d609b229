"""Checks of symmetries (see `transformations`) and locality (other frames of a batch, isolated atoms, separate fragments)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from ase.data import atomic_numbers

from forgefield.checks.probe import (
    CheckResult,
    Outputs,
    Probe,
    difference,
    edited,
    exact_tolerance,
    judged,
    molecule,
)
from forgefield.checks.transformations import Symmetry, mixed_batch
from forgefield.data.frame import Frame


def check_symmetry(
    symmetry: Symmetry, probe: Probe, frames: Sequence[Frame], random: np.random.Generator
) -> CheckResult:
    """Compare the outputs of each transformed frame with those that follow from the original frame."""
    frames = [symmetry.frame(frame, probe.cutoff) for frame in frames]
    before = probe.each(frames)
    value = 0.0
    for frame, out in zip(frames, before):
        transformed = symmetry.apply(frame, random, probe.vectors)
        forces = transformed.rotated(transformed.of_atoms(out.forces), 1)
        expected = Outputs(transformed.copies * out.energy, forces, transformed.rotated(out.stress, 2))
        value = np.maximum(value, difference(probe.outputs([transformed.frame])[0], expected))
    return judged(symmetry.name, value, exact_tolerance(before), symmetry.note)


def check_batch(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare each frame alone with the same frame in a batch with displaced copies, other frames and an isolated atom."""
    alone = probe.each(frames)
    batch, where = mixed_batch(list(frames), random)
    together = probe.outputs(batch)
    value = np.max([difference(together[i], out) for i, out in zip(where, alone)])
    note = "outputs of a frame do not depend on the other frames of a batch"
    return judged("batch independence", value, exact_tolerance(alone), note)


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


def _far_apart(one: np.ndarray, other: np.ndarray, cutoff: float, random: np.random.Generator) -> np.ndarray:
    """`other` moved in a random direction until every atom is more than three cutoffs from every atom of `one`."""
    direction = random.standard_normal(3)
    direction /= np.linalg.norm(direction)
    gap = np.max(one @ direction) - np.min(other @ direction) + 3 * cutoff
    return other + gap * direction
