"""Shared by the tests of the data layer: a private cache, and small structures with known numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forgefield.data.frame import Frame

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the real data sets are not here")
    return SHARED


@pytest.fixture
def make_frame():
    """A frame with random positions, energy from `per_species` and zero forces unless told otherwise."""
    rng = np.random.default_rng(7)

    def make(numbers, *, energy=0.0, forces="zero", stress=None, cell=None, pbc=False, positions=None, **rest) -> Frame:
        n = len(numbers)
        if positions is None:
            positions = np.arange(n)[:, None] * np.array([1.1, 0.2, 0.3]) + rng.normal(scale=0.05, size=(n, 3))
        return Frame(
            positions=np.asarray(positions, dtype=np.float64),
            numbers=np.array(numbers, dtype=np.int64),
            cell=np.zeros((3, 3)) if cell is None else np.asarray(cell, dtype=np.float64),
            pbc=np.full(3, pbc) if np.ndim(pbc) == 0 else np.array(pbc),
            energy=energy,
            forces=np.zeros((n, 3)) if isinstance(forces, str) else forces,
            stress=stress,
            **rest,
        )

    return make
