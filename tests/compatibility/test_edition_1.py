"""Runs, checkpoints and stores written by version 0.1.0 load, predict, test and resume with today's code.

`tests/fixtures/make_edition_1.py` says how they were made. They are never made again: users have such folders.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase.io import read
from safetensors.numpy import load_file

import forgefield
from forgefield import api
from forgefield.data.store import store as store_module
from forgefield.data.store.store import open_store, read_manifest
from tests.fixtures.make_edition_1 import FINISHED, KILLED_AT, values_of
from tests.support.edition import unpack_edition

FRAME_RUNS = [name for name in FINISHED if name != "ldos"]
LABELLED = [name for name in FRAME_RUNS if name != "properties"]


@pytest.fixture
def edition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stored folder, unpacked; the current folder of the test."""
    unpack_edition(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expected(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())[name]


@pytest.mark.parametrize("name", FRAME_RUNS)
def test_a_run_predicts_what_it_predicted_when_it_was_made(edition: Path, name: str) -> None:
    forgefield.predict(forgefield.load_run(name), "bare.extxyz", "out.extxyz")
    tolerance = 1e-4 if name.endswith("float32") else 1e-9
    for atoms, reference in zip(read("out.extxyz", ":"), expected(edition, name)["frames"], strict=True):
        values = values_of(atoms)
        for key, number in reference.items():
            # Values of atoms were written with eight decimals then.
            smallest = max(tolerance, 1e-8) if np.ndim(number) else tolerance
            np.testing.assert_allclose(values[key], number, rtol=tolerance, atol=smallest, err_msg=key)


@pytest.mark.parametrize("name", LABELLED)
def test_a_run_is_tested_with_the_errors_it_reported(edition: Path, name: str) -> None:
    stored = json.loads(Path("runs", name, "test.json").read_text())["errors"]
    errors = api.test(name, "test.extxyz")
    assert errors.keys() == stored.keys()
    for key, number in stored.items():
        assert errors[key] == pytest.approx(number, rel=1e-4 if name.endswith("float32") else 1e-7), key


def test_an_ldos_run_predicts_what_it_predicted_when_it_was_made(edition: Path) -> None:
    rows = np.load("s2.in.npy")[..., 3:].reshape(-1, 6)[:5]
    with torch.no_grad():
        ldos = forgefield.load("ldos")(torch.from_numpy(rows).double())
    np.testing.assert_allclose(ldos.numpy(), expected(edition, "ldos")["ldos"], rtol=1e-9)


@pytest.mark.parametrize("name", KILLED_AT)
def test_a_killed_run_resumes_to_the_end_it_would_have_had(edition: Path, name: str) -> None:
    run = forgefield.train(f"{name}.yaml")
    log = (run.path / "log.txt").read_text()
    assert str(KILLED_AT[name][0]) in log  # it resumed at that step instead of starting over
    for which in ("best", "last"):
        reference = load_file(edition / "expected" / name / f"{which}.safetensors")
        weights = load_file(run.checkpoints / f"{which}.safetensors")
        assert weights.keys() == reference.keys()
        for key, value in reference.items():
            np.testing.assert_allclose(weights[key], value, rtol=1e-8, atol=1e-10, err_msg=key)
    rows = (edition / "expected" / name / "metrics.csv").read_text().splitlines()
    assert len((run.path / "metrics.csv").read_text().splitlines()) == len(rows)


@pytest.mark.parametrize("name", ["nequip", "ldos"])
def test_a_finished_run_is_extended(edition: Path, name: str) -> None:
    before = forgefield.load_run(name).metrics()[-1]
    run = forgefield.train(f"{name}.yaml", "trainer.max_epochs=4")
    assert run.metrics()[-1]["epoch"] == 3 > before["epoch"]


def test_a_store_has_the_frames_it_was_made_of(edition: Path) -> None:
    frames = read("frames.extxyz", ":")
    table = open_store("frames.store").table()
    assert len(table) == len(frames)
    for frame, atoms in zip(table, frames, strict=True):
        np.testing.assert_array_equal(frame.positions, atoms.positions)
        assert frame.energy == atoms.get_potential_energy()


def test_a_store_of_an_earlier_version_goes_through_every_migration(
    edition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_manifest(Path("frames.store"))
    assert before["version"] == 1
    migrations = (
        lambda old: {**old, "forgefield": f"{old['forgefield']} 1"},
        lambda old: {**old, "forgefield": f"{old['forgefield']} 2"},
    )
    monkeypatch.setattr(store_module, "STORE", replace(store_module.STORE, migrations=migrations))
    after = open_store("frames.store").manifest
    assert after["version"] == 3
    assert after["forgefield"] == f"{before['forgefield']} 1 2"
    assert after["parts"] == before["parts"]


def test_a_run_is_the_start_of_another(edition: Path) -> None:
    config = {**FINISHED["nequip"], "name": "tuned", "model": {"from": "runs/nequip"}}
    run = forgefield.train(config)
    assert run.metrics()[-1]["epoch"] == 1
