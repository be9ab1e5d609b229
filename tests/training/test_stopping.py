"""A request to stop is answered at once wherever nothing has to be saved, and the same command resumes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from forgefield.runs import Run
from forgefield.training.run.signals import REQUEUE
from tests.support.helpers import tiny_config, write_emt
from tests.support.warm import run_warm

CODES = {"SIGTERM": REQUEUE, "SIGINT": 128 + signal.SIGINT}
EVALUATION = "forgefield.evaluation:evaluate_batches"
COMPILATION = "forgefield.training.engines.compiled:CompiledFunction._compile"


def train(folder: Path, config: dict, **environ: str) -> subprocess.CompletedProcess[str]:
    path = folder / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    words = ("tests.support.stopping", "forgefield", "train", str(path))
    return run_warm(*words, folder=folder, environ={**os.environ, **environ}, timeout=120)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("by", "how"), [("SIGTERM", "python"), ("SIGTERM", "native"), ("SIGINT", "python")])
def test_a_signal_stops_the_final_evaluation_and_the_same_command_finishes_it(by, how, tmp_path):
    config = tiny_config(tmp_path)
    config["trainer"]["max_epochs"] = 1
    config["training"]["engine"] = "eager"
    stopped = train(tmp_path, config, STOP_IN=EVALUATION, STOP_BY=by, STOP_HOW=how)
    assert stopped.returncode == CODES[by], stopped.stdout + stopped.stderr
    assert "Run the same command" in stopped.stdout + stopped.stderr
    if how == "python":
        assert "Stopped during the final evaluation" in stopped.stdout
    run = Run(tmp_path / "runs" / "tiny")
    assert not (run.path / "report.html").exists()
    if by == "SIGINT":
        return  # what follows is the same
    done = train(tmp_path, config)
    assert done.returncode == 0, done.stderr
    assert "is complete" in done.stdout
    assert (run.path / "report.html").exists()


@pytest.mark.parametrize("by", CODES)
def test_a_signal_ends_compilation_and_is_not_taken_for_an_engine_that_does_not_work(by, tmp_path):
    config = tiny_config(tmp_path)
    config["training"]["engine"] = "auto"
    stopped = train(tmp_path, config, STOP_IN=COMPILATION, STOP_BY=by, STOP_HOW="compiler")
    assert stopped.returncode == CODES[by], stopped.stdout + stopped.stderr
    assert "Stopped before the first step" in stopped.stdout
    assert "Engine auto" not in stopped.stdout.partition("Stopped")[2]
    run = Run(tmp_path / "runs" / "tiny")
    assert run.info["status"] == "stopped"
    assert "engine" not in run.info
    compilers = [int(number) for number in (tmp_path / "compilers").read_text().split()]
    assert len(compilers) == 2
    if by == "SIGTERM":
        assert not any(map(is_alive, compilers))


@pytest.mark.parametrize("how", ["python", "native"])
def test_a_signal_stops_the_reading_of_data(how, tmp_path):
    """A huge cutoff, for instance: neighbour lists are made by compiled code that takes minutes."""
    place = "forgefield.data.neighbours.edges:build_edges"
    stopped = train(tmp_path, tiny_config(tmp_path), STOP_IN=place, STOP_BY="SIGTERM", STOP_HOW=how)
    assert stopped.returncode == REQUEUE, stopped.stdout + stopped.stderr
    assert "Run the same command to resume" in stopped.stdout + stopped.stderr


@pytest.mark.parametrize("how", ["python", "native"])
def test_sigterm_ends_a_conversion_with_a_message_and_the_same_command_resumes(how, tmp_path):
    write_emt(tmp_path / "frames.extxyz", 6)
    words = ("tests.support.stopping", "forgefield", "data", "convert", "frames.extxyz", "store", "--workers", "1")
    environ = {"STOP_IN": "forgefield.data.store.convert:_finish", "STOP_BY": "SIGTERM", "STOP_HOW": how}
    stopped = run_warm(*words, folder=tmp_path, environ={**os.environ, **environ}, timeout=120)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "stopped by SIGTERM" in stopped.stderr
    if how == "python":
        assert "run the same command to resume; finished parts are kept in store.partial" in stopped.stderr
    assert run_warm(*words, folder=tmp_path, environ=os.environ).returncode == 0
    assert (tmp_path / "store").is_dir()
