"""One call of `forgefield bench`: the measurements in their order, and the report."""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.bench import tables
from forgefield.bench.children import STRUCTURES, Children, Failure, run_job
from forgefield.bench.options import (
    BenchOptions,
    Job,
    count_processes,
    on_devices,
    powers_of_two,
    process_slots,
    sharing_warnings,
)
from forgefield.bench.tables import Row, best_row, engines_notes, engines_table, measured_row, peer_row
from forgefield.bench.training import water_training
from forgefield.errors import ForgefieldError
from forgefield.processes import usable_cores

if TYPE_CHECKING:
    from rich.console import Console

    from forgefield.bench.step import Limits, Work
    from forgefield.bench.timer import Measurement
    from forgefield.parallel.ranks import Ranks
    from forgefield.settings import Config


@dataclass
class Results:
    """measured: of each number of processes. rows: of engines and peers. work: by precision. model: its resolved options.
    sizes: atoms and edges of the structures that peers are measured on."""

    measured: list[Measurement] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    limits: Limits | None = None
    work: dict[str, Work] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    sizes: tuple[int, int] = (0, 0)


def run_bench(
    file: str | None,
    overrides: Sequence[str],
    options: BenchOptions,
    ranks: Ranks,
    *,
    water: bool = False,
    job: Job | None = None,
) -> int:
    """Measure the training of a config and return an exit code. Every process of a launcher calls this.

    file: config; None for a training on water. overrides: `key=value` strings. water: replace the data of the config by liquid
    water. job: what to do in a process that another `forgefield bench` has started.
    """
    if file is None or water:
        limit = _most_processes(options)
        with water_training(file, list(overrides), ranks, most=limit, trust_code=options.trust_code) as config:
            return _measure(config, options, ranks, job)
    from forgefield.config.loading import load_config, require_training_data
    from forgefield.ldos.options import require_frames

    config = load_config(file, list(overrides), trust_code=options.trust_code)
    require_training_data(config, file)
    require_frames(
        config, "bench", "timing.csv of a run has its points per second, and benchmarks/ldos.py compares engines"
    )
    return _measure(config, options, ranks, job)


def _most_processes(options: BenchOptions) -> int | None:
    """The largest number of processes to measure; None for as many as fit on this machine or were started."""
    if not options.measures_ranks:
        return 1
    return None if options.ranks is None else max(options.ranks)


def _measure(config: Config, options: BenchOptions, ranks: Ranks, job: Job | None) -> int:
    if job is not None:
        return run_job(config, ranks, job)
    if ranks.launch.launcher != "none":
        return measure_group(config, ranks, options)
    return plan_memory_of(config, options) if options.plan else measure_here(config, options)


def measure_group(config: Config, ranks: Ranks, options: BenchOptions) -> int:
    """Measure the processes that a launcher has started, of which this is one."""
    launch = ranks.launch
    requested = [*options.requested(), *([("--plan", "")] if options.plan else [])]
    if requested:
        option, value = requested[0]
        raise ForgefieldError(
            f"{f'{option} {value}'.strip()}: {launch.launcher} has started {count_processes(ranks.world_size)}, and those are "
            f"measured; leave {option} out, or leave out the launcher to measure more on one machine."
        )
    from forgefield.bench.training import measure

    out, warned = console(), sharing_warnings(launch.local_size, *process_slots(config))
    if ranks.is_rank_zero:
        notify(out, announcement(config, options), *warned, f"{_description(ranks.world_size, options)} ...")
    scratch = tempfile.TemporaryDirectory(prefix="forgefield-bench-") if ranks.is_rank_zero else nullcontext("")
    with scratch as name:
        folder = Path(ranks.broadcast(name))
        measurement, code = measure(
            config, ranks, steps=options.steps, warmup=options.warmup, folder=folder, trust_code=options.trust_code
        )
    if measurement is not None:
        conclude(out, Results(measured=[measurement]), config, options, warned)
    return code


def plan_memory_of(config: Config, options: BenchOptions) -> int:
    """Measure the memory of small batches in a child process, and print what larger ones need (`--plan`)."""
    _, kind = process_slots(config)
    out = console()
    with tempfile.TemporaryDirectory(prefix="forgefield-bench-") as folder:
        children = Children(Path(folder), threads(1), options)
        notify(out, f"Memory of single training steps of {config.name}, on batches of 1, 2 and 4 frames.")
        result = children.run(on_devices(config, 1, kind), "plan")
    if isinstance(result, Failure):
        raise ForgefieldError(result.reason)
    out.print(tables.plan_table(result))
    notify(out, *tables.plan_notes(result))
    if options.json is not None:
        from forgefield.files import write_atomically

        result.pop("folder")
        write_atomically(options.json.absolute(), json.dumps(result, indent=1) + "\n")
    return 0


