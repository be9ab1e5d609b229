"""What a captured update refuses. Graphs themselves need a GPU (`tests/gpu/test_gpu_engines.py`)."""

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.training.engines.captured_update import CapturedUpdate


def test_groups_added_later_are_refused_in_words():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimiser = torch.optim.Adam([first], lr=0.1)
    update = CapturedUpdate(optimiser, None)
    optimiser.add_param_group({"params": [second]})
    first.grad = torch.ones(2)
    with pytest.raises(ForgefieldError, match="a group of parameters was added"):
        update.step()
