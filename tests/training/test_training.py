"""A training does what its config says: it learns, measures what it claims, and refuses what it cannot do."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from torch import nn

import forgefield
from forgefield import api
from forgefield.api import load, load_run, train
from forgefield.errors import ForgefieldError
from tests.support.helpers import emt_frames, tiny_config, write_emt
from tests.support.train_many import train_only


def with_trainer(config: dict, **options) -> dict:
    return {**config, "trainer": {**config["trainer"], **options}}


def with_training(config: dict, **options) -> dict:
    return {**config, "training": {**config["training"], **options}}


def test_training_learns(tmp_path):
    run = train_only(with_trainer(tiny_config(tmp_path), max_epochs=28))
    rows = run.metrics()
    assert rows[-1]["val/forces_mae"] < 0.5 * rows[0]["val/forces_mae"]
    assert rows[-1]["train/loss"] < 0.2 * rows[0]["train/loss"]


def test_metrics_of_the_best_epoch_equal_a_plain_evaluation_of_the_deployed_model(tmp_path):
    """What is logged during validation (average applied) is what the user gets from the calculator, frame by frame."""
    config = tiny_config(tmp_path)
    write_emt(tmp_path / "val.extxyz", 5, seed=1)
    config["data"]["val"] = str(tmp_path / "val.extxyz")
    run = train_only(config)
    best = min(run.metrics(), key=lambda row: row["val/loss"])
    energy_errors, force_errors = [], []
    for atoms in emt_frames(5, seed=1):
        reference = atoms.get_potential_energy(), atoms.get_forces()
        atoms.calc = forgefield.Calculator(run.path)
        energy_errors.append((atoms.get_potential_energy() - reference[0]) / len(atoms))
        force_errors.append(np.ravel(atoms.get_forces() - reference[1]))
    forces = np.concatenate(force_errors)
    assert best["val/energy_mae"] == pytest.approx(1000 * np.mean(np.abs(energy_errors)), rel=1e-4)
    assert best["val/forces_mae"] == pytest.approx(1000 * np.mean(np.abs(forces)), rel=1e-4)
    assert best["val/forces_rmse"] == pytest.approx(1000 * np.sqrt(np.mean(forces**2)), rel=1e-4)


def test_validation_metrics_do_not_depend_on_the_batch_size(tmp_path):
    config = with_training(tiny_config(tmp_path), precision="float64")
    one = {**config, "name": "one", "data": {**config["data"], "eval_batch": 1}}
    all_at_once = {**config, "name": "all", "data": {**config["data"], "eval_batch": 4}}
    for a, b in zip(train_only(one).metrics(), train_only(all_at_once).metrics()):
        assert a == pytest.approx(b, rel=1e-10)


def test_files_of_a_run(tmp_path):
    run = train(with_training(tiny_config(tmp_path), tensorboard=2))
    rows = list(csv.DictReader((run.path / "metrics.csv").open()))
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "5"), ("1", "10"), ("2", "15")]
    for csv_row, json_row in zip(rows, run.metrics()):
        assert {key: float(value) for key, value in csv_row.items()} == json_row
    timing = list(csv.DictReader((run.path / "timing.csv").open()))
    assert all(float(row["atoms_per_second"]) > 0 for row in timing)
    assert run.info["status"] == "finished"
    assert (run.path / "report.html").stat().st_size > 10_000
    assert "tiny" in (run.path / "log.txt").read_text()
    assert forgefield.load_run(run.path).config.training.lr == 0.01


def test_tensorboard_levels(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = {}
    for level in (0, 1, 2):
        config = {**with_training(tiny_config(tmp_path), tensorboard=level), "name": f"level{level}"}
        folder = train_only(config).path / "tensorboard"
        if level == 0:
            assert not folder.exists()
            continue
        events = EventAccumulator(str(folder))
        events.Reload()
        tags[level] = events.Tags()
        assert [event.step for event in events.Scalars("val/forces_mae")] == [5, 10, 15]
    assert "step/loss" in tags[1]["scalars"]
    assert not tags[1]["histograms"]
    assert any(tag.startswith("weights/") for tag in tags[2]["histograms"])
    assert any(tag.startswith("gradients/") for tag in tags[2]["histograms"])


def test_errors_on_the_test_set_are_written_and_repeatable(tmp_path):
    config = tiny_config(tmp_path)
    config["data"]["test"] = 3
    run = train(config)
    stored = json.loads((run.path / "test.json").read_text())
    assert stored["frames"] == 3
    write_emt(tmp_path / "other.extxyz", 4, seed=9)
    first = api.test(run, str(tmp_path / "other.extxyz"))
    assert first == api.test(run.path, str(tmp_path / "other.extxyz"))
    assert first.keys() >= {"energy_mae", "forces_mae", "forces_rmse/Cu", "stress_mae"}
    assert json.loads((run.path / "test-other.json").read_text())["errors"] == first
    assert (run.path / "parity-test-other.png").stat().st_size > 10_000
    assert json.loads((run.path / "test.json").read_text()) == stored  # another test does not overwrite the run's own


def test_stress_is_trained_on_request(tmp_path):
    task = {"energy": {}, "forces": {}, "stress": {"weight": 1000.0}}
    run = train_only(with_trainer({**tiny_config(tmp_path), "task": task}, max_epochs=15))
    rows = run.metrics()
    assert rows[-1]["val/stress_mae"] < rows[0]["val/stress_mae"]


def test_a_target_that_no_frame_has_is_refused(tmp_path):
    config = tiny_config(tmp_path, task={"energy": {}, "stress": {}})
    config["data"]["labels"] = {"stress": "none", "virial": "none"}
    with pytest.raises(ForgefieldError, match=r"task\.stress is set, but no training frame has stress"):
        train(config)


def test_without_validation_frames_the_training_loss_picks_the_best(tmp_path, capsys):
    config = tiny_config(tmp_path)
    config["data"]["val"] = 0
    run = train_only(config)
    assert "There is no validation" in capsys.readouterr().out
    assert "val/loss" not in run.metrics()[0]
    load(run)


def test_the_reason_for_early_stopping_is_in_log_panel_and_report(tmp_path, capsys):
    config = with_training(tiny_config(tmp_path), early_stopping={"patience": 2, "min_delta": 1e9})
    run = train(with_trainer(config, max_epochs=50))
    rows = run.metrics()
    assert len(rows) == 3
    text = (
        f"Stopped early after epoch 3: val/loss has not improved by more than 1e+09 in the last 2 validations "
        f"(training.early_stopping.patience=2); it is {rows[-1]['val/loss']:.6g}. Its best value was "
        f"{rows[0]['val/loss']:.6g} in epoch 1."
    )
    log = (run.path / "log.txt").read_text()
    printed = capsys.readouterr().out
    assert text in log
    assert text in printed
    panel = " ".join(printed[printed.index("Result") :].replace("│", " ").split())
    assert text in panel
    assert text in (run.path / "report.html").read_text()
    extended = train(with_trainer(with_training(tiny_config(tmp_path), early_stopping={"patience": 9}), max_epochs=5))
    assert len(extended.metrics()) == 5
    assert extended.info["stopped_early"] is None
    assert "Stopped early" not in (run.path / "report.html").read_text()


def test_fast_dev_run_leaves_the_run_alone(tmp_path):
    config = tiny_config(tmp_path)
    run = train_only(config)
    before = (run.path / "metrics.csv").read_bytes()
    quick = train(with_trainer(config, fast_dev_run=True))
    assert quick.path.name == ".tiny-quick"
    assert (run.path / "metrics.csv").read_bytes() == before


def test_overfit_batches_drives_one_batch_down(tmp_path):
    config = with_trainer(tiny_config(tmp_path), overfit_batches=1, max_epochs=150)
    rows = train_only(config).metrics()
    assert rows[-1]["train/forces_mae"] < 0.3 * rows[0]["train/forces_mae"]


class Springs(nn.Module):
    """A user's own potential: a spring of one trainable stiffness between neighbours."""

    def __init__(self, species, cutoff, stiffness: float = 0.1) -> None:
        super().__init__()
        self.species, self.cutoff = species, cutoff
        self.stiffness = nn.Parameter(torch.tensor(stiffness, dtype=torch.float64))

    def forward(self, batch):
        length = batch["edge_vectors"].norm(dim=1)
        pair = 0.5 * self.stiffness * (self.cutoff - length) ** 2
        return torch.zeros(len(batch["species"]), dtype=torch.float64).index_add(0, batch["edge_index"][1], pair)


