"""`lcurve.out`: DeePMD-kit's columns, numbers of the run's own metrics, exact after an interruption and on several ranks."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forgefield.errors import ForgefieldError
from tests.support.helpers import tiny_config
from tests.support.interrupting import Interrupted
from tests.support.launching import ranks, write_config
from tests.support.train_many import train_only

CURVE = "forgefield.training.callbacks.lcurve.LearningCurve"
END = "tests.support.interrupting.EndAt"
BY_STEPS = {
    "enable_progress_bar": False,
    "accelerator": "cpu",
    "val_check_interval": 3,
    "check_val_every_n_epoch": None,
}


def curve_config(folder: Path, *, curve: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """10 training frames in batches of 2: 5 steps an epoch."""
    config = tiny_config(folder, **changes)
    config["callbacks"] = [END, {"name": CURVE, **(curve or {})}]
    return config


def metrics(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_rows_are_the_rows_of_the_metrics_in_the_units_and_columns_of_deepmd_kit(tmp_path: Path) -> None:
    run = train_only(curve_config(tmp_path, trainer={**BY_STEPS, "max_epochs": 3})).path
    lines = (run / "lcurve.out").read_text().splitlines()
    assert lines[0] == (
        "# step       rmse_val    rmse_trn    rmse_e_val  rmse_e_trn    rmse_f_val  rmse_f_trn   lr      "
    )
    assert lines[1].startswith("#")
    assert [len(line) for line in lines[2:]] == [len(lines[2])] * 5
    rows = np.loadtxt(run / "lcurve.out")
    assert rows[:, 0].tolist() == [3, 6, 9, 12, 15]
    measured = {int(row["step"]): row for row in metrics(run)}
    assert list(measured) == [3, 5, 6, 9, 10, 12, 15]  # the ends of epochs, too
    for row in rows:
        found = measured[int(row[0])]
        names = ("energy_rmse", "forces_rmse")
        expected = [math.sqrt(float(found["val/loss"])), *(float(found[f"val/{name}"]) / 1000 for name in names)]
        assert row[[1, 3, 5]] == pytest.approx(expected, rel=6e-3)  # two digits behind the point
    first, last = measured[3], measured[15]  # rows with no end of an epoch between them and the row before
    for row, found in ((rows[0], first), (rows[-1], last)):
        expected = [math.sqrt(float(found["train/loss"])), float(found["train/energy_rmse"]) / 1000]
        assert row[[2, 4]] == pytest.approx(expected, rel=6e-3)
    # Between them, energies of 6 frames a row and of as many frames as there were steps in the metrics.
    squares = [
        float(row["train/energy_rmse"]) ** 2 * n / 1e6 for row, n in zip(measured.values(), (3, 2, 1, 3, 1, 2, 3))
    ]
    assert 3 * np.square(rows[:, 4]) == pytest.approx(
        [squares[0], squares[1] + squares[2], squares[3], squares[4] + squares[5], squares[6]], rel=1.3e-2
    )


def test_the_rate_is_that_of_the_step(tmp_path: Path) -> None:
    schedule = {"name": "exp", "decay_steps": 1, "decay_rate": 0.5, "stop_lr": 0.0}
    config = curve_config(tmp_path, trainer={**BY_STEPS, "max_epochs": 3}, training={"scheduler": schedule, "lr": 0.01})
    rates = np.loadtxt(train_only(config).path / "lcurve.out")[:, -1]
    assert rates == pytest.approx([0.01 * 0.5 ** (step - 1) for step in (3, 6, 9, 12, 15)], rel=0.05)


def test_the_first_column_is_the_root_of_the_loss_with_the_weights_of_the_step(tmp_path: Path) -> None:
    weights = {"weight": 10.0, "schedule": {"kind": "lr", "to": 2.0}}
    schedule = {"name": "exp", "decay_steps": 1, "decay_rate": 0.8, "stop_lr": 0.0}
    changes = {"training": {"scheduler": schedule, "lr": 0.01}, "task": {"energy": {"weight": 1.0}, "forces": weights}}
    rows = np.loadtxt(
        train_only(curve_config(tmp_path, trainer={**BY_STEPS, "max_epochs": 3}, **changes)).path / "lcurve.out"
    )
    force_weight = 2 + 8 * 0.8 ** (rows[:, 0] - 1)
    for split in (0, 1):
        root, energy, forces = rows[:, 1 + split], rows[:, 3 + split], rows[:, 5 + split]
        assert root == pytest.approx(np.sqrt(energy**2 + force_weight * forces**2), rel=1.2e-2)


def test_mean_absolute_errors_have_columns_of_their_own(tmp_path: Path) -> None:
    config = curve_config(tmp_path, curve={"errors": "mae"}, trainer={**BY_STEPS, "max_epochs": 1})
    run = train_only(config).path
    header = (run / "lcurve.out").read_text().splitlines()[0].split()
    assert header[2:] == ["mae_e_val", "mae_e_trn", "mae_f_val", "mae_f_trn", "rmse_val", "rmse_trn", "lr"]
    first = np.loadtxt(run / "lcurve.out", ndmin=2)[0]
    assert first[3] == pytest.approx(float(metrics(run)[0]["val/forces_mae"]) / 1000, rel=6e-3)


def test_without_validation_there_is_a_row_every_few_steps(tmp_path: Path) -> None:
    config = curve_config(tmp_path, curve={"every": 3}, data={"val": 0})
    run = train_only(config).path
    assert (run / "lcurve.out").read_text().split()[1:6] == ["step", "rmse_trn", "rmse_e_trn", "rmse_f_trn", "lr"]
    rows = np.loadtxt(run / "lcurve.out")
    assert rows[:, 0].tolist() == [3, 6, 9, 12, 15, 18, 21]
    # 14 frames, 7 steps an epoch: 7 rows of 3 steps see what 3 epochs see, every frame once.
    of_epochs = [float(row["train/energy_rmse"]) / 1000 for row in metrics(run)]
    assert np.mean(rows[:, 2] ** 2) == pytest.approx(np.mean(np.square(of_epochs)), rel=1e-2)


def test_a_curve_of_accumulated_batches_has_a_row_for_steps_only(tmp_path: Path) -> None:
    """Seven batches and so three steps an epoch; no row at step 0, where the first batch ends."""
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 3}
    config = curve_config(tmp_path, curve={"every": 2}, data={"val": 0}, trainer=trainer)
    rows = np.loadtxt(train_only(config).path / "lcurve.out", ndmin=2)
    assert rows[:, 0].tolist() == [2, 4, 6]


@pytest.mark.parametrize("validates", [True, False])
def test_an_interrupted_curve_is_the_curve_of_a_run_that_was_not(
    validates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {**BY_STEPS, "max_epochs": 3} if validates else {}
    changes: dict[str, Any] = {"trainer": {**tiny_config(tmp_path)["trainer"], **trainer}}
    if not validates:
        changes["data"] = {"val": 0}
    config = curve_config(tmp_path, curve={"every": 3}, **changes)
    config["training"] |= {
        "checkpoint": {"every_steps": 2},
        "scheduler": {"name": "exp", "stop_lr": 1e-5, "decay_steps": 2},
    }
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"}).path
    for step in (7, 13):  # after checkpoints at 6 and 12 and the rows of those steps
        monkeypatch.setenv("END_HOW", "raise")
        monkeypatch.setenv("END_AT", str(step))
        with pytest.raises(Interrupted):
            train_only({**config, "name": "again"})
        with open(tmp_path / "runs" / "again" / "lcurve.out", "a") as file:  # what a kill may leave
            file.write("     99      1.0e+00     1.0e+00\n    100      1.")
    monkeypatch.setenv("END_AT", "-1")
    again = train_only({**config, "name": "again"}).path
    for name in ("lcurve.out", "metrics.csv", "checkpoints/last.safetensors"):
        assert (again / name).read_bytes() == (straight / name).read_bytes(), name


@pytest.mark.parametrize("validates", [True, False])
def test_two_ranks_write_the_curve_of_one(validates: bool, tmp_path: Path) -> None:
    data = {"val": 4 if validates else 0}
    trainer = {**BY_STEPS, "max_epochs": 3} if validates else {"accelerator": "cpu", "max_epochs": 3}
    config = curve_config(tmp_path, curve={"every": 3}, data=data, trainer=trainer)
    config["training"] = {**config["training"], "precision": "float64"}
    one = train_only(config).path
    two = {**config, "name": "two", "data": {**config["data"], "batch": {"frames": 1}}}
    path = write_config(tmp_path / "two.yaml", two)
    done = ranks(2, "tests.support.train_many", str(path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "two" / "lcurve.out").read_text() == (one / "lcurve.out").read_text()


def test_a_path_with_a_folder_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = curve_config(tmp_path, curve={"file": "curves/water.out"}, trainer={**BY_STEPS, "max_epochs": 1})
    run = train_only(config).path
    assert np.loadtxt(tmp_path / "curves" / "water.out", ndmin=2)[:, 0].tolist() == [3]
    assert not (run / "water.out").exists()
    before = (tmp_path / "curves" / "water.out").read_text()
    train_only({**config, "trainer": {**config["trainer"], "fast_dev_run": True}})
    assert (tmp_path / "curves" / "water.out").read_text() == before


@pytest.mark.parametrize(
    ("curve", "said"), [({"errors": "r2"}, "rmse or mae"), ({"every": 0}, "must be a positive integer")]
)
def test_what_has_no_meaning_is_refused(curve: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ForgefieldError, match=said):
        train_only(curve_config(tmp_path, curve=curve))
