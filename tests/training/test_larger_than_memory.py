"""Training on a store several times larger than the memory the process may use, shuffled, on one and on two ranks.

The limit is enforced by the kernel (a memory cgroup). That it bites is shown by the same training with `data.lazy=false`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from forgefield.data.store.store import is_store
from tests.support.large_store import write_large_store
from tests.support.warm import run_warm, run_warm_ranks

MB = 2**20
LIMIT = 420 * MB
"""For one process. Of the memory that imported libraries take, what it does not change is not counted: it is shared."""
CGROUPS = Path("/sys/fs/cgroup")

WHOLE_EPOCH = """
import re, sys
import numpy as np
from forgefield.data.sampling.order import EveryFrameOnce
from forgefield.data.reading import read_table

table = read_table(sys.argv[1])
rows = EveryFrameOnce(len(table), seed=1).rows(0)
seen = np.zeros(len(table), dtype=np.int64)
total = 0.0
for begin in range(0, len(rows), 1024):
    chosen = rows[begin : begin + 1024]
    seen[chosen] += 1
    total += table.atoms("positions", chosen).sum() + table.atoms("forces", chosen).sum()
assert (seen == 1).all() and np.isfinite(total)
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]))
"""


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[Path]:
    """A control group whose processes may use so much memory together, page cache included."""
    version_2 = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if version_2 else CGROUPS / "memory") / f"forgefield-test-{os.getpid()}"
    limit = group / ("memory.max" if version_2 else "memory.limit_in_bytes")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("memory cgroups cannot be made here")
    try:
        try:
            limit.write_text(str(n_bytes))
        except OSError:
            pytest.skip("the memory of a cgroup cannot be limited here")
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Written once, also where several processes share the tests."""
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    with (place / "large.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_store(place / "large"):
            write_large_store(place / "large", 3.2 * LIMIT)
    return place / "large"


def config(folder: Path, store: Path) -> Path:
    path = folder / "large.yaml"
    small = {
        "num_layers": 1,
        "l_max": 0,
        "num_features": 4,
        "radial_mlp_depth": 1,
        "radial_mlp_width": 4,
        "parity": False,
    }
    settings = {
        "name": "large",
        "out": str(folder / "runs"),
        "data": {"train": str(store), "val": 32, "cutoff": 3.0, "batch": {"frames": 2}, "workers": 1, "cache": False},
        "model": {"name": "nequip", **small},
        "trainer": {"max_steps": 12, "accelerator": "cpu", "limit_val_batches": 2, "enable_progress_bar": False},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def train(group: Path, path: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """`forgefield train` in one or more processes that are in `group` before they begin."""
    words = ("tests.support.limited", str(group), "forgefield", "train", str(path), *overrides)
    if ranks == 1:
        return run_warm(*words, folder=path.parent, environ=os.environ, timeout=240)
    return run_warm_ranks(ranks, *words, folder=path.parent, environ=os.environ, timeout=240)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_needs_no_memory_for_the_data(store, tmp_path, ranks):
    with memory_limit(ranks * LIMIT) as group:
        trained = train(group, config(tmp_path, store), ranks=ranks)
    assert trained.returncode == 0, trained.stdout[-2000:] + trained.stderr[-2000:]
    assert "on disk, neighbour lists made for each batch" in trained.stdout


def test_the_limit_is_real(store, tmp_path):
    with memory_limit(LIMIT) as group:
        refused = train(group, config(tmp_path, store), "data.lazy=false")
    assert refused.returncode == -signal.SIGKILL, refused.stdout[-2000:] + refused.stderr[-2000:]


def test_a_whole_shuffled_epoch_is_read_within_the_limit(store):
    with memory_limit(LIMIT) as group:
        inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        command = [*inside, sys.executable, "-c", WHOLE_EPOCH, str(store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < LIMIT
