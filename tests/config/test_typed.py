"""Settings are dataclasses: values are converted to the types of fields, and OmegaConf stays inside `forgefield.config`."""

import ast
from pathlib import Path

import pytest

import forgefield
from forgefield.config.typed import convert, select, update

ROOT = Path(forgefield.__file__).parent


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_omegaconf_and_hydra_are_used_in_config_only():
    files = [file for file in ROOT.rglob("*.py") if file.relative_to(ROOT).parts[0] != "config"]
    assert len(files) > 100
    assert [str(file) for file in files if imported(file) & {"omegaconf", "hydra"}] == []


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", int, 3),
        (3, float, 3.0),
        ("1e-3", float, 0.001),
        (5, str, "5"),
        ("off", bool, False),
        (1, bool, True),
        (None, int | None, None),
        ([1, "2"], list[int], [1, 2]),
        ({"H": 1}, dict[str, float], {"H": 1.0}),
        ("anything", bool | list[int], "anything"),
    ],
)
def test_a_value_becomes_the_type_of_its_field(value, kind, expected):
    converted = convert(value, kind)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, int),
        (True, int),
        (1.5, int),
        (True, float),
        ("fast", float),
        ("perhaps", bool),
        ([1], str),
        ("H", list[str]),
        ([None], list[int]),
        ({1: 2.0}, dict[str, float]),
    ],
)
def test_a_value_of_another_type_is_refused(value, kind):
    with pytest.raises(ValueError):
        convert(value, kind)


def test_settings_are_read_and_set_by_dotted_key(load):
    config = load("data: {train: a.xyz, batch: {frames: 3}}\ntrainer: {max_epochs: 2}")
    assert [select(config, key) for key in ("data.batch.frames", "trainer.max_epochs")] == [3, 2]
    assert select(config, "training.swa.start", 0.5) == 0.5
    values = {"data": {"train": "a.xyz"}}
    update(values, "data.train", "b.xyz")
    update(values, "training.kernels.knots", 512)
    assert values == {"data": {"train": "b.xyz"}, "training": {"kernels": {"knots": 512}}}
