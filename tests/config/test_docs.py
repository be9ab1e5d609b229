"""Every example in docs/guides/configure.md, and in the pages on own models and fine-tuning, is a config that loads; its
trainer settings and callbacks work in a training; and the pages name every section and resolver.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from forgefield.config.hydra import RESOLVERS
from forgefield.config.loading import load_config
from forgefield.settings import Config
from tests.support.helpers import tiny_config

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGE = "".join((GUIDES / f"{name}.md").read_text(encoding="utf-8") for name in ("configure", "own-model", "fine-tune"))
EXAMPLES = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL) if "train:" in text]
OVERRIDE = re.compile(r"^'?(\+\+?)?[\w.]+=|^~")
OVERRIDES = [
    word.strip("'") for word in re.findall(r"^\| `(.*?)` \|", PAGE, flags=re.MULTILINE) if OVERRIDE.search(word)
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_loads(folder, number):
    (folder / "model").mkdir()
    (folder / "model" / "small.yaml").write_text("name: nequip\npreset: S\n")
    (folder / "my.yaml").write_text(EXAMPLES[number])
    config = load_config("my.yaml")
    assert config.data.train is not None


def test_overrides_of_the_table_work_on_the_first_example(folder):
    assert len(OVERRIDES) == 9
    (folder / "my.yaml").write_text(EXAMPLES[0].replace("task:\n", "task:\n  stress: {}\n"))
    for override in OVERRIDES:
        load_config("my.yaml", [override])


def test_trainer_settings_and_callbacks_of_the_examples_work_in_a_training(folder):
    import forgefield

    examples = [yaml.safe_load(text) for text in EXAMPLES]
    trainer = {key: value for example in examples for key, value in example.get("trainer", {}).items()}
    named = [entry for example in examples for entry in example.get("callbacks", []) if isinstance(entry, dict)]
    callbacks = [entry for entry in named if entry["name"].startswith("lightning.")]
    assert trainer
    assert callbacks
    short = {"max_epochs": 1, "check_val_every_n_epoch": 1, "accelerator": "cpu", "enable_progress_bar": False}
    run = forgefield.train(tiny_config(folder, trainer={**trainer, **short}, callbacks=callbacks))
    assert run.info["status"] == "finished"


def test_the_page_names_every_section_and_resolver():
    assert len(EXAMPLES) >= 8
    for field in dataclasses.fields(Config):
        assert f"`{field.name}`" in PAGE
    for resolver in RESOLVERS:
        assert resolver in PAGE
