"""Run folders, stores and configs written by version 0.1.0 (see `tests/fixtures/make_edition_1.py`)."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "edition_1.tar.gz"


def unpack_edition(folder: Path) -> Path:
    """Unpack the stored files into `folder`, with its path in their configs."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in folder.glob("runs/*/config.yaml"):
        path.write_text(path.read_text().replace("@FOLDER@", str(folder)))
    return folder
