"""Check symmetry, exact derivatives, smoothness and locality of your model on your data.

For a run the trained model is checked, for a config a model with new weights. Everything is computed in float64. With
--overfit, check whether the model of a config can learn a single batch of its data. With --lammps, compare LAMMPS on one and on
several MPI processes with the ASE calculator on one frame. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forgefield.cli.arguments import CONFIG_SUFFIXES, add_trust, is_package, refuse_files
from forgefield.errors import ForgefieldError

FRAMES, STEPS, GOAL, RANKS = 4, 500, 0.05, (1, 2, 4)
EXAMPLES = """\
examples:
  forgefield check runs/water
  forgefield check water.yaml model.preset=M --frames 2
  forgefield check water --data liquid.extxyz
  forgefield check many --head water
  forgefield check --overfit water.yaml
  forgefield check --lammps runs/water --data box.extxyz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("target", metavar="RUN|CONFIG", help="name or path of a run, a packaged model (.ff), or a config file")
    add("--frames", metavar="N", type=int, help=f"number of frames to check (default: {FRAMES})")
    add("--data", metavar="FILE", help="take the frames from this file (default: the training data)")
    add("--which", choices=("best", "last"), default="best", help="weights of the run (default: best)")
    add("--head", metavar="NAME", help="branch of a model with several branches")
    add("--seed", type=int, default=0, help="seed for choosing frames, rotations and directions (default: 0)")
    add("--overfit", action="store_true", help="train on a single batch and check that its errors become small")
    add("--steps", metavar="N", type=int, help=f"with --overfit: largest number of steps (default: {STEPS})")
    add("--goal", metavar="SHARE", type=float, help=f"with --overfit: fraction of the error left (default: {GOAL})")
    add(
        "--lammps",
        action="store_true",
        help="compare LAMMPS on one and on several MPI processes with ASE, on one frame",
    )
    add(
        "--ranks",
        metavar="N",
        type=int,
        nargs="+",
        help=f"with --lammps: numbers of processes (default: {_words(RANKS)})",
    )
    add_trust(parser)
    add("overrides", metavar="key=value", nargs="*", help="settings; for a run: how its data is read")


def run(args: argparse.Namespace) -> int:
    overrides = refuse_files(args.overrides)
    is_file = Path(args.target).is_file() or args.target.endswith(CONFIG_SUFFIXES)
    is_config = is_file and not is_package(args.target)
    if args.lammps:
        return _lammps(args, overrides, is_config)
    if args.ranks is not None:
        raise ForgefieldError("--ranks needs --lammps.")
    return _overfit(args, overrides, is_config) if args.overfit else _check(args, overrides, is_config)


def _check(args: argparse.Namespace, overrides: list[str], is_config: bool) -> int:
    for option, value in (("--steps", args.steps), ("--goal", args.goal)):
        if value is not None:
            raise ForgefieldError(f"{option} needs --overfit.")
    count = FRAMES if args.frames is None else args.frames
    if count < 1:
        raise ForgefieldError(f"--frames must be 1 or more, not {count}.")
    import numpy as np
    from rich.console import Console

    from forgefield.checks import print_checks
    from forgefield.checks.suite import Subject

    options = {"data": args.data, "head": args.head, "trust_code": args.trust_code}
    if is_config:
        subject = Subject.of_config(args.target, overrides, **options)
    else:
        subject = Subject.of_run(args.target, overrides, which=args.which, **options)
    generator = np.random.default_rng(args.seed)
    frames = subject.choose_frames(count, generator)
    console = Console()
    model = "a newly initialised model" if is_config else f"the {args.which} model"
    console.print(f"Checking {model} of {args.target} on {len(frames)} frames, in float64", highlight=False)
    results = subject.check(frames, generator)
    print_checks(console, results)
    if (line := subject.radial_tables()) is not None:
        console.print(line, highlight=False)
    return 0 if all(result.passed for result in results) else 1


def _overfit(args: argparse.Namespace, overrides: list[str], is_config: bool) -> int:
    if not is_config:
        raise ForgefieldError(
            f"--overfit trains a new model, so it needs a config; {args.target} is not a config file."
        )
    if args.head is not None:
        raise ForgefieldError(
            "--head cannot be combined with --overfit: all branches of the model are trained together."
        )
    for option, value in (("--frames", args.frames), ("--data", args.data)):
        if value is not None:
            raise ForgefieldError(
                f"{option} cannot be combined with --overfit: the batch is that of the config (data.train, data.batch)."
            )
    steps = STEPS if args.steps is None else args.steps
    goal = GOAL if args.goal is None else args.goal
    if steps < 1 or not 0 < goal < 1:
        raise ForgefieldError("--steps must be 1 or more, and --goal between 0 and 1.")
    from forgefield.checks.overfit import overfit_config, print_overfit
    from forgefield.config.loading import load_config
    from forgefield.ldos.options import require_frames

    config = load_config(args.target, overrides, trust_code=args.trust_code)
    require_frames(config, "check --overfit", "train on a single snapshot (data.train) and see its loss go down")
    result = overfit_config(config, steps=steps, goal=goal)
    print_overfit(result, args.target)
    return 0 if result.passed else 1


def _lammps(args: argparse.Namespace, overrides: list[str], is_config: bool) -> int:
    if is_config:
        raise ForgefieldError(f"--lammps needs a trained run; {args.target} is a config file.")
    for option in ("overfit", "steps", "goal", "frames"):
        if vars(args)[option]:
            raise ForgefieldError(f"--{option} cannot be combined with --lammps.")
    ranks = args.ranks or RANKS
    if min(ranks) < 1:
        raise ForgefieldError(f"--ranks must be 1 or more, not {min(ranks)}.")
    from forgefield.checks.lammps import check_lammps
    from forgefield.runs import Run

    run = Run.open(args.target, trust_code=args.trust_code)
    options = {"data": args.data, "which": args.which, "head": args.head, "seed": args.seed}
    return 0 if check_lammps(run, overrides, ranks=ranks, **options) else 1


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
