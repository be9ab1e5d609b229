"""No process outlives the one that looks after it: commands and launchers that are ended, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.helpers import tiny_config
from tests.support.launching import clean_environment, is_alive, torchrun, train_command
from tests.support.warm import ROOT

PATIENCE = 200.0
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def write_config(folder: Path, **changes) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(folder, **changes)))
    return path


def test_sigterm_ends_a_bench_and_what_it_has_started(tmp_path):
    config = write_config(tmp_path)
    command = [sys.executable, "-m", "forgefield", "bench", str(config), "--steps", "2"]
    with open(tmp_path / "said", "w") as said:
        bench = subprocess.Popen(command, cwd=tmp_path, env=ENVIRON, stdout=said, stderr=said)
    wait_until(lambda: bool(children(bench.pid)) or bench.poll() is not None)
    started = children(bench.pid)
    assert started, (tmp_path / "said").read_text()
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(PATIENCE) == 128 + signal.SIGTERM, (tmp_path / "said").read_text()
    assert "stopped by SIGTERM" in (tmp_path / "said").read_text()
    assert not any(map(is_alive, started))


def test_ranks_of_torchrun_save_and_end_when_their_agent_is_killed(tmp_path):
    slow = {"callbacks": ["tests.support.interrupting.Slow"]}
    config = write_config(tmp_path, **slow, trainer={"max_epochs": 10000, "accelerator": "cpu"})
    command = [*torchrun(2), *train_command(config, "training.engine=eager")]
    with open(tmp_path / "said", "w") as said:
        agent = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(SLOW="0.1"), stdout=said, stderr=said)
    run = tmp_path / "runs" / "tiny"
    try:
        wait_until(lambda: bool(list(run.glob("checkpoints/step-*"))) or agent.poll() is not None)
        ranks = children(agent.pid)
        assert len(ranks) == 2, (tmp_path / "said").read_text()
    finally:
        agent.kill()
        agent.wait()
    wait_until(lambda: not any(map(is_alive, ranks)))
    assert json.loads((run / "run.json").read_text())["status"] == "stopped", (tmp_path / "said").read_text()
