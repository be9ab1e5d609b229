"""Checkpoints on disk: written atomically, verified when they are read, and loaded without executing code.

A checkpoint is a torch zip archive of tensors, numbers, strings and containers of them. It is written to a temporary file,
flushed to disk and renamed, so that a file with the name of a checkpoint is complete. The checksums of the archive are verified
first when it is read. A damaged file is renamed and the previous checkpoint is used; any other error (of the disk, of memory,
of another version) stops the command and leaves the file as it is. Checkpoints of earlier versions of the format are migrated
when they are read (`CHECKPOINT`).
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO

from forgefield.errors import ForgefieldError
from forgefield.files import PARTIAL, read_bytes, write_atomically
from forgefield.formats import VERSION, Format
from forgefield.parallel.ranks import Ranks
from forgefield.training.run.writer import BackgroundWriter, Snapshot

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

POSITION = "forgefield_position"
"""Key of the position in the epoch: samples seen, number of ranks, and the limits of a training that has ended."""
RANDOM = "forgefield_random"
"""Key of the states of the random number generators of all ranks."""

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
    """Key of the state of `training.early_stopping`; states of different metrics are independent."""
    return f"early_stopping:{monitor}"


def _fixed_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Migration from version 1 to version 2: states have fixed names instead of class names."""
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


def load_checkpoint(path: Path, map_location: MAP_LOCATION = "cpu") -> dict[str, Any]:
    """The content of a checkpoint, in the current version of the format.

    Raises `DamagedCheckpoint` for a damaged file, `UnreadableCheckpoint` for an undamaged one that cannot be loaded,
    `NewerFormat` for one of a newer version of Forgefield, and ForgefieldError if the file cannot be read.
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
        raise UnreadableCheckpoint(f"it contains a {type(checkpoint).__name__} instead of a dictionary")
    return CHECKPOINT.upgrade(checkpoint, path)


def _require_intact(content: io.BytesIO) -> None:
    """Raise `DamagedCheckpoint` unless all files in the archive match their checksums and all necessary ones exist."""
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
    """The file has changed since it was written: its checksums do not match, or something is missing."""


class UnreadableCheckpoint(Exception):
    """The file is undamaged, but its content cannot be loaded."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes.

    path: of the checkpoint.
    step: of the optimiser.
    sample: number of samples of the epoch that were used.
    rows: number of rows of metrics written so far.
    finished: the limits of a training that has ended; None if it has not.
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
    steps = [
        (int(match.group(1)), path) for path in folder.glob("step-*.ckpt") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(steps, reverse=True)]


def find_resume_point(folder: Path, notify: Callable[[str], None]) -> ResumePoint | None:
    """The newest undamaged checkpoint; None if there is no checkpoint. Damaged ones are renamed and reported."""
    for leftover in folder.glob(f".*{PARTIAL}*"):
        leftover.unlink(missing_ok=True)
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            return _resume_point(path, load_checkpoint(path))
        except (UnreadableCheckpoint, KeyError) as error:
            raise ForgefieldError(
                f"Checkpoint {path} is undamaged but cannot be loaded ({error}). It may be of another version of Forgefield or "
                "torch; use that version, or start over with --fresh (the folder is kept)."
            ) from error
        except DamagedCheckpoint as error:
            renamed = path.with_suffix(".damaged")
            os.replace(path, renamed)
            notify(f"Checkpoint {path.name} is damaged ({error}); renamed to {renamed.name}, trying the previous one.")
    if damaged := list(folder.glob("*.damaged")):
        raise ForgefieldError(
            f"None of the {len(damaged)} checkpoints in {folder} can be read; start over with --fresh (the folder is kept)."
        )
    return None


def prune_checkpoints(folder: Path, keep: int) -> None:
    for path in list_checkpoints(folder)[max(keep, 1) :]:
        path.unlink(missing_ok=True)


class AtomicCheckpointIO(CheckpointIO):
    """Writes and reads checkpoints for Lightning. Only rank 0 accesses the disk; it sends what it reads to the others."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._writer: BackgroundWriter | None = None

    @contextmanager
    def in_background(self, writer: BackgroundWriter) -> Iterator[None]:
        """Inside the block checkpoints are copied, and written while the training continues."""
        self._writer = writer
        try:
            yield
        finally:
            self._writer = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage options are not supported")
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if self._writer is None:
            save_checkpoint(file, checkpoint)
            return
        snapshot = Snapshot(checkpoint)
        self._writer.submit(file.name, lambda: save_checkpoint(file, snapshot.content()))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: MAP_LOCATION = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = load_checkpoint(Path(path), map_location or "cpu") if self.ranks.is_rank_zero else {}
        return self.ranks.broadcast(checkpoint)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


def _resume_point(path: Path, checkpoint: dict[str, Any]) -> ResumePoint:
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
