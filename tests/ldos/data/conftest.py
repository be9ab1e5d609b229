"""Small snapshots with known numbers: the first descriptor and the first level of a point are its row in the whole table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forgefield.ldos.data import PointTable, find_snapshots
from tests.support.numbered_snapshots import SHAPES, write_snapshot

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.fixture
def be2() -> Path:
    if not (SHARED / "be2_ldos").is_dir():
        pytest.skip("the real data sets are not here")
    return SHARED / "be2_ldos"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three snapshots of 120, 105 and 128 points, 4 descriptors behind 3 coordinates, 3 levels."""
    first = 0
    for number, shape in enumerate(SHAPES):
        write_snapshot(tmp_path, f"snap{number}", shape, first)
        first += int(np.prod(shape))
    return tmp_path


@pytest.fixture
def table(folder) -> PointTable:
    return PointTable(find_snapshots(str(folder)))
