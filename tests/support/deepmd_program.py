"""Calls of deepmd-kit in its own Python; FORGEFIELD_DEEPMD_PYTHON may name that interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).with_name("deepmd_oracle.py")


def deepmd_python() -> str | None:
    named = os.environ.get("FORGEFIELD_DEEPMD_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("deepmd") else None)


def ask(what: str, job: dict[str, Any], folder: Path) -> None:
    """Run the oracle; it writes the files that the job names."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    python = deepmd_python()
    assert python is not None
    done = subprocess.run(
        [python, str(ORACLE), what, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
