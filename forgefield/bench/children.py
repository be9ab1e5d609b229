"""Child processes of `forgefield bench`: each runs one job with one config and writes its result to a file.

If a job of a single process fails, it writes the reason instead, which is printed with the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.bench.options import BenchOptions, Job
from forgefield.errors import ForgefieldError
from forgefield.processes import die_with_parent

if TYPE_CHECKING:
    from forgefield.bench.step import BareStep, Work
    from forgefield.data.batch import Batch
    from forgefield.parallel.ranks import Ranks
    from forgefield.settings import Config

QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables that silence torch's profiler."""
STRUCTURES = "structures.npz"


@dataclass(frozen=True)
class Failure:
    """Why a job has no result. was_printed: whether the process has printed the reason. of_memory: whether memory ran out."""

    reason: str
    code: int
    was_printed: bool = False
    of_memory: bool = False


@dataclass(frozen=True)
class Children:
    """Starts child processes. folder: for their files. threads: of each process, as the value of OMP_NUM_THREADS."""

    folder: Path
    threads: str
    options: BenchOptions

    def run(self, config: Config, job: str, n: int = 1, *, precisions: Sequence[str] = ()) -> dict[str, Any] | Failure:
        """The result of a job of `JOBS`, done by n processes together."""
        from forgefield.config.components import environment_of_children
        from forgefield.config.template import commented_yaml
        from forgefield.parallel.spawn import run_ranks

        folder = self.folder / f"job-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        path, result = folder / "config.yaml", folder / "result.json"
        path.write_text(commented_yaml(config))
        command = [sys.executable, "-m", "forgefield", "bench", str(path), "--worker", str(result), "--job", job]
        command += ["--steps", str(self.options.steps), "--warmup", str(self.options.warmup)]
        command += ["--precisions", ",".join(precisions)] if precisions else []
        command += ["--trust-code"] if self.options.trust_code else []
        environ = {**environment_of_children(), **QUIET, "OMP_NUM_THREADS": self.threads}
        code = run_ranks(command, n, environ=environ, disposable=True)
        if not result.exists():
            return Failure(f"its process ended with exit code {code}", code or 1, was_printed=code == 2)
        content = json.loads(result.read_text())
        if "refusal" in content:
            return Failure(content["refusal"], code or 2, of_memory=content["of_memory"])
        return {**content, "folder": str(folder)}

    def run_peer(self, job: dict[str, Any], pythons: Sequence[str]) -> dict[str, Any]:
        """The result of a peer, measured with the first interpreter that has the program installed."""
        from forgefield.bench import peers as bench_peers

        module, package = bench_peers.PEERS[job["name"]]
        python = next((python for python in pythons if _has_module(python, module)), None)
        if python is None:
            return {"refusal": f"{package} is not installed"}
        folder = self.folder / f"peer-{job['name'].replace(' ', '-')}"
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(job))
        command = [python, bench_peers.__file__, "job.json", "result.json"]
        environ = {**os.environ, "OMP_NUM_THREADS": self.threads}
        done = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=die_with_parent(),
        )
        if not (folder / "result.json").exists():
            last = (done.stderr.strip().splitlines() or [""])[-1]
            return {"refusal": f"its process ended with exit code {done.returncode} ({last[:200]})"}
        return json.loads((folder / "result.json").read_text())


def _has_module(python: str, module: str) -> bool:
    """Whether an interpreter finds a module, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise ForgefieldError(f"--peer-python {python}: cannot be started ({error.strerror}).") from error


# ---- jobs, inside a child process


def run_job(config: Config, ranks: Ranks, job: Job) -> int:
    """Run the job, write its result or the reason for its failure, and return an exit code."""
    if ranks.world_size > 1:
        return _measure(config, ranks, job)
    jobs: dict[str, Callable[[Config, Ranks, Job], int]] = {"measure": _measure, "work": _work, "plan": _plan}
    try:
        return jobs[job.kind](config, ranks, job)
    except Exception as error:
        from forgefield.data.batch import is_memory_error

        is_explained = isinstance(error, ForgefieldError)
        of_memory = is_memory_error(error) or is_memory_error(error.__cause__ or error)
        if not is_explained and not of_memory:
            traceback.print_exc()
        line = (str(error).strip().splitlines() or [""])[0]
        content = {"refusal": str(error) if is_explained else f"{type(error).__name__}: {line}", "of_memory": of_memory}
        job.result.write_text(json.dumps(content))
        return 2 if is_explained else 1


def _measure(config: Config, ranks: Ranks, job: Job) -> int:
    from forgefield.bench.training import measure

    measurement, code = measure(
        config, ranks, steps=job.steps, warmup=job.warmup, folder=job.result.parent, trust_code=job.trust_code
    )
    if measurement is not None:
        job.result.write_text(json.dumps(measurement.as_dict()))
    return code


def _work(config: Config, ranks: Ranks, job: Job) -> int:
    """Limits of the device, work of a step in each precision, and the structures of the first batch for peers."""
    from forgefield.bench.step import bare_step, measure_limits
    from forgefield.data.padding import sizes

    content: dict[str, Any] = {"work": {}}
    refusals, data = [], None
    for precision in job.precisions:
        try:
            step = bare_step(config, precision=precision, data=data)
        except ForgefieldError as error:
            refusals.append(error)
            continue
        batch = step.first_batch()
        if data is None:
            _save_structures(job.result.parent / STRUCTURES, batch, step.data.species.symbols)
            _, atoms, edges = sizes(batch)
            content |= {"model": step.resolved, "device": str(step.device), "atoms": atoms, "edges": edges}
        data, device = step.data, step.device
        content["work"][precision] = _work_that_fits(step, batch).as_dict()
    if not content["work"]:
        raise refusals[0]
    job.result.write_text(json.dumps({**content, "limits": asdict(measure_limits(device, list(content["work"])))}))
    return 0


def _work_that_fits(step: BareStep, batch: Batch) -> Work:
    """The work of a step on the batch, or on one frame if the eager engine runs out of memory."""
    from forgefield.bench.step import count_work
    from forgefield.data.batch import is_memory_error

    try:
        return count_work(step, batch)
    except Exception as error:
        if not is_memory_error(error):
            raise
    return count_work(step, step.batch([0]))


def _save_structures(path: Path, batch: Batch, species: Sequence[str]) -> None:
    import numpy as np
    from ase.data import atomic_numbers

    arrays: dict[str, np.ndarray] = {key: tensor.cpu().numpy() for key, tensor in batch.items()}
    np.savez(path, allow_pickle=False, numbers=np.array([atomic_numbers[symbol] for symbol in species]), **arrays)


def _plan(config: Config, ranks: Ranks, job: Job) -> int:
    from forgefield.bench.memory import plan_memory

    job.result.write_text(json.dumps(plan_memory(config).as_dict()))
    return 0
