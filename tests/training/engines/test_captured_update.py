"""What a captured update refuses, and where it finds gradients. Graphs need a GPU (`tests/gpu/test_gpu_engines.py`)."""

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.training.optim.captured_optimiser import CapturedOptimiser


def test_groups_added_later_are_refused_in_words():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimiser = torch.optim.Adam([first], lr=0.1)
    update = CapturedOptimiser(optimiser, None)
    optimiser.add_param_group({"params": [second]})
    first.grad = torch.ones(2)
    with pytest.raises(ForgefieldError, match="a group of parameters was added"):
        update.step()


def test_gradients_that_are_not_static_are_copied_to_static_tensors_and_take_one_graph():
    """On a CPU the update is executed instead of replayed. The last weight has no gradient."""

    def three() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.ones(shape)) for shape in ((3,), (2, 2), ())]

    weights, plain = three(), three()
    update = CapturedOptimiser(torch.optim.Adam(weights, lr=0.1), None, static_gradients=lambda: False)
    expected, kept = torch.optim.Adam(plain, lr=0.1), []
    for step in range(5):
        for trained in (weights, plain):
            trained[0].grad, trained[1].grad = torch.full((3,), step - 1.5), torch.full((2, 2), 0.5 - step)
        kept += [weights[0].grad, weights[1].grad]  # so that the next ones lie elsewhere
        for optimiser in (update.optimiser, expected):
            optimiser.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimiser.step()
    assert len(update.steps) == 1
    assert all(torch.equal(*pair) for pair in zip(weights, plain))
    update.optimiser.param_groups[0]["betas"] = (0.5, 0.5)  # a constant of the graph
    update.step()
    assert len(update.steps) == 1
