"""Edges sorted by interval by kernels against torch's stable sort."""

import pytest
import torch

from forgefield.kernels.radial import table
from forgefield.kernels.radial.table import BLOCK, CHUNK, Intervals
from forgefield.ops.execution import execution
from tests.support.kernels import DEVICE, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize(("n_edges", "count"), [(0, 5), (7, 300), (2 * BLOCK + 3, 17), (3 * BLOCK, 1)])
def test_edges_in_order_of_their_intervals(n_edges, count, monkeypatch):
    monkeypatch.setattr(table, "BLOCKS", 2)  # so that blocks are added in more than one go
    at = torch.randint(0, max(count - 1, 1), (n_edges,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    at[: 2 * CHUNK + 1] = 0
    plain = Intervals(at.to(DEVICE), count).sorted()
    with execution(kernels=True):
        ours = Intervals(at.to(DEVICE), count).sorted()
    for name in plain._fields:
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
