"""Tutorials run from start to end, on less data and with shorter trainings than the stored ones, and these are up to date."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.warm_commands import warm_commands

pytest.importorskip("nbclient", reason="the docs extra is not installed")
pytest.importorskip("jupytext", reason="the docs extra is not installed")

DOCS = Path(__file__).parents[2] / "docs"
SHORTER = {
    "first-potential": [
        ("(300, 600, 900, 1200) for a in (3.55, 3.62, 3.69)", "(300, 900) for a in (3.6,)"),
        ("(450, 1050)", "(450,)"),
        ("100 + seed, 20)", "100 + seed, 4)"),
        ("model.num_features=16 trainer.max_epochs=40", "model.num_features=4 trainer.max_epochs=1"),
        ("!forgefield check runs/copper --frames 2", ""),
        ("dynamics.run(1000)", "dynamics.run(10)"),
        ("steps=400", "steps=4"),
    ],
    "own-model": [
        ("range(60)", "range(10)"),
        ("max_epochs: 60", "max_epochs: 1"),
        ("!forgefield check argon.yaml --frames 2", "!forgefield check argon.yaml --frames 1"),
        ("!forgefield check argon.yaml model.name=my_mistake.PairNetwork --frames 2 || true", ""),
    ],
    "failing-training": [
        ("range(40)", "range(12)"),
        ("!forgefield check --overfit copper.yaml\n", "!forgefield check --overfit copper.yaml --steps 2 || true\n"),
        ("!forgefield check --overfit copper.yaml data.train=gradients.extxyz | tail -6 || true", ""),
        ("max_epochs: 10", "max_epochs: 1"),
        ("!forgefield train copper.yaml --name better", "!cp too-fast.log better.log #"),
    ],
    "choosing-settings": [
        ("(300, 600, 900, 1200) for a in (3.55, 3.62, 3.69)", "(300,) for a in (3.6,)"),
        ("(450, 1050)", "(450,)"),
        ("50 + seed, 15)", "50 + seed, 2)"),
        ('"max_epochs": 12', '"max_epochs": 1'),
        ("(3.0, 4.0, 5.0, 6.0)", "(5.0,)"),
        ("((30, 48), (60, 24), (120, 12))", "((5, 1), (10, 1))"),
        ("0:120:{120 // frames}", "0:{frames}"),
        ('run("wide", "model.num_features=16")', "cutoffs[5.0]"),
        ('run("l2", "model.l_max=2")', "cutoffs[5.0]"),
        ("((1, 1), (1, 100), (100, 1))", "((1, 1),)"),
        ("(0.001, 0.03)}", "(0.001,)}"),
        ("0.03: rates[0.03]", "0.03: rates[0.001]"),
    ],
    "fine-tuning": [
        ("range(80)", "range(8)"),
        ("range(200, 230)", "range(200, 204)"),
        ("max_epochs: 20", "max_epochs: 1"),
        ("max_epochs: 40", "max_epochs: 1"),
        ("num_features: 16", "num_features: 4"),
    ],
    "several-gpus": [
        ("range(136)", "range(24)"),
        ("max_epochs: 6", "max_epochs: 2"),
        ("trainer.max_epochs=3", "trainer.max_epochs=1"),
        ('shutil.which("sinfo") is not None and', "False and"),  # SLURM is tested in tests/parallel
        (
            "!OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 --no-python forgefield train copper.yaml --name large",
            "!cp two.log large.log #",
        ),
    ],
    "active-learning": [
        ("for seed in range(15)", "for seed in range(5)"),
        ("100 + seed)) for seed in range(6)", "100 + seed)) for seed in range(1)"),
        ("1000 + seed) for seed in range(6)", "1000 + seed) for seed in range(2)"),
        ("max_epochs: 30", "max_epochs: 1"),
        ("num_features: 8", "num_features: 4"),
        ("iterations: 2", "iterations: 1"),
        ("ps: 0.2", "ps: 0.02"),
    ],
    "lammps": [
        ("range(100)", "range(8)"),
        ("max_epochs: 20", "max_epochs: 1"),
        ("num_features: 16", "num_features: 4"),
        ("* (4, 4, 4)", "* (2, 2, 2)"),
        ("run             300", "run             50"),
        ("(start / 64)", "(start / 8)"),
        ("(hot / 64)", "(hot / 8)"),
    ],
    "ldos": [
        ("range(16)", "range(4)"),
        ("mesh=(4, 4, 3)", "mesh=(2, 2, 1)"),
        ("be0*.in.npy be1[0-3].in.npy", "be00.in.npy be01.in.npy"),
        ("be14.in.npy, be15.in.npy", "be02.in.npy, be03.in.npy"),
        ("be15", "be03"),
        ("structures[15]", "structures[3]"),
        ("--twojmax 6", "--twojmax 2"),
        ("max_epochs=80", "max_epochs=20"),
    ],
    "properties": [
        ("range(300)", "range(30)"),
        (":240]", ":24]"),
        ("[240:]", "[24:]"),
        ("max_epochs: 40", "max_epochs: 1"),
    ],
}
"""Replacements in the source of each tutorial, so that it takes seconds."""
TUTORIALS = sorted(path.stem for path in (DOCS / "notebooks").glob("*.md"))


def executor():
    spec = importlib.util.spec_from_file_location("execute", DOCS / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_tutorial_is_tested():
    assert set(SHORTER) == set(TUTORIALS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_the_tutorial_runs(name, tmp_path, monkeypatch):
    execute = executor()
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    notebook = execute.read_source(name, SHORTER[name])
    path = [str(warm_commands()), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("JUPYTER_PATH", str(warm_commands()))
    execute.execute(notebook, tmp_path)  # an error in a cell is raised
    assert any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("name", TUTORIALS)
def test_the_stored_tutorial_has_the_code_of_its_source_and_output(name):
    stored = json.loads((DOCS / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8"))
    source = executor().read_source(name)
    assert ["".join(cell["source"]) for cell in stored["cells"]] == [cell["source"] for cell in source.cells], (
        f"run `make tutorials`, or python docs/execute.py {name}"
    )
    assert sum(bool(cell.get("outputs")) for cell in stored["cells"]) > 3
