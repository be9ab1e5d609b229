"""Labels that the systems of an input do not have: DeePMD-kit gives them no weight, whatever the loss says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgefield.config.deepmd.data import source_paths
from forgefield.config.deepmd.section import Section


def drop_missing_virial(root: Section, task: dict[str, Any], train: object) -> None:
    """Take `virial` out of the task, with a note, if no training system has it. train: `data.train`."""
    if "virial" not in task or any(_may_have_virial(path, root.file) for path in source_paths(train)):
        return
    del task["virial"]
    root.notes["loss.start_pref_v"] = "no effect: no system of training_data has a virial.npy."


def _may_have_virial(path: str, file: Path) -> bool:
    """Whether a folder contains virials; true for what is not a folder, which the reader looks into."""
    for start in (Path.cwd(), file.absolute().parent):
        folder = start / path
        if folder.is_dir() and folder.suffix != ".lmdb":
            return any(True for pattern in ("set.*/virial.npy", "virial.raw") for _ in folder.rglob(pattern))
    return True
