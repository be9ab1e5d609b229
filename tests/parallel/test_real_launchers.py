"""Every launcher that is installed, started for real: each process finds its launcher and its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forgefield.parallel.launch import Launch
from tests.support.recorded_environments import (
    ALONE,
    TWO_NODES_OF_TWO,
    WITHOUT_SRUN,
    Place,
    on_one_node,
    place_of,
)

PROBE = """
import dataclasses, json, os
from forgefield.parallel.launch import detect_launch
os.write(1, (json.dumps(dataclasses.asdict(detect_launch(os.environ))) + "\\n").encode())
"""
"""One write for line and end of line: the lines of processes that print at the same time stay apart."""
AS_ROOT = ["--allow-run-as-root", "--oversubscribe"]
CLEAN = {"HOME": os.environ.get("HOME", "/"), "PATH": f"{os.environ['PATH']}:/usr/sbin", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def probe(tmp_path: Path) -> list[str]:
    """The command that prints what detect_launch finds."""
    file = tmp_path / "probe.py"
    file.write_text(PROBE)
    return [sys.executable, str(file)]


def program(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found or pytest.skip(f"{names[0]} is not installed")


def launches_in(text: str) -> list[Launch]:
    return sorted((Launch(**json.loads(line)) for line in text.splitlines() if line.startswith("{")), key=place_of)


def run(*command: str, more: dict[str, str] | None = None) -> list[Launch]:
    """What the processes started by `command` print, in the order of their ranks."""
    done = subprocess.run(command, env=CLEAN | (more or {}), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return launches_in(done.stdout)


def assert_found(launches: list[Launch], launcher: str, places: list[Place]) -> None:
    assert [launch.launcher for launch in launches] == [launcher] * len(places)
    assert [place_of(launch) for launch in launches] == places
    assert len({(launch.master_address, launch.master_port) for launch in launches}) == 1


def test_started_plainly(probe) -> None:
    assert_found(run(*probe), "none", [ALONE])


def test_mpirun_of_open_mpi(probe) -> None:
    assert_found(run(program("mpirun.openmpi"), *AS_ROOT, "-n", "3", *probe), "Open MPI", on_one_node(3))


def test_mpirun_of_mpich(probe) -> None:
    launches = run(program("mpirun.mpich", "mpiexec.hydra"), "-n", "3", *probe)
    assert_found(launches, "MPICH or Intel MPI", on_one_node(3))


@pytest.fixture
def other_host(tmp_path: Path) -> str:
    """Instead of ssh: runs a command on this machine under another host name, which is all that mpirun sees of a node."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("only root can give a process another host name")
    file = tmp_path / "other-host"
    file.write_text(
        '#!/bin/bash\n[ "$1" = -x ] && shift\nhost=$1; shift\nexec unshare --uts bash -c "hostname $host; $*"\n'
    )
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("by", ["slot", "node"])
def test_mpirun_of_open_mpi_on_two_nodes(probe, other_host, by) -> None:
    ssh = ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", other_host, "--host", "node1:2,node2:2", "--map-by", by]
    launches = run(program("mpirun.openmpi"), *AS_ROOT, *ssh, "-x", "MASTER_ADDR=node1", "-n", "4", *probe)
    in_turn = [(0, 4, 0, 2, 0, 2), (1, 4, 0, 2, 1, 2), (2, 4, 1, 2, 0, 2), (3, 4, 1, 2, 1, 2)]
    assert_found(launches, "Open MPI", in_turn if by == "node" else TWO_NODES_OF_TWO)
    assert launches[0].master_address == "node1"


def test_mpirun_of_mpich_on_two_nodes(probe, other_host) -> None:
    ssh = ["-bootstrap", "ssh", "-bootstrap-exec", other_host, "-hosts", "node1:2,node2:2"]
    launches = run(program("mpirun.mpich"), *ssh, "-genv", "MASTER_ADDR", "node1", "-n", "4", *probe)
    assert_found(launches, "MPICH or Intel MPI", TWO_NODES_OF_TWO)
    assert launches[0].master_address == "node1"


TORCHRUN_PROGRAM = [sys.executable, "-m", "torch.distributed.run"]


def test_torchrun(probe) -> None:
    assert_found(run(*TORCHRUN_PROGRAM, "--nproc-per-node=2", probe[1]), "torchrun", on_one_node(2))


def test_torchrun_on_two_nodes(probe, tmp_path: Path) -> None:
    # The first agent picks the port, and the second finds it in a file: nothing is guessed, so nothing can collide.
    rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path}/store", "--rdzv-id=7"]
    rendezvous += ["--rdzv-conf=store_type=file"]
    agents = [
        subprocess.Popen(
            [*TORCHRUN_PROGRAM, *rendezvous, f"--nproc-per-node={n}", probe[1]],
            env=CLEAN,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2)
    ]
    outputs = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    launches = launches_in("".join(out for out, _ in outputs))
    one_first = [(0, 3, 0, 1, 0, 2), (1, 3, 0, 2, 1, 2), (2, 3, 1, 2, 1, 2)]
    two_first = [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]
    assert_found(launches, "torchrun", one_first if launches[0].local_size == 1 else two_first)


