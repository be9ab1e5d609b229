"""Asking SLURM to start a job again when it has warned of its end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable


def ask_slurm_to_requeue(notify: Callable[[str], None]) -> None:
    """Called after SIGUSR1, the warning that `sbatch --signal=USR1@SECONDS` asks for. Outside of SLURM it does nothing."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if shutil.which("scontrol") is None:
        notify(f"scontrol is not to be found here, so SLURM could not be asked to requeue job {job}.")
        return
    asked = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        notify(f"SLURM was asked to requeue job {job}; it will go on from here.")
    else:
        notify(f"SLURM would not requeue job {job}: {asked.stderr.strip() or asked.stdout.strip()}")
