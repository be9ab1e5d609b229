"""What may be varied, and what is refused."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.tuning.options import override, read_space


class Lowest:
    """Stands for a trial: takes the first choice, the low end of a range."""

    def suggest_categorical(self, key, choices):
        return choices[0]

    def suggest_int(self, key, low, high, step, log):
        return low

    def suggest_float(self, key, low, high, step, log):
        return low


def test_a_space_is_lists_and_ranges_and_the_command_line_comes_on_top():
    section = {"training.lr": {"log": ["1e-5", 0.01]}, "model.hidden": [[100], [200, 200]], "training.ema": [None, 0.9]}
    space = read_space(section, ["data.batch.points={range: [500, 4000, 500]}", "training.ema=[0.9, 0.99]"])
    assert [dimension.key for dimension in space] == [
        "training.lr",
        "model.hidden",
        "training.ema",
        "data.batch.points",
    ]
    assert [dimension.suggest(Lowest()) for dimension in space] == [1e-5, [100], 0.9, 500]
    assert [dimension.is_integer for dimension in space] == [False, False, False, True]
    assert space[1].decode("[200, 200]") == [200, 200]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.lr", 1.25e-05),
        ("model", {"name": "nequip", "preset": "S", "num_layers": 2}),
        ("training.ema", None),
        ("task", {"energy": {"weight": 2.0, "per_atom": True}}),
        ("out", "a folder, with a comma"),
    ],
)
def test_any_value_arrives_in_the_config_as_it_is(key, value):
    config = load_config({"data": {"train": "x.xyz"}}, [override(key, value)])
    found = asdict(config)
    for part in key.split("."):
        found = found[part]
    if isinstance(value, dict):
        found = {name: found[name] for name in value}
        if key == "task":
            found = {"energy": {name: found["energy"][name] for name in value["energy"]}}
    assert found == value


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "nothing to vary"),
        ({"training.lr": 0.1}, "training.lr must be a list of choices"),
        ({"training.lr": [0.1]}, "two or more"),
        ({"training.lr": {"log": [0, 1]}}, "above 0"),
        ({"training.lr": {"range": [2, 1]}}, "rise from low to high"),
        ({"training.lr": {"between": [1, 2]}}, "must be a list of choices"),
    ],
)
def test_a_space_without_meaning_is_refused(section, words):
    with pytest.raises(ForgefieldError, match=words):
        read_space(section)


def test_a_misspelt_setting_is_named():
    for section, message in (
        ({"trails": 3}, "unknown key 'tune.trails'. Did you mean 'tune.trials'"),
        ({"pruner": "medium"}, "'tune.pruner' must be median, halving or none, not 'medium'."),
        ({"storage": "search.db"}, "'tune.storage' must be a URL such as sqlite"),
        ({"repeats": 0}, "'tune.repeats' must be a positive whole number, not 0"),
        ({"space": [1]}, "'tune.space' must be a mapping such as"),
    ):
        with pytest.raises(ForgefieldError, match=re.escape(message)):
            load_config({"tune": section})
