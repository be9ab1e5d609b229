"""Reader of the output of Quantum ESPRESSO's pw.x: the metadata of a snapshot, from the last self-consistent cycle.

The temperature is the printed width of the Fermi-Dirac smearing; the band energy is the sum of printed eigenvalues with
Fermi-Dirac occupations at the printed Fermi energy, both with the digits that pw.x prints.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from ase.data import atomic_numbers

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.info import SnapshotInfo
from forgefield.physics.units import BOHR, BOLTZMANN, RYDBERG

_NUMBER = r"([-+]?\d*\.?\d+(?:[eEdD][-+]?\d+)?)"
_ENERGY_LINES = {
    "total": r"!\s+total energy\s+=",
    "entropy": r"smearing contrib\. \(-TS\)\s+=",
    "one_electron": r"one-electron contribution\s*=",
    "hartree": r"hartree contribution\s*=",
    "xc": r"xc contribution\s*=",
    "ewald": r"ewald contribution\s*=",
}


def read_espresso(path: Path) -> SnapshotInfo:
    """Fermi energy, electrons, temperature, cell, atoms, energies of an output of pw.x."""
    text = path.read_text(errors="replace")
    if "PWSCF" not in text:
        raise ForgefieldError(f"{path} is neither an .info.json nor an output of Quantum ESPRESSO's pw.x")
    info = SnapshotInfo(source=str(path))
    info.electrons = _last(r"number of electrons\s*=\s*" + _NUMBER, text)
    info.ecutrho = _last(r"charge density cutoff\s*=\s*" + _NUMBER, text)
    info.fermi_energy = _last(r"the Fermi energy is\s*" + _NUMBER, text)
    width = _last(r"(?:Fermi-Dirac|fermi-dirac|fd)\s+smearing, width \(Ry\)=\s*" + _NUMBER, text)
    info.temperature = None if width is None else width * RYDBERG / BOLTZMANN
    for name, pattern in _ENERGY_LINES.items():
        value = _last(pattern + r"\s*" + _NUMBER, text)
        if value is not None:
            info.energies[name] = value * RYDBERG
    grid = re.findall(r"FFT dimensions:\s*\(\s*(\d+),\s*(\d+),\s*(\d+)\)", text)
    if grid:
        nx, ny, nz = (int(n) for n in grid[0])  # the first is the dense grid
        info.grid_shape = (nx, ny, nz)
    for element, file in re.findall(r"PseudoPot\. #\s*\d+ for\s+(\S+)\s+read from file:?\s*\n?\s*(\S+)", text):
        info.pseudopotentials[_element(element)] = Path(file).name
    _add_structure(info, text)
    _add_band_energy(info, text)
    return info


def _last(pattern: str, text: str) -> float | None:
    matches = re.findall(pattern, text)
    return float(matches[-1].replace("d", "e").replace("D", "e")) if matches else None


def _element(label: str) -> str:
    """The element of a label such as Fe1."""
    match = re.match(r"[A-Z][a-z]?", label.capitalize())
    name = match.group() if match else label
    return name if name in atomic_numbers else name[:1]


def _add_structure(info: SnapshotInfo, text: str) -> None:
    """Cell and atoms as they were at the start, or after the last step where the atoms were moved."""
    alat = _last(r"celldm\(1\)=\s*" + _NUMBER, text)
    axes = re.findall(rf"a\([123]\) = \(\s*{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s*\)", text)
    if alat is None or len(axes) < 3:
        return
    info.cell = np.array(axes[:3], dtype=np.float64) * alat * BOHR
    sites = re.findall(rf"\d+\s+(\S+)\s+tau\(\s*\d+\) = \(\s*{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s*\)", text)
    n_atoms = _last(r"number of atoms/cell\s*=\s*" + _NUMBER, text)
    sites = sites[: int(n_atoms)] if n_atoms else sites
    info.numbers = np.array([atomic_numbers[_element(site[0])] for site in sites], dtype=np.int64)
    info.positions = np.array([site[1:] for site in sites], dtype=np.float64).reshape(-1, 3) * alat * BOHR
    if re.search(r"ATOMIC_POSITIONS|CELL_PARAMETERS", text):
        raise ForgefieldError(
            f"{info.source} is a relaxation or a dynamics: its atoms or cell move. Use the output of one scf calculation."
        )


def _add_band_energy(info: SnapshotInfo, text: str) -> None:
    """Sum over k points and bands of weight, eigenvalue and occupation, where all of these are printed."""
    weights = [float(w) for w in re.findall(rf"k\(\s*\d+\) = \([^)]*\), wk =\s*{_NUMBER}", text)]
    n_points = _last(r"number of k points=\s*" + _NUMBER, text)
    weights = weights[: int(n_points or 0)]  # they may be printed a second time, in the other axes
    parts = re.split(r"End of self-consistent calculation", text)
    if info.fermi_energy is None or info.temperature is None or not weights or len(parts) < 2:
        return
    blocks = re.findall(r"bands \(ev\):[ ]*\n\s*\n((?:[-\d. ]+\n)+)", parts[-1])
    n_bands = _last(r"number of Kohn-Sham states\s*=\s*" + _NUMBER, text)
    eigenvalues = [[float(word) for word in re.findall(r"-?\d+\.\d+", block)] for block in blocks]
    if n_bands is None or len({len(row) for row in eigenvalues} | {int(n_bands)}) != 1:
        return
    levels = np.array(eigenvalues)  # (n_k, n_bands)
    if len(levels) != len(weights) or not math.isclose(
        sum(weights), 2.0, abs_tol=1e-2
    ):  # 1 each with two spins: not done
        return
    x = np.clip((levels - info.fermi_energy) / (BOLTZMANN * info.temperature), -700.0, 700.0)
    info.energies["band"] = float(np.array(weights) @ (levels / (1 + np.exp(x))).sum(axis=1))
