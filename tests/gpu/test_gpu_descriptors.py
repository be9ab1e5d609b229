"""Descriptors of grid points on a GPU are those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CELL = np.array([[4.1, 0.0, 0.0], [1.3, 3.6, 0.0], [-0.7, 0.9, 4.4]])
POSITIONS = np.array([[0.3, 0.2, 0.1], [2.0, 1.1, 2.3], [3.1, 3.0, 3.9]])
STRUCTURE = CELL, POSITIONS, [13, 8, 13], True, (9, 8, 7)


@pytest.mark.parametrize(
    "options",
    [
        DescriptorOptions(element_weights={"Al": 1.0, "O": 0.4}),
        DescriptorOptions(twojmax=5, switch=False),
        DescriptorOptions(type="gaussian"),
    ],
    ids=["bispectrum", "no switch", "gaussian"],
)
def test_values_are_those_of_the_cpu_for_any_chunk(options):
    descriptors = make_descriptors(options, ["Al", "O"])
    on_cpu = descriptors.on_grid(*STRUCTURE)
    for chunk in (None, 100):
        found = descriptors.on_grid(*STRUCTURE, device="cuda", chunk=chunk)
        assert found.is_cuda
        np.testing.assert_allclose(found.cpu(), on_cpu, rtol=1e-10, atol=1e-10)


def test_float32_is_not_rounded_when_the_process_allows_tf32():
    exact = make_descriptors(DescriptorOptions(), ["Al", "O"]).on_grid(*STRUCTURE)
    descriptors = make_descriptors(DescriptorOptions(precision="float32"), ["Al", "O"])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = descriptors.on_grid(*STRUCTURE, device="cuda").cpu().double()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((found - exact).abs().max() / exact.abs().max()) < 2e-6


def test_gradients_are_those_of_the_cpu():
    descriptors = make_descriptors(DescriptorOptions(twojmax=6), ["Al", "O"])
    gradients = []
    for device in ("cpu", "cuda"):
        positions = torch.tensor(POSITIONS, device=device, requires_grad=True)
        descriptors.on_grid(CELL, positions, STRUCTURE[2], True, (3, 2, 2), device=device).sin().sum().backward()
        gradients.append(positions.grad.cpu())
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-7, atol=1e-7)


def test_the_loop_for_the_cpu_is_refused():
    with pytest.raises(ForgefieldError, match="kernel='compiled' is for the CPU"):
        make_descriptors(DescriptorOptions(kernel="compiled"), ["Al", "O"]).on_grid(*STRUCTURE, device="cuda")
