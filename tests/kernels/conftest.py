"""Memory that nobody has written holds NaN in the tests of kernels, so an element that a kernel forgets is seen."""

import pytest
import torch

from forgefield.kernels.core.runtime import interpreted
from forgefield.kernels.edges import coupling
from tests.support.kernels import DEVICE


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(1, device=DEVICE).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """An interpreter takes them one after the other."""
    if interpreted():
        monkeypatch.setattr(coupling, "PARTS", 3)
