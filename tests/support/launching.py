"""Starting real processes in tests, and looking at the runs they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from forgefield.training.run.checkpoint import list_checkpoints, load_checkpoint
from tests.support.warm import run_warm_ranks

ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**extra: str) -> dict[str, str]:
    """The variables of this process without anything that a launcher or an earlier test may have left."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES and "SLURM" not in key}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    modules = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PATH": path, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", **extra}


def torchrun(n: int, *options: str) -> list[str]:
    """The beginning of a command that starts n processes on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *options]


def start(
    command: Sequence[str], folder: Path, *, timeout: float = 200, **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(command),
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def ranks(
    n: int,
    *words: str,
    folder: Path | Sequence[Path],
    launcher: str = "forgefield",
    timeout: float = 200,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m WORDS` as n ranks that were told their places, and nobody looks after: for what ranks do together."""
    environ = clean_environment(**environment)
    return run_warm_ranks(n, *words, folder=folder, environ=environ, launcher=launcher, timeout=timeout)


def train_command(config: Path, *words: str) -> list[str]:
    return ["-m", "forgefield", "train", str(config), *words]


def write_config(path: Path, config: Any) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def final_state(run: Path) -> dict[str, Any]:
    return load_checkpoint(list_checkpoints(run / "checkpoints")[0])


def weights(run: Path) -> torch.Tensor:
    """All weights at the end of a run, as one vector."""
    state = final_state(run)["state_dict"]
    return torch.cat([state[name].reshape(-1).double() for name in sorted(state)])


def average(run: Path) -> torch.Tensor:
    state = final_state(run)["forgefield"]["ema"]["average"]
    return torch.cat([state[name].reshape(-1).double() for name in sorted(state)])


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and only was not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def with_default_interrupts() -> None:
    """For `preexec_fn`: a shell starts background jobs with Ctrl-C ignored, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
