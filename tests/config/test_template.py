"""Commented configs: comments from the schema, and an exact way back."""

import dataclasses
import typing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from forgefield.config.loading import load_config
from forgefield.config.option import class_doc, field_docs
from forgefield.config.reference import sections
from forgefield.config.template import commented_yaml, flow
from forgefield.data.options import DataOptions, UnitOptions
from forgefield.training.options import CheckpointOptions, EarlyStoppingOptions, TrainingOptions

SECTIONS = [section.cls for section in sections()]


def test_field_docstrings_are_read_from_the_source():
    docs = field_docs(TrainingOptions)
    assert docs["lr"] == "Learning rate."
    # Several lines become one.
    assert "\n" not in field_docs(DataOptions)["reference_energies"]
    assert class_doc(DataOptions) is None
    assert class_doc(UnitOptions).startswith("Units of labels")


@pytest.mark.parametrize("cls", SECTIONS)
def test_every_setting_is_documented(cls):
    documented = field_docs(cls)
    for field in dataclasses.fields(cls):
        section = typing.get_type_hints(cls)[field.name]
        covered = class_doc(cls) or (section in SECTIONS and class_doc(section))
        assert field.name in documented or covered, f"{cls.__name__}.{field.name} has no docstring"


def test_every_comment_of_the_schema_is_in_the_text():
    text = " ".join(commented_yaml(load_config({"task": {"energy": {}}, "training": {"early_stopping": {}}})).split())
    text = text.replace(" # ", " ")
    for cls in (DataOptions, TrainingOptions, CheckpointOptions, EarlyStoppingOptions):
        for name, doc in field_docs(cls).items():
            assert doc in text, name


def round_trip(folder, config):
    (folder / "again.yaml").write_text(commented_yaml(config), encoding="utf-8")
    return load_config("again.yaml")


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"task": {"energy": {"loss": "huber"}, "forces": {"species_weights": {"H": 2.0, "No": 1.0}}, "stress": {}}},
        {"task": {"stress": None, "forces": {"loss": "my.loss"}}},
        {"training": {"early_stopping": {"patience": 3}, "optimizer": {"name": "adamw", "betas": [0.9, 0.99]}}},
        {"training": {"lr": 1e-5, "ema": None}, "trainer": {"max_epochs": 3, "limit_val_batches": 1.0}},
        {
            "model": {
                "name": "a.B",
                "zbl": True,
                "scales": {"H": 1e-7, 1: 2},
                "text": "1e3",
                "list": [[1], []],
                "n": None,
            }
        },
        {"data": {"train": ["a.xyz", {"path": "b c.xyz", "weight": 2}], "val": {"indices": [1, 2]}, "indices": ":7"}},
        {
            "task": {
                "branches": {
                    "wet": {"energy": {}, "forces": {"loss": "huber"}},
                    "direct": {"energy": {}},
                    "net_zero": {"stress": {}},
                }
            }
        },
        {"callbacks": ["a.B", {"name": "c.D", "flag": False, "nested": {"x": "yes"}}]},
        {"name": "on", "out": "1_000", "data": {"species": ["N", "No", "Y"], "labels": {"energy": "null"}}},
    ],
)
def test_the_text_loads_to_the_same_config(folder, content):
    config = load_config({"name": "n", **content})
    assert round_trip(folder, config) == config


NAMES = st.text(max_size=12).filter(lambda text: "${" not in text and text != "???" and text.isprintable())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES.filter(bool), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["a", "b", "on", "x1"]), VALUES, max_size=3), st.floats(1e-300, 1e300))
def test_any_options_survive(folder, model, lr):
    config = load_config({"name": "n", "model": {"name": "my.Net", **model}, "training": {"lr": lr}})
    again = round_trip(folder, config)
    assert again == config
    assert again.training.lr == lr


@given(st.text(max_size=20).filter(lambda text: "${" not in text and text != "???"))
def test_one_line_values_are_one_line_and_exact(text):
    line = flow({"key": [text, text]})
    assert len(line.splitlines()) == 1
    assert OmegaConf.to_container(OmegaConf.create(line)) == {"key": [text, text]}


def test_notes_and_header_are_written(folder):
    config = load_config({"name": "n", "model": {"name": "nequip", "l_max": 2}})
    text = commented_yaml(config, header="Made by a test.\nSecond line.", notes={"model.l_max": "Highest order."})
    assert text.startswith("# Made by a test.\n# Second line.\n")
    assert "  l_max: 2  # Highest order.\n" in text
    (folder / "n.yaml").write_text(text)
    assert load_config("n.yaml") == config
