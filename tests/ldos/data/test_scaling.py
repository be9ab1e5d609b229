"""Scaling: one streaming pass gives numpy's float64 numbers, on any number of ranks; bad values are named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.ldos.data import (
    PointMoments,
    PointTable,
    Scaling,
    Snapshot,
    find_snapshots,
    measure_points,
    split_points,
)


@pytest.fixture
def far(tmp_path):
    """Values with a large offset, where sums of squares would fail, and a column that never changes."""
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(5000, 5)) * [1, 1e-3, 10, 1, 5] + [1e6, -1e5, 0, 3, 1e8]
    inputs[:, 3] = 0.1
    np.save(tmp_path / "far.in.npy", inputs)
    np.save(tmp_path / "far.out.npy", rng.random(size=(5000, 2)) * [1, 1e-4] + [0, 2.0])
    return PointTable([Snapshot("far", tmp_path / "far.in.npy", tmp_path / "far.out.npy", coordinates=False)])


@pytest.mark.parametrize(("ranks", "block", "workers"), [(1, 8192, 0), (1, 333, 2), (3, 100, 0)])
def test_moments_are_those_of_numpy(far, ranks, block, workers):
    parts = [measure_points(far, rank=r, world_size=ranks, block=block, workers=workers) for r in range(ranks)]
    found = PointMoments.merged(parts)
    for values, moments in zip(far.snapshots[0].read(dtype=np.float64), (found.inputs, found.targets)):
        exact = values.astype(np.longdouble)
        np.testing.assert_allclose(moments.mean, exact.mean(axis=0).astype(float), rtol=1e-14, atol=1e-13)
        spread = exact.std(axis=0, ddof=1).astype(float)
        spread[np.ptp(values, axis=0) == 0] = 0.0
        np.testing.assert_allclose(moments.std, spread, rtol=1e-12)
        np.testing.assert_allclose(moments.over_all().std, exact.std(ddof=1).astype(float), rtol=1e-12)
        assert np.array_equal(moments.low, values.min(axis=0))
        assert np.array_equal(moments.high, values.max(axis=0))


def test_only_selected_points_count(table):
    train = split_points(len(table), {"val": 0.2}, 5)["train"]
    rows = train.rows(torch.arange(train.n)).numpy()
    inputs = np.concatenate([snapshot.read(dtype=np.float64)[0] for snapshot in table.snapshots])[rows]
    found = measure_points(table, train, block=64)
    assert found.inputs.count == len(rows) < len(table)
    np.testing.assert_allclose(found.inputs.std, inputs.std(axis=0, ddof=1), rtol=1e-12)


@pytest.mark.parametrize("kind", ["standard", "minmax", "feature-wise-standard", "feature-wise-minmax", None])
def test_scaled_values_have_the_promised_range(far, kind):
    values = torch.from_numpy(far.snapshots[0].read(dtype=np.float64)[0])
    scaling = Scaling.of(kind, measure_points(far).inputs)
    scaling = Scaling.from_dict(json.loads(json.dumps(scaling.to_dict())))
    scaled = scaling.scaled(values)
    torch.testing.assert_close(scaling.physical(scaled), values, rtol=1e-14, atol=1e-15 * values.abs().max().item())
    moving = scaled if kind in ("standard", "minmax") else scaled[:, [0, 1, 2, 4]]
    dims = () if kind in ("standard", "minmax") else (0,)
    if kind is None:
        assert torch.equal(scaled, values)
    elif kind.endswith("minmax"):
        assert torch.all(moving.amin(dims) == 0)
        assert torch.all(moving.amax(dims) == 1)
    else:
        torch.testing.assert_close(moving.mean(dims), torch.zeros_like(moving.mean(dims)), rtol=0, atol=1e-6)
        torch.testing.assert_close(moving.std(dims), torch.ones_like(moving.std(dims)), rtol=1e-9, atol=0)
    if kind is not None and kind.startswith("feature-wise"):
        assert scaling.constant == (3,)
        assert torch.all(scaled[:, 3] == 0)
        assert "1 of 5 columns are constant (3)" in scaling.describe()


def test_scaling_by_all_values_treats_columns_alike(far):
    scaling = Scaling.of("minmax", measure_points(far).targets)
    assert len(set(scaling.scale.tolist())) == 1
    assert scaling.shift.shape == (2,)
    with pytest.raises(ForgefieldError, match="Did you mean 'minmax'"):
        Scaling.of("minmx", measure_points(far).targets)


def test_nan_values_are_named(folder):
    array = np.load(folder / "snap1.out.npy")
    array[1, 2, 3, 2] = np.nan
    array[2, 0, 0, 2] = np.inf
    array[2, 0, 0, 0] = np.nan
    np.save(folder / "snap1.out.npy", array)
    table = PointTable(find_snapshots(str(folder)))
    message = (
        r"snap1\.out\.npy: 3 values are NaN or infinite: level 0 \(1\), level 2 \(2\).* snap1, grid point \(1, 2, 3\)"
    )
    with pytest.raises(ForgefieldError, match=message):
        measure_points(table, block=50)
