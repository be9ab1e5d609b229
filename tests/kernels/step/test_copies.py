"""Tensors of any types filled by one launch."""

import pytest
import torch

from forgefield.kernels.step.copies import Copies
from tests.support.kernels import DEVICE, draw, needs_kernels

pytestmark = needs_kernels
TYPES = (torch.float64, torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.int32)
LENGTHS = (1, 1023, 1024, 1025, 3000, 0)


def numbers_of(*tensors: torch.Tensor) -> list[int]:
    return [n for tensor in tensors for n in (tensor.data_ptr(), tensor.numel())]


def drawn(seed: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return (draw(seed, length) * 100).to(dtype) if dtype != torch.bool else draw(seed, length) > 0


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_tensors_begin_with_their_source_and_continue_with_the_rest(share):
    cases = [(dtype, length) for dtype in TYPES for length in LENGTHS]
    rest = [drawn(i, length, dtype) for i, (dtype, length) in enumerate(cases)]
    sources = [drawn(100 + i, int(share * length), dtype) for i, (dtype, length) in enumerate(cases)]
    room = [torch.zeros(length + 2, dtype=dtype, device=DEVICE) for dtype, length in cases]
    copies = Copies([tensor[1:-1] for tensor in room], rest)
    for given in (rest, sources):  # what was there before does not matter
        copies.set_sources(numbers_of(*given))
        copies.launch()
    for found, source, others in zip(room, sources, rest):
        assert torch.equal(found[1:-1], torch.cat([source, others[source.numel() :]]))
        assert not found[0]
        assert not found[-1]


def test_a_source_that_does_not_fit_is_refused():
    copies = Copies([torch.zeros(3, device=DEVICE)], [torch.zeros(3, device=DEVICE)])
    with pytest.raises(ValueError, match="do not fit"):
        copies.set_sources(numbers_of(torch.zeros(4, device=DEVICE)))
