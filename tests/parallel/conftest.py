"""A real SLURM of one machine for the tests that need one."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

START = Path(__file__).with_name("start-slurm.sh")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class Slurm:
    """Submits batch scripts and waits for them."""

    def submit(self, script: str, folder: Path, *options: str, environ: dict[str, str] | None = None) -> str:
        """Submit `script`; what it prints goes to folder/job-ID.out. Returns the job's number."""
        file = folder / f"job-{time.monotonic_ns()}.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        command = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/job-%j.out", *options, str(file)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip().split(";")[0]

    def state(self, job: str) -> str:
        command = ["scontrol", "--oneliner", "show", "job", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return next((word[9:] for word in done.stdout.split() if word.startswith("JobState=")), "UNKNOWN")

    def wait(self, job: str, folder: Path, timeout: float = 200) -> str:
        """What the finished job printed; fails if it does not end well in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in ENDED:
            if time.monotonic() > deadline:
                subprocess.run(["scancel", job], timeout=60)
                break
            time.sleep(0.2)
        file = folder / f"job-{job}.out"
        text = file.read_text() if file.exists() else ""
        assert state == "COMPLETED", f"job {job} is {state} after {timeout} s at most; it printed:\n{text}"
        return text


@pytest.fixture(scope="session")
def slurm() -> Slurm:
    """A SLURM on this machine with 4 CPUs, started if there is none. Several test processes may ask at once."""
    if shutil.which("sbatch") is None:
        pytest.skip("no sbatch: SLURM is not installed (Debian: slurm-wlm, munge)")
    started = subprocess.run([str(START)], capture_output=True, text=True, timeout=200)
    if started.returncode and os.geteuid() != 0:
        pytest.skip("no SLURM answers, and only root can start one")
    assert started.returncode == 0, started.stderr
    config = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=60).stdout
    if "(127.0.0.1)" not in config:
        pytest.skip("the SLURM that answers is a real cluster: the tests use only one of this machine")
    return Slurm()