def test_torchrun_that_restarts_its_processes(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(f"import os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(3)\n{PROBE}")
    launches = run(*TORCHRUN_PROGRAM, "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", str(file))
    assert_found(launches, "torchrun", on_one_node(2))
    assert [launch.restarts for launch in launches] == [1, 1]


def test_the_subprocess_launcher_of_lightning(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(
        "from lightning.fabric.plugins.environments import LightningEnvironment\n"
        "from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher\n"
        "launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)\n"
        f"launcher.launch(lambda: exec({PROBE!r}))\n"
        "for child in launcher.procs: child.wait()\n"
    )
    assert_found(run(sys.executable, str(file)), "Lightning", on_one_node(2))


@pytest.fixture(scope="module")
def in_slurm(slurm, tmp_path_factory) -> dict[str, list[Launch]]:
    """What is found inside one job of 4 tasks, by how the program was started there."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "probe.py").write_text(PROBE)
    probe = f"{sys.executable} {folder}/probe.py"
    plugins = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True).stdout.split()
    commands = {"batch": probe, "srun": f"srun -n 3 {probe}", "srun, all tasks": f"srun {probe}"}
    commands |= {"srun in a shell": f"srun -n 3 bash -c 'true; {probe}'"}
    commands |= {
        f"srun --mpi={name}": f"srun --mpi={name} -n 3 {probe}" for name in ("pmi2", "cray_shasta") if name in plugins
    }
    if shutil.which("mpirun.openmpi"):
        commands["Open MPI"] = f"mpirun.openmpi {' '.join(AS_ROOT)} -n 3 {probe}"
        commands["Open MPI in a step"] = f"srun -n 1 mpirun.openmpi {' '.join(AS_ROOT)} -n 3 {probe}"
    if shutil.which("mpirun.mpich"):
        commands["MPICH"] = f"mpirun.mpich -n 3 {probe}"
    lines = [f"echo '# {name}'\n{command}" for name, command in commands.items()]
    output = slurm.wait(slurm.submit("set -e\n" + "\n".join(lines), folder, "-n", "4", environ=CLEAN), folder)
    sections = [section.split("\n", 1) for section in output.split("# ")[1:]]
    assert [name for name, _ in sections] == list(commands), output
    return {name: launches_in(text) for name, text in sections}


def test_a_batch_script_without_srun_is_one_process_with_a_message(in_slurm) -> None:
    assert_found(in_slurm["batch"], "none", [ALONE])
    assert in_slurm["batch"][0].note == WITHOUT_SRUN


@pytest.mark.parametrize(
    ("started", "launcher", "n"),
    [
        ("srun", "srun", 3),
        ("srun, all tasks", "srun", 4),
        ("srun in a shell", "srun", 3),
        ("srun --mpi=pmi2", "srun", 3),
        ("srun --mpi=cray_shasta", "srun", 3),
        ("Open MPI", "Open MPI", 3),
        ("Open MPI in a step", "Open MPI", 3),
        ("MPICH", "MPICH or Intel MPI", 3),
    ],
)
def test_the_innermost_launcher_counts_in_a_slurm_job(in_slurm, started, launcher, n) -> None:
    if started not in in_slurm:
        pytest.skip(f"{started} is not installed")
    assert_found(in_slurm[started], launcher, on_one_node(n))
    assert all(launch.job.startswith("SLURM job ") and not launch.note for launch in in_slurm[started])
    assert all(("step" in launch.job) == (launcher == "srun") for launch in in_slurm[started])


def test_a_shell_of_salloc_is_one_process(slurm, probe) -> None:
    salloc = ["salloc", "--quiet", "-n", "4"]
    for shell in ([], ["srun", "--interactive", "--preserve-env", "-n1", "-N1"]):  # by SLURM's use_interactive_step
        launches = run(*salloc, *shell, *probe)
        assert_found(launches, "none", [ALONE])
        assert launches[0].note == WITHOUT_SRUN
    assert_found(run(*salloc, "srun", "-n", "3", *probe), "srun", on_one_node(3))


def test_a_job_submitted_from_inside_a_step_ignores_the_variables_of_that_step(slurm, probe, tmp_path: Path) -> None:
    submitting = (
        f"[ $SLURM_PROCID = 1 ] || exit 0; sbatch --parsable -n 3 -o {tmp_path}/job-%j.out --wrap '{' '.join(probe)}'"
    )
    command = ["srun", "--quiet", "-n", "3", "bash", "-c", submitting]
    job = subprocess.run(command, env=CLEAN, capture_output=True, text=True, timeout=240, check=True).stdout.strip()
    launches = launches_in(slurm.wait(job, tmp_path))
    assert_found(launches, "none", [ALONE])
    assert "3 tasks" in launches[0].note


def test_a_requeued_job_knows_that_it_was_restarted(slurm, probe, tmp_path: Path) -> None:
    script = (
        f"if [ -z $SLURM_RESTART_COUNT ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi\nsrun {' '.join(probe)}"
    )
    job = slurm.submit(script, tmp_path, "-n", "2", "--open-mode=append", environ=CLEAN)
    launches = launches_in(slurm.wait(job, tmp_path))
    assert_found(launches, "srun", on_one_node(2))
    assert [launch.restarts for launch in launches] == [1, 1]


def test_starting_slurm_again_changes_nothing(slurm) -> None:
    def daemons() -> list[bytes]:
        return [file.read_bytes() for name in ("slurmctld", "slurmd") if (file := Path(f"/run/{name}.pid")).exists()]

    before = daemons()
    subprocess.run([str(Path(__file__).with_name("start-slurm.sh"))], check=True, timeout=60)
    assert daemons() == before
