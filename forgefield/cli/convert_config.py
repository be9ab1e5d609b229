"""Convert an input of DeePMD-kit, a config of NequIP or Allegro, or a script of Open MatSciML to a commented Forgefield config.

`forgefield train input.json` also works without conversion; both give the same training. MACE's options are not converted:
`forgefield init train.xyz` writes a config for its data; the page "Coming from MACE" of the documentation lists the options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLES = """\
examples:
  forgefield convert-config input.json
  forgefield convert-config input.json -o water.yaml
  forgefield convert-config nequip.yaml -o water.yaml
  forgefield convert-config train_lips.py -o lips.yaml
  forgefield train water.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "input",
        metavar="INPUT",
        type=Path,
        help="input of DeePMD-kit (.json, .yaml), config of NequIP or Allegro (.yaml), or script of Open MatSciML (.py)",
    )
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="config to write (default: print it)")
    parser.add_argument(
        "--species",
        nargs="+",
        metavar="SYMBOL",
        help="DeePMD-kit: elements of the atom types, in order, if their names do not tell them",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the config if it exists")


def run(args: argparse.Namespace) -> int:
    from forgefield.config.converting import convert_input

    text = convert_input(args.input, args.out, overwrite=args.force, species=args.species)
    if args.out is None:
        sys.stdout.write(text)
    else:
        print(f"wrote {args.out}; train with: forgefield train {args.out}")
    return 0
