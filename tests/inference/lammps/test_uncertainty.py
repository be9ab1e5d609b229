"""Uncertainties of atoms in LAMMPS: on one and two processes, and a run that stops where they exceed a limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.inference.ase import Calculator
from forgefield.inference.uncertainty import LastLayerUncertainty, write_uncertainty
from forgefield.models.edges import EdgeContext
from tests.support.lammps_runs import Case, alloy, launch, table, write_input, write_run
from tests.support.structures import make_batch, make_frame

SINGLE = """\
fix u all pair 1 forgefield uncertainty 0
compute umax all reduce max f_u
thermo_style custom step pe c_umax
thermo_modify format float %.16e norm no
dump 1 all custom 1 {name}.dump id fx fy fz f_u
dump_modify 1 format float %.16e sort id
run 0
"""
STOPPING = """\
velocity all create 3000 11 loop geom
fix 1 all nve
fix u all pair 1 forgefield uncertainty 0
compute umax all reduce max f_u
variable umax equal c_umax
variable small equal "c_umax < {limit}"
dump risky all custom 1 risky.dump id type x y z f_u
dump_modify risky skip v_small
fix stop all halt 1 v_umax > {limit} error continue
thermo_style custom step pe c_umax
thermo_modify format float %.16e norm no
thermo 1
run 200
"""


@pytest.fixture(scope="module", params=["nequip", "deeppot"])
def run(request, tmp_path_factory):
    """A run whose last weights have an arbitrary covariance."""
    run = write_run(tmp_path_factory.mktemp("runs"), request.param)
    batch = make_batch(make_frame(3, 1, numbers=(29, 79)), cutoff=3.6, species=("Cu", "Au"))
    n = run.load_potential().last_layer(batch, EdgeContext.of(batch)).features.shape[1]
    factor = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    write_uncertainty(run, LastLayerUncertainty(0.01 * factor, 0.5, 0.5), {})
    return run


@pytest.mark.parametrize("ranks", [1, 2])
def test_uncertainties_and_forces_are_those_of_the_calculator(run, tmp_path, ranks) -> None:
    atoms = alloy()
    write_input(tmp_path, [Case("alloy", run.path, atoms, options="uncertainty yes")], SINGLE)
    done = launch(tmp_path, ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = np.loadtxt(tmp_path / "alloy.dump", skiprows=9)
    atoms.calc = Calculator(run, uncertainty="energy")
    np.testing.assert_allclose(rows[:, 1:4], atoms.get_forces(), rtol=1e-8, atol=1e-9)
    expected = atoms.calc.results["energies_uncertainty"]
    np.testing.assert_allclose(rows[:, 4], expected, rtol=1e-8)
    (row,) = table(tmp_path)
    assert row["c_umax"] == pytest.approx(expected.max())


def test_a_run_stops_and_writes_the_frame_where_the_uncertainty_exceeds_a_limit(run, tmp_path) -> None:
    atoms = alloy()
    calculator = Calculator(run, uncertainty="energy")
    calculator.get_potential_energy(atoms)
    limit = 1.02 * calculator.results["energies_uncertainty"].max()
    commands = STOPPING.replace("{limit}", f"{limit:.10f}")
    write_input(tmp_path, [Case("alloy", run.path, atoms, options="uncertainty yes")], commands)
    done = launch(tmp_path, 1)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = table(tmp_path)
    assert len(rows) < 200
    assert [row["c_umax"] > limit for row in rows] == [False] * (len(rows) - 1) + [True]
    written = (tmp_path / "risky.dump").read_text().split("ITEM: TIMESTEP")[1:]
    assert [int(frame.split()[0]) for frame in written] == [len(rows) - 1]


def test_uncertainties_have_to_be_requested(run, tmp_path) -> None:
    write_input(tmp_path, [Case("alloy", run.path, alloy())], SINGLE)
    done = launch(tmp_path, 1)
    assert done.returncode == 1
    assert "only with: pair_style forgefield RUN uncertainty yes" in done.stdout + done.stderr
