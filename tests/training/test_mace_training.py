"""Training MACE, and fine-tuning one that was imported: the first predictions are those of the old model; replay is visible."""

import json
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch

import forgefield
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from tests.support.helpers import tiny_config
from tests.support.mace_models import write_module

TINY = {
    "name": "mace", "hidden_irreps": "4x0e + 4x1o", "max_ell": 2, "correlation": 2, "radial_mlp": [8], "mlp_irreps": "4x0e",
}  # fmt: skip


def mace_config(folder, name="mace", **changes):
    return {**tiny_config(folder, **changes), "name": name} | ({} if "model" in changes else {"model": TINY})


def test_errors_fall_and_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(tmp_path):
    whole = mace_config(tmp_path, "whole", trainer={"max_epochs": 6}, training={"engine": "eager"})
    run = forgefield.train(whole)
    losses = [float(line.split(",")[3]) for line in (run.path / "metrics.csv").read_text().splitlines()[1:]]
    assert losses[-1] < 0.85 * losses[0]
    part = {**whole, "name": "parts", "trainer": {**whole["trainer"], "max_epochs": 3}}
    forgefield.train(part)
    parts = forgefield.train({**part, "trainer": whole["trainer"]})
    one, other = (Run.open(str(each.path)).load_potential("last").state_dict() for each in (run, parts))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A folder with the run `residual` (H, C, O), structures, and what it predicts for them with other energies."""
    monkeypatch.chdir(tmp_path)
    write_module("residual", tmp_path)
    main(["import", "mace", "residual.model"])
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(12):
        atoms = ase.Atoms("OCH4", rng.uniform(0, 3.0, (6, 3)), cell=[6, 6, 6], pbc=True)
        frames.append(atoms)
    ase.io.write("bare.extxyz", frames)
    main(["predict", "residual", "bare.extxyz", "-o", "replay.extxyz", "--as-labels"])
    labelled = ase.io.read("replay.extxyz", ":")
    for atoms in labelled:
        results = {"energy": 1.3 * atoms.get_potential_energy() + 7.0 * len(atoms), "forces": 1.3 * atoms.get_forces()}
        atoms.calc = ase.calculators.singlepoint.SinglePointCalculator(atoms, **results)
    ase.io.write("new.extxyz", labelled)
    return tmp_path


def finetune(folder, name, *, source="new.extxyz", model=None, **sections):
    config = {
        "name": name,
        "out": "runs",
        "seed": 1,
        "data": {"train": source, "val": 0.25, "batch": {"frames": 4}, "cache": False, **sections.pop("data", {})},
        "model": {"from": "residual", **(model or {})},
        "task": sections.pop("task", {"energy": {"weight": 1.0}, "forces": {"weight": 1.0}}),
        "training": {
            "lr": 1e-3,
            "precision": "float64",
            "engine": "eager",
            "tensorboard": 0,
            **sections.pop("training", {}),
        },
        "trainer": {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    return forgefield.train(config)


def difference_at_step_0(text: str) -> tuple[float, float]:
    line = next(line for line in text.splitlines() if "Step 0: predictions differ" in line)
    words = line.split()
    return float(words[words.index("eV/atom") - 1]), float(words[words.index("eV/A") - 1])


@pytest.mark.parametrize(
    ("training", "shifts"),
    [({}, "keep"), ({}, "fit"), ({"freeze": ["model.interactions"]}, "keep"), ({"lora": {"rank": 2}}, "keep")],
)
def test_a_fine_tuning_begins_as_the_imported_model(imported, training, shifts, capsys):
    finetune(imported, "tuned", model={"shifts": shifts}, training=training)
    assert max(difference_at_step_0(capsys.readouterr().out)) < 1e-12


def test_new_branches_begin_as_copies_and_replay_is_measured_every_epoch(imported, capsys):
    source = [{"path": "new.extxyz", "branch": "dft"}, {"path": "replay.extxyz", "branch": "old", "share": 0.5}]
    targets = {"energy": {"weight": 1.0}, "forces": {"weight": 1.0}}
    task = {"branches": {"dft": targets, "old": targets}}
    model = {"branches": ["old", "dft"], "shifts": "fit"}
    run = finetune(imported, "both", source=source, model=model, task=task)
    assert max(difference_at_step_0(capsys.readouterr().out)) < 1e-12
    header, *rows = (run.path / "metrics.csv").read_text().splitlines()
    values = dict(zip(header.split(","), rows[0].split(",")))
    assert all(float(values[f"val/{branch}.forces_mae"]) > 0 for branch in ("old", "dft"))
    resolved = json.loads((run.path / "run.json").read_text())["model"]
    assert resolved["branches"] == ["old", "dft"]
    before, after = (resolved["energy_shifts"][name]["O"] for name in ("old", "dft"))
    assert before == pytest.approx(-5.49, abs=1e-6)
    assert abs(after - before) > 1
    assert Run.open("both").load_potential(head="old").interface.branches == ()


def test_replay_without_labels_is_an_error(imported):
    source = [{"path": "new.extxyz", "branch": "dft"}, {"path": "bare.extxyz", "branch": "old"}]
    targets = {"energy": {"weight": 1.0}, "forces": {"weight": 1.0}}
    with pytest.raises(ForgefieldError, match="training frames of the branch old carries energy or forces"):
        finetune(
            imported,
            "none",
            source=source,
            model={"branches": ["old", "dft"]},
            task={"branches": {"dft": targets, "old": targets}},
        )


def test_a_new_species_is_learnt_by_an_imported_model(imported, capsys):
    frames = ase.io.read("new.extxyz", ":")
    for atoms in frames[:3]:
        atoms.symbols[0] = "N"
    ase.io.write("nitrogen.extxyz", frames)
    run = finetune(
        imported, "nitrogen", source="nitrogen.extxyz", model={"shifts": "fit"}, data={"species": ["H", "C", "O", "N"]}
    )
    assert max(difference_at_step_0(capsys.readouterr().out)) < 1e-12
    assert Run.open(str(run.path)).load_potential().species == ("H", "C", "O", "N")
    assert Path("runs/nitrogen/run.json").exists()