def test_user_model_by_import_path(tmp_path):
    config = {**tiny_config(tmp_path), "model": {"name": "tests.training.test_training.Springs", "stiffness": 0.2}}
    run = train_only(config)
    assert load(run).state_dict() is not None
    assert load_run(run.path).info["model"]["stiffness"] == 0.2
    with pytest.raises(ForgefieldError, match=r"model\.stifness.*stiffness"):
        train_only({**config, "name": "x", "model": {"name": "tests.training.test_training.Springs", "stifness": 1.0}})


class CountsSteps(Callback):
    seen = 0

    def __init__(self, start: int) -> None:
        CountsSteps.seen = start

    def on_train_batch_end(self, *arguments) -> None:
        CountsSteps.seen += 1


def test_user_callback_by_import_path(tmp_path):
    spec = {"name": "tests.training.test_training.CountsSteps", "start": 100}
    train_only(tiny_config(tmp_path, callbacks=[spec]))
    assert CountsSteps.seen == 115


@pytest.mark.parametrize(
    "optimizer", ["AdamW", {"name": "sgd", "momentum": 0.9, "nesterov": True}, "torch.optim.RAdam"]
)
def test_any_torch_optimiser(optimizer, tmp_path):
    rows = train_only(with_training(tiny_config(tmp_path), optimizer=optimizer, lr=1e-3)).metrics()
    assert all(math.isfinite(row["train/loss"]) for row in rows)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("training", {"optimizer": "adamm"}, "unknown name 'adamm'.*Adam"),
        ("training", {"optimizer": {"name": "adam", "wieght_decay": 1}}, "wieght_decay.*weight_decay"),
        ("training", {"scheduler": {"name": "StepLR", "step_size": 3, "interval": "hour"}}, "epoch or step"),
        ("training", {"scheduler": "StepLR"}, "StepLR cannot be built.*step_size"),
        ("trainer", {"max_epoch": 3}, r"trainer\.max_epoch.*max_epochs"),
        ("trainer", {"precision": "bf16-mixed"}, r"training\.precision"),
        ("trainer", {"num_nodes": 2}, "one process was started, on one node"),
        ("trainer", {"max_time": "soon"}, r"trainer\.max_time"),
        ("trainer", {"gradient_clip_val": 1.0}, None),
    ],
)
def test_impossible_settings_are_refused_before_training(section, change, message, tmp_path):
    config = tiny_config(tmp_path)
    config[section] = {**config[section], **change}
    if message is None:
        train_only(config)
        return
    with pytest.raises(ForgefieldError, match=message):
        train(config)


