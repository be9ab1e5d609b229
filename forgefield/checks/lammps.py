"""Check of LAMMPS on several MPI processes: energy, forces and virial of a frame, next to those of the ASE calculator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ase import Atoms

from forgefield.checks.suite import Subject
from forgefield.inference.lammps.compare import TOLERANCE, compare_ranks
from forgefield.runs import Run


def check_lammps(
    run: Run,
    overrides: Sequence[str] = (),
    *,
    ranks: Sequence[int],
    data: object = None,
    which: str = "best",
    head: str | None = None,
    seed: int = 0,
) -> bool:
    """Print the relative deviations on a random frame for each number of processes; returns whether all are within rounding.

    Parameters
    ----------
    run
        The run whose model is checked.
    overrides, data, which, head
        As in `api.check`.
    ranks
        Numbers of processes.
    seed
        Seed for choosing the frame.
    """
    subject = Subject.of_run(run, overrides, data=data, which=which, head=head)
    (frame,) = subject.choose_frames(1, np.random.default_rng(seed))
    atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
    print(f"Comparing LAMMPS with ASE on {len(atoms)} atoms ({frame.where}), in float64; relative deviations:")
    print(f"  {'':<10}{'energy':>10}{'forces':>10}{'virial':>10}")
    largest = 0.0
    for name, deviations in compare_ranks(run, atoms, ranks, which=which, head=head).items():
        print(f"  {name:<10}" + "".join(f"{value:>10.1e}" for value in deviations.values()))
        largest = max(largest, *deviations.values())
    passed = largest <= TOLERANCE
    print(f"{'ok' if passed else 'FAILED'}: the largest deviation is {largest:.1e}, allowed are {TOLERANCE:.0e}")
    return passed
