"""Fields as targets in a config: written beside energy and forces, checked like them, stored and compared like them."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from forgefield.config.checking import stored_config
from forgefield.config.diff import config_diff
from forgefield.config.loading import load_config
from forgefield.config.sources import Sources
from forgefield.config.template import commented_yaml
from forgefield.settings import Config
from forgefield.tasks.options import FieldTargetOptions, ScheduleOptions, TargetOptions, TaskOptions, targets_of

DATA = "data: {train: a.xyz, labels: {fields: {band_gap: {unit: eV}, energy_above_hull: {}, q: atom}}}\n"


def stored(text: str) -> Config:
    return stored_config(yaml.safe_load(text), Sources())


def test_the_examples_of_the_docs_load(load):
    guides = Path(__file__).parents[2] / "docs" / "guides"
    pages = ("properties.md", "vectors-and-tensors.md", "fine-tune.md")
    examples = [
        re.findall(r"```yaml\n(.*?)```", (guides / page).read_text(encoding="utf-8"), re.DOTALL) for page in pages
    ]
    first, turning, extra_outputs = (load(texts[-1]) for texts in examples)
    assert list(targets_of(first.task)) == ["band_gap", "charge", "dos", "formation_energy", "space_group"]
    assert [target.kind for target in targets_of(turning.task).values()] == ["vector", "symmetric"]
    assert extra_outputs.training.lr_groups == {"model.*": 0.1}


def test_a_field_is_a_target_by_its_own_name(load):
    text = DATA + "task: {energy: {}, q: {}, band_gap: {loss: mae, normalise: {mean: 1, scale: 2}, schedule: {to: 3}}}"
    config = load(text, "task.band_gap.weight=4", "task.energy_above_hull={reduce: sum, per_atom: root}")
    expected = TaskOptions(
        energy=TargetOptions(),
        fields={
            "q": FieldTargetOptions(),
            "band_gap": FieldTargetOptions(
                weight=4.0, loss="mae", normalise={"mean": 1, "scale": 2}, schedule=ScheduleOptions(to=3)
            ),
            "energy_above_hull": FieldTargetOptions(reduce="sum", per_atom="root"),
        },
    )
    assert config.task == expected
    assert list(targets_of(config.task)) == ["energy", "band_gap", "energy_above_hull", "q"]


def test_normalise_on_the_command_line_replaces_the_whole(load):
    config = load(DATA + "task: {band_gap: {normalise: {mean: 1, scale: 2}}}", "task.band_gap.normalise=none")
    assert config.task.fields["band_gap"].normalise == "none"
    config = load(DATA + "task: {band_gap: {}, q: {}}", "~task.q", "task.band_gap=null", "task.energy={}")
    assert list(targets_of(config.task)) == ["energy"]


def test_what_is_written_loads_to_the_same_config_and_shows_no_difference(load, folder):
    config = load(DATA + "task: {band_gap: {loss: huber, huber_delta: 0.3}, q: {}, energy_above_hull: {reduce: sum}}")
    text = commented_yaml(config)
    assert "  band_gap:\n" in text
    assert "fields:" not in text.partition("\ntask:")[2]
    (folder / "again.yaml").write_text(text)
    again = load_config("again.yaml", ["name=my"])
    assert again == config
    assert load_config(config) == config
    assert load_config(asdict(config)) == config
    assert config_diff(stored(text), config) == []


def test_differences_name_the_key_as_it_is_written(load):
    old = stored(commented_yaml(load(DATA + "task: {band_gap: {}}")))
    changes = config_diff(old, load(DATA + "task: {band_gap: {loss: mae}, q: {}}"))
    assert [(change.key, change.meaning) for change in changes] == [("task.band_gap.loss", True), ("task.q", True)]


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("bandgap: {}", "my.yaml, line 3: unknown key 'task.bandgap'. Did you mean 'task.band_gap'?"),
        (
            "polar: {}",
            "unknown key 'task.polar'. 'task' has: energy, forces, stress, virial, denoise, branches, band_gap, "
            "energy_above_hull, q.",
        ),
        ("band_gap: {weigth: 1}", "unknown key 'task.band_gap.weigth'. Did you mean 'task.band_gap.weight'?"),
        ("band_gap: {species_weights: {H: 1}}", "unknown key 'task.band_gap.species_weights'."),
        (
            "band_gap: {reduce: men}",
            "'task.band_gap.reduce' must be sum, mean, max, attention or null, not 'men'. Did you mean 'mean'?",
        ),
        ("band_gap: {per_atom: true}", "'task.band_gap.per_atom' applies to extensive values only"),
        ("band_gap: {loss: meas}", "'task.band_gap.loss' must be mse, mae, rmse, huber or an import path, not 'meas'."),
        ("band_gap: {huber_delta: 2}", "'task.band_gap.huber_delta' applies to loss huber only"),
        (
            "band_gap: {normalise: aut}",
            "'task.band_gap.normalise' must be auto, none or {mean: ..., scale: ...}, not 'aut'. Did you mean 'auto'?",
        ),
        ("band_gap: {normalise: {mean: 1}}", "'task.band_gap.normalise' must be auto, none or {mean: ..., scale: ...}"),
        ("band_gap: {normalise: {mean: 1, scale: 0}}", "'task.band_gap.normalise.scale' must be a positive number"),
        ("band_gap: {normalise: {mean: x, scale: 1}}", "'task.band_gap.normalise.mean' must be a number"),
        ("band_gap: {schedule: {to: -1}}", "'task.band_gap.schedule.to' must be a finite number, zero or larger"),
        ("band_gap: {weight: -1}", "'task.band_gap.weight' must be a finite number, zero or larger"),
        ("band_gap: 3", "'task.band_gap' must be a section with the keys weight, loss,"),
    ],
)
def test_invalid_targets_are_refused_with_their_location(task, sentence, refused):
    assert sentence in refused(f"{DATA}task:\n  {task}")


def test_without_declared_fields_a_name_may_be_one_of_a_store_unless_it_looks_like_a_target(load, refused):
    config = load("data: {train: a.store}\ntask: {polarisation: {}}")
    assert list(targets_of(config.task)) == ["polarisation"]
    assert "Did you mean 'task.forces'?" in refused("data: {train: a.store}\ntask: {force: {}}")
    assert "Did you mean 'task.energy'?" in refused("task: {forces: {}}", "task.enrgy.weight=3")
    assert "unknown key 'task.bandgap.weight'" in refused(DATA + "task: {q: {}}", "task.bandgap.weight=3")
