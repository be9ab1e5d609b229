"""Predict energies, forces and stress of the structures in a file, and write them to a new file.

An LDOS run predicts densities, densities of states and energies, as files in a new folder.
"""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import (
    READING,
    add_option,
    add_overrides,
    add_run_arguments,
    device_name,
    refuse_files,
    selected,
)
from forgefield.cli.importing import for_good
from forgefield.ldos.options import ElectronOptions

TAKES = (*READING, "data.batch.frames")
EXAMPLES = """\
examples:
  forgefield predict runs/water new.extxyz -o out.extxyz
  forgefield predict runs/water new.extxyz -o out.extxyz --uncertainty forces
  forgefield predict runs/seed1 new.extxyz -o out.extxyz --ensemble runs/seed2 --ensemble runs/seed3
  forgefield predict runs/be new.xyz --temperature 300 -o out          LDOS run: the folder out
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    parser.add_argument("source", metavar="FILE", help="file, folder or pattern with structures; labels are not needed")
    parser.add_argument(
        "-o",
        "--out",
        metavar="OUT",
        required=True,
        help="file to write (.extxyz, .traj, .db); for an LDOS run: a folder",
    )
    parser.add_argument("--force", "--overwrite", action="store_true", help="overwrite the file OUT if it exists")
    parser.add_argument(
        "--uncertainty",
        choices=("energy", "forces"),
        help="also write uncertainties, of energies alone or of forces too (see forgefield uncertainty)",
    )
    parser.add_argument(
        "--ensemble",
        metavar="RUN",
        action="append",
        default=[],
        help="another run; the mean of all runs is predicted, with uncertainties and deviations (may be repeated)",
    )
    parser.add_argument(
        "--model-devi", metavar="FILE", help="write the deviations of an ensemble in DeePMD-kit's format"
    )
    parser.add_argument(
        "--as-labels",
        action="store_true",
        help="write training data: predictions are read as labels, as replay data of a fine-tuning needs them",
    )
    group = parser.add_argument_group("LDOS runs")
    for name in ("temperature", "spacing", "electrons", "ldos"):
        add_option(group, f"--{name}", ElectronOptions, name)
    add_option(group, "--grid", ElectronOptions, "grid", read=int, nargs=3, metavar=("NX", "NY", "NZ"))
    add_option(group, "--pseudopotentials", ElectronOptions, "pseudopotentials", metavar="FOLDER")
    add_overrides(parser, TAKES)


def run(args: argparse.Namespace) -> int:
    overrides = refuse_files(args.overrides)
    with for_good():
        from forgefield import api
    from forgefield.config.loading import override_config, override_keys
    from forgefield.runs import Run

    opened = Run.open(args.run, trust_code=args.trust_code)
    options = override_config(opened.config, overrides, allowed=TAKES, verb="predict").data if overrides else None
    device = device_name(args.device)
    written = api.predict(
        opened,
        args.source,
        args.out,
        options=options,
        which=args.which,
        head=args.head,
        device=device,
        labels_required=any(key.startswith("data.labels") for key in override_keys(overrides)),
        batch=None if options is None or "data.batch.frames" not in override_keys(overrides) else options.batch.frames,
        electrons=ElectronOptions(
            **selected(args, "temperature", "grid", "spacing", "pseudopotentials", "electrons", "ldos")
        ),
        overwrite=args.force,
        notify=print,
        trust_code=args.trust_code,
        uncertainty=args.uncertainty,
        ensemble=args.ensemble,
        model_devi=args.model_devi,
        as_labels=args.as_labels,
    )
    print(f"wrote {written}")
    return 0
