"""What a config file and overrides mean, when they are right."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from forgefield.config.loading import load_config, override_config, preset_path, require_training_data
from forgefield.config.typed import select
from forgefield.data.options import DataOptions
from forgefield.errors import ForgefieldError
from forgefield.settings import Config
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.training.options import TrainingOptions

MINIMAL = "data: {train: water.extxyz}\n"


def test_all_defaults_are_there_and_the_name_is_that_of_the_file(load):
    config = load(MINIMAL)
    expected = Config()
    expected.name = "my"
    expected.data.train = str(Path("water.extxyz").absolute())
    assert config == expected


def test_a_config_becomes_the_schemas_dataclasses(load):
    run = load("data: {train: a.xyz}\ntask: {forces: {weight: 10}}\ntrainer: {max_epochs: 2}\ncallbacks: [a.B]")
    assert type(run) is Config
    assert type(run.data) is DataOptions
    assert [type(value) for value in (run.model, run.trainer, run.callbacks)] == [dict, dict, list]
    assert run.task == TaskOptions(forces=TargetOptions(weight=10.0))


def test_the_config_of_the_design_page_loads(load):
    config = load(
        """
        data:
          train: water/*.extxyz            # file, folder, glob, or a list of {path, weight}
          val: 0.1                         # a share of train, or files
          cutoff: 5.0
          batch: {frames: 8}
        model: {name: nequip, preset: S}
        task:
          energy: {weight: 1, per_atom: true}
          forces: {weight: 10}
        training: {lr: 0.01, ema: 0.999}
        trainer: {max_epochs: 100, devices: auto}
        """
    )
    assert config.trainer == {"max_epochs": 100, "devices": "auto"}
    assert config.task.forces.weight == 10.0
    assert config.task.stress is None


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.lr=3e-3", "training.lr", 3e-3),
        ("++training.lr=3e-3", "training.lr", 3e-3),
        ("+training.lr=3e-3", "training.lr", 3e-3),
        ("trainer.num_nodes=2", "trainer.num_nodes", 2),
        ("++trainer.num_nodes=2", "trainer.num_nodes", 2),
        ("data.species=[H,O]", "data.species", ["H", "O"]),
        ("data.species=[N,'No']", "data.species", ["N", "No"]),
        ("training.early_stopping.patience=7", "training.early_stopping.patience", 7),
        ("training.early_stopping={}", "training.early_stopping.patience", 50),
        ("training.ema=null", "training.ema", None),
        ("training.optimizer={name: adamw, weight_decay: 1e-3}", "training.optimizer.weight_decay", 1e-3),
        ("model.l_max=3", "model.l_max", 3),
        ('name="a, b = c"', "name", "a, b = c"),
        ("data.units.energy=kcal/mol", "data.units.energy", "kcal/mol"),
        ("data.reference_energies={H: -13.6}", "data.reference_energies.H", -13.6),
        ("callbacks=[my.Callback]", "callbacks", ["my.Callback"]),
        ("task={energy: {}, forces: {weight: 3}}", "task.forces.weight", 3.0),
        ("training.checkpoint.every_epochs=null", "training.checkpoint.every_epochs", None),
    ],
)
def test_overrides_reach_settings_the_file_does_not_mention(load, override, key, value):
    assert select(load(MINIMAL, override), key) == value


def test_removing_a_setting_of_the_file_brings_its_default_back(load):
    text = MINIMAL + "training: {lr: 1.0, ema: 0.5}\ntask: {energy: {}, forces: {}}\n"
    config = load(text, "~training.ema", "~task.forces")
    assert (config.training.lr, config.training.ema) == (1.0, 0.99)
    assert config.task.forces is None
    assert config.task.energy is not None
    assert load(text, "~training").training == TrainingOptions()


def test_overrides_apply_in_order(load):
    assert load(MINIMAL, "seed=1", "seed=2").seed == 2


def test_empty_sections_are_defaults_and_null_targets_are_off(load):
    config = load(MINIMAL + "training:\ntrainer:\ncallbacks:\ntask: {energy: {}, forces: null}\n")
    assert config.training.lr == 0.01
    assert (config.trainer, config.callbacks) == ({}, [])
    assert config.task.energy.weight == 1.0
    assert config.task.forces is None
    assert config.task.stress is None


def test_a_model_section_replaces_the_default_model(load):
    assert load(MINIMAL).model == {"name": "nequip", "preset": "S"}
    assert load(MINIMAL, "model.l_max=2").model == {"name": "nequip", "preset": "S", "l_max": 2}
    assert load(MINIMAL + "model: {name: my_model.Net, width: 3}").model == {"name": "my_model.Net", "width": 3}
    assert load(MINIMAL, "model.name=my_model.Net").model == {"name": "my_model.Net"}
    assert load_config({"model": {"name": "my_model.Net"}}).model == {"name": "my_model.Net"}


def test_variables_and_interpolation(load, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_TEST_LR", "0.02")
    text = """
        effective_batch: 32
        symbols: [H, O]
        data:
          train: a.xyz
          species: ${symbols}
          batch: {frames: "${int_div:${effective_batch},5}"}
          eval_batch: ${int_mul:${.batch.frames},2}
        training: {lr: "${oc.env:FORGEFIELD_TEST_LR}"}
        """
    config = load(text)
    assert (config.data.batch.frames, config.data.eval_batch, config.training.lr) == (6, 12, 0.02)
    assert config.data.species == ["H", "O"]
    assert load(text, "effective_batch=64").data.batch.frames == 12
    # A variable stays legal when an override replaces the setting that used it.
    assert load(text, "data.batch.frames=3").data.batch.frames == 3


def test_defaults_lists_and_config_groups(load, folder):
    (folder / "model").mkdir()
    (folder / "model" / "small.yaml").write_text("name: nequip\nnum_layers: 1\n")
    (folder / "model" / "big.yaml").write_text("name: nequip\nnum_layers: 6\n")
    (folder / "base.yaml").write_text("training: {lr: 0.5, ema: 0.5}\nscale: 2\n")
    text = """
        defaults:
          - base
          - model: small
          - _self_
        data: {train: a.xyz}
        training: {lr: 0.25}
        seed: ${scale}
        """
    config = load(text)
    assert config.model == {"name": "nequip", "num_layers": 1}
    assert (config.training.lr, config.training.ema, config.seed) == (0.25, 0.5, 2)
    assert load(text, "model=big", "model.l_max=2").model == {"name": "nequip", "num_layers": 6, "l_max": 2}


def test_yaml_anchors_and_merge_keys(load):
    config = load(
        """
        data: {train: a.xyz}
        task:
          energy: &target {weight: 2, loss: mae}
          forces:
            <<: *target
            weight: 5
        """
    )
    assert (config.task.forces.loss, config.task.forces.weight) == ("mae", 5.0)


def test_other_suffix_and_odd_file_names_work(folder):
    for name in ("a.yml", "two words.yaml", "x=1.yaml", "a.b.yaml"):
        (folder / name).write_text(MINIMAL)
        assert load_config(name).name == Path(name).stem


def test_paths_are_absolute_here_first_then_next_to_the_config(folder):
    beside = folder / "configs"
    beside.mkdir()
    for place in (folder / "both.xyz", beside / "both.xyz", beside / "train1.xyz", beside / "split.txt"):
        place.write_text("1\n")
    (beside / "c.yaml").write_text(
        "data: {train: [both.xyz, {path: 'train?.xyz', weight: 2}, gone.xyz], val: {indices: split.txt}, "
        "test: 5, indices: '0:10'}"
    )
    data = load_config("configs/c.yaml").data
    assert data.train == [
        str(folder / "both.xyz"),
        {"path": str(beside / "train?.xyz"), "weight": 2},
        str(folder / "gone.xyz"),
    ]
    assert data.val == {"indices": str(beside / "split.txt")}
    assert (data.test, data.indices) == (5, "0:10")


def test_a_group_of_a_file_next_to_the_config(folder):
    (folder / "configs").mkdir()
    (folder / "configs" / "water.h5").write_text("1")
    (folder / "configs" / "c.yaml").write_text("data: {train: 'water.h5#/data_0', val: 0}")
    assert load_config("configs/c.yaml").data.train == f"{folder}/configs/water.h5#/data_0"


def test_home_is_expanded(load):
    assert load("data: {train: ~/a.xyz}").data.train == os.path.expanduser("~/a.xyz")


def test_a_loaded_config_loads_again_to_itself(load):
    config = load(MINIMAL + "task: {energy: {}, forces: {loss: huber}, stress: {}}\ntrainer: {max_epochs: 3}\n")
    assert load_config(config) == config
    assert load_config(asdict(config)) == config


def test_mappings_go_through_the_same_checks():
    assert load_config({"data": {"train": "a.xyz"}}, ["training.lr=1"]).training.lr == 1.0
    assert load_config({"x": 3, "seed": "${x}"}).seed == 3
    with pytest.raises(ForgefieldError, match=r"config: unknown key 'training\.lrr'\. Did you mean 'training\.lr'\?"):
        load_config({"training": {"lrr": 1}})
    with pytest.raises(ForgefieldError, match="not a list"):
        load_config([1])  # type: ignore[arg-type]


def test_without_a_file_the_defaults_alone():
    config = load_config(None, ["seed=4"])
    assert (config.name, config.seed, config.data.train) == (None, 4, None)


def test_training_needs_data(load):
    with pytest.raises(ForgefieldError, match=r"my\.yaml: 'data\.train' is missing"):
        require_training_data(load("seed: 1"), "my.yaml")
    require_training_data(load(MINIMAL))


def test_the_callers_own_hydra_is_left_alone(folder):
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    (folder / "theirs.yaml").write_text("a: 1\n")
    (folder / "my.yaml").write_text(MINIMAL)
    with initialize_config_dir(str(folder), version_base="1.3"):
        load_config("my.yaml")
        with pytest.raises(ForgefieldError):
            load_config("my.yaml", ["training.lrr=1"])
        assert compose("theirs").a == 1
    assert not [name for name in ConfigStore.instance().repo if "forgefield" in name]


def test_overrides_of_a_stored_config_are_limited_to_what_makes_sense(load):
    config = load(MINIMAL)
    allowed = ("data.labels", "data.units")
    changed = override_config(config, ["data.units.energy=kcal/mol"], allowed=allowed, verb="test")
    assert changed.data.units.energy == "kcal/mol"
    with pytest.raises(ForgefieldError, match=r"'training\.lr' does not apply to test, which takes data\.labels"):
        override_config(config, ["training.lr=1"], allowed=allowed, verb="test")


def test_the_built_in_example_is_a_valid_config():
    assert load_config(preset_path("example")).name == "example"
    with pytest.raises(ForgefieldError, match=r"no built-in config 'exampel'\. Did you mean 'example'\?"):
        preset_path("exampel")


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=12)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lr=st.floats(1e-8, 1e3),
    frames=st.integers(1, 10**6),
    shuffle=st.booleans(),
    species=st.lists(st.sampled_from(["H", "C", "N", "O", "Cu", "Y", "No"]), min_size=1, max_size=4, unique=True),
    label=TEXT.filter(lambda text: "${" not in text and "\\" not in text and text.strip() == text and text != "???"),
)
def test_overrides_mean_what_the_file_means(load, lr, frames, shuffle, species, label):
    """A value written into the file and the same value given as an override load to equal configs."""
    values = {
        "training.lr": lr,
        "data.batch.frames": frames,
        "data.shuffle": shuffle,
        "data.species": species,
        "data.labels.energy": label,
    }
    by_override = load(MINIMAL, *(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()))
    written = OmegaConf.create(MINIMAL)
    for key, value in values.items():
        OmegaConf.update(written, key, value)
    by_file = load(OmegaConf.to_yaml(written))
    assert by_override == by_file
    assert by_file.training.lr == lr
    assert by_file.data.labels.energy == label
    assert by_file.data.species == species


@pytest.mark.parametrize("key", ["training.scheduler", "training.optimizer", "model"])
def test_a_named_component_on_the_command_line_replaces_the_one_in_the_file(key):
    section, _, name = key.partition(".")
    old, new = {"name": "old", "a": 1, "b": 2}, "{name: other, c: 3}"
    config = load_config({section: {name: old} if name else old}, [f"{key}={new}", f"{key}.d=4"])
    assert select(config, key) == {"name": "other", "c": 3, "d": 4}


def test_single_options_of_a_component_are_changed_in_place():
    config = load_config(
        {"training": {"scheduler": {"name": "StepLR", "step_size": 5}}}, ["training.scheduler.gamma=0.5"]
    )
    assert dict(config.training.scheduler) == {"name": "StepLR", "step_size": 5, "gamma": 0.5}


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("data.reference_energies", {"H": -13.6, "O": -432.0}, {"H": -1.0}),
        ("data.train", {"path": "/a.xyz", "weight": 5}, {"path": "/b.xyz"}),
        ("data.train", ["/a.xyz", "/b.xyz"], {"path": "/c.xyz"}),
        ("data.val", {"path": "/a.xyz"}, {"indices": [1, 2]}),
        ("data.test", {"path": "/a.xyz", "weight": 5}, {"indices": [3]}),
        ("trainer.max_time", {"days": 1}, {"hours": 2}),
        ("trainer.logger", {"name": "a.Logger", "x": 1}, {"name": "b.Logger", "y": 2}),
        ("model.energy_shifts", {"H": 1.0, "O": 2.0}, {"H": 3.0}),
    ],
)
def test_a_mapping_that_is_one_value_replaces_the_old_one(load, key, old, new):
    written = OmegaConf.create(MINIMAL + "model: {name: nequip}")
    OmegaConf.update(written, key, old, merge=False)
    text = OmegaConf.to_yaml(written)
    given = json.dumps(new).replace('"', "")
    assert select(load(text, f"{key}={given}"), key) == new
    section, _, name = key.partition(".")
    assert select(load(text, f"{section}={{{name}: {given}}}"), key) == new


def test_a_task_on_the_command_line_is_the_whole_task(load):
    text = MINIMAL + "task: {energy: {weight: 3}, forces: {weight: 5, species_weights: {H: 2, O: 3}}, stress: null}\n"
    task = load(text, "task={forces: {loss: mae}}").task
    assert (task.energy, task.forces.weight, task.forces.loss, task.forces.species_weights) == (None, 1.0, "mae", None)
    forces = load(text, "task.forces.species_weights={O: 4}").task.forces
    assert (forces.weight, forces.species_weights) == (5.0, {"O": 4.0})
    # A target's options are settings of their own, so a mapping of some of them changes these alone.
    forces = load(text, "task.forces={loss: mae, species_weights: {O: 4}}").task.forces
    assert (forces.weight, forces.loss, forces.species_weights) == (5.0, "mae", {"O": 4.0})


def test_early_stopping_on_the_command_line_has_its_defaults_where_none_are_given(load):
    text = MINIMAL + "training: {lr: 0.5, early_stopping: {patience: 7, min_delta: 0.1}}\n"
    for override in ("training.early_stopping={patience: 9}", "training={early_stopping: {patience: 9}}"):
        training = load(text, override).training
        assert (training.lr, training.early_stopping.patience, training.early_stopping.min_delta) == (0.5, 9, 0.0)


def test_the_last_of_two_mappings_counts_alone(load):
    config = load(MINIMAL, "training.scheduler={name: A, a: 1}", "training.scheduler={name: B, b: 2}")
    assert config.training.scheduler == {"name": "B", "b": 2}


def test_model_options_without_a_name_are_merged(load):
    text = MINIMAL + "model: {name: nequip, preset: M, l_max: 2}\n"
    assert load(text, "model={l_max: 3}").model == {"name": "nequip", "preset": "M", "l_max": 3}


def test_a_mapping_also_replaces_what_a_config_group_gives(load, folder):
    for group, content in (("model", "name: nequip\nnum_layers: 1\nzbl: null\n"), ("task", "energy: {}\nstress: {}\n")):
        (folder / group).mkdir()
        (folder / group / "mine.yaml").write_text(content)
    text = "defaults: [model: mine, task: mine, _self_]\ndata: {train: a.xyz}\nmodel: {l_max: 2}\n"
    assert load(text).model == {"name": "nequip", "num_layers": 1, "zbl": None, "l_max": 2}
    config = load(text, "model.x=5", "model={name: my.Net, width: 3}", "model.depth=4", "task={forces: {}}")
    assert config.model == {"name": "my.Net", "width": 3, "depth": 4}
    assert (config.task.energy, config.task.stress) == (None, None)
    assert config.task.forces is not None


def test_a_replaced_mapping_takes_its_missing_values_with_it(load):
    text = MINIMAL + "training: {scheduler: {name: StepLR, step_size: '???'}}\n"
    assert load(text, "training.scheduler={name: B}").training.scheduler == {"name": "B"}


def test_a_plus_does_not_replace(load):
    text = MINIMAL + "training: {scheduler: {name: StepLR, step_size: 5}}\n"
    with pytest.raises(ForgefieldError, match=r"the config gives 'training\.scheduler' already"):
        load(text, "+training.scheduler={name: B}")
    assert load(MINIMAL, "+training.scheduler={name: B}").training.scheduler == {"name": "B"}


def test_threads_get_their_own_configs():
    """Hydra has one state for all threads."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda n: load_config({"seed": n}, [f"training.clip_norm={n + 1}"]), range(40)))
    finally:
        sys.setswitchinterval(before)
    assert [(config.seed, config.training.clip_norm) for config in found] == [(n, n + 1) for n in range(40)]
