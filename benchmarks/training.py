"""Wall clock of whole trainings through the real command, split into start, steps, validation, checkpoints and report.

    python benchmarks/training.py [--data FILE] [--epochs 60] [--cold | --once] [--profile FOLDER] [--out FOLDER]
                                  [key=value ...]

The default case is NequIP (4 layers, l_max 2, 64 features) on 500 frames of 27 atoms in batches of 5, with all defaults and
the graphs engine on a GPU. FILE is an extxyz file such as train_300K.xyz of 3BPA, of which 50 frames are validated; without
it, frames of that size with harmonic bonds are generated. `forgefield train` runs in a process of its own, with one more
callback (`Clock`) that reads the clock. A training of one epoch comes first, so that kernels are on disk; `--cold`: it starts
without any and is shown as well; `--once`: it is left out. `--profile`: then a short training under Python's profiler and one
under torch's. `key=value` overrides the config.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import yaml

from forgefield.training.step_loop import ObservesSteps

ROOT = Path(__file__).parents[1]
STARTED = "BENCHMARK_STARTED"
"""Environment variable: the time at which the command was started, seconds since the epoch."""
PARTS = {
    "checkpoints": ("RunCheckpoint", ("_save",)),
    "best weights": ("BestModel", ("_write_if_better",)),
    "metrics": ("MetricsLog", ("on_validation_end", "on_train_epoch_end")),
    "tensorboard": ("TensorBoardLog", ("on_train_epoch_end", "on_train_batch_end")),
    "step log": ("StepLog", ("on_train_batch_end",)),
    "progress": ("RunProgress", ("on_train_batch_end", "on_validation_end", "on_train_epoch_start")),
}
"""Name of a part, class of the callback, and its methods that are timed."""
PROFILED_STEPS = 50
SPACING = 2.2
"""Distance of neighbouring atoms in generated frames, A; within 5 A they have 17 neighbours, as in 3BPA."""


class Clock(ObservesSteps):
    """Writes a file of times, in seconds: `first step` since the start of the command; `training` from the first step to the
    end, and the parts of it that `PARTS` and the validation take; `queue`, how long validations wait for steps in the queue of
    the GPU, which is part of the time of steps; `host`, the CPU time of the main thread.

    trace: folder for a profile by torch of a few steps after the first epoch, if any.
    """

    def __init__(self, out: str, trace: str | None = None) -> None:
        self.out, self.trace = Path(out), None if trace is None else Path(trace)
        self.seconds: dict[str, float] = {}
        self.profiler: Any = None
        self._origin: torch.cuda.Event | None = None
        """Event at the end of the first step, at which times on the GPU and on the host are the same."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds["fit start"] = time.time() - float(os.environ[STARTED])
        callbacks = {type(callback).__name__: callback for callback in vars(trainer)["callbacks"]}
        for part, (name, methods) in PARTS.items():
            for method in methods:
                if name in callbacks:
                    self._measure(callbacks[name], method, part)
        self._measure(trainer.fit_loop.epoch_loop.val_loop, "run", "validation")

    def _measure(self, owner: Any, method: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            start, nested = time.perf_counter(), sum(self.seconds.get(name, 0.0) for name in PARTS)
            queue_ends = self._mark() if part == "validation" else None
            try:
                return inner(*arguments, **options)
            finally:
                taken = time.perf_counter() - start
                if (
                    part == "validation"
                ):  # its callbacks are parts of their own, and steps may be in the queue of the GPU
                    taken -= sum(self.seconds.get(name, 0.0) for name in PARTS) - nested
                    if queue_ends is not None:
                        taken -= self._wait(queue_ends, start)
                self.seconds[part] = self.seconds.get(part, 0.0) + taken

        setattr(owner, method, timed)

    def _mark(self) -> torch.cuda.Event | None:
        """An event on the GPU, which comes after the steps in its queue; None before the first step."""
        if self._origin is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self, event: torch.cuda.Event, recorded: float) -> float:
        """Seconds between the time when an event was recorded by the host and when the GPU reached it."""
        assert self._origin is not None
        event.synchronize()
        seconds: float = max(1e-3 * self._origin.elapsed_time(event) - (recorded - self._begin), 0.0)
        self.seconds["queue"] = self.seconds.get("queue", 0.0) + seconds
        return seconds

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if "first step" not in self.seconds:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds = {key: value for key, value in self.seconds.items() if key not in PARTS}
            self.seconds["first step"] = time.time() - float(os.environ[STARTED])
            self._begin, self._host, self._first = time.perf_counter(), time.thread_time(), trainer.global_step
            if torch.cuda.is_available():
                self._origin = torch.cuda.Event(enable_timing=True)
                self._origin.record()
        if self.trace is not None and trainer.current_epoch == 1:
            self._profile(batch_idx)

    def _profile(self, batch_idx: int) -> None:
        if batch_idx == 10:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile()
            self.profiler.__enter__()
        elif batch_idx == 10 + PROFILED_STEPS and self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            events = [e for e in self.profiler.key_averages() if e.device_time_total and not e.cpu_time_total]
            total = sum(e.self_device_time_total for e in events) / PROFILED_STEPS
            rows = sorted(events, key=lambda e: -e.self_device_time_total)
            lines = [f"{total:.0f} us of kernels per step"]
            lines += [
                f"{e.self_device_time_total / PROFILED_STEPS:8.1f} us {e.count / PROFILED_STEPS:6.2f} x {e.key[:100]}"
                for e in rows[:30]
            ]
            assert self.trace is not None
            (self.trace / "kernels.txt").write_text("\n".join(lines) + "\n")
            self.profiler = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds["training"] = time.perf_counter() - self._begin
        self.seconds["host"] = time.thread_time() - self._host
        steps = trainer.global_step - self._first
        self.out.write_text(json.dumps({"steps": steps, "ended": time.time(), **self.seconds}))


