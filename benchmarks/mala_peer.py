"""CPU time of MALA 1.4.0, one thread, for what Forgefield computes itself; needs a Python with materials-learning-algorithms.

    OMP_NUM_THREADS=1 python benchmarks/mala_peer.py --data ../shared/data

Fermi energy and band energy of a density of states of 250 levels (Al_dos.npy), and MALA's bispectrum without LAMMPS (twojmax
10, Be snapshot 0) per grid point: the difference of two grids, so that what is done once per structure does not count. These
are the times of MALA in docs/explanations/ldos-energies.md and docs/reference/grid-descriptors.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ase.io
import mala
import numpy as np
import torch

REPEATS = 3


def seconds(action: Callable[[], Any]) -> float:
    """Least CPU time of a few calls, without what MALA prints."""
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            action()
        taken.append(time.process_time() - began)
    return min(taken)


def density_of_states(file: Path) -> None:
    p = mala.Parameters()
    p.verbosity, p.targets.target_type = 0, "DOS"
    p.targets.ldos_gridsize, p.targets.ldos_gridspacing_ev, p.targets.ldos_gridoffset_ev = 250, 0.1, -10
    dos = mala.DOS.from_numpy_array(p, np.load(file))
    dos.number_of_electrons_exact, dos.temperature = 108, 299.986
    values = dos.density_of_states
    fermi = dos.get_self_consistent_fermi_energy(values)
    print(f"Fermi energy, 250 levels: {seconds(lambda: dos.get_self_consistent_fermi_energy(values)):.2f} s CPU")
    print(f"band energy, 250 levels: {seconds(lambda: dos.get_band_energy(values, fermi_energy=fermi)):.2f} s CPU")


def bispectrum(file: Path) -> None:
    p = mala.Parameters()
    p.verbosity, p.use_lammps = 0, False
    p.descriptors.bispectrum_twojmax, p.descriptors.bispectrum_cutoff = 10, 4.67637
    atoms, descriptors = ase.io.read(file, format="espresso-out"), mala.Bispectrum(p)
    few, many = [2, 2, 2], [4, 4, 8]
    difference = seconds(lambda: descriptors.calculate_from_atoms(atoms, many)) - seconds(
        lambda: descriptors.calculate_from_atoms(atoms, few)
    )
    print(f"bispectrum without LAMMPS: {1e6 * difference / (np.prod(many) - np.prod(few)):,.0f} us CPU a point")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of al36_ldos and be2_ldos")
    folder = parser.parse_args().data
    torch.set_num_threads(1)
    density_of_states(folder / "al36_ldos" / "Al_dos.npy")
    bispectrum(folder / "be2_ldos" / "Be_snapshot0.out")


main()
