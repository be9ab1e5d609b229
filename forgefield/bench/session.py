"""A whole `forgefield bench` on this machine: what is measured in which order, and how it is told."""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.bench import tables
from forgefield.bench.children import STRUCTURES, Children, Refused
from forgefield.bench.machine import cores, doubling, on_devices, places, processes, warnings
from forgefield.bench.rows import Row, best_row, engines_notes, engines_table, measured_row, peer_row
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from rich.console import Console

    from forgefield.bench.roofline import Limits, Work
    from forgefield.bench.timer import Measurement
    from forgefield.config.schema import Config


@dataclass
class Found:
    """measured: numbers of processes. rows: engines and peers. work: by precision. model: its options in full."""

    measured: list[Measurement] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    limits: Limits | None = None
    work: dict[str, Work] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    sizes: tuple[int, int] = (0, 0)
    """Atoms and edges of the structures that peers get."""


def measure_here(config: Config, args: argparse.Namespace) -> int:
    """Start the processes of each measurement on this machine, one measurement after the other."""
    from forgefield.cli.bench import asks_for_engines, asks_for_ranks, numbers_of_ranks

    n_places, kind = places(config)
    asked = numbers_of_ranks(args.ranks) if args.ranks is not None else doubling(n_places)
    numbers = asked if asks_for_ranks(args) else []
    out, warned = console(), warnings(max(numbers, default=1), n_places, kind)
    notify(out, announcement(config, args), *warned)
    found = Found()
    with tempfile.TemporaryDirectory(prefix="forgefield-bench-") as folder:
        shared = max(numbers, default=1) if kind == "GPU" or not asks_for_engines(args) else 1
        children = Children(Path(folder), threads(shared), args.steps, args.warmup, args.trust_code)
        alone: dict[str, Measurement] = {}
        if asks_for_engines(args):
            alone = _measure_engines(out, config, args, children, found, kind)
            if args.peers:
                _measure_peers(out, config, args, children, found)
            if not alone and not any(row.refusal is None for row in found.rows):
                conclude(out, found, config, args, warned)
                return 2
        if numbers:
            config = _with_fastest(config, found)
            together = Children(Path(folder), threads(max(numbers)), args.steps, args.warmup, args.trust_code)
            known = alone if children.threads == together.threads else {}
            _measure_ranks(out, config, args, together, found, numbers, kind, known)
    conclude(out, found, config, args, warned)
    return 0