def synthetic(path: Path, frames: int = 500) -> None:
    """Rattled cubes of 27 atoms of four elements with harmonic bonds, as extxyz."""
    random = np.random.default_rng(0)
    grid = SPACING * np.stack(np.meshgrid(*[np.arange(3)] * 3), axis=-1).reshape(-1, 3)
    symbols = random.choice(["C", "H", "N", "O"], 27)
    i, j = np.triu_indices(27, 1)
    bonded = np.linalg.norm(grid[i] - grid[j], axis=1) < SPACING + 0.1
    i, j = i[bonded], j[bonded]
    lines = []
    for _ in range(frames):
        positions = grid + random.normal(0, 0.1, grid.shape)
        vectors = positions[i] - positions[j]
        lengths = np.linalg.norm(vectors, axis=1)
        pull = -10.0 * (1 - SPACING / lengths)[:, None] * vectors
        forces = np.zeros_like(positions)
        np.add.at(forces, i, pull)
        np.add.at(forces, j, -pull)
        energy = 5.0 * ((lengths - SPACING) ** 2).sum()
        lines += ["27", f'Properties=species:S:1:pos:R:3:forces:R:3 energy={energy:.10f} pbc="F F F"']
        for symbol, row in zip(symbols, np.hstack([positions, forces])):
            lines.append(f"{symbol} " + " ".join(f"{value:.10f}" for value in row))
    path.write_text("\n".join(lines) + "\n")


def config(data: Path, folder: Path, name: str, epochs: int, trace: Path | None) -> dict[str, Any]:
    clock = {"name": "benchmarks.training.Clock", "out": str(folder / f"{name}.json")}
    return {
        "name": name,
        "out": str(folder),
        "data": {"train": str(data), "val": 50, "cutoff": 5.0, "batch": {"frames": 5}},
        "model": {"name": "nequip", "num_layers": 4, "l_max": 2, "num_features": 64},
        "task": {"energy": {"weight": 1.0, "per_atom": True}, "forces": {"weight": 1.0}},
        "training": {"engine": "graphs" if torch.cuda.is_available() else "eager"},
        "trainer": {"max_epochs": epochs},
        "callbacks": [clock if trace is None else {**clock, "trace": str(trace)}],
    }


