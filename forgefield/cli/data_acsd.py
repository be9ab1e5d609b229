"""Compare settings of descriptors without training: average cosine similarity distance of descriptors and LDOS.

The distance is large if points with similar descriptors have different LDOS; 0 is best. All pairs of --points random points
of each snapshot are compared. Without settings it is that of the descriptors in the files. With values of --twojmax, --cutoff
or --sigma, descriptors of all combinations are computed at these points and sorted by their distance.

examples:
  forgefield data acsd Be_snapshot0.in.npy Be_snapshot1.in.npy
  forgefield data acsd Be_snapshot0.info.json --twojmax 4 6 8 10 --cutoff 3.5 4.67637 6
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from forgefield.cli.arguments import add_option, device_name
from forgefield.cli.data_arguments import progress_bar, source_of
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.options import PointsOptions
from forgefield.text import counted

if TYPE_CHECKING:
    from forgefield.ldos.descriptors.acsd import Score

SUMMARY = "compare settings of descriptors without training (average cosine similarity distance)"
_VARIED = ("twojmax", "cutoff", "sigma")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="SNAPSHOT", help="files such as Be_snapshot0.in.npy or .info.json, folders or globs"
    )
    add_option(parser, "--type", DescriptorOptions, "type")
    for name in _VARIED:
        add_option(parser, f"--{name}", DescriptorOptions, name, nargs="+")
    parser.add_argument(
        "--points", type=int, default=2000, metavar="N", help="random points of each snapshot (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random points (default: 0)")
    add_option(parser, "--units", PointsOptions, "units")
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: cuda if available)")


def run(args: argparse.Namespace) -> int:
    from forgefield.ldos.data.snapshot_files import find_snapshots
    from forgefield.ldos.descriptors.acsd import candidate_settings, score_descriptors

    varied = {name: vars(args)[name] for name in _VARIED if vars(args)[name] is not None}
    choices = varied | ({"type": [args.type]} if args.type is not None else {})
    snapshots = find_snapshots(source_of(args.paths), units=args.units, need=("targets",), setting="SNAPSHOT")
    with progress_bar("comparing", "snapshots") as report:
        scores = score_descriptors(
            snapshots,
            candidate_settings(choices) if choices else [],
            points=args.points,
            seed=args.seed,
            device=device_name(args.device) if choices else "cpu",
            progress=report,
        )
    _print(scores, list(choices))
    return 0


def _print(scores: list[Score], chosen: list[str]) -> None:
    names = [field.name for field in fields(DescriptorOptions) if field.name in chosen]
    print("  ".join([*(f"{name:>10}" for name in names), "descriptors", "distance"]))
    for score in scores:
        settings = [f"{getattr(score.settings, name)!s:>10}" for name in names]
        print("  ".join([*settings, f"{score.columns:>11}", f"{score.mean:.3e}"]))
    left_out = max(score.left_out for score in scores)
    if left_out:
        print(f"{counted(left_out, 'point')} left out: descriptors or LDOS are zero there")
    if chosen:
        best = ", ".join(f"{name}: {getattr(scores[0].settings, name)}" for name in dict.fromkeys(["type", *names]))
        print(f"in a config:  data.points.descriptors: {{{best}}}")