def threads(n: int) -> str:
    """Of each of n processes, the same in every row of a table."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // n))


# ---- engines


def _measure_engines(
    out: Console, config: Config, args: argparse.Namespace, children: Children, found: Found, kind: str
) -> dict[str, Measurement]:
    """Fills in rows. Returns measurements of the configured precision, by engine."""
    import torch

    from forgefield.bench.timer import Measurement
    from forgefield.training.engines.choose import why_not

    precisions = args.precisions.split(",") if args.precisions else [_precision(config)]
    _count_work(out, on_devices(config, 1, kind), children, found, precisions)
    alone: dict[str, Measurement] = {}
    for engine, derivative, precision in _combinations(config, args, precisions, kind):
        words = f"{engine}, {derivative} derivative, {precision}" if derivative != "auto" else f"{engine}, {precision}"
        _begin(out, f"Measuring {words}, {args.warmup} + {args.steps} steps")
        changed = on_devices(config, 1, kind)
        changed.training.engine, changed.training.derivative = engine, derivative
        changed.training.precision = precision
        reason = why_not(engine, torch.device(found.device))
        result = (
            children.run(changed, "measure") if reason is None else Refused(f"training.engine={engine}: {reason}", 2)
        )
        if isinstance(result, Refused):
            out.print("no result", markup=False)
            if engine == "eager" and precision == _precision(config) and not result.of_memory:  # no engine can do that
                raise ForgefieldError(result.reason)
            found.rows.append(
                Row(engine, precision, None if derivative == "auto" else derivative, refusal=result.reason)
            )
            continue
        one = Measurement.from_dict(result)
        found.rows.append(measured_row(one, found.work.get(precision), found.limits))
        out.print(f"{tables.milliseconds(one.step_ms)} ms", markup=False)
        if precision == _precision(config):
            alone.setdefault(engine, one)
    return alone


def _combinations(
    config: Config, args: argparse.Namespace, precisions: Sequence[str], kind: str
) -> list[tuple[str, str, str]]:
    """Engine, derivative and precision of each row."""
    if args.engines:
        engines = [word.strip() for word in args.engines.split(",")]
    elif args.quick:
        engines = [config.training.engine or "eager"]
    else:
        engines = ["eager", "compile", "graphs", "script"] if kind == "GPU" else ["eager", "compile", "script"]
    derivatives = args.derivatives.split(",") if args.derivatives else [config.training.derivative]
    return [(e, d.strip(), p.strip()) for p in precisions for e in engines for d in derivatives]


def _count_work(out: Console, config: Config, children: Children, found: Found, precisions: Sequence[str]) -> None:
    from forgefield.bench.roofline import Limits, Work

    _begin(out, "Measuring the limits of the device, counting the work of a step")
    result = children.run(config, "work", more=["--precisions", ",".join(precisions)])
    if isinstance(result, Refused):
        out.print("no result", markup=False)
        if result.code == 2:
            raise ForgefieldError(result.reason)
        return
    found.limits, found.device, found.model = Limits(**result["limits"]), result["device"], result["model"]
    found.sizes = result["atoms"], result["edges"]
    found.work = {precision: Work.from_dict(work) for precision, work in result["work"].items()}
    out.print(f"{found.limits.copy / 1e9:.3g} GB/s", markup=False)
    (Path(result["folder"]) / STRUCTURES).rename(children.folder / STRUCTURES)


def _precision(config: Config) -> str:
    """The precision that a training begins with."""
    from forgefield.bench.step import first_precision

    return first_precision(config)


def _measure_peers(out: Console, config: Config, args: argparse.Namespace, children: Children, found: Found) -> None:
    from forgefield.bench.peers import PEERS

    if not found.work:
        return
    pythons = [sys.executable, *args.peer_python]
    precision, (atoms, edges) = next(iter(found.work)), found.sizes
    programs = args.peer_names.split(",") if args.peer_names else None
    for name in (name for name in PEERS if programs is None or name.split()[0] in programs):
        _begin(out, f"Measuring {name}, {precision}")
        job = {
            "name": name,
            "structures": str(children.folder / STRUCTURES),
            "model": found.model,
            "device": found.device,
            "precision": precision,
            "lr": float(config.training.lr),
            "warmup": args.warmup,
            "steps": args.steps,
        }
        row = peer_row(name, children.run_peer(job, pythons), precision=precision, atoms=atoms, edges=edges)
        out.print("no result" if row.step_ms is None else f"{tables.milliseconds(row.step_ms)} ms", markup=False)
        found.rows.append(row)


# ---- numbers of processes


def _with_fastest(config: Config, found: Found) -> Config:
    """Where the config leaves the engine open, the one that was found to be the fastest."""
    best = best_row(found.rows, _precision(config))
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
    args: argparse.Namespace,
    children: Children,
    found: Found,
    numbers: Sequence[int],
    kind: str,
    alone: dict[str, Measurement],
) -> None:
    """alone: one process, by engine, where it need not be measured again."""
    from forgefield.bench.timer import Measurement
    from forgefield.training.run.summary import digits

    for n in numbers:
        _begin(out, doing(n, args))
        if n == 1 and (config.training.engine or "eager") in alone:
            measurement = alone[config.training.engine or "eager"]
        else:
            result = children.run(on_devices(config, n, kind), "measure", n)
            if isinstance(result, Refused):
                out.print("no result", markup=False)
                if result.is_told:
                    raise SystemExit(result.code)
                raise ForgefieldError(
                    result.reason
                    if result.code == 2
                    else f"The measurement with {processes(n)} failed: {result.reason}."
                )
            measurement = Measurement.from_dict(result)
        out.print(f"{digits(measurement.samples_per_second)} samples/s", markup=False)
        found.measured.append(measurement)


# ---- words


def console() -> Console:
    """The terminal, or a file with lines of a fixed width."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def notify(out: Console, *texts: str) -> None:
    for text in texts:
        out.print(text, markup=False, soft_wrap=True)


def _begin(out: Console, text: str) -> None:
    out.print(f"{text} ... ", end="", markup=False)
    out.file.flush()


def doing(n: int, args: argparse.Namespace) -> str:
    return f"Measuring {processes(n)}, {args.warmup} + {args.steps} steps"


def announcement(config: Config, args: argparse.Namespace) -> str:
    from forgefield.bench.training import not_measured

    left_out = not_measured(config)
    note = f" Not measured: {', '.join(left_out)}." if left_out else ""
    water = (
        " Data: liquid water, 64 molecules a frame, with energies and forces between rigid molecules (TIP3P), made for this."
        if "forgefield-water-" in str(config.data.train)
        else ""
    )
    return (
        f"Timing training steps of {config.name} in a temporary folder, {args.warmup} to warm up and {args.steps} that count, "
        f"without validation, logs and checkpoints.{water}{note}"
    )


def conclude(out: Console, found: Found, config: Config, args: argparse.Namespace, warned: list[str]) -> None:
    """Print the tables, write the numbers, draw the figure."""
    notes = []
    if found.rows:
        out.print(engines_table(found.rows))
        notify(out, *engines_notes(found.rows, found.limits, found.device))
    if found.measured:
        notes = tables.scaling_notes(found.measured)
        out.print(tables.scaling_table(found.measured))
        notify(out, *notes)
        out.print(tables.parts_table(found.measured))
        notify(out, *tables.parts_notes(found.measured))
    if args.json is not None:
        from forgefield.files import write_atomically

        content = as_json(found, config, args, [*warned, *notes])
        write_atomically(args.json.absolute(), json.dumps(content, indent=1) + "\n")
    if args.figure is not None and any(row.refusal is None for row in found.rows):
        from forgefield.bench.figure import draw

        draw(found.rows, args.figure, f"{config.name}: one training step on {found.device}")
        notify(out, f"figure             {args.figure}")


def as_json(found: Found, config: Config, args: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    from forgefield.runs import versions

    measured = found.measured
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
        "warmup": args.warmup,
        "steps": args.steps,
        "cores": cores(),
        "versions": versions(),
        "notes": notes,
        "limits": asdict(found.limits) if found.limits is not None else None,
        "work": {precision: work.as_dict() for precision, work in found.work.items()},
        "engines": [row.as_dict() for row in found.rows],
        "measurements": ranks,
    }