def train(
    data: Path,
    folder: Path,
    name: str,
    overrides: list[str],
    *,
    epochs: int,
    profile: Path | None = None,
    trace: Path | None = None,
) -> dict[str, float] | None:
    """Times of a training by `forgefield train` in a process of its own; None if it failed.

    profile: file of Python's profiler, if any. trace: folder for torch's.
    """
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config(data, folder, name, epochs, trace)))
    python = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else [])]
    started = time.time()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*python, "-m", "forgefield", "train", str(path), "--fresh", *overrides],
        cwd=ROOT,
        env={**environ, STARTED: str(started)},
        capture_output=True,
        text=True,
    )
    total = time.time() - started
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        print(f"{name}: exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}", flush=True)
        return None
    times: dict[str, float] = json.loads((folder / f"{name}.json").read_text())
    return {**times, "total": total, "report": started + total - times["ended"]}


def show(name: str, times: dict[str, float] | None) -> None:
    """A table of a training."""
    if times is None:
        return
    steps = max(times["steps"], 1)
    parts = [*PARTS, "validation"]
    rest = times["training"] - sum(times.get(part, 0.0) for part in parts)
    print(f"\n{name}: {times['total']:.1f} s from command to report")
    print(
        f"  start (to the end of the first step) {times['first step']:7.2f} s, to Lightning's start {times['fit start']:.2f} s"
    )
    print(
        f"  training                             {times['training']:7.2f} s  {1e3 * times['training'] / steps:7.3f} ms per step"
    )
    print(f"    steps                              {rest:7.2f} s  {1e3 * rest / steps:7.3f} ms per step")
    if "queue" in times:
        queue = times["queue"]
        print(f"      of which GPU queue at validations  {queue:7.2f} s  {1e3 * queue / steps:7.3f} ms per step")
    for part in parts:
        if part in times:
            print(f"    {part:34} {times[part]:7.2f} s  {1e3 * times[part] / steps:7.3f} ms per step")
    print(
        f"    CPU time of the main thread        {times['host']:7.2f} s  {1e3 * times['host'] / steps:7.3f} ms per step"
    )
    print(f"  report (from the last step to the end) {times['report']:5.2f} s", flush=True)


def show_profile(path: Path) -> None:
    """The functions in which the process spent most time, written next to the profile."""
    for order in ("tottime", "cumulative"):
        with open(path.with_suffix(f".{order}.txt"), "w") as file:
            pstats.Stats(str(path), stream=file).sort_stats(order).print_stats(90)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="extxyz file of at least 100 labelled frames")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--cold", action="store_true", help="first a training of one epoch without kernels on disk")
    parser.add_argument("--once", action="store_true", help="without a training before the one that is measured")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="then profile short trainings")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"{device}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.out or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        data = arguments.data
        if data is None:
            data = folder / "synthetic.xyz"
            synthetic(data)
        data, overrides = data.resolve(), arguments.overrides
        if arguments.cold:
            os.environ |= {"TRITON_CACHE_DIR": str(folder / "triton"), "FORGEFIELD_CACHE": str(folder / "cache")}
        if not arguments.once:
            first = train(data, folder, "first", overrides, epochs=1)
            show("without kernels on disk" if arguments.cold else "first training", first)
        show(f"{arguments.epochs} epochs", train(data, folder, "full", overrides, epochs=arguments.epochs))
        if arguments.profile is not None:
            profile = arguments.profile.resolve()
            profile.mkdir(parents=True, exist_ok=True)
            train(data, folder, "profiled", overrides, epochs=6, profile=profile / "python.prof")
            show_profile(profile / "python.prof")
            if torch.cuda.is_available():
                train(data, folder, "traced", overrides, epochs=3, trace=profile)
                print((profile / "kernels.txt").read_text())


if __name__ == "__main__":
    main()
