"""Relaxation with the model that is EMT gives EMT's minima, also after kill -9."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.optimize import LBFGS

import forgefield
from forgefield.cli import main
from tests.support.emt_run import emt_run, kill_when, start_command


def shaken(n: int) -> list:
    frames = []
    for seed in range(n):
        atoms = bulk("Cu", a=3.7, cubic=True)
        atoms.rattle(0.1, seed=seed)
        atoms.info["name"] = f"copper-{seed}"
        frames.append(atoms)
    return frames


def test_relaxed_cells_are_those_of_the_calculator(tmp_path):
    run, atoms = emt_run(tmp_path), shaken(1)[0]
    result = forgefield.relax(run, atoms, tmp_path / "out.extxyz", cell=True, fmax=1e-4)
    relaxed = ase.io.read(tmp_path / "out.extxyz")
    atoms.calc = EMT()
    LBFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=1e-4)
    assert np.allclose(relaxed.cell, atoms.cell, atol=1e-10)
    assert relaxed.get_potential_energy() == pytest.approx(atoms.get_potential_energy(), abs=1e-10)
    assert relaxed.info["converged"]
    assert relaxed.info["name"] == "copper-0"
    assert "converged after" in repr(result)


def test_a_killed_relaxation_ends_as_an_uninterrupted_one(tmp_path, monkeypatch):
    emt_run(tmp_path / "runs")
    ase.io.write(tmp_path / "in.extxyz", shaken(30))
    words = ["relax", "emt", "in.extxyz", "--fmax", 1e-5, "--device", "cpu", "--trust-code", "-o"]
    state = tmp_path / "a.extxyz.state.json"
    kill_when(start_command(tmp_path, *words, "a.extxyz"), state.exists)
    n_before = len(ase.io.read(tmp_path / "a.extxyz", index=":"))
    assert 1 <= n_before < 30
    monkeypatch.chdir(tmp_path)
    for out in ("a.extxyz", "b.extxyz"):
        assert main([*map(str, words), out]) == 0
    assert (tmp_path / "a.extxyz").read_bytes() == (tmp_path / "b.extxyz").read_bytes()
    assert [atoms.info["start"] for atoms in ase.io.read(tmp_path / "a.extxyz", index=":")] == list(range(30))


def test_structures_that_do_not_converge_give_a_nonzero_exit_code(tmp_path, capsys):
    run = emt_run(tmp_path)
    ase.io.write(tmp_path / "in.extxyz", shaken(2))
    words = ["relax", str(run.path), str(tmp_path / "in.extxyz"), "-o", str(tmp_path / "out.extxyz"), "--trust-code"]
    assert main([*words, "--steps", "2", "--device", "cpu"]) == 1
    assert "2 of 2 structures did not converge" in capsys.readouterr().out
    assert main([*words, "--steps", "3", "--device", "cpu"]) == 2
    assert "was started with steps 2, now it is 3" in capsys.readouterr().err


def test_a_complete_relaxation_is_reported_once_and_writes_nothing(tmp_path, capsys):
    run = emt_run(tmp_path)
    ase.io.write(tmp_path / "in.extxyz", shaken(1))
    words = ["relax", str(run.path), str(tmp_path / "in.extxyz"), "-o", str(tmp_path / "out.extxyz"), "--trust-code"]
    assert main([*words, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    energy = ase.io.read(tmp_path / "out.extxyz").get_potential_energy()
    assert f", energy {energy:.4f} eV (changed by -" in printed
    assert f"wrote {tmp_path / 'out.extxyz'}" in printed
    assert main([*words, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "this relaxation is complete; nothing to do." in printed
    assert "wrote" not in printed
    assert main([*words, "--pressure", "0", "--device", "cpu"]) == 2
    assert "--pressure has no effect without --cell" in capsys.readouterr().err
