"""Write a commented config for your data: species, cutoff, batch size, labels and length of the run filled in.

For data without energies and forces, the config is for the properties and classes in it; for snapshots of grid points, it is
for an LDOS network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forgefield.cli.arguments import add_option, is_override
from forgefield.errors import ForgefieldError
from forgefield.settings import Config

EXAMPLES = """\
examples:
  forgefield init water.extxyz                                   writes water.yaml
  forgefield init 'cu/*.extxyz' -o cu.yaml --name copper
  forgefield init ethanol.npz data.units.energy=kcal/mol
  forgefield init ethanol.extxyz --accurate                      MACE and a long training, on a GPU
  forgefield init band-gaps.extxyz                               properties and classes instead of energies
  forgefield init water/data_0 water/data_1 -o water.yaml        systems of DeePMD-kit
  forgefield init Be_snapshot*.in.npy -o be.yaml                 snapshots of the LDOS
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "words",
        metavar="DATA | key=value",
        nargs="+",
        help="files, folders or patterns to train on; settings for the config, of which data.labels and data.units also "
        "apply to reading the data",
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="config to write (default: name of the data, .yaml)")
    add_option(parser, "--name", Config, "name", default="name of the config")
    parser.add_argument(
        "--accurate", action="store_true", help="settings for small errors: MACE and a long training (on a GPU)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the config if it exists")


def run(args: argparse.Namespace) -> int:
    from forgefield.data.starter import describe, propose_config, unit_note
    from forgefield.ldos.starter import are_snapshots, propose_points_config

    files = [word for word in args.words if Path(word).exists() or not is_override(word)]
    overrides = [word for word in args.words if word not in files]
    if not files:
        raise ForgefieldError("name the data to write a config for, as in: forgefield init water.extxyz")
    if are_snapshots(files):
        if args.accurate:
            raise ForgefieldError("--accurate has settings for potentials, and this is grid data; leave it out.")
        out, about = propose_points_config(files, overrides, out=args.out, name=args.name, overwrite=args.force)
        print(f"{', '.join(files)}: {about}")
        has_energies = any(word.startswith("data.points.energies") for word in overrides)
        todo = "train with:" if has_energies else "enter the energies of the levels (data.points.energies), then:"
        print(f"wrote {out}; {todo} forgefield train {out}")
        return 0
    out, facts = propose_config(
        files, overrides, out=args.out, name=args.name, overwrite=args.force, accurate=args.accurate
    )
    print(f"{', '.join(files)}: {describe(facts)}")
    if "?" in unit_note(facts):
        print(unit_note(facts))
    for remark in facts.remarks:
        print(f"worth a look: {remark}")
    print(f"wrote {out}; train with: forgefield train {out}")
    return 0
