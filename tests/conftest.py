"""Settings for all tests: one thread, so that results do not depend on the machine, and a cache of their own."""

import gc
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from forgefield.report import canvas

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


@pytest.fixture(autouse=True, scope="session")
def _session_cache(request, tmp_path_factory) -> Path:
    """The cache folder of fixtures that several tests share, and not that of the user; one for all workers of pytest-xdist.

    Compiled C code is kept from one session to the next, with what pytest itself keeps.
    """
    folder = tmp_path_factory.getbasetemp()
    cache = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared-cache"
    cache.mkdir(exist_ok=True)
    compiled = request.config.cache.mkdir("compiled") if hasattr(request.config, "cache") else cache / "compiled"
    compiled.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (cache / "c").symlink_to(compiled)
    os.environ["FORGEFIELD_CACHE"] = str(cache)
    return cache


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, _session_cache) -> None:
    """A cache folder for each test. Compiled C code is shared: it is stored under a hash of all that it depends on."""
    cache = tempfile.mkdtemp(dir=_session_cache)
    os.symlink(_session_cache / "c", f"{cache}/c")
    monkeypatch.setenv("FORGEFIELD_CACHE", cache)


@pytest.fixture(autouse=True)
def _few_drawings(request, monkeypatch) -> None:
    """Figures are converted to SVG in tests of reports and in separate processes only. Elsewhere pages and figures are made as
    well, but matplotlib does not draw them: for a short training that takes longer than the training."""
    if "/report/" not in request.node.nodeid:
        monkeypatch.setattr(canvas, "_draw", lambda figure, name: '<svg viewBox="0 0 1 1"></svg>')
