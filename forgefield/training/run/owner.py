"""The process that trains a run: a record in the run folder, and requests that other processes of this machine send to it.

The record exists while the run folder is locked. A process that was killed leaves it behind, which `read_owner` notices.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.processes import ProcessIdentity, is_alive, machine, this_process
from forgefield.training.run.signals import CHECKPOINT

OWNER = ".training.json"
"""Name of the record."""
REQUESTS = {"stop": signal.SIGINT, "checkpoint": CHECKPOINT}
"""Requests and their signals. A stop is that of Ctrl-C, after which no batch system starts the run again."""


@dataclass(frozen=True)
class Owner:
    """The process that trains a run. hears_signals: whether it accepts requests."""

    process: ProcessIdentity
    hears_signals: bool

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine."""
        return self.process["host"] == machine()

    @property
    def host(self) -> str:
        """Name of its machine."""
        return self.process["host"].partition(" ")[0]


@contextmanager
def training_process(path: Path, *, hears_signals: bool) -> Iterator[None]:
    """Inside the block the run folder `path`, which must be locked, has a record of this process."""
    record = path / OWNER
    write_atomically(record, json.dumps({**this_process(), "hears_signals": hears_signals}) + "\n")
    try:
        yield
    finally:
        with suppress(OSError):
            record.unlink()


def read_owner(path: Path) -> Owner | None:
    """The process that trains the run in `path`; None where there is none. One of another machine counts as alive."""
    try:
        record = json.loads((path / OWNER).read_text())
        host, pid, born = str(record["host"]), int(record["pid"]), record["born"]
        # A number alone may be that of any process, and kill() takes small ones as groups of processes.
        if pid <= 1 or (born is None and sys.platform == "linux"):
            return None
        owner = Owner(
            {"host": host, "pid": pid, "born": None if born is None else str(born)}, bool(record["hears_signals"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return owner if not owner.is_local or is_alive(owner.process) else None


def send_request(path: Path, request: str) -> Owner:
    """Send `stop` or `checkpoint` to the process that trains the run in `path`. Returns that process."""
    owner = read_owner(path)
    if owner is None:
        raise ForgefieldError(f"Run {path.name} is not being trained.")
    if not owner.is_local:
        raise ForgefieldError(f"Run {path.name} is trained on {owner.host}; start `forgefield watch` on that machine.")
    if not owner.hears_signals:
        raise ForgefieldError(
            f"Run {path.name} is trained in a thread of process {owner.process['pid']}, which does not accept requests."
        )
    try:
        os.kill(owner.process["pid"], REQUESTS[request])
    except ProcessLookupError as error:
        raise ForgefieldError(f"Run {path.name} is not being trained.") from error
    except PermissionError as error:
        raise ForgefieldError(f"Run {path.name} is trained by another user.") from error
    return owner
