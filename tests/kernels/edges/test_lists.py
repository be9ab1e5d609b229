"""Neighbour lists by kernels: the same edges in the same order as the reference, for many systems at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.kernels.edges.lists import ListBuilder
from forgefield.kernels.edges.near import SkinLists
from forgefield.ops.neighbour_lists import batched_neighbours
from tests.support.kernels import DEVICE, needs_kernels

pytestmark = needs_kernels

PERIODICITIES = [(True, True, True), (True, True, False), (False, True, False), (False, False, False)]


def builder_of(frames, reach: float, capacity: int | None = None, blank_atoms: int = 3):
    """A builder for these frames and a blank system, and the reference's edges."""
    positions = torch.from_numpy(np.concatenate([np.asarray(f[0], dtype=np.float64).reshape(-1, 3) for f in frames]))
    cells = torch.from_numpy(np.array([f[1] for f in frames], dtype=np.float64))
    pbc = torch.tensor(np.array([f[2] for f in frames], dtype=bool))
    n_atoms = torch.tensor([len(f[0]) for f in frames])
    expected = batched_neighbours(positions, n_atoms, cells, pbc, reach)
    counts = torch.cat([n_atoms, torch.tensor([blank_atoms])])
    all_positions = torch.cat([positions, torch.zeros(blank_atoms, 3, dtype=torch.float64)]).to(DEVICE)
    all_cells = torch.cat([cells, 2 * reach * torch.eye(3, dtype=torch.float64)[None]]).to(DEVICE)
    system = torch.repeat_interleave(counts).to(DEVICE)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(DEVICE)
    capacity = expected[0].shape[1] + 5 if capacity is None else capacity
    total = len(all_positions)
    lists = SkinLists(
        pointers=torch.zeros(total + 1, dtype=torch.int64, device=DEVICE),
        source=torch.full((capacity,), -7, dtype=torch.int32, device=DEVICE),
        shift=torch.full((capacity, 3), -7, dtype=torch.int16, device=DEVICE),
        reverse=torch.full((capacity,), -7, dtype=torch.int32, device=DEVICE),
        positions=torch.zeros_like(all_positions),
        cell=torch.zeros_like(all_cells),
        inverse=torch.ones_like(all_cells),
    )
    all_pbc = torch.cat([pbc, torch.ones(1, 3, dtype=torch.bool)]).to(DEVICE)
    return ListBuilder(all_positions, all_cells, all_pbc, system, first, lists, reach), expected, n_atoms


def assert_built(builder: ListBuilder, expected, n_atoms) -> None:
    index, shift, reverse = (tensor.cpu() for tensor in expected)
    lists, count, real = builder.lists, index.shape[1], int(n_atoms.sum())
    assert int(builder.status) == 0
    pointers = lists.pointers.cpu()
    assert torch.equal(pointers[: real + 1], torch.searchsorted(index[1].contiguous(), torch.arange(real + 1)))
    assert (pointers[real:] == count).all()  # blank atoms have no neighbours
    assert torch.equal(lists.source[:count].cpu().long(), index[0])
    assert torch.equal(lists.shift[:count].cpu().long(), shift)
    assert torch.equal(lists.reverse[:count].cpu().long(), reverse)
    assert (lists.source[count:] == -7).all()
    assert torch.equal(lists.positions, builder.positions)
    assert torch.equal(lists.cell, builder.cell)


@pytest.mark.parametrize("pbc", PERIODICITIES, ids=str)
def test_systems_of_all_kinds(pbc):
    rng = np.random.default_rng(sum(pbc))
    frames = []
    for n, skew, size in ((4, 0.3, 5.0), (1, 0.0, 2.0), (3, 0.2, 9.0)):
        cell = np.eye(3) * size + rng.uniform(-skew, skew, (3, 3)) * size
        positions = rng.uniform(-1.5, 2.5, (n, 3)) @ cell
        cell[~np.array(pbc)] = 0.0
        frames.append((positions, cell, pbc))
    builder, expected, n_atoms = builder_of(frames, reach=3.0)
    builder.build()
    assert_built(builder, expected, n_atoms)
    inverse = builder.lists.inverse[: len(frames)].cpu()
    if all(pbc):
        unit = torch.eye(3, dtype=torch.float64).expand_as(inverse)
        torch.testing.assert_close(inverse @ builder.cell[: len(frames)].cpu(), unit)
    else:
        assert not inverse.any()


def test_lists_are_built_again_for_other_positions():
    rng = np.random.default_rng(3)
    cell = np.eye(3) * 6.0
    builder, _, n_atoms = builder_of([(rng.random((4, 3)) * 6.0, cell, (True,) * 3)], reach=3.0, capacity=500)
    for _ in range(2):
        positions = torch.from_numpy(rng.random((4, 3)) * 6.0)
        builder.positions[:4] = positions.to(DEVICE)
        builder.lists.source.fill_(-7)
        builder.build()
        assert_built(
            builder,
            batched_neighbours(
                positions, n_atoms, torch.from_numpy(cell)[None], torch.ones(1, 3, dtype=torch.bool), 3.0
            ),
            n_atoms,
        )


def test_a_single_row_of_atoms_in_vacuum():
    positions = np.arange(8)[:, None] * np.array([[2.0, 0.0, 0.0]])
    builder, expected, n_atoms = builder_of([(positions, np.zeros((3, 3)), (False,) * 3)], reach=3.0)
    builder.build()
    assert_built(builder, expected, n_atoms)


def test_what_does_not_fit_is_reported():
    rng = np.random.default_rng(1)
    crowded = (rng.random((4, 3)) * 4.0, np.eye(3) * 4.0, (True,) * 3)
    builder, _, _ = builder_of([crowded], reach=3.0, capacity=20)
    builder.build()
    assert int(builder.status) > 0
    assert int(builder.lists.pointers.max()) == 20
    thin = (rng.random((1, 3)), np.diag([0.05, 9.0, 9.0]), (True,) * 3)
    builder, _, _ = builder_of([thin], reach=3.0, capacity=20)
    builder.build()
    assert int(builder.status) > 0


def test_shifts_beyond_twelve_bits_are_reported():
    positions = np.array([[0.0, 0.0, 0.0], [1.0 + 4.0 * 2500, 0.0, 0.0]])
    builder, _, _ = builder_of([(positions, np.eye(3) * 4.0, (True,) * 3)], reach=3.0)
    builder.build()
    assert int(builder.status) > 0


def test_unusable_numbers_do_not_stop_the_build():
    positions = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    builder, _, _ = builder_of([(positions, np.eye(3) * 4.0, (True,) * 3)], reach=3.0, capacity=60)
    builder.positions[0, 0] = 1e12
    builder.build()
    assert int(builder.lists.pointers.max()) <= 60
