"""Settings for all tests: one thread, so that results do not depend on the machine, and a cache of their own."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
