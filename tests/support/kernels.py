"""What the tests of kernels share: where they run, fields whose memory is watched, and how numbers are compared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forgefield.kernels.core.fields import Field, Shape
from forgefield.kernels.core.runtime import has_triton, interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not has_triton() or not (torch.cuda.is_available() or interpreted()), reason="needs Triton and a GPU"
)
if has_triton() and interpreted():
    from tests.support.interpreter import speed_up

    speed_up()
BEHIND = 256
"""Numbers kept free behind every field, where a kernel that writes too far would leave a trace."""


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def nowhere_written(shape: Shape, n_atoms: int, dtype: torch.dtype = torch.float64) -> Field:
    """A field that holds NaN alone."""
    length = 2 * n_atoms * shape.dim
    return Field(torch.full((length + BEHIND,), torch.nan, dtype=dtype, device=DEVICE)[:length], n_atoms, shape)


def filled(blocks: Sequence[Tensor], place: int, into: Field) -> Field:
    into.fill(place, blocks)
    return into


def assert_only_written(field: Field, *places: int) -> None:
    """All of these places, nothing of the others and nothing behind the field."""
    for place in (0, 1):
        for number, block in enumerate(field.blocks(place)):
            assert block.isnan().logical_not().all() if place in places else block.isnan().all(), (number, place)
    assert field.flat.as_strided((BEHIND,), (1,), field.flat.numel()).isnan().all()


def assert_same(found: Tensor, reference: Tensor, tolerance: float = 1e-12) -> None:
    """Everywhere within this fraction of the largest number."""
    assert found.shape == reference.shape
    largest = reference.abs().max().item() if reference.numel() else 0.0
    torch.testing.assert_close(found.to(reference), reference, rtol=0, atol=tolerance * max(largest, 1e-30))