def test_contradicting_clipping_is_refused(tmp_path):
    config = with_trainer(with_training(tiny_config(tmp_path), clip_norm=1.0), gradient_clip_val=2.0)
    with pytest.raises(ForgefieldError, match="contradict"):
        train(config)


def test_a_diverging_training_stops_with_a_clear_message_and_keeps_good_checkpoints(tmp_path):
    config = with_training(tiny_config(tmp_path), lr=1e30, optimizer="sgd", checkpoint={"every_steps": 1})
    with pytest.raises(ForgefieldError, match=r"The training loss is (nan|inf).*training\.lr"):
        train(config)
    assert (
        "lr 1e+30" in (tmp_path / "runs" / "tiny" / "log.txt").read_text()
    )  # a training that failed can be looked into


def test_same_seed_same_bits_other_seed_other_model(tmp_path):
    config = tiny_config(tmp_path)
    a, b, c = (train_only({**config, "name": name, "seed": seed}) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert (a.path / "metrics.csv").read_bytes() == (b.path / "metrics.csv").read_bytes()
    assert (a.path / "metrics.csv").read_bytes() != (c.path / "metrics.csv").read_bytes()


def test_a_batch_that_is_evaluated_several_times_is_measured_once(tmp_path):
    """LBFGS calls the model up to max_iter times per batch; the first row must be the error of the starting weights."""
    config = with_trainer(tiny_config(tmp_path), max_epochs=1, limit_train_batches=1)
    lbfgs = train_only({**with_training(config, optimizer={"name": "lbfgs", "max_iter": 3}, lr=1e-2), "name": "lbfgs"})
    adam = train_only({**config, "name": "adam"})
    assert lbfgs.metrics()[0]["train/forces_mae"] == pytest.approx(adam.metrics()[0]["train/forces_mae"], rel=1e-12)


def test_lightning_loggers_get_the_rows(tmp_path):
    logger = {"name": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path / "logs")}
    run = train_only(with_trainer(tiny_config(tmp_path), logger=logger))
    (written,) = (tmp_path / "logs").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(written.open()) if row["val/loss"]]
    assert [float(row["val/loss"]) for row in rows] == [row["val/loss"] for row in run.metrics()]


@pytest.mark.parametrize("every", [2, 7])
def test_lightning_loggers_get_every_nth_step_and_the_settings(every, tmp_path):
    """Of 15 steps; also where the run is made longer, from where it was."""
    logger = {"name": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path / "logs")}
    config = with_trainer(tiny_config(tmp_path), logger=logger, log_every_n_steps=every)
    train_only(config)
    train_only(with_trainer(config, max_epochs=5))
    seen = []
    for written in sorted((tmp_path / "logs").rglob("metrics.csv")):
        rows = [row for row in csv.DictReader(written.open()) if row["step/loss"]]
        assert all(float(row["step/loss"]) > 0 and float(row["step/lr"]) > 0 for row in rows)
        seen += [int(float(row["step"])) for row in rows]
        settings = yaml.safe_load(written.with_name("hparams.yaml").read_text())
        assert settings["training"]["lr"] == config["training"]["lr"]
        assert settings["model"]["name"] == "nequip"
        assert settings["task"]["forces"]["weight"] == 1.0
    assert seen == list(range(every, 26, every))


