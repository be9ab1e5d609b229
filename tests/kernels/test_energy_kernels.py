"""Readout, sums of frames and pointers of segments by kernels against plain operations."""

import pytest
import torch

from forgefield.kernels.dense.readout import ATOMS, CHANNELS, energies_by_kernel, moved_energies_by_kernel
from forgefield.kernels.edges.segments import ROWS, pointers_by_kernel, sums_by_kernel
from forgefield.ops.graph import Segments, gather
from tests.support.kernels import DEVICE, assert_same, draw, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize(("n_atoms", "width"), [(ATOMS + 3, 5), (2, CHANNELS + 1), (0, 3)])
def test_energies_by_a_linear_readout_and_all_their_derivatives(n_atoms, width):
    norm, species = 0.37, (draw(1, n_atoms) > 0).long()
    rows, weight, scales, shifts = draw(2, 2 * n_atoms, width), draw(3, width, 1), draw(4, 2), draw(5, 2)
    given = [tensor.requires_grad_() for tensor in (rows, weight, scales, shifts)]
    kind = Segments(species, 2)
    read, moved = norm * (rows @ weight).view(2, -1)
    expected = [gather(shifts, kind) + gather(scales, kind) * read, gather(scales, kind) * moved]
    cotangents = [draw(6, n_atoms), draw(7, n_atoms)]
    slopes = torch.autograd.grad(expected, given, cotangents)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        ours = [tensor.detach().to(dtype).requires_grad_() for tensor in (rows, weight)]
        found = moved_energies_by_kernel(*ours, norm, species, scales, shifts)
        for one, other in zip(found, expected):
            assert_same(one, other, tolerance)
        for one, other in zip(torch.autograd.grad(found, [*ours, scales, shifts], cotangents), slopes):
            assert_same(one, other, tolerance)
        features = ours[0].detach()[:n_atoms].requires_grad_()
        alone = energies_by_kernel(features, weight.to(dtype), norm, species, scales, shifts)
        assert_same(alone, expected[0], tolerance)
        (slope,) = torch.autograd.grad(alone, features, cotangents[0])
        assert_same(slope, slopes[0][:n_atoms], tolerance)


@pytest.mark.parametrize("sizes", [[], [1], [0, 3, 0, 0, 2 * ROWS, 1, 0], [1] * (ROWS + 2)])
def test_where_segments_begin_and_sums_over_them(sizes):
    counts = torch.tensor(sizes, dtype=torch.int64, device=DEVICE)
    index = torch.repeat_interleave(torch.arange(len(sizes), device=DEVICE), counts)
    pointers = pointers_by_kernel(index, len(sizes))
    assert torch.equal(pointers, Segments(index, len(sizes), rows_are_sorted=True).pointers)
    values = draw(8, index.shape[0])
    assert_same(sums_by_kernel(values, pointers), values.new_zeros(len(sizes)).index_add(0, index, values))
