"""Comparison of the evaluation engine with the eager model in float64, on the user's structure, before results are used.

Structures that are too large for the eager model are compared on a part: the first systems of several, or, of one large system,
the atoms next to its centre, as a cluster without periodic boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.inference.engine.device import DeviceEngine, Results, Systems
from forgefield.inference.engine.edges import EdgeEngine, edge_batch
from forgefield.models.edges import EdgeContext
from forgefield.models.potential import Potential, float64_copy
from forgefield.ops.execution import C_NONE, execution
from forgefield.ops.graph import EdgeGraph, GradientSwitch
from forgefield.ops.neighbour_lists import batched_neighbours

MOST_ATOMS = 256
"""Atoms that the eager model evaluates in float64."""
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-7}
"""Largest deviation of forces, in units of the largest force or of 0.1 eV/A, by the precision of the model."""


@dataclass(frozen=True)
class Deviation:
    """Largest deviations from the eager model in float64: energy in eV/atom, forces in eV/A, stress in eV/A^3 (NaN without a
    volume). n_atoms: compared atoms; whole: whether these were all atoms. largest_force: eV/A."""

    energy: float
    forces: float
    stress: float
    n_atoms: int
    whole: bool
    largest_force: float

    def __str__(self) -> str:
        of = f"{self.n_atoms} atoms" if self.whole else f"{self.n_atoms} of the atoms"
        stress = "" if self.stress != self.stress else f", stress {1e3 * self.stress:.1e} meV/A^3"
        return (
            f"compared with the eager model in float64 on {of}: energy differs by {1e3 * self.energy:.1e} meV/atom, forces by "
            f"{1e3 * self.forces:.1e} meV/A (largest force {self.largest_force:.2g} eV/A){stress}"
        )


def compare(engine: DeviceEngine, systems: Systems, positions: Tensor, cell: Tensor) -> Deviation:
    """The deviation of the engine for these positions (n, 3) and cells (n_systems, 3, 3), A; an error where it is too large."""
    whole = systems.sizes[1] <= MOST_ATOMS
    if whole:
        results = engine.evaluate(positions, cell)
    else:
        systems, positions, cell = part_of(systems, positions, cell)
        apart = DeviceEngine(engine.potential, engine.device, skin=engine.skin, captured=False)
        apart.set_systems(systems)
        results = apart.evaluate(positions, cell)
    expected = reference(engine, systems, positions, cell)
    return _required(_deviation(results, expected, systems, whole), engine.potential)


def reference(engine: DeviceEngine, systems: Systems, positions: Tensor, cell: Tensor) -> Results:
    """Results of the eager model in float64, without kernels."""
    potential = float64_copy(engine.potential).requires_grad_(False)
    index, shift, reverse = batched_neighbours(positions, systems.n_atoms, cell, systems.pbc, potential.cutoff)
    batch = {
        "positions": positions,
        "species": systems.species,
        "frame": torch.repeat_interleave(systems.n_atoms, output_size=positions.shape[0]),
        "n_atoms": systems.n_atoms,
        "pbc": systems.pbc,
        "cell": cell,
        "edge_index": index,
        "edge_shift": shift.double(),
        "edge_reverse": reverse,
    }
    with execution(kernels=False, operators=False, c_code=C_NONE):
        out = potential(batch, forces=True, stress=True)
    return Results(out["energy"], out["atomic_energy"], out["forces"], out["stress"])


def compare_edges(
    engine: EdgeEngine, species: Tensor, source: Tensor, destination: Tensor, vectors: Tensor
) -> Deviation:
    """The same for edges; arguments as of `EdgeEngine.evaluate`. Of large structures, the first atoms and the edges between
    them are compared, and instead of forces on atoms the derivatives in edge vectors."""
    n_atoms = min(len(species), MOST_ATOMS)
    among = (source < n_atoms) & (destination < n_atoms)
    species, source, destination, vectors = species[:n_atoms], source[among], destination[among], vectors[among]
    apart = EdgeEngine(engine.potential, engine.device, captured=False)
    energies, slopes = apart.evaluate(species, source, destination, vectors)
    potential = float64_copy(engine.potential).requires_grad_(False)
    batch, graph = edge_batch(species, torch.stack([source, destination])), EdgeGraph(source, destination, n_atoms)
    with execution(kernels=False, operators=False, c_code=C_NONE), torch.enable_grad():
        exact = vectors.detach().requires_grad_(True)
        edges = EdgeContext(exact, batch, graph, GradientSwitch(), differentiated_again=False)
        atomic = potential.atomic_energies(batch, edges)
        expected = torch.zeros_like(exact)
        if atomic.requires_grad:
            (expected,) = torch.autograd.grad(atomic.sum(), exact)
    whole = bool(among.all())
    deviation = Deviation(
        energy=float((energies - atomic.detach()).sum().abs() / max(1, n_atoms)),
        forces=_largest(slopes - expected),
        stress=float("nan"),
        n_atoms=n_atoms,
        whole=whole,
        largest_force=_largest(expected),
    )
    return _required(deviation, engine.potential)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _required(deviation: Deviation, potential: Potential) -> Deviation:
    """The deviation, unless it is too large."""
    dtype = potential.interface.weight_dtype() or torch.float64
    limit = TOLERANCES.get(dtype, TOLERANCES[torch.float32]) * max(0.1, deviation.largest_force)
    if not deviation.forces <= limit:
        raise ForgefieldError(
            f"The evaluation engine is not exact for this model and structure ({deviation}). Use `engine=False`, which "
            "evaluates the eager model, and report this."
        )
    return deviation


def part_of(systems: Systems, positions: Tensor, cell: Tensor) -> tuple[Systems, Tensor, Tensor]:
    """The first systems with at most `MOST_ATOMS` atoms, or the atoms next to the centre of the first system."""
    ends = systems.n_atoms.cumsum(0)
    n_systems = int((ends <= MOST_ATOMS).sum())
    if n_systems:
        n_atoms = int(ends[n_systems - 1])
        first = Systems(systems.species[:n_atoms], systems.n_atoms[:n_systems], systems.pbc[:n_systems])
        return first, positions[:n_atoms], cell[:n_systems]
    n_atoms = int(ends[0])
    inside = positions[:n_atoms]
    distances = (inside - inside.mean(0)).square().sum(1)
    chosen = torch.argsort(distances)[:MOST_ATOMS].sort().values
    alone = Systems(
        systems.species[chosen], torch.full_like(systems.n_atoms[:1], len(chosen)), torch.zeros_like(systems.pbc[:1])
    )
    return alone, inside[chosen], torch.zeros_like(cell[:1])


def _deviation(results: Results, expected: Results, systems: Systems, whole: bool) -> Deviation:
    assert results.forces is not None
    assert results.stress is not None
    assert expected.forces is not None
    assert expected.stress is not None
    energies = ((results.energy - expected.energy) / systems.n_atoms).abs()
    forces = (results.forces - expected.forces).abs()
    stress = (results.stress - expected.stress).abs().flatten()
    stress = stress[~torch.isnan(expected.stress.flatten())]
    return Deviation(
        energy=float(energies.max()),
        forces=float(forces.max()),
        stress=float(stress.max()) if stress.numel() else float("nan"),
        n_atoms=systems.sizes[1],
        whole=whole,
        largest_force=float(expected.forces.abs().max()),
    )