def measure_here(config: Config, options: BenchOptions) -> int:
    """Start the processes of each measurement on this machine, one measurement after the other."""
    n_slots, kind = process_slots(config)
    numbers = (options.ranks or powers_of_two(n_slots)) if options.measures_ranks else []
    out, warned = console(), sharing_warnings(max(numbers, default=1), n_slots, kind)
    notify(out, announcement(config, options), *warned)
    results = Results()
    with tempfile.TemporaryDirectory(prefix="forgefield-bench-") as folder:
        shared = max(numbers, default=1) if kind == "GPU" or not options.measures_engines else 1
        children = Children(Path(folder), threads(shared), options)
        alone: dict[str, Measurement] = {}
        if options.measures_engines:
            alone = _measure_engines(out, config, options, children, results, kind)
            if options.peers:
                _measure_peers(out, config, options, children, results)
            if not alone and not any(row.refusal is None for row in results.rows):
                conclude(out, results, config, options, warned)
                return 2
        if numbers:
            config = _with_fastest(config, results)
            together = Children(Path(folder), threads(max(numbers)), options)
            reusable = alone if children.threads == together.threads else {}
            _measure_ranks(out, config, options, together, results, numbers, kind, reusable)
    conclude(out, results, config, options, warned)
    return 0


def threads(n: int) -> str:
    """Number of threads of each of n processes, as the value of OMP_NUM_THREADS."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // n))


# ---- engines


def _measure_engines(
    out: Console, config: Config, options: BenchOptions, children: Children, results: Results, kind: str
) -> dict[str, Measurement]:
    """Measure each engine in one process and add its row. Returns measurements of the configured precision, by engine."""
    import torch

    from forgefield.bench.timer import Measurement
    from forgefield.training.engines.choose import engine_refusal

    precisions = options.precisions or [_precision(config)]
    _count_work(out, on_devices(config, 1, kind), children, results, precisions)
    alone: dict[str, Measurement] = {}
    for engine, derivative, precision in _combinations(config, options, precisions, kind):
        title = f"{engine}, {derivative} derivative, {precision}" if derivative != "auto" else f"{engine}, {precision}"
        _begin(out, f"Measuring {title}, {options.warmup} + {options.steps} steps")
        changed = on_devices(config, 1, kind)
        changed.training.engine, changed.training.derivative = engine, derivative
        changed.training.precision = precision
        reason = engine_refusal(engine, torch.device(results.device))
        result = (
            children.run(changed, "measure") if reason is None else Failure(f"training.engine={engine}: {reason}", 2)
        )
        if isinstance(result, Failure):
            out.print("no result", markup=False)
            if engine == "eager" and precision == _precision(config) and not result.of_memory:  # no engine can do that
                raise ForgefieldError(result.reason)
            results.rows.append(
                Row(engine, precision, None if derivative == "auto" else derivative, refusal=result.reason)
            )
            continue
        one = Measurement.from_dict(result)
        results.rows.append(measured_row(one, results.work.get(precision), results.limits))
        out.print(f"{tables.milliseconds(one.step_ms)} ms", markup=False)
        if precision == _precision(config):
            alone.setdefault(engine, one)
    return alone


def _combinations(
    config: Config, options: BenchOptions, precisions: Sequence[str], kind: str
) -> list[tuple[str, str, str]]:
    """Engine, derivative and precision of each row."""
    if options.engines:
        engines = list(options.engines)
    elif options.quick:
        engines = [config.training.engine or "eager"]
    else:
        engines = ["eager", "compile", "graphs", "script"] if kind == "GPU" else ["eager", "compile", "script"]
    derivatives = options.derivatives or [config.training.derivative]
    return [(e, d, p) for p in precisions for e in engines for d in derivatives]


def _count_work(out: Console, config: Config, children: Children, results: Results, precisions: Sequence[str]) -> None:
    from forgefield.bench.step import Limits, Work

    _begin(out, "Measuring the limits of the device, counting the work of a step")
    result = children.run(config, "work", precisions=precisions)
    if isinstance(result, Failure):
        out.print("no result", markup=False)
        if result.code == 2:
            raise ForgefieldError(result.reason)
        return
    results.limits, results.device, results.model = Limits(**result["limits"]), result["device"], result["model"]
    results.sizes = result["atoms"], result["edges"]
    results.work = {precision: Work.from_dict(work) for precision, work in result["work"].items()}
    out.print(f"{results.limits.copy / 1e9:.3g} GB/s", markup=False)
    (Path(result["folder"]) / STRUCTURES).rename(children.folder / STRUCTURES)


def _precision(config: Config) -> str:
    """The precision that a training starts with."""
    from forgefield.bench.step import first_precision

    return first_precision(config)


def _measure_peers(out: Console, config: Config, options: BenchOptions, children: Children, results: Results) -> None:
    from forgefield.bench.peers import PEERS

    if not results.work:
        return
    pythons = [sys.executable, *options.peer_pythons]
    precision, (atoms, edges) = next(iter(results.work)), results.sizes
    for name in (name for name in PEERS if not options.peer_names or name.split()[0] in options.peer_names):
        _begin(out, f"Measuring {name}, {precision}")
        job = {
            "name": name,
            "structures": str(children.folder / STRUCTURES),
            "model": results.model,
            "device": results.device,
            "precision": precision,
            "lr": float(config.training.lr),
            "warmup": options.warmup,
            "steps": options.steps,
        }
        row = peer_row(name, children.run_peer(job, pythons), precision=precision, atoms=atoms, edges=edges)
        out.print("no result" if row.step_ms is None else f"{tables.milliseconds(row.step_ms)} ms", markup=False)
        results.rows.append(row)


# ---- numbers of processes


def _with_fastest(config: Config, results: Results) -> Config:
    """The config with the fastest measured engine if its engine is `auto`."""
    best = best_row(results.rows, _precision(config))
    if config.training.engine != "auto" or best is None:
        return config
    changed = copy.deepcopy(config)
    changed.training.engine, changed.training.derivative = best.engine, best.derivative or "auto"
    if best.captured is not None:
        changed.training.graphs.compiled = best.captured == "compile"
    return changed


def _measure_ranks(
    out: Console,
    config: Config,
    options: BenchOptions,
    children: Children,
    results: Results,
    numbers: Sequence[int],
    kind: str,
    alone: dict[str, Measurement],
) -> None:
    """Measure each number of processes. alone: measurements of one process by engine, which are not repeated."""
    from forgefield.bench.timer import Measurement
    from forgefield.training.run.summary import digits

    for n in numbers:
        _begin(out, _description(n, options))
        if n == 1 and (config.training.engine or "eager") in alone:
            measurement = alone[config.training.engine or "eager"]
        else:
            result = children.run(on_devices(config, n, kind), "measure", n)
            if isinstance(result, Failure):
                out.print("no result", markup=False)
                if result.was_printed:
                    raise SystemExit(result.code)
                raise ForgefieldError(
                    result.reason
                    if result.code == 2
                    else f"The measurement with {count_processes(n)} failed: {result.reason}."
                )
            measurement = Measurement.from_dict(result)
        out.print(f"{digits(measurement.samples_per_second)} samples/s", markup=False)
        results.measured.append(measurement)


# ---- output


def console() -> Console:
    """The terminal, or a file with lines of fixed width."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def notify(out: Console, *texts: str) -> None:
    for text in texts:
        out.print(text, markup=False, soft_wrap=True)


