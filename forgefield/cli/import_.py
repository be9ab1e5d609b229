"""Import a model trained with another program as a run that can be tested, used and trained further."""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import add_option, selected
from forgefield.cli.importing import for_good
from forgefield.models.registry import import_formats
from forgefield.settings import Config

EXAMPLES = """\
examples:
  forgefield import nequip best.ckpt --name water
  forgefield import nequip water.nequip.zip --energy-unit kcal/mol
  forgefield import deepmd model.ckpt.pt --head water
  forgefield import mala be_model.zip
  forgefield import ase ase.calculators.emt.EMT --species Cu Au
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    formats = import_formats()
    programs: dict[str, list[str]] = {}
    for program, entry in formats.items():
        programs.setdefault(entry.help, []).append(program)
    files = "; ".join(f"{', '.join(names)}: {text}" for text, names in programs.items())
    parser.add_argument(
        "program", metavar="PROGRAM", choices=list(formats), help=f"kind of model: {', '.join(formats)}"
    )
    parser.add_argument("file", metavar="FILE", help=files)
    add_option(parser, "--name", Config, "name", default="name of the file")
    add_option(parser, "--out", Config, "out", metavar="FOLDER")
    parser.add_argument(
        "--options",
        help="state dict: JSON file with the model section it was trained with; nequip, allegro: checkpoint or package "
        "that the model was trained from, if it has moved; ase: JSON file with the calculator's arguments",
    )
    parser.add_argument(
        "--species",
        nargs="+",
        metavar="SYMBOL",
        help="ase: chemical elements it supports; nequip, allegro, deepmd: elements of the types, in order, if their names "
        "are others",
    )
    parser.add_argument("--head", metavar="NAME", help="deepmd: which model of a checkpoint with several")
    parser.add_argument(
        "--weights", choices=["ema", "raw"], help="averaged weights if available (ema, default), or the last ones (raw)"
    )
    parser.add_argument(
        "--energy-unit", metavar="UNIT", help="nequip, allegro: unit of the model's energies (default: eV)"
    )
    parser.add_argument("--length-unit", metavar="UNIT", help="nequip, allegro: unit of positions (default: A)")


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield.api import import_model
        from forgefield.models.importing import ImportRequest

    request = ImportRequest(
        args.file, args.options, args.species, args.head, args.weights, args.energy_unit, args.length_unit
    )
    created, model = import_model(args.program, request, name=args.name, **selected(args, "out"))
    print(f"{created.path}: {model.origin}, {model.description}")
    if model.checked:
        print(model.checked)
    return 0
