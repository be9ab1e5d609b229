"""Measure the errors of a trained model on labelled data, in meV/atom, meV/A and GPa.

They are stored in the run, with a parity plot.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.arguments import READING, add_overrides, add_run_arguments, device_name, is_override, refuse_files
from forgefield.cli.importing import for_good
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.parallel.ranks import Ranks

SUSPICIOUS = 20_000.0
"""Energy error, meV/atom, above which the unit is probably wrong."""
TAKES = (*READING, "data.test", "data.eval_batch", "data.batch", "data.neighbours", "data.lazy")
OF_POINTS = ("data.test", "data.points.units", "data.points.pseudopotentials", "data.eval_batch")

EXAMPLES = """\
examples:
  forgefield test runs/water --data test.extxyz
  forgefield test runs/water --which last            on the data.test of its config
  forgefield test water --data a.extxyz b.extxyz --which last
  forgefield test ethanol --data test.npz data.units.energy=kcal/mol
  forgefield test water data.batch.frames=4 'data.test={300K: a.xyz, 600K: b.xyz}'
  forgefield test be --data Be_snapshot3.in.npy
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    parser.add_argument(
        "--data",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="files, folders or patterns; for grid points: snapshots (default: data.test of the run)",
    )
    parser.add_argument(
        "--uncertainty",
        choices=("energy", "forces"),
        help="compare uncertainties with the errors, of energies or of forces too (default: of energies, if the run has any)",
    )
    add_overrides(parser, TAKES)


def run(args: argparse.Namespace) -> int:
    from forgefield.parallel.session import run_on_all_ranks

    return run_on_all_ranks(lambda ranks: _run(args, ranks))


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    # argparse takes overrides that follow the files of --data for files.
    words = args.data or []
    files = [word for word in words if Path(word).exists() or not is_override(word)]
    overrides = refuse_files([*(word for word in words if word not in files), *args.overrides])
    from rich.console import Console

    with for_good():
        from forgefield import api
    from forgefield.config.loading import override_config, override_keys
    from forgefield.data.paths import is_named, test_sets, title
    from forgefield.evaluation import require_test_data
    from forgefield.ldos.observable_units import OBSERVABLE_UNITS
    from forgefield.runs import Run
    from forgefield.training.run.summary import end_summary

    opened = Run.open(args.run, trust_code=args.trust_code)
    takes = OF_POINTS if opened.of_points else TAKES
    options = override_config(opened.config, overrides, allowed=takes, verb="test").data if overrides else None
    if files and "data.test" in override_keys(overrides):
        raise ForgefieldError("--data and data.test both name data to test on; leave one of them out.")
    named = options.test if options is not None else opened.config.data.test
    data = (files[0] if len(files) == 1 else files) if files else require_test_data(opened, named)
    sets = {title(name): source for name, source in test_sets(data).items()}
    errors = api.test(
        opened,
        data,
        options=options,
        which=args.which,
        head=args.head,
        device=device_name(args.device, local_rank=ranks.launch.local_rank),
        labels_required=any(key.startswith("data.labels") for key in override_keys(overrides)),
        uncertainty=args.uncertainty,
    )
    if not ranks.is_rank_zero:
        return 0
    opened = opened.writable()
    results = {title(f"test-{name}"): values for name, values in errors.items()} if is_named(data) else {"test": errors}
    hints = [f"{name}: {_sources(source)}; {args.which} weights" for name, source in sets.items()]
    if any(values.get("energy_mae", 0.0) > SUSPICIOUS for values in results.values()):
        hints.append("energies are off by more than 20 eV/atom: are units and reference those of the training data?")
    end_summary(
        Console(highlight=False),
        opened.path,
        results,
        [*hints, f"report: {opened.path / 'report.html'}"],
        units=opened.units | (OBSERVABLE_UNITS if opened.of_points else {}),
        names=None if opened.of_points else opened.names_of_species,
        statistics=opened.info.get("statistics"),
    )
    return 0


def _sources(source: object) -> str:
    sources = [str(each) for each in source] if isinstance(source, list) else [str(source)]
    return sources[0] if len(sources) == 1 else f"{len(sources)} sources: {', '.join(sources)}"
