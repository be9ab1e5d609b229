"""A folder of its own for every test, and a short way to write a config into it."""

import textwrap
from pathlib import Path

import pytest

from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(folder: Path):
    """load(text, *overrides) -> config of my.yaml with that text."""

    def write_and_load(text: str, *overrides: str):
        (folder / "my.yaml").write_text(textwrap.dedent(text))
        return load_config("my.yaml", overrides)

    return write_and_load


@pytest.fixture
def refused(load):
    """refused(text, *overrides) -> the sentence with which the config is refused."""

    def sentence(text: str, *overrides: str) -> str:
        with pytest.raises(ForgefieldError) as caught:
            load(text, *overrides)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return sentence
