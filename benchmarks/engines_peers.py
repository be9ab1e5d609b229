"""NequIP and Allegro themselves beside our engines: a process for each model and way of running it (`bench_peers.py`).

All of them compile at the same time, since that takes minutes. Then nothing runs but what is timed: a process times a batch
when it is told to. Whoever is not ready in time, or does not answer, is ended and has a refusal for a result.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from forgefield.bench import peers as bench_peers
from forgefield.data.batch import Batch

MODES = ("eager", "compile", "oeq", "oeq-compile")
"""How a peer runs. oeq: NequIP with kernels of OpenEquivariance."""
POLL_SECONDS = 0.05


@dataclass
class PeerProcess:
    """log: what it prints. cases: in the order of the structures that it has. refusal: why it will time nothing."""

    name: str
    folder: Path
    log: Path
    cases: list[str]
    process: subprocess.Popen[str] | None = None
    refusal: str | None = None

    def wait_for(self, file: str, until: float, late: str) -> dict[str, Any]:
        """What it writes into a file; if it ends or is late (monotonic seconds), a refusal."""
        path = self.folder / file
        while self.process is not None and not path.exists():
            if self.process.poll() is not None and not path.exists():
                self.refusal = f"its process ended with exit code {self.process.returncode} ({self.last_line()})"
                return {"refusal": self.refusal}
            if time.monotonic() > until:
                self.end()
                self.refusal = late
                return {"refusal": late}
            time.sleep(POLL_SECONDS)
        return json.loads(path.read_text())

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "without a word"

    def end(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def order(batch: Batch) -> tuple[bool, int]:
    """The largest first, for which peers compile; one of a single frame last, since NequIP does not compile for it."""
    return batch["n_atoms"].shape[0] < 2, -batch["edge_index"].shape[1]


class Peers:
    """python: the interpreter that has them. steps: that count. patience: seconds for getting ready, all of them together.
    limit: seconds for timing one batch. logs: a folder for what they print, if it is to be kept."""

    def __init__(self, python: str, steps: int, patience: float, limit: float, logs: Path | None) -> None:
        self.python, self.steps, self.patience, self.limit, self.logs = python, steps, patience, limit, logs
        self.processes: list[PeerProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="engines-peers-")

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.processes:
            one.end()
        self._folder.cleanup()

    def add(
        self, name: str, model: dict[str, Any], numbers: list[int], batches: dict[str, Batch], job: dict[str, Any]
    ) -> None:
        """name: of `bench_peers.PEERS`. model: our options, in full. numbers: atomic, of species. batches: by case.
        job: device, precision, lr."""
        cases = sorted(batches, key=lambda case: order(batches[case]))
        folder = Path(self._folder.name) / f"{len(self.processes)}-{cases[0].split('-')[0]}-{name.replace(' ', '-')}"
        folder.mkdir()
        logs = self.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        one = PeerProcess(name, folder, logs.absolute() / f"{folder.name}.txt", cases)
        self.processes.append(one)
        if name not in bench_peers.PEERS:
            one.refusal = f"there is no {name}"
            return
        for case in cases:
            arrays: dict[str, Any] = {key: tensor.cpu().numpy() for key, tensor in batches[case].items()}
            np.savez(folder / f"{case}.npz", numbers=np.array(numbers), **arrays)
        job = {**job, "name": name, "model": model, "structures": [f"{case}.npz" for case in cases]}
        (folder / "job.json").write_text(json.dumps({**job, "warmup": 5, "steps": self.steps}))

    def prepare(self) -> None:
        """Start all of them and wait until each has taken a first step of every batch."""
        able = [one for one in self.processes if one.refusal is None]
        workers = str(max((os.cpu_count() or 1) // 2, 2))  # they do not all compile kernels in the same minute
        environ = {"TORCHINDUCTOR_COMPILE_THREADS": workers, **os.environ, "PYTHONUNBUFFERED": "1"}
        for one in able:
            command = [self.python, bench_peers.__file__, "job.json", "result.json"]
            with open(one.log, "w") as log:
                one.process = subprocess.Popen(
                    command, cwd=one.folder, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
                )
        began = time.monotonic()
        for one in able:
            found = one.wait_for("result.json", began + self.patience, f"it was not ready after {self.patience:.0f} s")
            one.refusal = found.get("refusal", one.refusal)
            seconds = time.monotonic() - began
            print(f"# {one.folder.name}: {one.refusal or 'ready'} ({seconds:.0f} s)", flush=True)

    def time(self, name: str, case: str) -> dict[str, Any]:
        """What `bench_peers.py` measured of a case, or a refusal."""
        one = next(one for one in self.processes if one.name == name and case in one.cases)
        if one.refusal is not None or one.process is None or one.process.stdin is None:
            return {"refusal": one.refusal or "it was not started"}
        n = one.cases.index(case)
        try:
            one.process.stdin.write(f"{n}\n")
            one.process.stdin.flush()
        except OSError:
            pass  # it has ended, and waiting for it says so
        late = f"it was not timed within {self.limit:.0f} s"
        return one.wait_for(f"result-{n}.json", time.monotonic() + self.limit, late)