def test_a_users_model_checkpoint_works_next_to_forgefields(tmp_path):
    spec = {"name": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": str(tmp_path / "mine"), "save_last": True}
    train_only(tiny_config(tmp_path, callbacks=[spec]))
    assert (tmp_path / "mine" / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("training", {"monitor": "val/force_mae"}, r"training\.monitor=val/force_mae.*val/forces_mae"),
        ("training", {"early_stopping": {"monitor": "val/los"}}, r"early_stopping\.monitor=val/los.*val/loss"),
        ("training", {"optimizer": {"name": "adam", "betas": 3}}, "Adam cannot be built"),
        ("trainer", {"accelerator": "gpu"}, "trainer"),
        ("trainer", {"enable_checkpointing": False}, "enable_checkpointing"),
        ("trainer", {"barebones": True}, "barebones"),
        ("trainer", {"max_epochs": "abc"}, r"trainer\.max_epochs must be an integer"),
        ("trainer", {"max_epochs": 0}, r"trainer\.max_epochs=0 trains nothing"),
        ("data", {"val": "unlabelled.extxyz"}, r"data\.val"),
        ("data", {"test": "unlabelled.extxyz"}, r"data\.test"),
    ],
)
def test_impossible_settings_are_refused_with_one_sentence(section, change, message, tmp_path, monkeypatch):
    if change.get("accelerator") == "gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    bare = emt_frames(2, seed=5)
    for atoms in bare:
        atoms.calc = None
    ase.io.write("unlabelled.extxyz", bare, format="extxyz")
    config = tiny_config(tmp_path)
    config[section] = {**config[section], **change}
    with pytest.raises(ForgefieldError, match=message):
        train(config)


def test_inference_mode_false_is_what_we_do_anyway(tmp_path):
    run = train_only(with_trainer(tiny_config(tmp_path), inference_mode=False, max_epochs=1))
    assert run.metrics()[0]["val/forces_mae"] > 0


def test_without_validation_batches_nothing_waits_for_a_validation(tmp_path):
    config = with_training(tiny_config(tmp_path), scheduler={"name": "plateau", "patience": 0})
    run = train_only(with_trainer(config, limit_val_batches=0))
    assert "val/loss" not in run.metrics()[0]


def test_a_command_that_was_refused_leaves_no_folder(tmp_path):
    for section, change in (
        ("trainer", {"num_nodes": 2}),
        ("model", {"lmax": 2}),
        ("training", {"optimizer": "adamm"}),
    ):
        config = tiny_config(tmp_path)
        config[section] = {**config[section], **change}
        with pytest.raises(ForgefieldError):
            train(config)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_fewer_epochs_than_were_trained_is_one_clear_error_and_changes_nothing(tmp_path):
    config = tiny_config(tmp_path)
    run = train_only(config)
    before = (run.path / "config.yaml").read_bytes()
    with pytest.raises(ForgefieldError, match=r"completed 3 epochs.*max_epochs=1"):
        train_only(config, "trainer.max_epochs=1")
    assert (run.path / "config.yaml").read_bytes() == before


def test_cosine_takes_its_length_from_the_run(tmp_path):
    rows = train_only(with_training(tiny_config(tmp_path), scheduler="cosine")).metrics()
    assert [row["lr"] for row in rows] == pytest.approx([0.0075, 0.0025, 0.0], abs=1e-12)


def test_code_inside_a_run_is_not_executed(tmp_path):
    run = train_only(with_trainer(tiny_config(tmp_path), max_epochs=1))
    (run.path / "sneaky.py").write_text("open('executed', 'w')")
    run.write_info(model={**run.info["model"], "name": "sneaky.Model", "module_folder": str(run.path)})
    with pytest.raises(ForgefieldError, match="code in a run is never executed"):
        load(run)


def test_a_typo_on_an_existing_run_is_named_as_a_typo(tmp_path):
    config = tiny_config(tmp_path)
    train_only(config)
    with pytest.raises(ForgefieldError, match=r"model\.lmax.*l_max"):
        train_only(config, "model.lmax=2")


def test_the_model_of_the_docs_trains(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "own-model.md").read_text()
    (tmp_path / "springs_of_the_docs.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    run = train_only({**tiny_config(tmp_path), "model": {"name": "springs_of_the_docs.Springs", "power": 2}})
    rows = run.metrics()
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


class Mistaken(Springs):
    """A user's own model with a mistake in it."""

    def forward(self, batch):
        return super().forward(batch) + "energy"


def test_a_mistake_in_a_user_model_keeps_its_traceback(tmp_path):
    config = {**tiny_config(tmp_path), "model": {"name": "tests.training.test_training.Mistaken"}}
    with pytest.raises(TypeError, match="unsupported operand"):
        train(config)
