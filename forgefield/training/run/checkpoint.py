"""Checkpoints on disk: written whole or not at all, verified when read, loaded without executing code.

A checkpoint is a torch zip archive of tensors, numbers, strings and containers of them. It is written under a temporary name,
flushed to the disk and renamed, so that a file with a checkpoint's name is complete. On reading, the archive's own
checksums are verified first. A file that does not match them is renamed and the next older one is used; any other error (of the
disk, of memory, of another version) stops the command and leaves the file alone. Checkpoints of earlier versions of the format
are upgraded when they are read (`CHECKPOINT`).
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from forgefield.errors import ForgefieldError
from forgefield.files import PARTIAL, read_bytes, write_atomically
from forgefield.formats import VERSION, Format
from forgefield.parallel.ranks import Ranks

POSITION = "forgefield_position"
"""Where the training stands inside its epoch: samples seen, number of ranks, and the limits under which it ended, if it did."""
RANDOM = "forgefield_random"
"""States of the random number generators of each rank."""

_STATE_KEYS_OF_CLASSES = {
    "MetricsLog": "metrics_log",
    "BestModel": "best_model",
    "RunProgress": "progress",
    "LearningCurve": "learning_curve",
    "LossSpike": "loss_spike",
    "GradientCheck": "gradient_check",
    "TrainingHelper": "training_helper",
    "ForwardNaNDetection": "forward_nan",
    "ModelAutocorrelation": "autocorrelation",
    "ThroughputMeter": "throughput",
    "EnergyMeter": "energy",
    "ReportTrial": "report_trial",
}
_EARLY_STOPPING_OF_VERSION_1 = "_Patience{'monitor': '"


def early_stopping_key(monitor: str) -> str:
    """The name of the state of `training.early_stopping`; the state of one metric says nothing about another."""
    return f"early_stopping:{monitor}"


def _fixed_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Version 1 to version 2."""
    renamed = {"forgefield_place": POSITION}
    checkpoint = {renamed.get(key, key): value for key, value in checkpoint.items()}
    callbacks = checkpoint.get("callbacks", {})
    checkpoint["callbacks"] = {_state_key(name): state for name, state in callbacks.items()}
    state = dict(checkpoint.get("forgefield", {}))
    if "own_kernels" in state:
        state["fused_kernels"] = state.pop("own_kernels")
    return {**checkpoint, "forgefield": state}


def _state_key(name: str) -> str:
    if name.startswith(_EARLY_STOPPING_OF_VERSION_1):
        return early_stopping_key(name.removeprefix(_EARLY_STOPPING_OF_VERSION_1).partition("'")[0])
    return _STATE_KEYS_OF_CLASSES.get(name, name)


CHECKPOINT = Format("a checkpoint", (_fixed_names,))


_NAME = re.compile(r"step-(\d+)\.ckpt")


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint of the current version of the format."""
    buffer = io.BytesIO()
    torch.save({**checkpoint, VERSION: CHECKPOINT.version}, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """The content of a checkpoint, in the current version of the format.

    Raises `DamagedCheckpoint` when the file is not what was written, `UnreadableCheckpoint` when it is but cannot be loaded,
    `NewerFormat` when a newer version of Forgefield wrote it, and ForgefieldError when the file cannot be read.
    """
    content = io.BytesIO(read_bytes(path))
    _require_intact(content)
    content.seek(0)
    try:
        checkpoint = torch.load(content, map_location=map_location, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        raise UnreadableCheckpoint(str(error).split("\n")[0]) from error
    if not isinstance(checkpoint, dict):
        raise UnreadableCheckpoint(f"it holds a {type(checkpoint).__name__} instead of a dictionary")
    return CHECKPOINT.upgrade(checkpoint, path)


def _require_intact(content: io.BytesIO) -> None:
    """Raise `DamagedCheckpoint` unless all members of the archive match their checksums and torch finds those it needs."""
    try:
        with zipfile.ZipFile(content) as archive:
            broken = archive.testzip()
            members = {name.partition("/")[2] for name in archive.namelist()}
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedCheckpoint(str(error).split("\n")[0]) from error
    if broken is not None:
        raise DamagedCheckpoint(f"checksum of {broken} does not match")
    if missing := {"data.pkl", "version"} - members:
        raise DamagedCheckpoint(f"{min(missing)} is missing in the archive")
    content.seek(0)
    try:
        torch._C.PyTorchFileReader(content)  # notices damage of the archive's structure that Python's reader tolerates
    except RuntimeError as error:
        raise DamagedCheckpoint(str(error).split("\n")[0]) from error


class DamagedCheckpoint(Exception):
    """The file is not what was written: its checksums do not match, or a part is missing."""


class UnreadableCheckpoint(Exception):
    """The file is what was written, but its content cannot be loaded."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes: `path` of the checkpoint, optimiser `step`, `epoch`, and how many frames of it were seen.

    rows: rows of metrics written by then. finished: the limits under which training had ended, None where it had not.
    """

    path: Path
    step: int
    epoch: int
    sample: int
    world_size: int
    rows: int
    finished: str | None = None


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.ckpt"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, newest first."""
    found = [
        (int(match.group(1)), path) for path in folder.glob("step-*.ckpt") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def find_resume_point(folder: Path, notify: Callable[[str], None]) -> ResumePoint | None:
    """The newest good checkpoint, or None where there is none at all. Damaged ones are set aside, and that is said."""
    for leftover in folder.glob(f".*{PARTIAL}*"):
        leftover.unlink(missing_ok=True)
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            return _restart_from(path, load_checkpoint(path))
        except (UnreadableCheckpoint, KeyError) as error:
            raise ForgefieldError(
                f"Checkpoint {path} is undamaged but cannot be loaded ({error}). It may be of another version of Forgefield or "
                "torch; use that version, or start over with --fresh (the folder is kept)."
            ) from error
        except DamagedCheckpoint as error:
            aside = path.with_suffix(".damaged")
            os.replace(path, aside)
            notify(f"Checkpoint {path.name} is damaged ({error}); it was renamed {aside.name}, trying the one before.")
    if damaged := list(folder.glob("*.damaged")):
        raise ForgefieldError(
            f"None of the {len(damaged)} checkpoints in {folder} can be read; start over with --fresh (the folder is kept)."
        )
    return None


def prune_checkpoints(folder: Path, keep: int) -> None:
    for path in list_checkpoints(folder)[max(keep, 1) :]:
        path.unlink(missing_ok=True)


class AtomicCheckpointIO(CheckpointIO):
    """What Lightning calls to write and read checkpoints. Rank 0 alone touches the disk; the others get what it reads."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("storage options are not supported")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = load_checkpoint(Path(path), map_location or "cpu") if self.ranks.is_rank_zero else {}
        return self.ranks.broadcast(checkpoint)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def _restart_from(path: Path, checkpoint: dict[str, Any]) -> ResumePoint:
    position = checkpoint[POSITION]
    return ResumePoint(
        path=path,
        step=int(checkpoint["global_step"]),
        epoch=int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]),
        sample=int(position["sample"]),
        world_size=int(position["world_size"]),
        rows=int(checkpoint["callbacks"]["metrics_log"]["rows"]),
        finished=position.get("finished"),
    )
