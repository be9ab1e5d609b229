"""Where things that can be made again are kept: FORGEFIELD_CACHE, or .cache/forgefield in the home folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("FORGEFIELD_CACHE") or "~/.cache/forgefield").expanduser()
