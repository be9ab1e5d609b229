"""Where things that can be made again are kept: FORGEFIELD_CACHE, or .cache/forgefield in the home folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("FORGEFIELD_CACHE") or "~/.cache/forgefield").expanduser()


def can_keep(folder: Path) -> bool:
    """Whether files can be written to a folder, which is made where it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
