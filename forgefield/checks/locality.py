"""Checks on how far and in what company a model sees: batch mates, periodic images, lone atoms, separate fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def check_batch(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Each frame alone, and the same frame among shaken copies, other frames and a lone atom, in another order."""
    alone = probe.each(frames)
    shaken = [edited(f, positions=f.positions + 0.05 * random.standard_normal(f.positions.shape)) for f in frames]
    lone = molecule(frames[0].numbers[:1], np.zeros((1, 3)))
    mates = [*frames, *shaken, lone]
    order = random.permutation(len(mates))
    together = dict(zip(order.tolist(), probe.outputs([mates[i] for i in order])))
    value = np.max([difference(together[i], out) for i, out in enumerate(alone)])
    note = "a frame alone and among others: the same numbers"
    return judged("batch independence", value, exact_tolerance(alone), note)


def check_supercell(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Twice the cell along a random periodic axis: twice the energy, the same forces and stress."""
    periodic = [in_a_cell(frame, probe.cutoff) for frame in frames]
    single = probe.each(periodic)
    value = 0.0
    for frame, out in zip(periodic, single):
        axis = int(random.choice(np.flatnonzero(frame.pbc)))
        doubled = probe.outputs([doubled_cell(frame, axis)])[0]
        expected = Outputs(2 * out.energy, np.concatenate([out.forces, out.forces]), out.stress)
        value = np.maximum(value, difference(doubled, expected))
    note = "two cells side by side: twice the energy, same forces"
    return judged("supercell", value, exact_tolerance(single), note)


def check_wrapping(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Atoms moved by whole lattice vectors, each by its own."""
    periodic = [in_a_cell(frame, probe.cutoff) for frame in frames]
    before = probe.each(periodic)
    value = 0.0
    for frame, out in zip(periodic, before):
        images = random.integers(-2, 3, size=frame.positions.shape) * frame.pbc
        moved = edited(frame, positions=frame.positions + images @ frame.cell)
        value = np.maximum(value, difference(probe.outputs([moved])[0], out))
    note = "atoms replaced by their periodic images: nothing changes"
    return judged("wrapping", value, exact_tolerance(before), note)


def check_isolated_atoms(probe: Probe, reference_energies: Mapping[str, float] | None) -> CheckResult:
    """A lone atom against its reference energy; without reference energies, against a lone atom in a large box."""
    symbols = probe.species.symbols
    atoms = [molecule(np.array([atomic_numbers[symbol]]), np.zeros((1, 3))) for symbol in symbols]
    energies = probe.energies(atoms)
    if reference_energies is not None:
        expected = np.array([reference_energies[symbol] for symbol in symbols])
        note = "an atom without neighbours has its reference energy"
    else:
        cell, pbc = 3 * probe.cutoff * np.eye(3), np.ones(3, dtype=bool)
        expected = probe.energies([edited(atom, cell=cell, pbc=pbc) for atom in atoms])
        note = "a lone atom has the same energy in empty space and in a large box"
    tolerance = 1e-9 * max(1.0, float(np.max(np.abs(expected))))
    return judged("isolated atom", np.max(np.abs(energies - expected)), tolerance, note)


def check_fragments(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Two clusters far apart have the sum of their energies and keep their forces."""
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
    note = "two clusters far apart: energies add up, forces stay"
    return judged("separate fragments", value, exact_tolerance(alone), note)


def check_no_edges(probe: Probe, frames: Sequence[Frame]) -> CheckResult:
    """Atoms without neighbours: finite energies, zero forces, finite gradients of the parameters."""
    lone = [molecule(np.array([atomic_numbers[symbol]]), np.zeros((1, 3))) for symbol in probe.species.symbols]
    apart = molecule(np.repeat(lone[0].numbers, 2), np.array([[0.0, 0, 0], [5 * probe.cutoff, 0, 0]]))
    empty = [*lone, apart]
    value = 0.0
    for batch in (empty, [*empty, frames[0]]):
        outputs = probe.outputs(batch)
        finite = all(np.isfinite(out.energy) and np.isfinite(out.forces).all() for out in outputs)
        largest = np.max([np.max(np.abs(out.forces)) for out in outputs[: len(empty)]])
        value = np.maximum(value, largest if finite and gradients_are_finite(probe, batch) else np.nan)
    note = "lone atoms: no force, no NaN, also not in weight gradients"
    return judged("no neighbours", value, 1e-12, note)


def gradients_are_finite(probe: Probe, frames: Sequence[Frame]) -> bool:
    """Whether a loss on energies, forces, the stresses that exist and all further outputs has finite parameter gradients."""
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
    """The frame where it is periodic, else its atoms in a periodic box."""
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
