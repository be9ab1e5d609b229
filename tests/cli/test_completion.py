"""Shell completion: the scripts are run by the shells themselves where they are installed."""

import dataclasses
import shutil
import subprocess

import pytest

from forgefield.cli import VERBS
from forgefield.cli.completion import bash_script, config_keys, fish_script, zsh_script
from forgefield.cli.describe import all_commands
from forgefield.config.checking import unknown_key
from forgefield.ldos.options import PointTaskOptions

COMMANDS = all_commands()


def in_bash(tmp_path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    (tmp_path / "completion.bash").write_text(bash_script(COMMANDS))
    line = " ".join(f"'{word}'" for word in ("forgefield", *words))
    script = (
        f"source completion.bash; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _forgefield; echo ${{COMPREPLY[@]}}"
    )
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_bash_completes_verbs_options_choices_and_config_keys(tmp_path):
    assert in_bash(tmp_path, "tr") == ["train"]
    assert set(in_bash(tmp_path, "")) == {*VERBS, "--help", "--version"}
    assert in_bash(tmp_path, "train", "--fi") == ["--finetune"]
    assert in_bash(tmp_path, "train", "training.lr_") == ["training.lr_groups="]
    assert "info" in in_bash(tmp_path, "data", "")
    assert in_bash(tmp_path, "data", "info", "--energy-u") == ["--energy-unit"]
    assert in_bash(tmp_path, "train", "--log-mode", "") == ["master", "collect", "workers"]
    assert in_bash(tmp_path, "completion", "f") == ["fish"]
    assert in_bash(tmp_path, "report", "training.l") == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_verbs_options_and_choices(tmp_path):
    (tmp_path / "completion.fish").write_text(fish_script(COMMANDS))

    def offered(line: str) -> list[str]:
        command = f"source completion.fish; complete -C '{line}'"
        ran = subprocess.run(["fish", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return [row.partition("\t")[0] for row in ran.stdout.splitlines()]

    assert offered("forgefield tra") == ["train"]
    assert offered("forgefield train --fi") == ["--finetune"]
    assert "info" in offered("forgefield data in")
    assert set(offered("forgefield completion ")) >= {"bash", "zsh", "fish"}


def test_zsh_runs_the_script_of_bash():
    assert zsh_script(COMMANDS).endswith(bash_script(COMMANDS).partition("\n")[2])
    assert "bashcompinit" in zsh_script(COMMANDS)


def test_every_key_that_is_offered_exists():
    keys = config_keys()
    assert {"training.lr", "data.batch.frames", "task.forces.weight"} <= set(keys)
    of_points = {f"task.{field.name}" for field in dataclasses.fields(PointTaskOptions)}  # need data.points
    of_frames = [key for key in keys if ".".join(key.split(".")[:2]) not in of_points]
    assert len(of_frames) > 100
    assert [key for key in of_frames if unknown_key(key) is not None] == []


def test_every_command_has_examples():
    assert [command.name for command in COMMANDS if not command.examples] == []
