"""Measure how fast training is on this machine: engines and precisions, scaling with the number of processes, and memory.

All numbers come from short trainings of your model on your data, in a temporary folder; your runs are not changed. Without a
config, or with --water, the data is liquid water with 192 atoms per frame. The batch of each process stays as configured, so
that twice as many processes train on twice as many frames (weak scaling). If bench is started by torchrun, srun or mpirun,
these processes are measured. --plan estimates how much memory a batch needs and which batch would fit.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.bench.options import JOBS, BenchOptions, Job
from forgefield.cli.arguments import add_option, add_trust, selected, split_config
from forgefield.config.reference import flag_help
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.parallel.ranks import Ranks

EXAMPLES = """\
examples:
  forgefield bench my.yaml                                  engines, then numbers of processes
  forgefield bench my.yaml --engines eager,compile --precisions float32,tf32 --json out.json --figure out.png
  forgefield bench --water model.preset=M data.batch.frames=32 --peers
  forgefield bench my.yaml --plan                           memory before training
  forgefield bench my.yaml --ranks 1,2,4 --steps 50 data.batch.frames=16
  srun --ntasks 64 forgefield bench my.yaml --json 64-ranks.json
"""
NAMES, SWITCHES = ("engines", "precisions", "derivatives", "peer_names"), ("quick", "peers", "plan")
NUMBERS, FILES = ("steps", "warmup"), ("json", "figure")
"""Options by the type of their values."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("words", metavar="CONFIG | key=value", nargs="*", help="config file (YAML), and settings that override it")
    for name in NAMES:
        add_option(parser, f"--{name.replace('_', '-')}", BenchOptions, name, metavar="A,B,...", read=_names)
    add_option(parser, "--ranks", BenchOptions, "ranks", metavar="1,2,...", read=_numbers)
    for name in SWITCHES:
        add_option(parser, f"--{name}", BenchOptions, name)
    add("--water", action="store_true", help="use liquid water instead of the config's data")
    for name in NUMBERS:
        add_option(parser, f"--{name}", BenchOptions, name, metavar="N")
    for name in FILES:
        add_option(parser, f"--{name}", BenchOptions, name, metavar="FILE", read=Path)
    add(
        "--peer-python",
        metavar="FILE",
        action="append",
        default=[],
        help=f"{flag_help(BenchOptions, 'peer_pythons')}; may be repeated",
    )
    add_trust(parser)
    add("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    add("--job", choices=JOBS, default="measure", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    chosen = selected(args, *NAMES, "ranks", *SWITCHES, *NUMBERS, *FILES)
    options = BenchOptions(**chosen, peer_pythons=args.peer_python, trust_code=args.trust_code)
    job = None
    if args.worker is not None:
        job = Job(args.job, args.worker, options.steps, options.warmup, options.precisions or (), args.trust_code)
    from forgefield.parallel.session import run_on_all_ranks

    def measure(ranks: Ranks) -> int:
        from forgefield.bench.session import run_bench
        from forgefield.config.components import look_where_the_parent_did

        look_where_the_parent_did()
        file, overrides = split_config(args.words)
        return run_bench(file, overrides, options, ranks, water=args.water, job=job)

    return run_on_all_ranks(measure)


def _names(text: str) -> list[str]:
    """`a,b` as a list without duplicates."""
    return list(dict.fromkeys(word.strip() for word in text.split(",")))


def _numbers(text: str) -> list[int]:
    """`1,2,4` as numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", word) and int(word) > 0 for word in words):
        raise ForgefieldError(f"--ranks must be positive whole numbers separated by commas, as in 1,2,4, not '{text}'.")
    return [int(word) for word in words]
