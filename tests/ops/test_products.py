"""Products with weights in less than float32: factors are rounded, nothing else, in values and in derivatives of any order."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from forgefield.ops.execution import products_in
from forgefield.ops.products import add_product, product

# Half a unit in the last place of a factor, relative; a product has two of them.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
MODES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=["bf16", "fp16"])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rounded_by_torch(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Oracle: torch's own conversion, float64. Float16 gets its range by a power of two."""
    exponent = torch.frexp(x.abs().max()).exponent if dtype == torch.float16 else torch.zeros((), dtype=torch.int32)
    scale = torch.ldexp(torch.ones((), dtype=torch.float64), 15 - exponent) if dtype == torch.float16 else 1.0
    return (x.double() * scale).to(dtype).double() / scale


@MODES
@pytest.mark.parametrize("shape", [(7, 5), (4, 3, 5), (2, 3, 2, 5), (5,), (0, 5), (0, 3, 5), (1, 5)])
def test_the_value_is_the_product_of_rounded_factors_summed_in_float32(dtype, shape):
    x, matrix = drawn(*shape), drawn(5, 6, seed=1)
    with products_in(dtype):
        made = product(x, matrix)
    assert made.dtype == torch.float32
    assert made.shape == (*shape[:-1], 6)
    if x.numel():
        expected = rounded_by_torch(x, dtype) @ rounded_by_torch(matrix, dtype)
        torch.testing.assert_close(made.double(), expected, rtol=0, atol=2e-6)
        assert not torch.equal(made, x @ matrix)


def test_without_a_lower_precision_it_is_the_product_of_torch():
    x, matrix, start = drawn(4, 3, 5), drawn(5, 6, seed=1), drawn(4, 6, seed=2)
    assert torch.equal(product(x, matrix), x @ matrix)
    assert torch.equal(add_product(start, x[:, 0], matrix), torch.addmm(start, x[:, 0], matrix))


@MODES
def test_float64_is_never_lowered(dtype):
    x, matrix = drawn(7, 5, dtype=torch.float64), drawn(5, 6, seed=1, dtype=torch.float64)
    with products_in(dtype) as lowering:
        assert torch.equal(product(x, matrix), x @ matrix)
        assert torch.equal(add_product(x @ matrix, x, matrix), x @ matrix + x @ matrix)
    assert lowering.count == 0


def test_the_precision_ends_with_its_block_and_products_are_counted():
    x, matrix = drawn(7, 5), drawn(5, 6, seed=1)
    with pytest.raises(ZeroDivisionError), products_in(torch.bfloat16):
        raise ZeroDivisionError
    assert torch.equal(product(x, matrix), x @ matrix)
    with products_in(torch.bfloat16) as outer:
        product(x, matrix)
        with products_in(None):
            assert torch.equal(product(x, matrix), x @ matrix)
        add_product(x @ matrix, x, matrix)
    assert outer.count == 2
    with pytest.raises(ValueError, match="bfloat16 or float16"), products_in(torch.int8):
        pass


