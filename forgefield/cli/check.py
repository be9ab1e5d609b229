"""The laws of physics on your own model and data: symmetry, exact derivatives, smoothness, locality, as a table.

For a run its trained model is checked, for a config a model with fresh weights. Everything is computed in float64. With
--overfit: whether the model of a config can learn one batch of its data by heart. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forgefield.cli.arguments import CONFIG_SUFFIXES, READING, add_trust, refuse_files
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from forgefield.config.schema import Config
    from forgefield.data.frame import Frame
    from forgefield.data.store.table import FrameTable
    from forgefield.models.potential import Potential

EXAMPLES = """\
examples:
  forgefield check runs/water
  forgefield check water.yaml model.preset=M --frames 2
  forgefield check water --data liquid.extxyz
  forgefield check many --head water
  forgefield check --overfit water.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("target", metavar="RUN|CONFIG", help="name or path of a run, or a config file")
    parser.add_argument(
        "--frames", metavar="N", type=int, default=None, help="how many frames to check on (default: 4)"
    )
    parser.add_argument("--data", metavar="FILE", help="take the frames from here (default: the training data)")
    parser.add_argument("--which", choices=("best", "last"), default="best", help="weights of a run (default: best)")
    parser.add_argument("--head", metavar="NAME", default=None, help="branch of a model that has several")
    parser.add_argument("--seed", type=int, default=0, help="picks frames, rotations, directions (default: 0)")
    parser.add_argument(
        "--overfit", action="store_true", help="train on one batch only: do its errors go to (near) zero?"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=None, help="with --overfit: steps at most (default: 500)"
    )
    parser.add_argument(
        "--goal", metavar="SHARE", type=float, default=None, help="with --overfit: error left (default: 0.05)"
    )
    add_trust(parser)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings; for a run: how data is read")


def run(args: argparse.Namespace) -> int:
    overrides = refuse_files(args.overrides)
    is_config = Path(args.target).is_file() or args.target.endswith(CONFIG_SUFFIXES)
    if args.overfit:
        return _overfit(args, overrides, is_config)
    for option in ("steps", "goal"):
        if getattr(args, option) is not None:
            raise ForgefieldError(f"--{option} belongs to --overfit; give both, or neither.")
    args.frames = 4 if args.frames is None else args.frames
    if args.frames < 1:
        raise ForgefieldError(f"--frames is {args.frames}; it should be 1 or more.")
    import numpy as np
    from rich.console import Console

    from forgefield.checks import print_checks, run_checks
    from forgefield.data.neighbours.graph import graph_of
    from forgefield.data.species import SpeciesTable
    from forgefield.models.resolving import hooks_of

    random = np.random.default_rng(args.seed)
    potential, frames, options, knots = (_from_config if is_config else _from_run)(args, overrides)
    chosen = _pick(frames, args.frames, random)
    console = Console()
    what = "a freshly initialised model" if is_config else f"the {args.which} model"
    console.print(f"Checking {what} of {args.target} on {len(chosen)} frames, in float64", highlight=False)
    results = run_checks(
        potential,
        chosen,
        SpeciesTable(potential.species),
        graph_of(potential).reach,
        generator=random,
        reference_energies=hooks_of(options).isolated_energies(options) if potential.interface.isolated_limit else None,
    )
    print_checks(console, results)
    line = potential.interface.radial_table_line(knots) if knots else None
    if line is not None:
        console.print(line, highlight=False)
    return 0 if all(result.passed for result in results) else 1


