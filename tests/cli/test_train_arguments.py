"""Which config and which overrides a command line means."""

import argparse
import sys
from pathlib import Path

import pytest

from forgefield.cli import Parser, main, train
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from tests.support.launching import start


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("data: {train: a.xyz}\n")
    return tmp_path


def parsed(*words: str) -> tuple[Path | None, list[str]]:
    parser = Parser(prog="forgefield train")
    train.add_arguments(parser)
    args = parser.parse(list(words))
    return train.config_and_overrides(args, args.words)


@pytest.mark.parametrize(
    ("words", "config", "overrides"),
    [
        ([], None, []),
        (["training.lr=1"], None, ["training.lr=1"]),
        (["my.yaml"], "my.yaml", []),
        (
            ["my.yaml", "training.lr=3e-3", "++trainer.num_nodes=2"],
            "my.yaml",
            ["training.lr=3e-3", "++trainer.num_nodes=2"],
        ),
        (["seed=1", "my.yaml", "--fresh", "~training.ema"], "my.yaml", ["seed=1", "~training.ema"]),
        (["gone.yml"], "gone.yml", []),
        (["input.json"], "input.json", []),
        (["my.yaml", "data.test=other.yaml"], "my.yaml", ["data.test=other.yaml"]),
        (["-cn", "my.yaml"], "my.yaml", []),
        (["-cn", "my", "seed=2"], "my.yaml", ["seed=2"]),
        (["--config-name", "my"], "my.yaml", []),
        (["-cp", "configs", "-cn", "water"], "configs/water.yaml", []),
    ],
)
def test_arguments_are_sorted_into_config_and_overrides(words, config, overrides):
    assert parsed(*words) == (None if config is None else Path(config), overrides)


def test_a_file_of_any_name_that_exists_is_the_config(folder):
    (folder / "lr=3.cfg").write_text("seed: 1\n")
    assert parsed("lr=3.cfg") == (Path("lr=3.cfg"), [])
    assert load_config("lr=3.cfg").seed == 1


def test_name_is_an_override_whatever_it_holds():
    config, overrides = parsed("my.yaml", "--name", 'odd, "name" = x')
    assert load_config(config, overrides).name == 'odd, "name" = x'


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["my.yml", "my.yaml"], "one config at a time, not my.yml and my.yaml"),
        (["my.yaml", "-cn", "other"], "two configs are named: my.yaml and -cn other"),
        (["-cp", "configs", "my.yaml"], "name the config in it with -cn NAME"),
        (["my.yam"], "'my.yam' is neither a config file nor an override (key=value). Did you mean 'my.yaml'?"),
    ],
)
def test_unclear_command_lines_are_refused(words, sentence):
    with pytest.raises(ForgefieldError) as caught:
        parsed(*words)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["a.xyz", "b.extxyz", "c.npz", "d.traj", "system", "store.h5", "e.in.npy"])
@pytest.mark.parametrize("verb", ["train", "bench", "tune"])
def test_data_instead_of_a_config_points_to_init(folder, name, verb, capsys):
    if name == "system":
        (folder / name).mkdir()
        (folder / name / "type.raw").write_text("0\n")
    else:
        (folder / name).write_text("1\nenergy=1\nHe 0 0 0\n")
    assert main([verb, name]) == 2
    error = capsys.readouterr().err
    assert f"'{name}' is data, not a config; write a config for it with `forgefield init {name}`" in error
    assert f"`forgefield train {name.partition('.')[0]}.yaml`" in error


def test_every_run_verb_takes_options_in_any_order():
    from forgefield.cli import predict
    from forgefield.cli import test as test_verb

    parser = Parser()
    test_verb.add_arguments(parser)
    args = parser.parse(["--which", "last", "run", "--data", "a.xyz", "b.xyz"])
    assert (args.run, args.data, args.which) == ("run", ["a.xyz", "b.xyz"], "last")
    parser = Parser()
    predict.add_arguments(parser)
    args = parser.parse(["run", "-o", "out.xyz", "in.xyz", "data.units.length=Bohr"])
    assert (args.run, args.source, args.out, args.overrides) == ("run", "in.xyz", "out.xyz", ["data.units.length=Bohr"])
    assert isinstance(args, argparse.Namespace)


def test_errors_of_the_config_end_the_command(capsys):
    pytest.importorskip("forgefield.api")
    assert main(["train", "my.yaml", "training.lrr=1"]) == 2
    assert "unknown key 'training.lrr'. Did you mean 'training.lr'?" in capsys.readouterr().err
    assert main(["train", "input.json"]) == 2
    assert "config file input.json not found" in capsys.readouterr().err


def test_missing_config_file_is_refused_before_torch_is_imported(tmp_path):
    code = "import sys; from forgefield.cli import main; print(main(['train', 'nofile.yaml']), 'torch' in sys.modules)"
    done = start([sys.executable, "-P", "-c", code], tmp_path)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert done.stderr == "error: config file nofile.yaml not found.\n"
