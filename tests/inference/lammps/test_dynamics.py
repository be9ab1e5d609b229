"""Simulations: minimisation, constant energy and pressure, atoms that migrate between processes, and plain lmp."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest

from forgefield.cli import main
from forgefield.inference.lammps.build import _shared_python, find_lammps, plugin_path
from tests.support.lammps_runs import Case, alloy, launch, launch_command, single_points, table, write_input, write_run

DYNAMICS = """\
neigh_modify every 1 delay 0 check yes
thermo_style custom step pe etotal press vol fmax
thermo_modify format float %.16e norm no
velocity all create 300 11 loop geom
velocity all set 80 50 0 sum yes
timestep 0.001
fix 1 all nve
thermo 10
run 100
unfix 1
minimize 0 1e-4 60 200
reset_timestep 0
velocity all create 300 12 loop geom
fix 1 all npt temp 300 300 0.1 tri 0 0 1.0
run 40
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs"), "nequip")


def simulate(run, folder: Path, ranks: int) -> tuple[list[dict[str, float]], ...]:
    """Rows of thermodynamic output at constant energy, during the minimisation, and at constant pressure."""
    folder.mkdir()
    write_input(folder, [Case("alloy", run.path, alloy(skewed=True))], DYNAMICS)
    done = launch(folder, ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = table(folder)
    return rows[:11], rows[11:-5], rows[-5:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_simulations_on_one_and_two_processes(run, tmp_path):
    found = {ranks: simulate(run, tmp_path / str(ranks), ranks) for ranks in (1, 2)}
    for nve, minimisation, npt in found.values():
        # Atoms travel 8 A along x and 5 A along y in a box of 11 A x 7 A: all of them change their process.
        total, potential = (np.array([row[name] for row in nve]) for name in ("TotEng", "PotEng"))
        assert np.ptp(potential) > 0.3
        assert np.abs(total - total[0]).max() < 2e-3 * np.ptp(potential)
        assert minimisation[-1]["PotEng"] < minimisation[0]["PotEng"] - 0.1
        assert minimisation[-1]["Fmax"] < 0.2 * minimisation[0]["Fmax"]
        assert [row["Step"] for row in npt] == [0, 10, 20, 30, 40]
        assert abs(npt[-1]["Volume"] / npt[0]["Volume"] - 1) > 1e-5
        assert np.isfinite(npt[-1]["Press"])
    for one, two in zip(found[1][0], found[2][0]):
        assert one["PotEng"] == pytest.approx(two["PotEng"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plain_lmp_starts_the_interpreter(run, tmp_path):
    lammps = find_lammps()
    plugin = plugin_path(lammps)
    case = Case("alloy", run.path, alloy())
    write_input(tmp_path, [case])
    text = (tmp_path / "in.lammps").read_text()
    (tmp_path / "in.lammps").write_text(f"plugin load {plugin}\n{text}")
    lmp = Path(sys.executable).with_name("lmp")
    done = launch_command(tmp_path, 2, str(lmp), "-in", "in.lammps")
    if _shared_python() is None:
        assert "has no shared library" in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    atoms = case.atoms.copy()
    from forgefield.inference.ase import Calculator

    atoms.calc = Calculator(run)
    assert single_points(tmp_path, [case])["alloy"].energy == pytest.approx(atoms.get_potential_energy(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_check_compares_processes_with_ase(run, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ase.io.write(tmp_path / "alloy.extxyz", alloy((2, 2, 1), skewed=True))
    data = os.fspath(tmp_path / "alloy.extxyz")
    assert main(["check", "--lammps", str(run.path), "--data", data, "--ranks", "1", "2"]) == 0
    output = capfd.readouterr().out
    assert "1 rank " in output
    assert "2 ranks" in output
    assert "ok: the largest deviation" in output
