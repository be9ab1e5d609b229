"""Law 2 with several processes, and what happens when one of them is lost. Real processes, real signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgefield.parallel.spawn import free_port
from forgefield.training.run.signals import REQUEUE
from tests.support.helpers import tiny_config, write_emt
from tests.support.launching import clean_environment, ranks, start, train_command, write_config
from tests.support.resuming import END, assert_same_run, resumed_at
from tests.support.warm_commands import warm_commands

RECORD = "tests.support.interrupting.RecordsFrames"


def parallel_config(folder: Path, name: str, **trainer: Any) -> Path:
    config = tiny_config(folder, name=name, callbacks=[END, RECORD])
    config["training"] = {**config["training"], "checkpoint": {"every_epochs": None, "every_steps": 2}}
    config["trainer"] = {**config["trainer"], "max_epochs": 3, **trainer}
    return write_config(folder / f"{name}.yaml", config)


def own_processes(folder: Path, config: Path, **environment: str):
    """Two ranks without any launcher, started as the command does it, without the report at the end."""
    command = [str(warm_commands() / "train-many"), str(config)]
    return start([sys.executable, "-m", "tests.support.ranks", "2", *command], folder, **environment)


def two_ranks(folder: Path, config: Path, **environment: str):
    """The same for what the ranks do by themselves: nobody ends one that stays behind."""
    return ranks(2, "tests.support.train_many", str(config), folder=folder, **environment)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run on two ranks that nothing has disturbed: 9 steps."""
    folder = tmp_path_factory.mktemp("straight")
    config = parallel_config(folder, "straight")
    done = start([sys.executable, *train_command(config, "++trainer.devices=2")], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launcher" in done.stdout
    assert done.stdout.count("Summary of the training") == 1  # rank 0 alone speaks
    return folder / "runs" / "straight"


@pytest.mark.slow
def test_a_killed_rank_ends_the_command_and_the_same_command_resumes_exactly(tmp_path, straight):
    """Rank 1 is killed while rank 0 waits for its gradient."""
    marker = tmp_path / "killed"
    config = parallel_config(tmp_path, "again")
    broken = own_processes(tmp_path, config, END_AT="5", END_HOW="kill", END_RANKS="1", END_ONCE=str(marker))
    assert marker.exists()
    assert_said(broken, f"rank 1 on {socket.gethostname()} exited without an error message")
    continued = two_ranks(tmp_path, config)
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert resumed_at(continued.stdout) in (2, 4)
    assert_same_run(straight, tmp_path / "runs" / "again")


@pytest.mark.slow
def test_rank_0_is_killed_while_it_writes_a_checkpoint_that_its_clock_has_requested(tmp_path, straight):
    config = parallel_config(tmp_path, "again")
    settings = yaml.safe_load(config.read_text())
    settings["training"]["checkpoint"] = {"every_seconds": 1e-6}
    settings["callbacks"].append("tests.support.interrupting.KilledWhileWriting")
    config.write_text(yaml.safe_dump(settings))
    broken = own_processes(tmp_path, config, KILL_STEP="4", KILL_WHEN="whole")
    assert_said(broken, f"rank 0 on {socket.gethostname()} exited without an error message")
    continued = two_ranks(tmp_path, config)
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert "Resuming run again at step " in continued.stdout
    assert_same_run(straight, tmp_path / "runs" / "again")


@pytest.mark.parametrize(
    ("how", "rank", "says"),
    [
        ("kill", "0", "rank 0 on {host} exited without an error message"),
        ("raise", "1", "a crash that a test asked for"),
        ("memory", "1", "rank 1 on {host} failed with the error above"),
    ],
)
def test_the_cause_of_a_lost_rank_is_reported(how, rank, says, tmp_path):
    """An error is like a kill in that nothing is saved; only its words are looked at here."""
    config = parallel_config(tmp_path, "again")
    broken = two_ranks(tmp_path, config, END_AT="5", END_HOW=how, END_RANKS=rank)
    assert_said(broken, says.format(host=socket.gethostname()))


def assert_said(broken: subprocess.CompletedProcess[str], says: str) -> None:
    """The command failed, and the cause comes before its consequences."""
    assert broken.returncode != 0
    assert says in broken.stderr, broken.stdout + broken.stderr
    assert "gloo" not in broken.stderr.split(says)[0]


@pytest.mark.parametrize("how", ["usr1"])  # SIGTERM takes the same way, see the jobs that SLURM starts again
def test_a_stop_signal_on_one_rank_stops_all_at_the_same_step_and_saves_once(how, tmp_path, straight):
    config = parallel_config(tmp_path, "again")
    stopped = two_ranks(tmp_path, config, END_AT="5", END_HOW=how, END_RANKS="1")
    assert stopped.returncode == REQUEUE, stopped.stdout + stopped.stderr
    name = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1}[how].name
    assert f"Stopped after step 6: {name} was received. Run the same command to resume." in stopped.stdout
    assert stopped.stdout.count("Stopped after") == 1
    assert "Resuming run again at step 6" in two_ranks(tmp_path, config).stdout
    assert_same_run(straight, tmp_path / "runs" / "again")


