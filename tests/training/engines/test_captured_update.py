"""What a captured update refuses, and where it finds gradients. Graphs need a GPU (`tests/gpu/test_gpu_engines.py`)."""

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.training.optim.captured_update import CapturedUpdate


def test_groups_added_later_are_refused_in_words():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimiser = torch.optim.Adam([first], lr=0.1)
    update = CapturedUpdate(optimiser, None)
    optimiser.add_param_group({"params": [second]})
    first.grad = torch.ones(2)
    with pytest.raises(ForgefieldError, match="a group of parameters was added"):
        update.step()


def test_gradients_that_are_not_static_are_copied_to_static_tensors():
    weights = [
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.nn.Parameter(torch.ones(())),
    ]
    update = CapturedUpdate(torch.optim.Adam(weights, lr=0.1), None, static_gradients=lambda: False)
    seen, kept = set(), []
    for step in range(4):
        weights[0].grad, weights[1].grad = torch.full((3,), float(step)), torch.full((2, 2), -float(step))
        kept += [weights[0].grad, weights[1].grad]  # so that the next ones lie elsewhere
        update._copy_gradients()
        assert weights[0].grad.tolist() == [step] * 3
        assert weights[1].grad.tolist() == [[-step] * 2] * 2
        assert weights[2].grad is None
        seen.add(update._settings())
    assert len(seen) == 1
