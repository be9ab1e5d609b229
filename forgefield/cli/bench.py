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

from forgefield.bench.options import DERIVATIVES, ENGINES, JOBS, PEERS, STEPS, WARMUP, BenchOptions, Job
from forgefield.cli.arguments import add_trust, split_config
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("words", metavar="CONFIG | key=value", nargs="*", help="config file (YAML), and settings that override it")
    engines = ", ".join(ENGINES)
    add("--engines", metavar="A,B,...", type=_names, help=f"engines: {engines} (default: all that run here)")
    add("--precisions", metavar="A,B,...", type=_names, help="such as float32,tf32 (default: the configured one)")
    forms = ", ".join(DERIVATIVES)
    add("--derivatives", metavar="A,B,...", type=_names, help=f"{forms} (default: the configured one)")
    add("--quick", action="store_true", help="measure only the configured engine, in one process")
    add("--peers", action="store_true", help="also measure NequIP, Allegro, MACE and DeePMD-kit, where installed")
    add("--peer-names", metavar="A,B,...", type=_names, help=f"only these peers: {', '.join(PEERS)}")
    add(
        "--peer-python",
        metavar="FILE",
        action="append",
        default=[],
        help="Python interpreter of another environment in which to look for peers; may be repeated",
    )
    add("--water", action="store_true", help="use liquid water instead of the config's data")
    add("--plan", action="store_true", help="estimate the memory of the configured batch, and which batch would fit")
    add(
        "--ranks",
        metavar="1,2,...",
        type=_numbers,
        help="numbers of processes to start on this machine (default: 1, 2, 4, ... up to the number of GPUs, or of cores "
        "where there is no GPU)",
    )
    add("--steps", metavar="N", type=int, default=STEPS, help=f"number of timed steps (default: {STEPS})")
    add("--warmup", metavar="N", type=int, default=WARMUP, help=f"number of steps before them (default: {WARMUP})")
    add("--json", metavar="FILE", type=Path, help="write all numbers to this file")
    add("--figure", metavar="FILE", type=Path, help="draw the times of engines to this file (.png, .svg, .pdf)")
    add_trust(parser)
    add("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    add("--job", choices=JOBS, default="measure", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    options = BenchOptions(
        engines=args.engines,
        precisions=args.precisions,
        derivatives=args.derivatives,
        quick=args.quick,
        peers=args.peers,
        peer_names=args.peer_names,
        peer_pythons=args.peer_python,
        plan=args.plan,
        ranks=args.ranks,
        steps=args.steps,
        warmup=args.warmup,
        json=args.json,
        figure=args.figure,
        trust_code=args.trust_code,
    )
    job = None
    if args.worker is not None:
        job = Job(args.job, args.worker, args.steps, args.warmup, args.precisions or (), args.trust_code)
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
        raise ForgefieldError(f"--ranks is '{text}'; it should be positive whole numbers with commas, as in 1,2,4.")
    return [int(word) for word in words]
