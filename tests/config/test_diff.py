"""Which changes of a config a run may be continued with."""

from pathlib import Path

import pytest

from forgefield.config.checking import stored_config
from forgefield.config.diff import config_diff, format_diff
from forgefield.config.loading import load_config
from forgefield.config.sources import Sources, read_yaml
from forgefield.config.template import commented_yaml
from forgefield.settings import Config, as_dict

BASE = {
    "data": {"train": "a.xyz"},
    "task": {"energy": {}, "forces": {}},
    "trainer": {"max_epochs": 10},
    "name": "x",
}


def stored(file: str) -> Config:
    return stored_config(read_yaml(Path(file)), Sources())


def changes(*overrides):
    return config_diff(load_config(BASE), load_config(BASE, overrides))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("trainer.max_epochs=20", "trainer.max_epochs"),
        ("trainer.max_time='00:01:00:00'", "trainer.max_time"),
        ("trainer.max_steps=5", "trainer.max_steps"),
        ("trainer.devices=2", "trainer.devices"),
        ("trainer.enable_progress_bar=false", "trainer.enable_progress_bar"),
        ("trainer.log_every_n_steps=7", "trainer.log_every_n_steps"),
        ("training.checkpoint.every_steps=7", "training.checkpoint.every_steps"),
        ("training.tensorboard=2", "training.tensorboard"),
        ("training.kernels.radial=exact", "training.kernels.radial"),
        ("training.early_stopping={patience: 3}", "training.early_stopping"),
        ("data.test=0.1", "data.test"),
        ("data.cache=false", "data.cache"),
        ("name=y", "name"),
        ("out=elsewhere", "out"),
    ],
)
def test_how_long_where_and_how_visibly_may_change(override, key):
    (change,) = changes(override)
    assert (change.key, change.meaning) == (key, False)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.lr=1", "training.lr"),
        ("seed=1", "seed"),
        ("data.batch.frames=3", "data.batch.frames"),
        ("data.cutoff=4", "data.cutoff"),
        ("data.train=b.xyz", "data.train"),
        ("model.l_max=2", "model.l_max"),
        ("model.preset=M", "model.preset"),
        ("~task.forces", "task.forces"),
        ("task.energy.weight=3", "task.energy.weight"),
        ("task.stress={}", "task.stress"),
        ("training.ema=null", "training.ema"),
        ("training.precision=float64", "training.precision"),
        ("training.optimizer=sgd", "training.optimizer"),
        ("trainer.limit_train_batches=3", "trainer.limit_train_batches"),
        ("trainer.check_val_every_n_epoch=3", "trainer.check_val_every_n_epoch"),
        ("callbacks=[a.B]", "callbacks"),
    ],
)
def test_everything_else_changes_the_meaning(override, key):
    (change,) = changes(override)
    assert (change.key, change.meaning) == (key, True)


def test_equal_configs_do_not_differ_also_when_one_comes_from_the_run_folder(folder):
    config = load_config(BASE)
    assert config_diff(config, config) == []
    (folder / "stored.yaml").write_text(commented_yaml(config))
    assert config_diff(stored("stored.yaml"), config) == []
    assert config_diff(config, stored("stored.yaml")) == []


def test_a_setting_that_an_older_config_lacks_counts_as_its_default():
    old = load_config(BASE)
    values = as_dict(old)
    del values["training"]["accumulate"]
    assert config_diff(stored_config(values, Sources()), old) == []
    (change,) = config_diff(stored_config(values, Sources()), load_config(BASE, ["training.accumulate=2"]))
    assert (change.old, change.new) == (1, 2)


def test_true_is_not_one():
    old, new = (stored_config({"model": {"zbl": value}}, Sources()) for value in (True, 1))
    assert [change.key for change in config_diff(old, new)] == ["model.zbl"]


def test_the_text_marks_what_matters():
    text = format_diff(changes("training.lr=0.5", "trainer.max_epochs=20", "model.l_max=2"))
    assert text.splitlines() == [
        "! model.l_max         (not given) -> 2",
        "! training.lr         0.01 -> 0.5",
        "  trainer.max_epochs  10 -> 20",
    ]
