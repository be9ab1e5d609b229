"""Settings for all tests: one thread, so that results do not depend on the machine, and a cache of their own."""

import gc
import os

import pytest
import torch

pytest.register_assert_rewrite("tests.support")
gc.disable()  # until everything has been imported
# Code without vector instructions is compiled in less time; one test of the compile engine has them. In one thread, since a
# pool of processes would import PyTorch for a few kernels.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: a worker that starts one of them last would keep the others waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at half a million objects again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
