"""Couplings of components of atoms as an operator: every place of the form and its derivatives, with kernels and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forgefield.kernels.convolution import dispatch
from forgefield.kernels.core.runtime import interpreted
from forgefield.kernels.edges.coupling import couple, mark, reference_coupling
from forgefield.kernels.edges.coupling_source import coupling_of_key, key_of_coupling
from forgefield.models.allegro.tensors import EnvironmentCoupling, harmonic_irreps, layer_irreps
from tests.support.kernels import DEVICE, assert_same, draw

by_plain_operations = pytest.mark.skipif(interpreted() or DEVICE == "cuda", reason="of what runs without kernels")


def coupling_of(l_max: int, n_weights: int, parity: bool = True, layers: int = 2) -> EnvironmentCoupling:
    irreps = layer_irreps(l_max, parity, layers)
    made = EnvironmentCoupling(
        irreps[0],
        harmonic_irreps(l_max),
        irreps[1],
        n_weights,
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )
    return made.to(DEVICE)


def inputs_of(coupling: EnvironmentCoupling, n_atoms: int, channels: int) -> list[Tensor]:
    """Environments and rows over results."""
    _, n_environment, n_results = coupling.form.sizes
    shapes = [(n_environment, n_atoms, channels), (n_results, n_atoms, channels)]
    return [draw(number, *shape).requires_grad_(True) for number, shape in enumerate(shapes)]


def derivatives(coupling: EnvironmentCoupling, given: list[Tensor]) -> list[Tensor]:
    """Values, cotangents of environments and rows, and the derivatives of these in everything, weights included."""
    out = coupling.pull(*given)
    grad = draw(7, *out.shape).requires_grad_(True)
    first = torch.autograd.grad(out, given, grad, create_graph=True)
    along = [draw(8 + number, *found.shape) for number, found in enumerate(first)]
    everything = [grad, *given, coupling.weight]
    return [out, *first, *torch.autograd.grad(first, everything, along)]


@pytest.mark.parametrize(
    ("l_max", "channels", "n_weights", "layers"),
    [(1, 40, 40, 2), (2, 3, 1, 2), (2, 70, 70, 2), (1, 3, 3, 3), (3, 2, 2, 2)],
)
def test_couplings_and_their_derivatives_are_those_of_matrices(l_max, channels, n_weights, layers, monkeypatch):
    coupling = coupling_of(l_max, n_weights, layers=layers)
    given = inputs_of(coupling, 5, channels)
    plain = derivatives(coupling, given)
    monkeypatch.setattr(dispatch, "use_edge_operators", lambda x: True)
    for found, expected in zip(derivatives(coupling, given), plain, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("place", range(4))
def test_every_place_is_that_of_reference_operations(place):
    coupling = coupling_of(2, 3)
    key = key_of_coupling(coupling.form.paths, coupling.form.sizes, mark())
    form = coupling_of_key(key)
    tensors = [draw(number, form.size(number), *((3,) if number == 0 else (4, 3))) for number in range(4)]
    others = [tensor for number, tensor in enumerate(tensors) if number != place]
    found = torch.ops.forgefield.couple(*others, place, key)
    assert_same(found, reference_coupling(form, place, *others))
    assert torch.equal(found, torch.ops.forgefield.couple(*others, place, key))


@by_plain_operations
@pytest.mark.parametrize("place", range(4))
def test_the_operator_is_what_torch_asks_of_operators(place):
    coupling = coupling_of(1, 3)
    key = key_of_coupling(coupling.form.paths, coupling.form.sizes, mark())
    form = coupling_of_key(key)
    tensors = [draw(number, form.size(number), *((3,) if number == 0 else (4, 3))) for number in range(4)]
    others = [tensor for number, tensor in enumerate(tensors) if number != place]
    given = (*others, place, key)
    assert set(torch.library.opcheck(torch.ops.forgefield.couple.default, given).values()) == {"SUCCESS"}


def test_derivatives_are_those_of_differences():
    coupling = coupling_of(1, 2)
    key = key_of_coupling(coupling.form.paths, coupling.form.sizes, mark())
    weights = coupling.weight.detach().clone().requires_grad_(True)
    given = (weights, *inputs_of(coupling, 2, 2))
    assert torch.autograd.gradcheck(lambda *rows: couple(*rows, key), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *rows: couple(*rows, key), given, fast_mode=True)


@pytest.mark.parametrize(("l_max", "layers"), [(0, 1), (1, 2), (2, 1), (2, 3)])
def test_scalar_rows_are_those_of_the_matrix(l_max, layers):
    coupling = coupling_of(l_max, 3, layers=layers)
    environment, _ = inputs_of(coupling, 4, 3)
    found = coupling.scalar_row(environment)
    coupling.scalars_are_products = False
    assert_same(found, coupling.scalar_row(environment))
