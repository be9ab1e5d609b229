"""`forgefield import`: turn a model trained elsewhere into a run that can be tested, used and reported on."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", choices=["nequip", "allegro"], help="kind of model")
    parser.add_argument(
        "file", help="checkpoint (.ckpt), or state dict (.pt, .pth, .npz) with its options as JSON beside it"
    )
    parser.add_argument("--name", help="name of the run; default: name of the file")
    parser.add_argument("--out", default="runs", help="folder that holds runs (default: runs)")
    parser.add_argument("--options", help="JSON file with the model section it was trained with, for a state dict")
    parser.add_argument(
        "--weights", choices=["ema", "raw"], default="ema", help="averaged weights if there are any, or the last ones"
    )


def run(args: argparse.Namespace) -> int:
    from forgefield.models.importers.allegro import ALLEGRO
    from forgefield.models.importers.framework import read_model
    from forgefield.models.importers.nequip import NEQUIP
    from forgefield.models.registry import build_model
    from forgefield.runs import create_run_from_model

    kind = {"nequip": NEQUIP, "allegro": ALLEGRO}[args.program]
    imported = read_model(kind, args.file, options=args.options, weights=args.weights)
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    created = create_run_from_model(
        name=args.name or Path(args.file).stem,
        out=args.out,
        resolved=imported.resolved,
        potential=potential,
        origin=imported.origin,
        precision=imported.precision,
    )
    print(f"{created.path}: {imported.origin}, species {' '.join(potential.species)}, cutoff {potential.cutoff:g} A")
    return 0
