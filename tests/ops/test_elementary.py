"""Harmonics, radial functions, activations, gate and linear maps agree with e3nn and differentiate exactly twice."""

import math

import pytest
import torch
from e3nn import nn as e3nn_nn
from e3nn import o3

from forgefield.ops.convolution_plan import Block
from forgefield.ops.functions import activate, bessel_basis, polynomial_cutoff, second_moment_scale
from forgefield.ops.graph import GradientSwitch, Segments, barrier, gather, segment_sum
from forgefield.ops.harmonics import SphericalHarmonics, lowering_terms
from forgefield.ops.linear import Gate, IrrepsLinear, NormActivation, Perceptron, SpeciesLinear


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def new(seed=0):
    return {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}


def test_slopes_of_harmonics_along_the_sphere_come_from_the_degree_below():
    vectors = normal(5, 3).requires_grad_()
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    harmonics = SphericalHarmonics(4)(unit)
    cotangents = normal(5, 25, seed=1)
    (expected,) = torch.autograd.grad(harmonics, vectors, cotangents)
    slopes = torch.zeros(5, 3, dtype=torch.float64)
    for degree in range(1, 5):
        for (k, j), terms in lowering_terms(degree).items():
            for i, value in terms:
                slopes[:, j] += value * harmonics[:, (degree - 1) ** 2 + i].detach() * cotangents[:, degree**2 + k]
    unit = unit.detach()
    along = slopes - unit * (slopes * unit).sum(1, keepdim=True)
    torch.testing.assert_close(along / vectors.detach().norm(dim=1, keepdim=True), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("l_max", range(6))
def test_harmonics_equal_e3nn(l_max):
    unit = torch.nn.functional.normalize(normal(50, 3), dim=1)
    expected = o3.spherical_harmonics(list(range(l_max + 1)), unit, normalize=True, normalization="component")
    torch.testing.assert_close(SphericalHarmonics(l_max)(unit), expected, rtol=1e-12, atol=1e-12)


def test_harmonics_differentiate_twice():
    unit = torch.nn.functional.normalize(normal(4, 3), dim=1).requires_grad_()
    assert torch.autograd.gradgradcheck(SphericalHarmonics(3), [unit])


@pytest.mark.parametrize("p", [2, 6, 3.5])
def test_envelope_ends_smoothly_at_the_cutoff(p):
    x = torch.tensor([1e-9, 0.5, 1 - 1e-4, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    value = polynomial_cutoff(x, p)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert value[0].item() == pytest.approx(1, abs=1e-8)
    assert (value[3:] == 0).all()
    assert (slope[3:] == 0).all()
    k = p * (p + 1) * (p + 2) / 2
    assert slope[2].item() == pytest.approx(-k * 1e-8, rel=1e-2)
    assert bend[2].item() == pytest.approx(2 * k * 1e-4, rel=1e-2)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("p", [2.0, 6.0])
def test_bessel_basis_is_its_formula_with_exact_derivatives(trainable, p):
    x = torch.tensor([0.05, 0.3, 0.7, 0.999, 1.0, 1.2], dtype=torch.float64, requires_grad=True)
    frequencies = torch.arange(1.0, 5.0, dtype=torch.float64, requires_grad=trainable)
    value = bessel_basis(x, frequencies, p)
    for row, r in zip(value.tolist(), x.tolist()):
        envelope = (
            1 - (p + 1) * (p + 2) / 2 * r**p + p * (p + 2) * r ** (p + 1) - p * (p + 1) / 2 * r ** (p + 2)
            if r < 1
            else 0.0
        )
        for n, number in enumerate(row, start=1):
            assert number == pytest.approx(math.sin(n * math.pi * r) / (math.pi * r) * envelope, rel=1e-12, abs=1e-14)
    inside = x[:4].detach().requires_grad_()
    arguments = (inside, frequencies) if trainable else (inside,)
    function = (lambda a, f: bessel_basis(a, f, p)) if trainable else (lambda a: bessel_basis(a, frequencies, p))
    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize("name", ["silu", "tanh", "ssp"])
def test_activation_equals_e3nn_normalised_and_differentiates_twice(name):
    plain = {"silu": torch.nn.functional.silu, "tanh": torch.tanh}.get(
        name, lambda v: torch.nn.functional.softplus(v) - math.log(2)
    )
    x = normal(20).requires_grad_()
    scale = second_moment_scale(name)
    expected = e3nn_nn.Activation("20x0e", [plain])(x.detach())
    torch.testing.assert_close(activate(name, x, scale), expected, rtol=1e-12, atol=0)
    assert torch.autograd.gradgradcheck(lambda v: activate(name, v, scale), [x])


def test_activation_scale_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    second_moment_scale.cache_clear()
    second_moment_scale("silu")
    assert torch.equal(before, torch.random.get_rng_state())


def test_gate_equals_e3nn():
    scalars = [Block(4, 0, 1), Block(3, 0, -1)]
    gated = [Block(2, 1, 1), Block(5, 1, -1), Block(3, 2, 1)]
    ours = Gate(scalars, gated)
    theirs = e3nn_nn.Gate(
        "4x0e+3x0o", [torch.nn.functional.silu, torch.tanh], "10x0e", [torch.nn.functional.silu], "2x1e+5x1o+3x2e"
    )
    irreps = o3.Irreps([(b.mul, (b.l, b.p)) for b in ours.in_blocks])
    assert irreps == theirs.irreps_in
    x = normal(7, irreps.dim)
    blocks = [
        x[:, s].unflatten(1, (b.mul, 2 * b.l + 1)).transpose(1, 2) for s, b in zip(irreps.slices(), ours.in_blocks)
    ]
    got = torch.cat([block.transpose(1, 2).flatten(1) for block in ours(blocks)], dim=1)
    torch.testing.assert_close(got, theirs(x), rtol=1e-12, atol=1e-12)


def test_norm_activation_equals_e3nn():
    ours = NormActivation([Block(4, 0, 1)], [Block(2, 1, -1)])
    theirs = e3nn_nn.NormActivation(o3.Irreps("4x0e+2x1o"), torch.nn.functional.silu, normalize=True, epsilon=1e-8)
    x = normal(6, 10)
    blocks = [x[:, :4].unsqueeze(1), x[:, 4:].unflatten(1, (2, 3)).transpose(1, 2)]
    got = torch.cat([block.transpose(1, 2).flatten(1) for block in ours(blocks)], dim=1)
    torch.testing.assert_close(got, theirs(x.clone()), rtol=1e-12, atol=1e-12)


def test_linear_equals_e3nn_with_the_same_flat_weight():
    ours = IrrepsLinear([(4, 3), (2, 5)], **new())
    theirs = o3.Linear("4x0e+2x1o", "3x0e+5x1o").double()
    theirs.weight.data.copy_(ours.weight.data)
    scalars, vectors = normal(6, 4), normal(6, 2, 3)
    a, b = ours.matrices()
    got = torch.cat([scalars @ a, torch.einsum("nuk,uv->nvk", vectors, b).flatten(1)], dim=1)
    torch.testing.assert_close(got, theirs(torch.cat([scalars, vectors.flatten(1)], dim=1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("one_hot", [True, False])
def test_species_linear_equals_e3nn_fully_connected_product(one_hot):
    ours = SpeciesLinear([(4, 3), (2, 5)], 6, **new())
    theirs = o3.FullyConnectedTensorProduct("4x0e+2x1o", "6x0e", "3x0e+5x1o").double()
    theirs.weight.data.copy_(ours.weight.data)
    table, species = normal(3, 6, seed=1), torch.tensor([0, 2, 1, 1])
    scalars, vectors = normal(4, 1, 4, seed=2), normal(4, 3, 2, seed=3)
    attributes = torch.eye(3, dtype=torch.float64)[species] if one_hot else table[species]
    matrices = ours.matrices(table if one_hot else None)
    blocks = [
        (x.unsqueeze(3) * attributes[:, None, None]).flatten(2) @ matrix
        for x, matrix in zip((scalars, vectors), matrices)
    ]
    got = torch.cat([block.transpose(1, 2).flatten(1) for block in blocks], dim=1)
    x = torch.cat([scalars.flatten(1), vectors.transpose(1, 2).flatten(1)], dim=1)
    torch.testing.assert_close(got, theirs(x, table[species]), rtol=1e-12, atol=1e-12)


def test_perceptron_keeps_unit_variance_and_weights_are_uniform_of_unit_variance():
    network = Perceptron([256, 256, 64], activation="silu", **new())
    weight = network.weights[0]
    assert weight.abs().max() <= math.sqrt(3)
    assert weight.var().item() == pytest.approx(1, abs=0.02)
    linear = Perceptron([256, 256, 64], activation=None, **new())
    assert linear(normal(500, 256)).var().item() == pytest.approx(1, abs=0.1)


def test_gather_and_segment_sum_are_adjoint_and_differentiable():
    segments = Segments(torch.tensor([2, 0, 0, 3]), 5)
    rows, values = normal(5, 2), normal(4, 2, seed=1)
    assert (gather(rows, segments) * values).sum().item() == pytest.approx(
        (rows * segment_sum(values, segments)).sum().item(), rel=1e-12
    )
    assert torch.equal(segment_sum(values, segments)[[1, 4]], torch.zeros(2, 2, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(lambda v: gather(v, segments) ** 2, [rows.requires_grad_()])
    assert torch.autograd.gradgradcheck(lambda v: segment_sum(v, segments) ** 2, [values.requires_grad_()])


@pytest.mark.parametrize("is_sorted", [True, False])
def test_row_pointers_delimit_the_rows_of_each_segment(is_sorted):
    index = torch.tensor([0, 0, 2, 3]) if is_sorted else torch.tensor([3, 0, 2, 0])
    segments = Segments(index, 5, rows_are_sorted=is_sorted)
    for number in range(5):
        rows = segments.order[segments.pointers[number] : segments.pointers[number + 1]]
        assert rows.tolist() == [row for row, segment in enumerate(index.tolist()) if segment == number]


def test_barrier_stops_gradients_only_once_switched_off():
    switch, x = GradientSwitch(), torch.ones(2, requires_grad=True)
    out = barrier(x * 2, switch)
    assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], torch.full((2,), 2.0))
    switch.off = True
    assert torch.autograd.grad(out.sum(), x, allow_unused=True)[0] is None
