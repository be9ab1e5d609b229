"""What the functions of this package accept as runs, configs and data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ase import Atoms

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import detect_launch
from forgefield.runs import Run
from forgefield.settings import Config

ConfigSource = str | Path | dict[str, Any] | Config
"""A YAML file, a dictionary or a loaded config."""
RunSource = str | os.PathLike[str] | Run
"""Name or path of a run, or a `Run`."""
Structures = Atoms | Sequence[Atoms]
"""One structure or several, in memory."""
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Structures or snapshots: a file, folder, glob or store, or a list of them."""


def require_first_rank(verb: str) -> None:
    """Raise an error in all processes of a launcher but the first."""
    launch = detect_launch(os.environ)
    if launch.rank > 0:
        raise ForgefieldError(f"{verb} runs in one process: call it on rank 0 alone (this is rank {launch.rank}).")