def network(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Energy-like: two layers on (n, 3, c) features."""
    return product(torch.tanh(product(x, weights[0])), weights[1]).square().sum()


def force_loss_gradients(x, weights, dtype):
    """Gradients in the weights of a loss of a gradient in x: what training on forces asks for."""
    x, weights = x.clone().requires_grad_(True), [w.clone().requires_grad_(True) for w in weights]
    with products_in(dtype):
        energy = network(x, weights)
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return [force.detach(), *torch.autograd.grad(force.square().sum(), weights)]


@MODES
def test_first_and_second_derivatives_are_right_to_the_rounding(dtype):
    x, weights = drawn(64, 3, 8), [drawn(8, 16, seed=1) / 8, drawn(16, 4, seed=2) / 4]
    exact = force_loss_gradients(x.double(), [w.double() for w in weights], None)
    for low, high in zip(force_loss_gradients(x, weights, dtype), exact):
        error = float((low.double() - high).norm() / high.norm())
        assert ROUNDING[dtype] / 20 < error < 10 * ROUNDING[dtype]


@MODES
def test_derivatives_follow_the_precision_of_the_value_after_its_block(dtype):
    x, matrix, grad = drawn(9, 5).requires_grad_(True), drawn(5, 6, seed=1), drawn(9, 6, seed=2)
    with products_in(dtype):
        made = product(x, matrix)
        expected = product(grad, matrix.t())
    (slope,) = torch.autograd.grad(made, x, grad)
    assert torch.equal(slope, expected)


@MODES
def test_forward_mode_agrees_with_reverse_mode_and_can_be_differentiated(dtype):
    x, along = drawn(9, 3, 5), drawn(9, 3, 5, seed=3)
    weights = [(drawn(5, 6, seed=1) / 5).requires_grad_(True), (drawn(6, 4, seed=2) / 6).requires_grad_(True)]
    with products_in(dtype), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(network(forward_ad.make_dual(x, along), weights)).tangent
    by_tangent = torch.autograd.grad(tangent, weights)
    moving = x.clone().requires_grad_(True)
    with products_in(dtype):
        energy = network(moving, weights)
    (slope,) = torch.autograd.grad(energy, moving, create_graph=True)
    torch.testing.assert_close(tangent, (slope * along).sum(), rtol=20 * ROUNDING[dtype], atol=0)
    for one, other in zip(by_tangent, torch.autograd.grad((slope * along).sum(), weights)):
        assert float((one - other).norm() / other.norm()) < 20 * ROUNDING[dtype]


@MODES
def test_a_matrix_can_carry_the_tangent(dtype):
    x, matrix, along = drawn(9, 5), drawn(5, 6, seed=1), drawn(5, 6, seed=3)
    with products_in(dtype), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(product(x, forward_ad.make_dual(matrix, along))).tangent
        assert torch.equal(tangent, product(x, along))


@MODES
@pytest.mark.parametrize("rows", [2, 33])
def test_a_trace_with_symbolic_sizes_computes_the_same_for_other_sizes(dtype, rows):
    weights = [drawn(8, 16, seed=1) / 8, drawn(16, 4, seed=2) / 4]

    def gradients(x, *weights):
        return force_loss_gradients(x, list(weights), dtype)

    graph = make_fx(gradients, tracing_mode="symbolic")(drawn(11, 3, 8), *weights)
    x = drawn(rows, 3, 8, seed=5)
    for traced, eager in zip(graph(x, *weights), gradients(x, *weights)):
        torch.testing.assert_close(traced, eager, rtol=1e-6, atol=1e-6)


def test_compiled_code_rounds_as_well():
    """Compilers are free to leave out a rounding between two operations of theirs."""
    x, matrix = drawn(64, 32), drawn(32, 16, seed=1)

    def made(x, matrix):
        results = []
        for dtype in ROUNDING:
            with products_in(dtype):
                results.append(product(x, matrix))
        return results

    compiled = torch.compile(make_fx(made, tracing_mode="symbolic")(x, matrix))
    for one, other in zip(compiled(x, matrix), made(x, matrix)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.floats(-37, 37), st.floats(-37, 37))
def test_float16_neither_overflows_nor_underflows(of_x, of_matrix):
    """Entries of 1e-37 or 1e37 in either factor: the relative error stays that of float16, wherever the result fits float32."""
    x = (drawn(9, 5, dtype=torch.float64) * 10.0**of_x).float()
    matrix = (drawn(5, 6, seed=1, dtype=torch.float64) * 10.0**of_matrix).float()
    exact = x.double() @ matrix.double()
    if not 1e-36 < float(exact.abs().max()) < 1e38:
        return
    with products_in(torch.float16):
        made = product(x, matrix)
    bound = 3 * ROUNDING[torch.float16] * (x.double().abs() @ matrix.double().abs())
    assert bool(((made.double() - exact).abs() <= bound).all())


def test_float16_keeps_entries_of_very_different_size_in_one_factor():
    """What is small beside the largest entry still counts where only small entries meet: eight orders of magnitude of it."""
    x = torch.diag(torch.tensor([1e30, 1e26, 1e22]))
    matrix = torch.diag(torch.tensor([1e-30, 3e-30, 7e-30]))
    with products_in(torch.float16):
        made = product(x, matrix)
    torch.testing.assert_close(made.diagonal(), torch.tensor([1.0, 3e-4, 7e-8]), rtol=1e-2, atol=0)


def test_zeros_and_numbers_that_are_none_stay_what_they_are():
    with products_in(torch.float16):
        assert torch.equal(product(torch.zeros(3, 2), drawn(2, 4)), torch.zeros(3, 4))
        assert product(torch.full((3, 2), 1e-42), torch.ones(2, 1)).gt(0).all()
    for dtype in ROUNDING:
        with products_in(dtype):
            assert product(torch.tensor([[float("nan"), 1.0]]), torch.ones(2, 1)).isnan().all()
            assert not product(torch.tensor([[float("inf"), 1.0]]), torch.ones(2, 1)).isfinite().any()
