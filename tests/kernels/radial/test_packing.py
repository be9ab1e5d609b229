"""Tables in three words for each polynomial: what they lose, where they lose nothing, and the kernel that makes them."""

import pytest
import torch
from torch import Tensor

from forgefield.kernels.radial import packing
from forgefield.kernels.radial.packing import BITS, HALF, pack_by_kernel, pack_by_operations, stored_table, unpack
from forgefield.ops.execution import execution
from tests.support.kernels import assert_same, draw, needs_kernels

EPSILON = torch.finfo(torch.float32).eps
WAYS = [pack_by_operations, pytest.param(pack_by_kernel, marks=needs_kernels)]


def drawn(n_intervals: int, columns: int) -> Tensor:
    """Polynomials of short intervals: every coefficient about a hundredth of the one before."""
    sizes = torch.tensor([1.0, 1e-2, 1e-4, 1e-6], dtype=torch.float64).reshape(1, 4, 1)
    return (draw(1, n_intervals, 4, columns) * sizes.to(draw(1, 1).device)).float()


def values_at(table: Tensor, t: float) -> Tensor:
    c0, c1, c2, c3 = table.double().unbind(1)
    return c0 + t * (c1 + t * (c2 + t * c3))


@pytest.mark.parametrize("pack", WAYS)
def test_the_highest_coefficients_are_rounded_to_their_bits(pack):
    given = drawn(9, 300)
    packed = pack(given)
    assert packed.words.shape == (9, 3, 300)
    _, _, c2, c3 = unpack(packed).double().unbind(1)
    lost = (c3 - given[:, 3].double()).abs() / packed.unit.unsqueeze(1)
    assert 0.45 < lost.max() < 0.5001
    assert_same(packed.unit * (HALF - 1), given[:, 3].abs().amax(1), 2 * EPSILON)  # the largest has the largest number
    lost = (c2 / given[:, 2].double() - 1).abs()
    assert 2.0 ** (BITS - 26) < lost.max() < 2.0 ** (BITS - 24)


@pytest.mark.parametrize("pack", WAYS)
def test_values_at_the_ends_of_intervals_stay_and_those_between_move_by_less_than_rounding(pack):
    given = drawn(9, 300)
    found = unpack(pack(given))
    for t in (-0.5, -0.3, 0.0, 0.4, 0.5):
        assert_same(values_at(found, t), values_at(given, t), EPSILON)
    high = given.clone()
    high[:, :2] = 0  # what is left are the terms that lose bits
    found = unpack(pack(high))
    for t in (-0.5, 0.5):
        assert_same(values_at(found, t), values_at(high, t), EPSILON)
    assert (values_at(found, 0.0) - values_at(high, 0.0)).abs().max() > 10 * EPSILON * high.abs().max()


@pytest.mark.parametrize("pack", WAYS)
def test_zeros_stay_zero_and_one_large_polynomial_spoils_no_other_interval(pack):
    given = drawn(5, 7)
    given[0] = 0  # an interval of zeros
    given[1, 3] = 0  # parabolas
    given[2, 2] = 0  # no c2 that c3 could lie in
    given[3, :, 0] = torch.tensor([-1e6, 1e6, -1e6, 1e6], device=given.device)
    given[4, 3] = 1e-38  # too small for a unit
    found = unpack(pack(given))
    assert found.isfinite().all()
    assert found[0].abs().max() < 1e-38
    assert not found[1, 3].any()
    assert found[2, 2].abs().max() < 1e-38
    for row in (1, 2, 4):
        for t in (-0.5, 0.2, 0.5):
            assert_same(values_at(found[row : row + 1], t), values_at(given[row : row + 1], t), EPSILON)
    assert_same(found[3, :, 0], given[3, :, 0], EPSILON * 2**BITS)


@needs_kernels
@pytest.mark.parametrize("columns", [5, 256, packing.COLUMNS + 3])
def test_the_kernel_packs_as_reference_operations_do(columns, monkeypatch):
    monkeypatch.setattr(packing, "interpreted", lambda: False)  # one interval for every program, as on a GPU
    given = drawn(4, columns)
    found, expected = pack_by_kernel(given), pack_by_operations(given)
    assert_same(found.unit, expected.unit, EPSILON)
    ours, plain = unpack(found), unpack(expected)
    for power, tolerance in enumerate((EPSILON, EPSILON, 2.0 ** (BITS - 24), 1.01 / (HALF - 1))):
        assert_same(ours[:, power], plain[:, power], tolerance)
    equal = (ours[:, 3] - plain[:, 3]).abs() < 0.5 * expected.unit.unsqueeze(1)
    assert equal.float().mean() > 0.99  # but for numbers half way between two units


def test_numbers_that_are_not_finite_are_seen():
    given = drawn(2, 3)
    given[0, 3, 1] = torch.nan
    given[1, 2, 2] = torch.inf
    found = values_at(unpack(pack_by_operations(given)), 0.3)
    assert not found[0, 1].isfinite()
    assert not found[1, 2].isfinite()


def test_only_float32_that_is_to_stay_it_is_packed():
    given = drawn(2, 3)
    assert stored_table(given).unit is not None
    assert stored_table(given.double()).unit is None
    with execution(storage="bfloat16"):
        assert stored_table(given).words is given
