"""One command, every launcher: what comes out is the training of one process. The launchers are real."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forgefield import api
from tests.support.helpers import tiny_config, write_emt
from tests.support.launching import clean_environment, ranks, start, torchrun, weights, write_config
from tests.support.train_many import train_only

SLOW = "tests.support.interrupting.Slow"


def make(folder: Path, name: str, frames: int, **trainer) -> dict:
    config = tiny_config(folder, name=name, callbacks=[SLOW])
    config["data"] = {**config["data"], "batch": {"frames": frames}}
    config["training"] = {**config["training"], "precision": "float64", "checkpoint": {"every_steps": 1}}
    config["trainer"] = {**config["trainer"], "max_epochs": 2, **trainer}
    return config


@pytest.fixture(scope="module")
def serial(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("serial")
    return train_only(make(folder, "serial", 4)).path


def assert_same_training(folder: Path, serial: Path, name: str = "launched") -> None:
    """Adam divides by the root of the squared gradient, so the last bits of a sum grow a little within these six steps."""
    assert float((weights(folder / "runs" / name) - weights(serial)).abs().max()) < 1e-9


def train_many(config: Path) -> list[str]:
    """The training alone: what comes after it is looked at under torchrun and srun."""
    return ["-m", "tests.support.train_many", str(config)]


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


@pytest.mark.slow
def test_torchrun_and_its_messages(tmp_path, serial):
    """Through the installed command, with a log of all ranks, a metric of the user's own and a rank that is slow."""
    settings = make(tmp_path, "launched", 2)
    settings["callbacks"].append("tests.support.interrupting.LogsTogether")
    settings["training"]["tensorboard"] = 1
    config = write_config(tmp_path / "launched.yaml", settings)
    command = [*torchrun(2, "--no-python"), str(Path(sys.executable).with_name("forgefield")), "train", str(config)]
    done = start([*command, "-l", "all.log", "-m", "collect"], tmp_path, SLOW="0.3", SLOW_RANKS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_training(tmp_path, serial)
    for words in ("distributed", "yes, SimpleDDPStrategy", "torchrun", "world size", "node list", "gloo"):
        assert words in done.stdout
    assert done.stdout.count("epoch 2/2") <= 1
    assert "2 frames x 2 ranks = 4 frames per step" in done.stdout
    assert "rank 1 on" in done.stdout
    assert "is slow" in done.stdout
    assert_test_counts_each_frame_once(tmp_path)
    log = (tmp_path / "all.log").read_text()
    assert "[rank 1]" in log
    assert any("my rank" in line and " 1 " in line for line in log.splitlines() if line.startswith("[rank 1]"))
    assert "[rank 0]" not in log


def assert_test_counts_each_frame_once(folder: Path) -> None:
    """`forgefield test` on two ranks, with a number of frames that does not divide, gives the errors of one process."""
    data = write_emt(folder / "test.extxyz", 5, seed=7)
    done = ranks(2, "forgefield", "test", "runs/launched", "--data", str(data), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    together = json.loads((folder / "runs" / "launched" / "test.json").read_text())
    alone = api.test(folder / "runs" / "launched", str(data))
    assert together["frames"] == 5
    assert together["errors"] == pytest.approx(alone, rel=1e-9)


def test_a_contradiction_is_an_error_before_any_work(tmp_path):
    config = write_config(tmp_path / "launched.yaml", make(tmp_path, "launched", 2, devices=4))
    done = ranks(2, "forgefield", "train", str(config), folder=tmp_path, launcher="torchrun")
    assert done.returncode != 0
    assert "trainer.devices=4" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert not (tmp_path / "runs").exists()


def test_verbs_for_one_process_refuse_several(tmp_path):
    done = ranks(2, "forgefield", "report", "x", folder=tmp_path, launcher="torchrun")
    assert done.returncode != 0
    assert "forgefield report runs in one process, and 2 were started by torchrun" in done.stderr


# ---- SLURM


def submit(slurm, folder: Path, *options: str, config: Path, **environment: str) -> str:
    script = f"srun --overlap {sys.executable} -m forgefield train {config}"
    return slurm.submit(script, folder, "-n", "2", *options, environ=clean_environment(**environment))


def output(folder: Path, job: str) -> str:
    path = folder / f"job-{job}.out"
    return path.read_text() if path.exists() else ""


def wait_for(condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)


def has_processes(job: str) -> bool:
    """Whether SLURM still looks after processes of a job on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"slurmstepd: [{job}.".encode() in path.read_bytes():
                return True
    return False


def begins_again(slurm, job: str) -> bool:
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True, timeout=60)
    return slurm.state(job) in ("RUNNING", "COMPLETED")


@pytest.mark.slow
@pytest.mark.timeout(900)  # other jobs may hold the node's cores for a while
@pytest.mark.parametrize("how", ["preempted", "warned"])
def test_a_job_that_slurm_starts_again_ends_as_if_nothing_had_happened(how, slurm, tmp_path, serial):
    """preempted: `scontrol requeue` takes the job away. warned: SIGUSR1, upon which the job asks to be requeued itself.

    The second attempt is also what srun starts without any restart: two ranks of one job that train to the end.
    """
    config = write_config(tmp_path / "launched.yaml", make(tmp_path, "launched", 2))
    job = submit(slurm, tmp_path, "--requeue", "--open-mode=append", config=config, SLOW="1.5")
    wait_for(lambda: any((tmp_path / "runs").glob("launched/checkpoints/step-*2.ckpt")))
    if how == "preempted":
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
    else:
        subprocess.run(["scancel", "--signal=USR1", job], check=True, timeout=60)
    wait_for(lambda: "Stopped after step" in output(tmp_path, job))
    # A job that was requeued waits two minutes before SLURM looks at it again, unless it is asked to. It must not be asked
    # while anything of its first attempt is left, nor in the same second: the new attempt would be killed with the old one.
    wait_for(lambda: slurm.state(job) == "PENDING" and not has_processes(job))
    time.sleep(2)
    wait_for(lambda: begins_again(slurm, job))
    text = slurm.wait(job, tmp_path, timeout=200)
    name = {"preempted": "SIGTERM", "warned": "SIGUSR1"}[how]
    assert f"{name} was received. Run the same command to resume." in text
    assert ("SLURM requeues job" in text) == (how == "warned")
    assert text.count("Resuming run launched at step") == 1
    assert re.search(rf"launcher +srun.*job {job}.*restart 1", text), text
    assert_same_training(tmp_path, serial)


# ---- two nodes


@pytest.fixture
def nodes():
    """Two network namespaces with a cable between them: each has its own interfaces, ports and loopback.

    What a command begins with to run on each of them; none where there is no right to make any.
    """
    ip = shutil.which("ip")
    names = ("ffnode0", "ffnode1")

    def call(*words: str) -> bool:
        return ip is not None and subprocess.run([ip, *words], capture_output=True, timeout=30).returncode == 0

    for name in names:
        call("netns", "del", name)
    if not call("netns", "add", names[0]):
        yield []
        return
    call("netns", "add", names[1])
    call("link", "add", "ffcable0", "netns", names[0], "type", "veth", "peer", "name", "ffcable1", "netns", names[1])
    for number, name in enumerate(names):
        call("-n", name, "addr", "add", f"10.231.7.{number + 1}/24", "dev", f"ffcable{number}")
        call("-n", name, "link", "set", f"ffcable{number}", "up")
        call("-n", name, "link", "set", "lo", "up")
    yield [
        [ip, "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "_"]
        for name in names
    ]
    for name in names:
        call("netns", "del", name)


@pytest.mark.slow
def test_two_nodes(nodes, tmp_path, serial):
    """torchrun on each of two machines that share a file system; the nodes find each other over the cable alone."""
    if not nodes:
        pytest.skip("no ip (iproute2), or no right to make network namespaces")
    config = write_config(tmp_path / "launched.yaml", make(tmp_path, "launched", 2))
    rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=10.231.7.1", "--master-port=29655"]
    nodes = [
        subprocess.Popen(
            [
                *node,
                sys.executable,
                "-m",
                "torch.distributed.run",
                *rendezvous,
                f"--node-rank={rank}",
                *train_many(config),
            ],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs[0] + outputs[1]
    assert "2: ffnode0 (1), ffnode1 (1)" in outputs[0]
    assert "Summary of the training" not in outputs[1]
    assert_same_training(tmp_path, serial)


AS_ROOT = {"mpirun.openmpi": ["--allow-run-as-root", "--oversubscribe"], "mpirun.mpich": []}


def over_the_cable(program: str, folder: Path) -> list[str]:
    """Options for one process on each node. MPI starts that of the other node by an agent, for which ssh is the usual one."""
    agent = folder / "agent"
    agent.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nshift\n"  # options and the name of the host: there is only one
        'exec ip netns exec ffnode1 unshare --uts sh -c "hostname ffnode1; $*"\n'
    )
    agent.chmod(0o755)
    hosts = folder / "hosts"
    if program == "mpirun.openmpi":
        hosts.write_text("10.231.7.1 slots=1\n10.231.7.2 slots=1\n")
        network = ["--mca", "oob_tcp_if_include", "10.231.7.0/24", "--mca", "plm_rsh_agent", str(agent)]
        return ["--allow-run-as-root", *network, "--hostfile", str(hosts), "-x", "MASTER_ADDR=10.231.7.1"]
    hosts.write_text("10.231.7.1:1\n10.231.7.2:1\n")
    start_by = ["-launcher", "rsh", "-launcher-exec", str(agent), "-f", str(hosts)]
    return [*start_by, "-genv", "MASTER_ADDR", "10.231.7.1"]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpirun(program, nodes, tmp_path, serial):
    """Two trainings, one after the other: by our strategy and by `ddp_with_mpi`, Lightning's DDP among MPI's processes.

    On two nodes by a host file; on one where there is no right to make two. What MPI says on one node is looked at in
    `test_real_launchers.py`.
    """
    configs = [make(tmp_path, "launched", 2), make(tmp_path, "by-strategy", 2, strategy="ddp_with_mpi")]
    path = write_config(tmp_path / "launched.yaml", configs)
    options = over_the_cable(program, tmp_path) if nodes else AS_ROOT[program]
    command = [need(program), *options, "-n", "2", sys.executable, *train_many(path)]
    done = start([*(nodes[0] if nodes else []), *command], tmp_path, LOG_MODE="workers")
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = done.stdout.split("Summary of the training")[1:]  # each said once
    assert "SimpleDDPStrategy" in ours
    assert "MPIDDPStrategy" in theirs
    for name, said in (("launched", ours), ("by-strategy", theirs)):
        assert_same_training(tmp_path, serial, name)
        assert {"mpirun.openmpi": "Open MPI", "mpirun.mpich": "MPICH or Intel MPI"}[program] in said
        assert not nodes or "2: ffnode0 (1), ffnode1 (1)" in said
        assert re.search(r"my rank +1 ", (tmp_path / "runs" / name / "log.1.txt").read_text())
