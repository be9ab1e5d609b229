"""How fast training is here: each engine and precision, how it scales with the number of processes, and what memory it needs.

Every number comes from a short training on your model and data, in a temporary folder; your runs are not touched. Without a
config, or with --water, the data is liquid water, 192 atoms a frame. Processes: the batch of a process stays as configured, so
twice the processes work on twice the frames (weak scaling). With torchrun, srun or mpirun in front, the processes that were
started are measured. --plan says how much memory a batch needs and which one would fill the device.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.bench.children import JOBS, be_child
from forgefield.bench.machine import places, processes, warnings
from forgefield.cli.arguments import add_trust, split_config
from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.config.schema import Config
    from forgefield.parallel.ranks import Ranks

STEPS, WARMUP = 20, 5
ENGINES = ("eager", "compile", "graphs", "script", "auto")
DERIVATIVES = ("double", "tangent", "kernels", "auto")
PEERS = ("nequip", "allegro", "mace", "deepmd")
EXAMPLES = """\
examples:
  forgefield bench my.yaml                                  engines, then numbers of processes
  forgefield bench my.yaml --engines eager,compile --precisions float32,tf32 --json out.json --figure out.png
  forgefield bench --water model.preset=M data.batch.frames=32 --peers
  forgefield bench my.yaml --plan                           memory before training
  forgefield bench my.yaml --ranks 1,2,4 --steps 50 data.batch.frames=16
  srun --ntasks 64 forgefield bench my.yaml --json 64-ranks.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("words", metavar="CONFIG | key=value", nargs="*", help="config file (YAML), and settings that override it")
    add("--engines", metavar="A,B,...", help=f"of {', '.join(ENGINES)} (default: all that run here)")
    add("--precisions", metavar="A,B,...", help="such as float32,tf32 (default: the configured one)")
    add("--derivatives", metavar="A,B", help="double,tangent,kernels (default: the configured one)")
    add("--quick", action="store_true", help="the configured engine in one process only")
    add("--peers", action="store_true", help="also NequIP, Allegro, MACE and DeePMD-kit, where installed")
    add("--peer-names", metavar="A,B,...", help=f"only these of {', '.join(PEERS)}")
    add(
        "--peer-python",
        metavar="FILE",
        action="append",
        default=[],
        help="a Python of another environment in which peers are looked for as well",
    )
    add("--water", action="store_true", help="measure on liquid water instead of the config's data")
    add("--plan", action="store_true", help="how much memory the configured batch needs, and which batch would fit")
    add(
        "--ranks",
        metavar="1,2,...",
        help="numbers of processes to start on this machine (default: 1, 2, 4, ... up to its GPUs, or without GPU its cores)",
    )
    add("--steps", metavar="N", type=int, default=STEPS, help=f"steps to time (default: {STEPS})")
    add("--warmup", metavar="N", type=int, default=WARMUP, help=f"steps before them (default: {WARMUP})")
    add("--json", metavar="FILE", type=Path, help="write all numbers to this file")
    add("--figure", metavar="FILE", type=Path, help="draw the engines' times into this file (.png, .svg, .pdf)")
    add_trust(parser)
    add("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    add("--job", choices=JOBS, default="measure", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    check(args)
    from forgefield.parallel.session import run_on_all_ranks

    return run_on_all_ranks(lambda ranks: _run(args, ranks))


def check(args: argparse.Namespace) -> None:
    """Whatever can be known to be wrong before any work is done."""
    from forgefield.bench.figure import SUFFIXES

    if args.steps < 1:
        raise ForgefieldError(f"--steps is {args.steps}; at least one step must be timed.")
    if args.warmup < 0:
        raise ForgefieldError(f"--warmup is {args.warmup}; it should be 0 or more.")
    if args.ranks is not None:
        numbers_of_ranks(args.ranks)
    for option, known in (("engines", ENGINES), ("derivatives", DERIVATIVES), ("peer_names", PEERS)):
        chosen(getattr(args, option), f"--{option.replace('_', '-')}", known)
    for option in ("json", "figure"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise ForgefieldError(f"--{option} {path}: the folder {path.absolute().parent} does not exist.")
    if args.figure is not None and args.figure.suffix not in SUFFIXES:
        raise ForgefieldError(f"--figure {args.figure}: the name should end in {', '.join(SUFFIXES)}.")
    for python in args.peer_python:
        if shutil.which(python) is None:
            raise ForgefieldError(f"--peer-python {python}: there is no such program.")
    _check_company(args)


def _check_company(args: argparse.Namespace) -> None:
    """Options that ask for nothing together."""
    asked = [
        option
        for option in ("engines", "precisions", "derivatives", "peers", "ranks", "figure")
        if getattr(args, option)
    ]
    if args.plan and asked and args.worker is None:
        raise ForgefieldError(f"--plan measures memory, not time: leave out --{asked[0]}.")
    if args.quick and args.engines:
        raise ForgefieldError("--quick measures the configured engine, --engines others: give one of them.")
    for option in ("peer_python", "peer_names"):
        if getattr(args, option) and not args.peers:
            raise ForgefieldError(f"--{option.replace('_', '-')} is about peers, which --peers asks for: give both.")
    if args.figure is not None and not asks_for_engines(args):
        raise ForgefieldError(
            "--figure draws engines, and only numbers of processes are measured: give --engines as well."
        )


def asks_for_engines(args: argparse.Namespace) -> bool:
    """Engines are measured unless nothing but numbers of processes was asked for."""
    return args.ranks is None or bool(args.engines or args.precisions or args.derivatives or args.quick or args.peers)


def asks_for_ranks(args: argparse.Namespace) -> bool:
    """Numbers of processes are measured when asked for, or when nothing else was."""
    others = args.engines or args.precisions or args.derivatives or args.quick or args.peers
    return args.ranks is not None or not others


def numbers_of_ranks(text: str) -> list[int]:
    """`1,2,4` as numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", word) and int(word) > 0 for word in words):
        raise ForgefieldError(f"--ranks is '{text}'; it should be whole numbers from 1 up with commas, as in 1,2,4.")
    return [int(word) for word in words]


def chosen(text: str | None, option: str, known: Sequence[str]) -> list[str] | None:
    """`a,b` as names of which all are known."""
    if text is None:
        return None
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise ForgefieldError(f"{option}: '{name}' is not one of {', '.join(known)}.{did_you_mean(name, known)}")
    return list(dict.fromkeys(names))


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    from forgefield.config.components import look_where_the_parent_did

    look_where_the_parent_did()
    file, overrides = split_config(args.words)
    if file is None or args.water:
        with Water(file, overrides, ranks, args) as config:
            return _dispatch(config, ranks, args)
    from forgefield.config.loading import load_config, require_training_data
    from forgefield.config.point_checks import require_frames

    config = load_config(file, overrides, trust_code=args.trust_code)
    require_training_data(config, file)
    require_frames(
        config, "bench", "timing.csv of a run has its points per second, and benchmarks/ldos.py compares engines"
    )
    return _dispatch(config, ranks, args)


class Water:
    """Inside, the config of a training on water; its frames lie in a temporary folder of the same name on every node."""

    def __init__(self, file: str | None, overrides: list[str], ranks: Ranks, args: argparse.Namespace) -> None:
        self.file, self.overrides, self.ranks, self.args = file, overrides, ranks, args
        name = f"forgefield-water-{os.getpid()}-{os.urandom(4).hex()}"
        self.folder = Path(tempfile.gettempdir()) / ranks.broadcast(name)
        self.writes = ranks.launch.local_rank == 0

    def __enter__(self) -> Config:
        from forgefield.bench.water import frames_for, water_config, write_water
        from forgefield.config.loading import load_config

        path = self.folder / "water.extxyz"
        water = load_config(water_config(path), self.overrides if self.file is None else [])
        trust_code = self.args.trust_code
        config = water if self.file is None else load_config(self.file, self.overrides, trust_code=trust_code)
        if self.file is not None:  # everything of the config but its data
            kept = {key: copy.deepcopy(getattr(config.data, key)) for key in ("cutoff", "batch", "neighbours")}
            config.data, config.task = water.data, water.task
            for key, value in kept.items():
                setattr(config.data, key, value)
        n, _ = places(config)
        most = self.ranks.world_size if self.ranks.launch.launcher != "none" else n
        if self.args.ranks is not None:
            most = max(numbers_of_ranks(self.args.ranks))
        if self.writes:
            self.folder.mkdir(mode=0o700)
            write_water(path, frames_for(config.data, most if asks_for_ranks(self.args) else 1))
        self.ranks.barrier()
        return config

    def __exit__(self, *exception: object) -> None:
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)


def _dispatch(config: Config, ranks: Ranks, args: argparse.Namespace) -> int:
    from forgefield.bench import plan as bench_plan
    from forgefield.bench import session as bench_session

    if args.worker is not None:
        return be_child(config, ranks, args)
    if ranks.launch.launcher != "none":
        return measure_group(config, ranks, args)
    if args.plan:
        return bench_plan.plan(config, args)
    return bench_session.measure_here(config, args)


def measure_group(config: Config, ranks: Ranks, args: argparse.Namespace) -> int:
    """Be one of the processes that a launcher has started: they are what is measured."""
    launch = ranks.launch
    for option in ("ranks", "engines", "precisions", "derivatives", "peers", "plan", "figure"):
        given = getattr(args, option, None)
        if given:
            words = f"--{option} {given}" if isinstance(given, str) else f"--{option}"
            raise ForgefieldError(
                f"{words}: {launch.launcher} has started {processes(ranks.world_size)}, and those are measured; "
                f"leave --{option} out, or leave out the launcher to measure more on one machine."
            )
    from forgefield.bench import session
    from forgefield.bench.training import measure

    console, warned = session.console(), warnings(launch.local_size, *places(config))
    if ranks.is_rank_zero:
        session.notify(
            console, session.announcement(config, args), *warned, f"{session.doing(ranks.world_size, args)} ..."
        )
    own = tempfile.TemporaryDirectory(prefix="forgefield-bench-") if ranks.is_rank_zero else nullcontext("")
    with own as name:
        folder = Path(ranks.broadcast(name))
        measurement, code = measure(
            config, ranks, steps=args.steps, warmup=args.warmup, folder=folder, trust_code=args.trust_code
        )
    if measurement is not None:
        session.conclude(console, session.Found(measured=[measurement]), config, args, warned)
    return code
