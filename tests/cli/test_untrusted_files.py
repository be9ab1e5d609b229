"""Files from a stranger: nothing that they name is imported or called without permission."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import forgefield
from forgefield import api
from forgefield.cli import main
from forgefield.config.deepmd.run import CURVE
from forgefield.config.trust import named_code
from forgefield.errors import ForgefieldError
from forgefield.models import build_model, resolve_model
from forgefield.runs import Run, create_run_from_model
from tests.support.helpers import tiny_config, write_emt

ROOT = Path(__file__).parents[2]
MODULE = """
from pathlib import Path

import torch

Path({marker!r}).touch()


class Net(torch.nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, batch):
        lengths = batch["edge_vectors"].norm(dim=1)
        zero = torch.zeros(len(batch["species"]), dtype=lengths.dtype)
        return zero.index_add(0, batch["edge_index"][1], self.weight.sum() * (3.5 - lengths).clamp(min=0) ** 3)
"""


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """What code of the stranger would leave behind. The working directory holds frames and the folder runs."""
    monkeypatch.chdir(tmp_path)
    write_emt(tmp_path / "frames.extxyz", 8)
    known = set(sys.modules)
    yield tmp_path / "executed"
    for name in set(sys.modules) - known:
        if name.startswith("stranger"):
            del sys.modules[name]


def nice_run(model: dict[str, Any] | None = None) -> Run:
    """runs/nice, a working run, whose `run.json` has these options of the model instead."""
    section = {"name": "nequip", "num_layers": 1, "l_max": 1, "num_features": 2, "radial_mlp_width": 4}
    section |= {"energy_scales": 1.0, "energy_shifts": 0.0, "avg_num_neighbours": 1.0}
    resolved = resolve_model(section, species=("Cu", "Au"), cutoff=3.5, statistics={})
    potential = build_model(resolved, precision="float64", seed=0)
    run = create_run_from_model(
        name="nice",
        out="runs",
        resolved=resolved,
        potential=potential,
        origin="test",
        precision="float64",
        settings={"data": {"train": "frames.extxyz", "cutoff": 3.5}},
    )
    if model is not None:
        run.write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **model})
    return run


def hostile(kind: str, marker: Path) -> dict[str, Any]:
    """Options of a model that would leave the marker when it is built, and the files that they need."""
    text = MODULE.format(marker=str(marker))
    touch = {"args": [sys.executable, "-c", f"open({str(marker)!r}, 'w')"]}
    if kind in ("calculator", "pyg", "mace_like", "ase_like"):
        return {"name": kind, "module": "subprocess.Popen", "options": touch}
    if kind == "name":
        return {"name": "subprocess.Popen", **touch}
    folder = {"in the run": Path("runs/nice"), "sibling": Path("runs/code"), "here": Path()}[kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stranger_net.py").write_text(text)
    return {"name": "stranger_net.Net", **({} if kind == "here" else {"module_folder": str(folder.absolute())})}


KINDS = ("calculator", "pyg", "mace_like", "ase_like", "name", "in the run", "sibling", "here")
VERBS = {
    "predict": ["predict", "nice", "frames.extxyz", "-o", "out.extxyz", "--device", "cpu"],
    "test": ["test", "nice", "--data", "frames.extxyz", "--device", "cpu"],
    "test with an override": ["test", "nice", "--data", "frames.extxyz", "--device", "cpu", "data.units.energy=eV"],
    "check": ["check", "nice", "--frames", "1"],
    "export": ["export", "nice", "--to", "deepmd", "-o", "out.dp"],
    "train --init-model": ["train", "mine.yaml", "--init-model", "nice", "--name", "new"],
    "train --finetune": ["train", "mine.yaml", "--finetune", "nice", "--name", "new"],
    "tune": ["tune", "from.yaml", "--trials", "1", "--space", "training.lr=[1e-3, 2e-3]"],
}


def my_configs() -> None:
    config = tiny_config(Path.cwd())
    config["out"] = "runs"
    config.pop("model")
    config["data"].pop("cutoff")
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    Path("from.yaml").write_text(yaml.safe_dump({**config, "model": {"from": "runs/nice"}, "name": "tuned"}))


@pytest.mark.parametrize("kind", KINDS)
def test_opening_a_run_in_python_executes_nothing(kind, marker):
    run = nice_run()
    run.write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **hostile(kind, marker)})
    openings = {
        "Calculator": lambda: forgefield.Calculator("runs/nice"),
        "Calculator in float32": lambda: forgefield.Calculator(run, dtype="float32"),
        "load": lambda: forgefield.load("nice"),
        "load_run": lambda: forgefield.load_run("nice").load_potential(),
        "predict": lambda: forgefield.predict("nice", "frames.extxyz", "out.extxyz"),
        "test": lambda: api.test("nice", "frames.extxyz"),
        "train": lambda: forgefield.train({**tiny_config(Path.cwd()), "out": "runs", "model": {"from": "nice"}}),
    }
    for name, opening in openings.items():
        with pytest.raises(ForgefieldError, match=r"runs/nice.*(subprocess\.Popen|stranger_net\.Net).*trust_code=True"):
            opening()
        assert not marker.exists(), name
    assert "stranger_net" not in sys.modules


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["calculator", "sibling"])
def test_no_verb_executes_what_a_run_names(kind, verb, marker, capsys):
    run = nice_run()
    run.write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **hostile(kind, marker)})
    my_configs()
    if verb == "tune":
        pytest.importorskip("optuna")
    code = main(VERBS[verb])
    printed = capsys.readouterr()
    assert code != 0
    assert not marker.exists()
    assert "--trust-code" in printed.err + printed.out


def test_a_report_needs_no_code(marker, capsys):
    nice_run().write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **hostile("sibling", marker)})
    assert main(["report", "nice"]) == 0
    assert not marker.exists()
    assert "--trust-code" in Path("runs/nice/report.html").read_text()  # it says how to use the model


def test_a_run_opened_from_inside_its_folder_executes_nothing(marker, monkeypatch, capsys):
    """As a command of its own, because Python finds modules of the current folder before all others with `python -m`."""
    run = nice_run()
    run.write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **hostile("here", marker)})
    for name in ("stranger_net.py", "ase.py", "torch.py"):
        (run.path / name).write_text(MODULE.format(marker=str(marker)))
    (marker.parent / "stranger_net.py").unlink()
    words = ["predict", ".", "../../frames.extxyz", "-o", "../../out.extxyz", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "forgefield", *words],
        cwd=run.path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--trust-code" in done.stderr
    assert not marker.exists()
    monkeypatch.chdir(run.path)
    assert main([*words, "--trust-code"]) == 2
    assert "code in a run is never executed" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["sibling", "here"])
def test_with_permission_the_named_code_is_used(kind, marker):
    run = nice_run()
    run.write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **hostile(kind, marker)})
    with pytest.raises(
        ForgefieldError, match="damaged or belongs to another model"
    ):  # weights are still those of NequIP
        forgefield.load("nice", trust_code=True)
    assert marker.exists()


@pytest.mark.parametrize("kind", ["calculator", "pyg", "mace_like", "ase_like", "name"])
def test_permission_is_for_classes_of_the_right_kind(kind, marker):
    nice_run().write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **hostile(kind, marker)})
    with pytest.raises(ForgefieldError, match=r"subprocess\.Popen, not a class derived from (torch\.nn\.Module|ase\.)"):
        forgefield.load("nice", trust_code=True)
    assert not marker.exists()


def test_code_in_the_run_folder_is_not_executed_even_with_permission(marker):
    nice_run().write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, **hostile("in the run", marker)})
    with pytest.raises(ForgefieldError, match="code in a run is never executed"):
        forgefield.load("nice", trust_code=True)
    assert not marker.exists()


def test_code_in_the_run_folder_is_not_found_as_part_of_a_package(marker):
    run = nice_run()
    (run.path / "stranger_net.py").write_text(MODULE.format(marker=str(marker)))
    run.write_info(model={"species": ["Cu", "Au"], "cutoff": 3.5, "name": "runs.nice.stranger_net.Net"})
    with pytest.raises(ForgefieldError, match="code in a run is never executed"):
        forgefield.load("nice", trust_code=True)
    assert not marker.exists()


@pytest.mark.parametrize("section", ["callbacks", "loss", "model"])
def test_a_resume_from_inside_the_run_folder_executes_nothing_in_it(section, marker, monkeypatch, capsys):
    run = forgefield.train(tiny_config(Path.cwd(), trainer={"max_epochs": 1}))
    (run.path / "stranger_parts.py").write_text(MODULE.format(marker=str(marker)))
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    if section == "loss":
        config["task"]["forces"]["loss"] = "stranger_parts.loss"
    else:
        config[section] = ["stranger_parts.Net"] if section == "callbacks" else {"name": "stranger_parts.Net"}
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(run.path)
    for words in (["train", ".", "trainer.max_epochs=2"], ["train", "config.yaml", "name=new"]):
        for permission, expected in (([], "--trust-code"), (["--trust-code"], "code in a run is never executed")):
            assert main([*words, *permission]) == 2
            assert expected in capsys.readouterr().err
            assert not marker.exists()


def test_the_config_of_a_run_neither_names_code_nor_reads_the_environment(marker, monkeypatch, capsys):
    monkeypatch.setenv("A_SECRET", "secret-value")
    run = nice_run()
    path = run.path / "config.yaml"
    config = {**tiny_config(Path.cwd(), trainer={"fast_dev_run": True}), "out": "elsewhere"}
    (run.path / "stranger_parts.py").write_text(MODULE.format(marker=str(marker)))
    for section, value in {
        "callbacks": ["stranger_parts.Net"],
        "model": {"name": "stranger_parts.Net"},
        "task": {"forces": {"loss": "stranger_parts.Net"}},
        "training": {"optimizer": {"name": "stranger_parts.Net"}},
        "trainer": {"logger": {"name": "stranger_parts.Net"}},
    }.items():
        path.write_text(yaml.safe_dump({**config, section: value}))
        for verb in ("train", "check", "bench"):
            assert main([verb, str(path)]) == 2
            message = capsys.readouterr().err
            assert all(word in message for word in (section, "stranger_parts.Net", "--trust-code"))
            assert not marker.exists()
    path.write_text(yaml.safe_dump({**config, "name": "${oc.env:A_SECRET}"}))
    for words in (["train", str(path)], ["test", "nice", "--data", "frames.extxyz", "--device", "cpu"]):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert "interpolation" in message
        assert "secret-value" not in message


HOSTILE_SETTINGS = {
    "callbacks": lambda name, arguments: {"callbacks": [{"name": name, **arguments}]},
    "trainer.callbacks": lambda name, arguments: {"trainer": {"callbacks": [{"name": name, **arguments}]}},
    "trainer.logger": lambda name, arguments: {"trainer": {"logger": {"name": name, **arguments}}},
    "trainer.profiler": lambda name, arguments: {"trainer": {"profiler": {"name": name, **arguments}}},
    "trainer.strategy": lambda name, arguments: {"trainer": {"strategy": {"name": name, **arguments}}},
    "trainer.plugins": lambda name, arguments: {"trainer": {"plugins": [{"name": name, **arguments}]}},
    "training.optimizer": lambda name, arguments: {"training": {"optimizer": {"name": name, **arguments}}},
    "training.scheduler": lambda name, arguments: {"training": {"scheduler": {"name": name, **arguments}}},
    "model.name": lambda name, arguments: {"model": {"name": name, **arguments}},
    "model.module": lambda name, arguments: {"model": {"name": "pyg", "module": name, "options": arguments}},
}


@pytest.mark.parametrize("function", ["subprocess.check_call", "subprocess.Popen"])
@pytest.mark.parametrize("setting", HOSTILE_SETTINGS)
def test_what_a_config_names_is_checked_before_it_is_called(setting, function, marker):
    arguments = {"args": [sys.executable, "-c", f"open({str(marker)!r}, 'w')"]}
    config = tiny_config(Path.cwd(), trainer={"fast_dev_run": True})
    for section, values in HOSTILE_SETTINGS[setting](function, arguments).items():
        config[section] = {**config[section], **values} if section in ("trainer", "training") else values
    with pytest.raises(
        ForgefieldError, match=rf"{setting}: {function} is .* not (a class derived from|torch.nn.Module)"
    ):
        forgefield.train(config)
    assert not marker.exists()


def test_a_loss_is_a_function_and_not_a_class(marker):
    config = {**tiny_config(Path.cwd()), "task": {"forces": {"loss": "subprocess.Popen"}}}
    with pytest.raises(ForgefieldError, match=r"task\.forces\.loss: subprocess\.Popen is the class .* not a function"):
        forgefield.train(config)


def test_a_resume_takes_code_and_its_arguments_from_the_config(marker):
    Path("stranger_own.py").write_text(MODULE.format(marker=str(marker)))
    config = tiny_config(Path.cwd(), trainer={"max_epochs": 1}, model={"name": "stranger_own.Net", "width": 2})
    config["model"] = {"name": "stranger_own.Net", "width": 2}
    run = forgefield.train(config)
    config["trainer"]["max_epochs"] = 2
    assert forgefield.train(config).info["epochs"] == 2
    kept = run.info["model"]
    marker.unlink()
    config["trainer"]["max_epochs"] = 3
    Path("code").mkdir()
    Path("code/stranger_else.py").write_text(MODULE.format(marker=str(marker)))
    for change in (
        {"name": "stranger_else.Net", "module_folder": str(Path("code").absolute())},
        {"width": 3},
        {"another": "argument"},
        {"name": "calculator", "module": "subprocess.Popen"},
    ):
        run.write_info(model={**kept, **change})
        with pytest.raises(ForgefieldError, match=r"run tiny .* names .*trust_code=True"):
            forgefield.train(config)
        assert not marker.exists()
    run.write_info(model={**kept, "module_folder": str(Path("code").absolute())})
    assert forgefield.train(config).info["epochs"] == 3
    assert "module_folder" not in json.loads((run.path / "run.json").read_text())["model"] or (
        run.info["model"]["module_folder"] == str(Path.cwd())
    )


def test_a_run_with_user_code_is_finetuned_with_permission(marker, capsys):
    Path("stranger_own.py").write_text(MODULE.format(marker=str(marker)))
    first = tiny_config(Path.cwd(), trainer={"max_epochs": 1})
    first |= {"name": "first", "model": {"name": "stranger_own.Net"}}
    forgefield.train(first)
    second = {**first, "name": "second", "model": {"from": "first"}}
    with pytest.raises(ForgefieldError, match=r"first.*stranger_own\.Net.*trust_code=True"):
        forgefield.train(second)
    assert forgefield.train(second, trust_code=True).info["status"] == "finished"


def test_the_run_of_a_deepmd_input_needs_no_permission():
    """Its config names the callback that writes lcurve.out, which is part of Forgefield."""
    assert list(named_code({"callbacks": [{"name": CURVE, "file": "lcurve.out"}, "os.system"]})) == [
        ("callbacks", "os.system")
    ]
