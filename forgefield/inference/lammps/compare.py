"""Compares LAMMPS on one and on several MPI processes with each other and with the ASE calculator, on a structure of the user.

A mistake in the communication between processes changes forces near the borders of their domains only: trajectories stay stable
and look right. A comparison of all forces finds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io.lammpsdata import write_lammps_data

from forgefield.errors import ForgefieldError
from forgefield.inference.ase import Calculator
from forgefield.inference.lammps.build import find_lammps
from forgefield.runs import Run

TOLERANCE = 1e-9
"""Largest relative deviation in float64."""
LEAST_FORCE, LEAST_VIRIAL = 0.1, 0.1
"""Smallest scales of relative deviations: of forces, eV/A, and of the virial, eV per atom. In a perfect crystal both quantities
may be zero but for rounding."""
INPUT = """\
units metal
atom_style atomic
boundary {boundary}
box tilt large
read_data structure.data
pair_style forgefield {run} which {which} device cpu dtype float64 {options}
pair_coeff * * {symbols}
thermo_style custom step pe
compute virial all pressure NULL virial
variable energy equal pe
variable volume equal vol
dump forces all custom 1 forces.dump id fx fy fz
dump_modify forces format float %.17g sort id
run 0
print "$(v_energy:%.17g) $(v_volume:%.17g) $(c_virial[1]:%.17g) $(c_virial[2]:%.17g) $(c_virial[3]:%.17g) &
$(c_virial[4]:%.17g) $(c_virial[5]:%.17g) $(c_virial[6]:%.17g)" file totals.txt
"""
EV_PER_BAR_A3 = 1 / 1.6021765e6
"""The inverse of `nktv2p` of LAMMPS for units metal."""


@dataclass(frozen=True)
class Outcome:
    """energy: eV; forces: (n_atoms, 3), eV/A; virial: (6,) xx yy zz xy xz yz, eV."""

    energy: float
    forces: np.ndarray
    virial: np.ndarray

    def deviations(self, reference: Outcome) -> dict[str, float]:
        """Largest deviation of each quantity, relative to its largest component in the reference, or to `LEAST_FORCE` or
        `LEAST_VIRIAL` if these are larger."""
        return {
            name: float(np.abs(value - expected).max() / max(np.abs(expected).max(), least))
            for name, value, expected, least in (
                ("energy", np.array(self.energy), np.array(reference.energy), 1e-300),
                ("forces", self.forces, reference.forces, LEAST_FORCE),
                ("virial", self.virial, reference.virial, LEAST_VIRIAL * len(reference.forces)),
            )
        }


def compare_ranks(
    run: Run, atoms: Atoms, ranks: Sequence[int], *, which: str = "best", head: str | None = None
) -> dict[str, dict[str, float]]:
    """Relative deviations of energy, forces and virial from the ASE calculator, by number of processes; all in float64.

    atoms: with a cell of nonzero volume; enlarge it where single processes should have atoms inside their domain.
    """
    atoms = in_lammps_orientation(atoms)
    reference = _by_ase(run, atoms, which, head)
    return {f"{n} rank{'s' * (n > 1)}": _by_lammps(run, atoms, n, which, head).deviations(reference) for n in ranks}


def in_lammps_orientation(atoms: Atoms) -> Atoms:
    """The structure rotated so that LAMMPS can describe its cell (a along x, b in the plane of x and y), and wrapped."""
    if not atoms.cell.volume > 0:
        raise ForgefieldError("the structure has no cell; LAMMPS needs one, also where nothing repeats.")
    image = Atoms(atoms.numbers, positions=atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    if image.cell.handedness < 0:
        raise ForgefieldError("the lattice vectors of the structure are left-handed, which LAMMPS cannot describe.")
    standard, _ = image.cell.standard_form()
    image.set_cell(standard, scale_atoms=True)
    image.wrap()
    return image


def _by_ase(run: Run, atoms: Atoms, which: str, head: str | None) -> Outcome:
    image = atoms.copy()
    image.calc = Calculator(run, which=which, head=head, dtype="float64")
    virial = -image.get_stress()[[0, 1, 2, 5, 4, 3]] * image.get_volume()
    return Outcome(image.get_potential_energy(), image.get_forces(), virial)


def _by_lammps(run: Run, atoms: Atoms, ranks: int, which: str, head: str | None) -> Outcome:
    mpirun = find_lammps().mpirun
    if ranks > 1 and mpirun is None:
        raise ForgefieldError("there is no mpirun on this machine to start several processes with.")
    symbols = sorted(set(atoms.get_chemical_symbols()))
    options = " ".join([*(["head", head] if head else []), *(["trust_code", "yes"] if run.trust_code else [])])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lammps_data(folder / "structure.data", atoms, specorder=symbols, masses=True, units="metal")
        (folder / "in.compare").write_text(
            INPUT.format(
                run=run.path.resolve(),
                which=which,
                options=options,
                symbols=" ".join(symbols),
                boundary=" ".join("p" if periodic else "f" for periodic in atoms.pbc),
            )
        )
        command = [sys.executable, "-m", "forgefield", "lammps", "-in", "in.compare", "-log", "none"]
        command = [str(mpirun), "-n", str(ranks), *command] if ranks > 1 else command
        done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or "error:" in line]
            raise ForgefieldError(f"LAMMPS failed on {ranks} processes: {lines[0] if lines else done.stderr[-500:]}")
        energy, volume, *pressure = map(float, (folder / "totals.txt").read_text().split())
        forces = np.loadtxt(folder / "forces.dump", skiprows=9, ndmin=2)[:, 1:4]
    return Outcome(energy, forces, np.array(pressure) * volume * EV_PER_BAR_A3)


def _environment() -> Mapping[str, str]:
    """That of this process, with one thread for each of the others and this copy of Forgefield."""
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
