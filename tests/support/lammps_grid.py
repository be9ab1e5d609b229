"""Descriptors of a grid by LAMMPS itself, where its Python module is installed: the outside program to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def lammps_grid(
    cell: np.ndarray,
    positions: np.ndarray,
    types: Sequence[int],
    command: str,
    *,
    shape: tuple[int, int, int],
    local: bool,
) -> np.ndarray:
    """Columns (nx, ny, nz, c) of a compute `command` for atoms of `types` 1, 2, ... in a lower-triangular `cell`.

    local: whether the compute gives local rows (six columns of coordinates first) or a global array (three).
    """
    from lammps import LMP_STYLE_GLOBAL, LMP_STYLE_LOCAL, LMP_TYPE_ARRAY, lammps

    run = lammps(cmdargs=["-screen", "none", "-log", "none"])
    edges = [cell[0, 0], cell[1, 1], cell[2, 2], cell[1, 0], cell[2, 0], cell[2, 1]]
    x, y, z, xy, xz, yz = (f"{float(edge)!r}" for edge in edges)
    for line in (
        "units metal",
        "atom_modify map array sort 0 0",
        "box tilt large",
        f"region box prism 0 {x} 0 {y} 0 {z} {xy} {xz} {yz}",
        f"create_box {max(types)} box",
        "mass * 1",
    ):
        run.command(line)
    run.create_atoms(len(positions), None, list(types), np.ravel(positions).tolist())
    reduced = "compute first all reduce sum c_grid[1] inputs local" if local else "variable first equal c_grid[1][1]"
    for line in (
        "pair_style zero 8.0",
        "pair_coeff * *",
        f"compute grid all {command}",
        reduced,
        f"thermo_style custom step {'c' if local else 'v'}_first",
        "run 0",
    ):
        run.command(line)
    found = run.numpy.extract_compute("grid", LMP_STYLE_LOCAL if local else LMP_STYLE_GLOBAL, LMP_TYPE_ARRAY)
    columns = np.array(found).reshape(*shape[::-1], -1).transpose(2, 1, 0, 3)[..., 6 if local else 3 :]
    run.close()
    return columns
