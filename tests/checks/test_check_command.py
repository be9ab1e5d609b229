"""`forgefield check` on configs and runs, with exit codes that scripts can use."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from forgefield.checks import run_checks
from forgefield.cli import main
from forgefield.data.readers import read_frames
from forgefield.data.species import SpeciesTable
from forgefield.models.building import build_model
from forgefield.models.resolving import resolve_model
from forgefield.runs import create_run_from_model
from tests.support import toy_models as toys
from tests.support.helpers import tiny_config, write_emt

OPTIONS = {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": 4, "radial_mlp_width": 8}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_file(tmp_path, **changes) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tmp_path, **changes)))
    return str(path)


def small_nequip(**more) -> dict:
    facts = {"mean_neighbours": 14.0, "forces_rms": 1.0, "reference_energies": toys.REFERENCE}
    return resolve_model({**OPTIONS, **more}, species=("Cu", "Au"), cutoff=3.5, statistics=facts)


@pytest.mark.parametrize(
    "more",
    [{}, {"parity": False, "l_max": 2, "zbl": True}, {"per_edge_type_cutoff": {"Cu": {"Au": 3.0}, "Au": {"Cu": 3.0}}}],
    ids=["plain", "l2-zbl", "cutoff-by-species"],
)
def test_nequip_in_float32_keeps_the_laws_in_a_float64_copy(tmp_path, more):
    potential = build_model(small_nequip(**more), precision="float32", seed=1)
    results = run_checks(
        potential,
        read_frames(write_emt(tmp_path / "frames.extxyz", 2)),
        SpeciesTable(("Cu", "Au")),
        3.5,
        generator=np.random.default_rng(0),
        reference_energies=toys.REFERENCE,
    )
    assert [result.name for result in results if not result.passed] == []
    assert max(r.value for r in results if r.name in ("rotation", "reflection", "permutation")) < 1e-12


def test_config_is_checked_with_a_fresh_model(tmp_path, capsys):
    assert main(["check", config_file(tmp_path), "--frames", "2", "model.num_features=3"]) == 0
    printed = capsys.readouterr().out
    assert "newly initialised" in printed
    assert "All 13 checks passed" in printed
    assert "Radial table, 1024 intervals: weights differ from the network by" in printed
    assert "too coarse" not in printed


def test_user_model_that_breaks_a_law_gives_exit_code_1(tmp_path, capsys):
    model = {"name": "tests.support.toy_models.HardCutoff"}
    config = tiny_config(tmp_path, data={"cutoff": 4.0})
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**config, "model": model}))
    assert main(["check", "own.yaml", "--frames", "1"]) == 1
    assert "1 of 13 checks failed: cutoff smoothness" in capsys.readouterr().out


def imported_run() -> None:
    resolved = small_nequip()
    potential = build_model(resolved, precision="float32", seed=0)
    create_run_from_model(
        name="mine", out="runs", resolved=resolved, potential=potential, origin="test", precision="float32"
    )


def test_run_is_checked_on_the_requested_data(tmp_path, capsys):
    imported_run()
    write_emt(tmp_path / "other.extxyz", 2)
    assert main(["check", "mine", "--data", "other.extxyz", "--frames", "1"]) == 0
    assert "the best model of mine on 1 frames" in capsys.readouterr().out


def test_run_without_recorded_data_asks_for_it(capsys):
    imported_run()
    assert main(["check", "mine"]) == 2
    assert "--data FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no run 'nowhere'"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["mine", "--frames", "0"], "--frames must be 1 or more, not 0"),
    ],
)
def test_wrong_arguments_are_one_clear_error(words, message, capsys):
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err