def _overfit(args: argparse.Namespace, overrides: list[str], is_config: bool) -> int:
    """Can the model learn one batch? Prints the loss, and what is left of the error of each target."""
    if not is_config:
        raise ForgefieldError(
            f"--overfit trains a fresh model, so it takes a config; {args.target} is not a config file."
        )
    if args.head is not None:
        raise ForgefieldError("--head does not go with --overfit: all branches of the model are trained together.")
    for option in ("frames", "data"):
        if getattr(args, option) is not None:
            raise ForgefieldError(
                f"--{option} does not go with --overfit: the batch is that of the config (data.train, data.batch)."
            )
    steps = 500 if args.steps is None else args.steps
    goal = 0.05 if args.goal is None else args.goal
    if steps < 1 or not 0 < goal < 1:
        raise ForgefieldError("--steps is 1 or more, and --goal a share between 0 and 1.")
    from forgefield.checks.overfit import curve, overfit_config
    from forgefield.config.loading import load_config
    from forgefield.config.point_checks import require_frames

    config = load_config(args.target, overrides, trust_code=args.trust_code)
    require_frames(config, "check --overfit", "train on a single snapshot (data.train) and see its loss go down")
    result = overfit_config(config, steps=steps, goal=goal)
    print(f"One batch of {args.target}, {len(result.losses)} steps; loss:")
    print("\n".join(curve(result.losses)))
    print(f"{'target':16s}{'':8s}{'at first':>12s}{'now':>12s}{'left':>9s}{'allowed':>9s}")
    for target in result.targets:
        verdict = "ok" if target.remaining <= goal else "FAILED"
        numbers = f"{target.before:12.4g}{target.error:12.4g}{target.remaining:8.1%}{goal:9.1%}"
        print(f"{target.name:16s}{verdict:8s}{numbers}  {target.unit}".rstrip())
    if result.passed:
        print("The model can learn this batch.")
        return 0
    bad = [target.name for target in result.targets if not target.remaining <= goal]
    print(
        f"The error of {', '.join(bad)} does not go down to {goal:.0%}: is the label that of the frame, has the target a "
        "weight (task), does the model see neighbours (data.cutoff), is training.lr right? More steps: --steps."
    )
    return 1


class _Checked(NamedTuple):
    """The model, frames to pick from, the model's resolved options, intervals of its radial tables (zero: it has none)."""

    potential: Potential
    frames: FrameTable
    options: Mapping[str, Any]
    knots: int


def _from_run(args: argparse.Namespace, overrides: list[str]) -> _Checked:
    """Of the trained model."""
    from forgefield.config.loading import override_config
    from forgefield.data.reading import read_table
    from forgefield.runs import Run

    opened = Run.open(args.target, trust_code=args.trust_code)
    opened.require_head(args.head)
    config = override_config(opened.config, overrides, allowed=READING, verb="check") if overrides else opened.config
    data = config.data
    source = args.data if args.data is not None else data.train
    if source is None:
        raise ForgefieldError(f"Run {opened.name} does not know its training data; name a file with --data FILE.")
    potential = opened.load_potential(args.which, head=args.head)
    frames = read_table(source, data.labels, data.units, required=False)
    return _Checked(potential, frames, opened.info["model"], _knots(config))


def _from_config(args: argparse.Namespace, overrides: list[str]) -> _Checked:
    """Of a fresh model for the data of a config."""
    from forgefield.config.loading import load_config
    from forgefield.config.point_checks import require_frames
    from forgefield.config.trust import CONFIG
    from forgefield.data.module import read_data
    from forgefield.data.reading import read_table
    from forgefield.models.building import build_model
    from forgefield.models.resolving import branch_names, single_branch
    from forgefield.training.problem.model_options import resolved_model

    config = load_config(args.target, overrides, trust_code=args.trust_code)
    require_frames(config, "check", "their gradients are compared with autograd at the start of a training")
    data = read_data(config.data, config.seed, branches=branch_names(config.model))
    resolved = resolved_model(config, data)
    if args.head is not None or branch_names(resolved):
        resolved, _ = single_branch(resolved, None, args.head)
    frames = data.train.frames
    if args.data is not None:
        frames = read_table(args.data, config.data.labels, config.data.units, required=False)
    potential = build_model(resolved, precision="float64", seed=config.seed, trust=CONFIG)
    return _Checked(potential, frames, resolved, _knots(config))


def _knots(config: Config) -> int:
    """Intervals of the tables that a training with this config reads radial weights from; zero where it reads none."""

    kernels = config.training.kernels
    if kernels.radial == "exact" or config.training.precision == "float64":
        return 0
    return kernels.knots


def _pick(frames: FrameTable, count: int, random: np.random.Generator) -> list[Frame]:
    """Random frames in file order; single atoms only where there is nothing else."""
    several = (frames.n_atoms > 1).nonzero()[0]
    rows = several if len(several) else (frames.n_atoms > 0).nonzero()[0]
    chosen = random.permutation(len(rows))[:count]
    return list(frames.frames(rows[sorted(chosen)]))
