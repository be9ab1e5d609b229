"""Import a model trained with another program as a run that can be tested, used and trained further."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.importing import for_good
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.models.nequip.framework import ImportedModel


SHAPES_ONLY = (
    "weights, layers and scalings have the shapes that the file's parameters say, and all of them are used; the file holds no "
    "predictions to compare with."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", choices=["nequip", "allegro", "deepmd", "mala", "ase"], help="kind of model")
    parser.add_argument(
        "file",
        help="nequip, allegro: checkpoint (.ckpt), or state dict (.pt, .pth, .npz) with its options as JSON next to it; "
        "deepmd: backend-free model (.yaml, .dp) or checkpoint (.pt); mala: archive of save_run (.zip); ase: import path of a "
        "calculator (ase.calculators.emt.EMT)",
    )
    parser.add_argument("--name", help="name of the run (default: name of the file)")
    parser.add_argument("--out", default="runs", help="folder of the run (default: runs)")
    parser.add_argument(
        "--options",
        help="state dict: JSON file with the model section it was trained with; ase: JSON file with the calculator's arguments",
    )
    parser.add_argument("--species", nargs="+", metavar="SYMBOL", help="ase: chemical elements it supports")
    parser.add_argument("--head", metavar="NAME", help="deepmd: which model of a checkpoint with several")
    parser.add_argument(
        "--weights", choices=["ema", "raw"], help="averaged weights if available (ema, default), or the last ones (raw)"
    )


def run(args: argparse.Namespace) -> int:
    if args.program == "mala":
        return _run_mala(args)
    from forgefield.config.trust import CONFIG, NO_CODE
    from forgefield.models.registry import build_model
    from forgefield.runs import create_run_from_model

    imported = _read(args)
    trust = CONFIG if args.program == "ase" else NO_CODE  # the user typed the import path of the calculator
    potential = build_model(imported.resolved, precision=imported.precision, seed=0, trust=trust)
    potential.load_state_dict(imported.state)
    created = create_run_from_model(
        name=args.name or (args.file.split(".")[-1] if args.program == "ase" else Path(args.file).stem),
        out=args.out,
        resolved=imported.resolved,
        potential=potential,
        origin=imported.origin,
        precision=imported.precision,
    )
    print(f"{created.path}: {imported.origin}, species {' '.join(potential.species)}, cutoff {potential.cutoff:g} A")
    if imported.checked:
        print(imported.checked)
    return 0


def _run_mala(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield.api import import_mala

    _refuse_options(args)
    created = import_mala(args.file, name=args.name, out=args.out)
    info = created.info
    described = info["model"]["points"]["descriptors"]
    species = " ".join(info["species"]) or "unknown: there is no info.json in the archive"
    print(f"{created.path}: {info['origin']}, species {species}")
    print(f"Checked: {SHAPES_ONLY}")
    if described is None:
        print("Its descriptors cannot be made here: it is tested and trained with descriptor files only.")
    return 0


def _refuse_options(args: argparse.Namespace) -> None:
    for key in ("options", "weights"):
        if getattr(args, key) is not None:
            raise ForgefieldError(f"--{key} has no meaning for {args.program}: its files say how a model was built.")


def _read(args: argparse.Namespace) -> ImportedModel:
    if args.program == "ase":
        from forgefield.models.adapters.importer import read_calculator

        if args.weights is not None:
            raise ForgefieldError("--weights has no meaning for ase: a calculator has none.")
        return read_calculator(args.file, args.species or [], args.options)
    if args.species is not None:
        raise ForgefieldError("--species is for calculators of ASE; other models know theirs.")
    if args.program == "deepmd":
        from forgefield.models.deeppot.importer import read_deepmd

        _refuse_options(args)
        return read_deepmd(args.file, head=args.head)
    if args.head is not None:
        raise ForgefieldError(f"--head has no meaning for {args.program}: its files hold one model.")
    from forgefield.models.allegro.importer import ALLEGRO
    from forgefield.models.nequip.framework import read_model
    from forgefield.models.nequip.importer import NEQUIP

    kind = {"nequip": NEQUIP, "allegro": ALLEGRO}[args.program]
    return read_model(kind, args.file, options=args.options, weights=args.weights or "ema")
