"""Convert an input file of DeePMD-kit to a commented Forgefield config of the same training.

`forgefield train input.json` also works without conversion; both give the same training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forgefield.errors import ForgefieldError

EXAMPLES = """\
examples:
  forgefield convert-config input.json
  forgefield convert-config input.json -o water.yaml && forgefield train water.yaml
"""
COMMENTS = {
    "model": "The network, with DeePMD-kit's own names; its rcut is data.cutoff, its type_map data.species.",
    "trainer.max_steps": "Optimiser steps.",
    "trainer.val_check_interval": "Steps between two validations; each is over all validation frames.",
    "trainer.check_val_every_n_epoch": "Validations are counted in steps, whatever the epoch.",
    "callbacks": "The learning curve as DeePMD-kit writes it, a row for each validation.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("input", metavar="INPUT", type=Path, help="input file of DeePMD-kit, .json or .yaml")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="config to write (default: print it)")
    parser.add_argument("--force", action="store_true", help="overwrite the config if it exists")


def run(args: argparse.Namespace) -> int:
    out: Path | None = args.out
    if out is not None:
        _refuse_output(out, force=args.force)
    text = converted(args.input, out)
    if out is None:
        sys.stdout.write(text)
        return 0
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ForgefieldError(f"{out} cannot be written: {error.strerror}.") from error
    print(f"wrote {out}; train with: forgefield train {out}")
    return 0


def converted(file: Path, out: Path | None) -> str:
    """The config of an input as the text of `out`. Relative paths stay as they are where they mean the same there."""
    from forgefield.config.deepmd import is_deepmd_input, read_input, translation
    from forgefield.config.loading import load_config
    from forgefield.config.template import yaml_with_comments

    content = read_input(file)
    if not is_deepmd_input(content):
        raise ForgefieldError(
            f"{file} is not an input of DeePMD-kit: it has no section 'training' beside a 'model' with its type_map."
        )
    found = translation(content, file)
    checked = load_config(file)
    values = found.config
    places = {place.absolute().parent for place in (file, out or file)} | {Path.cwd()}
    if len(places) > 1:
        data = {"train": checked.data.train, "val": checked.data.val}
        values = {**values, "data": {**values["data"], **data}}
    header = [f"The run of {file.name}, an input of DeePMD-kit; written by `forgefield convert-config`."]
    if found.notes:
        header.append("What became of keys that have no setting of their own:")
        header += [f"  {key}: {text}" for key, text in found.notes.items()]
    return yaml_with_comments(values, header="\n".join(header), notes=COMMENTS)


def _refuse_output(out: Path, *, force: bool) -> None:
    if out.suffix not in (".yaml", ".yml"):
        raise ForgefieldError(f"{out}: a config ends in .yaml.")
    if not out.absolute().parent.is_dir():
        raise ForgefieldError(f"{out}: there is no folder {out.parent}.")
    if out.exists() and not force:
        raise ForgefieldError(f"{out} exists already; --force overwrites it, -o FILE names another.")