def _begin(out: Console, text: str) -> None:
    out.print(f"{text} ... ", end="", markup=False)
    out.file.flush()


def _description(n: int, options: BenchOptions) -> str:
    return f"Measuring {count_processes(n)}, {options.warmup} + {options.steps} steps"


def announcement(config: Config, options: BenchOptions) -> str:
    from forgefield.bench.training import not_measured

    excluded = not_measured(config)
    note = f" Not measured: {', '.join(excluded)}." if excluded else ""
    water = (
        " Data: liquid water, 64 molecules per frame, with energies and forces between rigid molecules (TIP3P)."
        if "forgefield-water-" in str(config.data.train)
        else ""
    )
    return (
        f"Timing {options.steps} training steps of {config.name} after {options.warmup} warm-up steps, in a temporary folder, "
        f"without validation, logs and checkpoints.{water}{note}"
    )


def conclude(out: Console, results: Results, config: Config, options: BenchOptions, warned: list[str]) -> None:
    """Print the tables, write the numbers, draw the figure."""
    notes = []
    if results.rows:
        out.print(engines_table(results.rows))
        notify(out, *engines_notes(results.rows, results.limits, results.device))
    if results.measured:
        notes = tables.scaling_notes(results.measured)
        out.print(tables.scaling_table(results.measured))
        notify(out, *notes)
        out.print(tables.parts_table(results.measured))
        notify(out, *tables.parts_notes(results.measured))
    if options.json is not None:
        from forgefield.files import write_atomically

        content = as_json(results, config, options, [*warned, *notes])
        write_atomically(options.json.absolute(), json.dumps(content, indent=1) + "\n")
    if options.figure is not None and any(row.refusal is None for row in results.rows):
        tables.draw(results.rows, options.figure, f"{config.name}: one training step on {results.device}")
        notify(out, f"figure             {options.figure}")


def as_json(results: Results, config: Config, options: BenchOptions, notes: list[str]) -> dict[str, Any]:
    from forgefield.runs import versions

    measured = results.measured
    ranks = [
        {
            **one.as_dict(),
            "speed_up": tables.speed_up(one, measured[0]),
            "efficiency": tables.efficiency(one, measured[0]),
        }
        for one in measured
    ]
    return {
        "config": config.name,
        "model": config.model,
        "cutoff": config.data.cutoff,
        "precision": config.training.precision,
        "warmup": options.warmup,
        "steps": options.steps,
        "cores": usable_cores(),
        "versions": versions(),
        "notes": notes,
        "limits": asdict(results.limits) if results.limits is not None else None,
        "work": {precision: work.as_dict() for precision, work in results.work.items()},
        "engines": [row.as_dict() for row in results.rows],
        "measurements": ranks,
    }
