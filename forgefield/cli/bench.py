"""How fast training is here, and how it scales: real training steps of a config, timed in 1, 2, 4, ... processes.

Each number of processes is one short training on your model and data, in a temporary folder; your runs are not touched. The
batch of a process stays as configured, so twice the processes work on twice the frames (weak scaling). With torchrun, srun or
mpirun in front, the processes that were started are measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.cli.arguments import split_config
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig
    from rich.console import Console
    from rich.table import Table

    from forgefield.parallel.group import Ranks
    from forgefield.training.bench import Measurement

STEPS, WARMUP = 20, 5
DISTURBED = 0.9
"""Share of a core below which a process that only computes must have been interrupted by others."""
EXAMPLES = """\
examples:
  forgefield bench my.yaml
  forgefield bench my.yaml --ranks 1,2,4 --steps 50 data.batch.frames=16
  srun --ntasks 64 forgefield bench my.yaml --json 64-ranks.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "words", metavar="CONFIG | key=value", nargs="*", help="config file (YAML), and settings that override it"
    )
    parser.add_argument(
        "--ranks",
        metavar="1,2,...",
        help="numbers of processes to start on this machine (default: 1, 2, 4, ... up to its GPUs, or without GPU its cores)",
    )
    parser.add_argument("--steps", metavar="N", type=int, default=STEPS, help=f"steps to time (default: {STEPS})")
    parser.add_argument(
        "--warmup", metavar="N", type=int, default=WARMUP, help=f"steps before them (default: {WARMUP})"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all numbers to this file")
    parser.add_argument("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    _check(args)
    from forgefield.parallel.session import run_as_one

    return run_as_one(lambda ranks: _run(args, ranks))


def _check(args: argparse.Namespace) -> None:
    """Whatever can be known to be wrong before any work is done."""
    if args.steps < 1:
        raise ForgefieldError(f"--steps is {args.steps}; at least one step must be timed.")
    if args.warmup < 0:
        raise ForgefieldError(f"--warmup is {args.warmup}; it should be 0 or more.")
    if args.ranks is not None:
        numbers_of_ranks(args.ranks)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ForgefieldError(f"--json {args.json}: the folder {args.json.absolute().parent} does not exist.")


def numbers_of_ranks(text: str) -> list[int]:
    """`1,2,4` as numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", word) and int(word) > 0 for word in words):
        raise ForgefieldError(f"--ranks is '{text}'; it should be whole numbers from 1 up with commas, as in 1,2,4.")
    return [int(word) for word in words]


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    from forgefield.config.components import look_where_the_parent_did
    from forgefield.config.loading import load_config, require_training_data

    file, overrides = split_config(args.words)
    if file is None:
        raise ForgefieldError("say which training is to be measured: forgefield bench CONFIG.")
    look_where_the_parent_did()
    config = load_config(file, overrides)
    require_training_data(config, file)
    if args.worker is not None:
        return _measure_as_worker(config, ranks, args)
    if ranks.launch.launcher != "none":
        return _measure_group(config, ranks, args)
    return _measure_here(config, args)


def _measure_as_worker(config: DictConfig, ranks: Ranks, args: argparse.Namespace) -> int:
    """Be one of the processes that `_measure_here` has started."""
    from forgefield.training.bench import measure

    measurement, code = measure(config, ranks, steps=args.steps, warmup=args.warmup, folder=args.worker.parent)
    if measurement is not None:
        args.worker.write_text(json.dumps(measurement.as_dict()))
    return code


def _measure_group(config: DictConfig, ranks: Ranks, args: argparse.Namespace) -> int:
    """Be one of the processes that a launcher has started: they are what is measured."""
    launch = ranks.launch
    if args.ranks is not None:
        raise ForgefieldError(
            f"--ranks {args.ranks}: {launch.launcher} has started {_processes(ranks.world_size)}, and those are measured; "
            "leave --ranks out, or leave out the launcher to measure several numbers of processes on one machine."
        )
    from forgefield.training.bench import measure

    console, warnings = _console(), _warnings(launch.local_size, *_places(config))
    if ranks.is_first:
        _say(console, _announcement(config, args), *warnings, f"{_doing(ranks.world_size, args)} ...")
    own = tempfile.TemporaryDirectory(prefix="forgefield-bench-") if ranks.is_first else nullcontext("")
    with own as name:
        folder = Path(ranks.share(name))
        measurement, code = measure(config, ranks, steps=args.steps, warmup=args.warmup, folder=folder)
    if measurement is not None:
        _conclude(console, [measurement], config, args, warnings)
    return code


def _measure_here(config: DictConfig, args: argparse.Namespace) -> int:
    """Start the processes of each measurement on this machine, one measurement after the other."""
    from forgefield.training.summary import digits

    places, kind = _places(config)
    numbers = numbers_of_ranks(args.ranks) if args.ranks is not None else _doubling(places)
    console, warnings = _console(), _warnings(max(numbers), places, kind)
    _say(console, _announcement(config, args), *warnings)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // max(numbers)))  # the same in every row
    measurements = []
    for n in numbers:
        console.print(f"{_doing(n, args)} ... ", end="", markup=False)
        console.file.flush()
        measurement, code = _spawn(_on_devices(config, n, kind), n, args, threads=threads)
        if measurement is None:
            console.print("no result")
            if code == 130:
                raise KeyboardInterrupt
            if code != 2:  # the processes have said it already
                raise ForgefieldError(f"The measurement with {_processes(n)} ended with exit code {code}.")
            return code
        console.print(f"{digits(measurement.samples_per_second)} samples/s", markup=False)
        measurements.append(measurement)
    _conclude(console, measurements, config, args, warnings)
    return 0


def _spawn(config: DictConfig, n: int, args: argparse.Namespace, *, threads: str) -> tuple[Measurement | None, int]:
    from forgefield.config.components import environment_of_children
    from forgefield.config.template import commented_yaml
    from forgefield.parallel.spawn import run_ranks
    from forgefield.training.bench import Measurement

    with tempfile.TemporaryDirectory(prefix="forgefield-bench-") as folder:
        path, result = Path(folder) / "config.yaml", Path(folder) / "result.json"
        path.write_text(commented_yaml(config))
        command = [sys.executable, "-m", "forgefield", "bench", str(path), "--worker", str(result)]
        command += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
        code = run_ranks(command, n, environ={**environment_of_children(), "OMP_NUM_THREADS": threads})
        if not result.exists():
            return None, code or 1
        return Measurement.from_dict(json.loads(result.read_text())), code


# ---- this machine


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _places(config: DictConfig) -> tuple[int, str]:
    """How many processes can run beside each other here without sharing a GPU or a core, and which of the two it is."""
    import torch

    if (config.trainer.get("accelerator") or "auto") == "cpu" or not torch.accelerator.is_available():
        return _cores(), "core"
    indices = _indices(config)
    return (len(indices) if indices is not None else torch.accelerator.device_count()), "GPU"


def _indices(config: DictConfig) -> list[int] | None:
    """The GPUs that the config names one by one; None where it does not."""
    from forgefield.data.readers import plain

    devices = plain(config.trainer.get("devices"))
    if isinstance(devices, str) and "," in devices:
        devices = [int(word) for word in devices.split(",") if word.strip().isdigit()]
    return list(devices) if isinstance(devices, list) else None


def _on_devices(config: DictConfig, n: int, kind: str) -> DictConfig:
    """The config for n processes on this machine, whatever number of devices and nodes it was written for."""
    changed, indices = copy.deepcopy(config), _indices(config)
    changed.trainer.pop("num_nodes", None)
    changed.trainer["devices"] = indices[:n] if indices is not None and kind == "GPU" else n
    return changed


def _doubling(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def _warnings(n: int, places: int, kind: str) -> list[str]:
    if n <= places:
        return []
    if kind == "GPU":
        return [
            f"Warning: {_processes(n)} are asked for and there {'is 1 GPU' if places == 1 else f'are {places} GPUs'}. "
            "Processes that share a GPU talk through gloo; it pays only where a step is too small to keep the GPU busy."
        ]
    return [
        f"Warning: {_processes(n)} are asked for and there {'is 1 core' if places == 1 else f'are {places} cores'}. "
        "Processes that share a core take turns, so no speed-up can be expected from more of them."
    ]


# ---- words and tables


def _console() -> Console:
    """The terminal, or a file with lines of a fixed width."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _say(console: Console, *texts: str) -> None:
    for text in texts:
        console.print(text, markup=False, soft_wrap=True)


def _processes(n: int) -> str:
    return f"{n} process{'es' if n > 1 else ''}"


def _doing(n: int, args: argparse.Namespace) -> str:
    return f"Measuring {_processes(n)}, {args.warmup} + {args.steps} steps"


def _announcement(config: DictConfig, args: argparse.Namespace) -> str:
    from forgefield.training.bench import not_measured

    left_out = not_measured(config)
    note = f" Not measured: {', '.join(left_out)}." if left_out else ""
    return (
        f"Timing training steps of {config.name} in a temporary folder, {args.warmup} to warm up and {args.steps} that count, "
        f"without validation, logs and checkpoints.{note}"
    )


def _conclude(
    console: Console, measured: list[Measurement], config: DictConfig, args: argparse.Namespace, warnings: list[str]
) -> None:
    """Print the tables, write the numbers."""
    notes = scaling_notes(measured)
    console.print(scaling_table(measured))
    _say(console, *notes)
    console.print(parts_table(measured))
    _say(console, *parts_notes(measured))
    if args.json is not None:
        from forgefield.files import write_whole

        content = as_json(measured, config, args, [*warnings, *notes])
        write_whole(args.json.absolute(), json.dumps(content, indent=1) + "\n")


def as_json(
    measured: Sequence[Measurement], config: DictConfig, args: argparse.Namespace, notes: list[str]
) -> dict[str, Any]:
    from forgefield.data.readers import plain
    from forgefield.runs import versions

    rows = [
        {**one.as_dict(), "speed_up": speed_up(one, measured[0]), "efficiency": efficiency(one, measured[0])}
        for one in measured
    ]
    return {
        "config": config.name,
        "model": plain(config.model),
        "cutoff": config.data.cutoff,
        "precision": config.training.precision,
        "warmup": args.warmup,
        "steps": args.steps,
        "cores": _cores(),
        "versions": versions(),
        "notes": notes,
        "measurements": rows,
    }


def speed_up(one: Measurement, first: Measurement) -> float:
    return one.samples_per_second / first.samples_per_second


def efficiency(one: Measurement, first: Measurement) -> float:
    return speed_up(one, first) * first.ranks / one.ranks


def scaling_table(measured: Sequence[Measurement]) -> Table:
    from forgefield.training.summary import digits

    table = _table("ranks", "s per 100 samples", "samples/s", "atoms/s", "speed-up", "efficiency")
    first = measured[0]
    for one in measured:
        table.add_row(
            str(one.ranks),
            digits(100 / one.samples_per_second),
            digits(one.samples_per_second),
            digits(one.atoms_per_second),
            f"{speed_up(one, first):.2f}",
            f"{100 * efficiency(one, first):.0f} %",
        )
    return table


def scaling_notes(measured: Sequence[Measurement]) -> list[str]:
    one = measured[0]
    frames = f"{one.frames_per_rank} frame{'s' if one.frames_per_rank > 1 else ''}"
    batches = f" x {one.accumulate} batches a step" if one.accumulate > 1 else ""
    notes = [
        f"Every rank has {frames}{batches} whatever their number (weak scaling); speed-up and efficiency are relative to "
        f"the first row."
    ]
    for short in (m for m in measured if not m.full_batches):
        had = short.samples / (short.steps * short.ranks)
        notes.append(
            f"Warning: the data has fewer training frames than {_processes(short.ranks)} take in a step, so that a rank had "
            f"{had:.1f} frames a step; this row cannot be compared with the others."
        )
    notes += [
        f"Warning: with ranks={one.ranks} a process had a core for only {100 * one.core_share:.0f} % of the time it computed. "
        "Something else was at work on this machine; measure again when it is idle."
        for one in measured
        if one.core_share is not None and one.core_share < DISTURBED
    ]
    return notes


def parts_table(measured: Sequence[Measurement]) -> Table:
    """ms per step: mean over ranks, and behind the slash the rank that needs longest."""
    table = _table("ranks", "step, ms", "data", "compute", "communication", "of it waiting", "update")
    for one in measured:
        cells = {part: f"{_ms(one.mean_ms[part])} / {_ms(one.max_ms[part])}" for part in one.mean_ms}
        waiting = _ms(one.waiting_ms)
        if one.communication_in_compute:
            cells["communication"], waiting = "in compute", "unknown"
        table.add_row(
            str(one.ranks),
            _ms(one.step_ms),
            cells["data"],
            cells["compute"],
            cells["communication"],
            waiting,
            cells["update"],
        )
    return table


def parts_notes(measured: Sequence[Measurement]) -> list[str]:
    last = measured[-1]
    strategies = ", ".join(dict.fromkeys(f"{m.strategy} ({m.backend})" for m in measured if m.ranks > 1))
    notes = ["Mean over ranks / slowest rank. Waiting is time spent in the exchange before the last rank has come."]
    if any(one.marks_synchronised for one in measured):
        notes.append(
            "Parts are timed in steps of their own, with the GPU halted at each mark: they do not add up to the step."
        )
    notes += [
        f"gradient message   {last.message_bytes / 1e6:.3g} MB a step, {last.parameters:,} parameters",
        f"exchange           {strategies or 'none, one process'}",
        f"threads            {', '.join(dict.fromkeys(str(m.threads) for m in measured))} per process",
        f"machine            {last.device}, {_cores()} cores" + (f", {last.nodes} nodes" if last.nodes > 1 else ""),
    ]
    if last.memory_bytes:
        notes.append(f"GPU memory         {last.memory_bytes / 2**30:.2f} GiB at most on rank 0")
    return notes


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