def test_a_checkpoint_requested_of_one_rank_is_saved_by_all_and_changes_nothing(tmp_path, straight):
    config = parallel_config(tmp_path, "again")
    done = two_ranks(tmp_path, config, END_AT="4", END_HOW="usr2", END_RANKS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("A checkpoint was requested: step 5 is saved.") == 1
    assert_same_run(straight, tmp_path / "runs" / "again")


@pytest.mark.slow
def test_an_elastic_restart_ends_as_if_nothing_had_happened(tmp_path, straight):
    """Two agents, as on two nodes. The one whose process is killed counts a restart, the other does not; and `--fresh` must
    not throw away what the first attempt has saved."""
    config = parallel_config(tmp_path, "again")
    once = {"END_AT": "5", "END_HOW": "kill", "END_RANKS": "1", "END_ONCE": str(tmp_path / "killed")}
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        *place,
    ]
    agents = [
        subprocess.Popen(
            [*agent, "--no-python", str(warm_commands() / "forgefield"), "train", str(config), "--fresh"],
            cwd=tmp_path,
            env=clean_environment(**once),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    output = "".join(agent.communicate(timeout=200)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert resumed_at(output) in (2, 4)
    assert not list((tmp_path / "runs").glob("again.before-*"))
    assert_same_run(straight, tmp_path / "runs" / "again")


def test_a_signal_on_one_rank_while_data_is_read_stops_all_before_the_first_step(tmp_path):
    config = parallel_config(tmp_path, "early")
    text = config.read_text().replace("energy:\n", "energy:\n    loss: tests.support.signal_on_import.squared\n")
    config.write_text(text)
    stopped = two_ranks(tmp_path, config, SIGNAL_ON_IMPORT="SIGTERM", SIGNAL_RANK="1")
    assert stopped.returncode == REQUEUE, stopped.stdout + stopped.stderr
    assert "Stopped before the first step: SIGTERM was received" in stopped.stdout


def recorded(folder: Path, epoch: int) -> Counter[int]:
    """How often each frame was trained on in an epoch, by all processes that ever wrote to the folder."""
    counts: Counter[int] = Counter()
    for path in folder.glob("frames-*.txt"):
        for line in path.read_text().splitlines():
            of_epoch, _, *frames = map(int, line.split())
            if of_epoch == epoch:
                counts.update(frames)
    return counts


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_resumed_on_another_number_of_ranks_every_frame_is_seen_once(before, after, tmp_path):
    """10 frames; the run stops in the middle of the second epoch, saved at the step where it stops."""
    config = parallel_config(tmp_path, "again")
    per_epoch = -(-10 // (2 * before))
    at = per_epoch + 1
    stop = {"END_AT": str(at), "END_HOW": "term", "END_RANKS": "0"}
    many = ("tests.support.train_many", str(config))
    stopped = ranks(before, *many, folder=tmp_path, **stop)
    assert "Stopped after" in stopped.stdout, stopped.stdout + stopped.stderr
    continued = ranks(after, *many, folder=tmp_path)
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert f"saved on {before} ranks and resumes on {after}" in continued.stdout
    for epoch in range(3):
        assert recorded(tmp_path, epoch) == Counter(range(10)), epoch


def test_an_error_of_all_ranks_is_reported_once(tmp_path):
    config = parallel_config(tmp_path, "wrong")
    done = ranks(2, "forgefield", "train", str(config), "training.scale_lr=lineer", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("'training.scale_lr' must be none, sqrt or linear, not 'lineer'") == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_ranks_with_different_settings_are_refused(tmp_path):
    """A variable of the environment may differ between nodes, and with it what the config means there."""
    config = parallel_config(tmp_path, "wrong")
    config.write_text(config.read_text().replace("seed: 3", "seed: ${oc.env:RANK}"))
    done = ranks(2, "forgefield", "train", str(config), folder=tmp_path)
    assert done.returncode != 0
    assert "does not have the same settings as rank 0" in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


def test_ranks_that_read_other_test_data_are_refused(tmp_path):
    """The same path leads to different files on different nodes: here through the working directory of each process."""
    config = parallel_config(tmp_path, "wrong")
    nodes = [tmp_path / "0", tmp_path / "1"]
    for rank, node in enumerate(nodes):
        node.mkdir()
        write_emt(node / "test.extxyz", 3 + rank)
    config.write_text(config.read_text().replace("data:\n", "data:\n  test: /proc/self/cwd/test.extxyz\n"))
    done = ranks(2, "tests.support.train_many", str(config), folder=nodes)
    assert done.returncode != 0
    assert "does not have the same data" in done.stderr, done.stderr
