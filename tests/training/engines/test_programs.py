"""Programs for C++: they give what the model gives, for batches of any size, in a process that has PyTorch alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.io import read

import forgefield
from forgefield.cli import main
from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from forgefield.training.engines.programs import INPUTS, METADATA, OUTPUTS, write_aoti, write_torchscript
from tests.support.edition import unpack_edition
from tests.support.engine_cases import labelled, potential_of

SIZES = ((4, 3), (5,), (2, 6, 3))


def batches() -> list[dict[str, torch.Tensor]]:
    return [{name: labelled(*atoms, seed=number)[name] for name in INPUTS} for number, atoms in enumerate(SIZES)]


def expected(potential, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outputs = potential.eval()(batch, forces=True, stress=True)
    return {name: outputs[name].detach() for name in OUTPUTS}


@pytest.mark.parametrize("name", ["nequip_zbl_float32", "allegro", "deeppot", "schnet", "painn", "egnn"])
def test_torchscript_equals_the_model_for_batches_of_any_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unpack_edition(tmp_path))
    potential, tolerance = forgefield.load(name), 1e-4 if name.endswith("float32") else 1e-10
    program = torch.jit.load(str(write_torchscript(potential, "model.pt")))
    for number in (3, 1):
        frames = [
            Frame(atoms.positions, atoms.numbers.astype(np.int64), np.array(atoms.cell), atoms.pbc)
            for atoms in read("bare.extxyz", f":{number}")
        ]
        batch = batch_from_frames(frames, SpeciesTable(potential.species), graph_of(potential))
        outputs = program(*(batch[name] for name in INPUTS))
        for key, value in expected(potential, batch).items():
            torch.testing.assert_close(outputs[key], value, rtol=tolerance, atol=tolerance)


ALONE = """\
import sys, torch
for case in torch.load("cases.pt"):
    script = torch.jit.load("model.pt")(*case["inputs"].values())
    package = torch._inductor.aoti_load_package("model.pt2")(**case["inputs"])
    for program in (script, package):
        for name, value in case["outputs"].items():
            torch.testing.assert_close(program[name], value, rtol=1e-10, atol=1e-11)
assert not [name for name in sys.modules if name.startswith("forgefield")]
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_both_run_in_a_process_without_forgefield(tmp_path: Path) -> None:
    potential = potential_of("nequip", num_layers=1)  # a second layer doubles the time to compile it
    write_torchscript(potential, tmp_path / "model.pt")
    write_aoti(potential, tmp_path / "model.pt2")
    cases = [{"inputs": batch, "outputs": expected(potential, batch)} for batch in batches()]
    torch.save(cases, tmp_path / "cases.pt")
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr


def test_export_writes_species_and_cutoff_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(unpack_edition(tmp_path))
    assert main(["export", "nequip", "--to", "torchscript", "-o", "model.pt"]) == 0
    assert "wrote model.pt" in capsys.readouterr().out
    described = {METADATA: ""}
    torch.jit.load("model.pt", _extra_files=described)
    description = json.loads(described[METADATA])
    run = Run.open("nequip")
    assert (description["species"].split(), description["cutoff"]) == (list(run.species), run.cutoff)
    assert main(["export", "nequip", "--to", "torchscript", "-o", "model.zip"]) == 2
    assert "must end in .pt" in capsys.readouterr().err


def test_a_model_with_another_graph_is_refused(tmp_path: Path) -> None:
    potential = potential_of("nequip")
    potential.max_neighbours = 3
    with pytest.raises(ForgefieldError, match="maximum number of neighbours"):
        write_torchscript(potential, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())
