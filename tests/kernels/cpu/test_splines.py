"""Radial splines equal the function that they interpolate, and C code reads them with all derivatives."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from forgefield.kernels.cpu.splines import (
    coefficients,
    collocation_points,
    read_splines,
    spline_intervals,
)
from forgefield.models.nequip.model import NequIP
from forgefield.models.nequip.options import PRESETS, NequIPOptions
from forgefield.models.nequip.tables import radial_splines
from forgefield.ops.execution import C_CONVOLUTIONS, execution, products_in
from forgefield.ops.functions import bessel_basis
from forgefield.ops.graph import GradientSwitch

N_INTERVALS = 24
STATISTICS = {"mean_neighbours": 20.0, "forces_rms": 1.0, "reference_energies": {"Cu": 0.0}}
COLUMNS = 150  # more than a block


def lengths(n=300):
    x = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1.1
    x[:4] = torch.tensor([0.0, 1.0 - 1e-12, 1.0, 5.0])
    return x


def random_table(n_kinds=1):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n_kinds * (N_INTERVALS + 5), COLUMNS, generator=generator, dtype=torch.float64)


def by_operations(x, table, kinds):
    """The same from truncated powers: the B-spline of degree 5 is a sum of (x - k)_+^5."""
    signs = torch.tensor([1.0, -6.0, 15.0, -20.0, 15.0, -6.0, 1.0], dtype=torch.float64) / 120
    rows = torch.arange(N_INTERVALS + 5)
    inside = (x < 1).to(x.dtype)
    powers = (x.unsqueeze(1) * N_INTERVALS - rows + 5).unsqueeze(2) - torch.arange(7)
    splines = (powers.clamp(min=0) ** 5 * signs).sum(2) * inside.unsqueeze(1)
    tables = table.unflatten(0, (-1, N_INTERVALS + 5)).index_select(0, kinds)
    return torch.einsum("pr,prc->pc", splines, tables)


def by_c(x, table, kinds):
    return read_splines(x, table, x.dtype, None, kinds=kinds, n_kinds=2)


def test_values_and_two_derivatives_equal_truncated_powers():
    x, table = lengths(), random_table(2)
    kinds = torch.arange(len(x)) % 2
    results = []
    for function in (by_operations, by_c):
        inputs = [value.clone().requires_grad_() for value in (x, table * 1.0)]
        scaled = inputs[1] * 1.0
        out = function(inputs[0], scaled, kinds)
        (first,) = torch.autograd.grad(out.sin().sum(), inputs[0], create_graph=True)
        loss = first.square().sum() + out.cos().sum()
        results.append([out, first, *torch.autograd.grad(loss, inputs)])
    for value, expected in zip(*reversed(results)):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8 * float(expected.detach().abs().max()))


def test_tangents_and_their_gradients_equal_truncated_powers():
    x, table = lengths(), random_table(2)
    kinds, along = torch.arange(len(x)) % 2, torch.linspace(-1, 1, len(x), dtype=torch.float64)
    results = []
    for function in (by_operations, by_c):
        inputs = [value.clone().requires_grad_() for value in (x, along, table)]
        with forward_ad.dual_level():
            out = function(forward_ad.make_dual(inputs[0], inputs[1]), inputs[2], kinds)
            tangent = forward_ad.unpack_dual(out).tangent
        results.append([tangent, *torch.autograd.grad(tangent.square().sum(), inputs)])
    for value, expected in zip(*reversed(results)):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8 * float(expected.detach().abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(("n_intervals", "factor"), [(256, 1.0), (256, 3.0), (32, None)])
def test_splines_are_as_accurate_as_the_network_in_float32(n_intervals, factor):
    """Values and slopes of a radial network, also with weights that make it three times as steep; not with few intervals."""
    options = NequIP.complete(NequIPOptions(**PRESETS["S"]), species=("Cu",), cutoff=5.0, statistics=STATISTICS)
    model = NequIP(options, species=("Cu",), cutoff=5.0, generator=torch.Generator().manual_seed(0))
    for layer in model.layers:
        layer.radial.weights[0].mul_(factor or 1.0)
    x = torch.linspace(0.05, 0.9999, 499, dtype=torch.float64)
    basis = bessel_basis(x, model.bessel_frequencies, 6.0)
    tables = radial_splines(model, n_intervals)
    single = model.radial_weights(basis.float())
    step = 1e-5
    around = [bessel_basis(x + sign * step, model.bessel_frequencies, 6.0) for sign in (1, -1)]
    exact, ahead, behind = (model.double().radial_weights(rows) for rows in (basis, *around))
    for number, table in enumerate(tables):
        with forward_ad.dual_level():
            moving = read_splines(forward_ad.make_dual(x, torch.ones_like(x)), table, torch.float64, None)
            value, slope = forward_ad.unpack_dual(moving)
        slopes = (ahead[number] - behind[number]) / (2 * step)
        error = float((value - exact[number]).norm() / (single[number] - exact[number]).norm())
        slope_error = float((slope - slopes).norm() / slopes.norm())
        assert (error < 1.0 and slope_error < 3e-7) == (factor is not None)


def test_gradients_of_coefficients_are_the_adjoint_of_the_solution():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(N_INTERVALS + 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    a.requires_grad_()
    (gradient,) = torch.autograd.grad((coefficients(a) * b).sum(), a)
    torch.testing.assert_close((gradient * a).sum(), (coefficients(a) * b).sum(), rtol=1e-10, atol=1e-10)
    points = collocation_points(N_INTERVALS)[:-1]  # the last is 1, where everything is zero
    torch.testing.assert_close(
        read_splines(points, coefficients(a), torch.float64, None), a[:-1], rtol=1e-11, atol=1e-11
    )


def test_results_do_not_depend_on_the_number_of_threads_and_lengths_get_no_gradient_once_the_switch_is_off():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            x, table = lengths(2000).requires_grad_(), random_table().requires_grad_()
            switch = GradientSwitch()
            out = read_splines(x, table * 1.0, torch.float32, switch)
            (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            switch.off = True
            to_x, to_table = torch.autograd.grad(first.square().sum() + out.sum(), (x, table), allow_unused=True)
            assert to_x is None
            results.append([out, first, to_table])
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results):
        assert torch.equal(one, three)


def test_a_length_that_is_not_a_number_gives_no_number():
    x = torch.tensor([0.5, float("nan"), float("inf")], dtype=torch.float64)
    value = read_splines(x, random_table(), torch.float32, None)
    assert value[0].isfinite().all()
    assert value[1].isnan().all()
    assert (value[2] == 0).all()


@pytest.mark.parametrize(
    ("context", "dtype", "n_pairs", "expected"),
    [
        ({}, torch.float32, 2000, 256),
        ({}, torch.float32, 500, 0),
        ({}, torch.float64, 2000, 0),
        ({"knots": 0}, torch.float32, 2000, 0),
        ({"knots": 2048}, torch.float32, 2000, 512),
        ({"c_code": C_CONVOLUTIONS}, torch.float32, 2000, 0),
        ({"operators": False}, torch.float32, 2000, 0),
    ],
)
def test_when_splines_are_used(context, dtype, n_pairs, expected):
    with execution(**context):
        assert spline_intervals(torch.ones(2, dtype=dtype), lengths(n_pairs)) == expected
    with products_in(torch.bfloat16):
        assert spline_intervals(torch.ones(2, dtype=dtype), lengths(n_pairs)) == 0
