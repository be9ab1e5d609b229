"""Write a commented config for your data: species, cutoff, batch size, labels and length of the run filled in."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.cli.arguments import is_override
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.config.starter import DataFacts
    from forgefield.data.frame import Frame

EXAMPLES = """\
examples:
  forgefield init water.extxyz                                   writes water.yaml
  forgefield init 'cu/*.extxyz' -o cu.yaml --name copper
  forgefield init ethanol.npz data.units.energy=kcal/mol
"""
SURVEYED = 64
"""Frames whose neighbours are counted."""


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
    parser.add_argument("--name", help="name of the run (default: name of the config)")
    parser.add_argument("--force", action="store_true", help="overwrite the config if it exists")


def run(args: argparse.Namespace) -> int:
    files = [word for word in args.words if Path(word).exists() or not is_override(word)]
    overrides = [word for word in args.words if word not in files]
    if not files:
        raise ForgefieldError("name the data to write a config for, as in: forgefield init water.extxyz")
    out = Path(args.out) if args.out is not None else Path(f"{_stem(files)}.yaml")
    _refuse_output(out, force=args.force)
    text, facts = propose(files, overrides, out=out, name=args.name or out.stem)
    from forgefield.config.starter import describe, unit_note

    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ForgefieldError(f"{out} cannot be written: {error.strerror}.") from error
    print(f"{', '.join(files)}: {describe(facts)}")
    if "?" in unit_note(facts):
        print(unit_note(facts))
    for doubt in facts.doubts:
        print(f"worth a look: {doubt}")
    print(f"wrote {out}; train with: forgefield train {out}")
    return 0


def propose(files: list[str], overrides: Sequence[str], *, out: Path, name: str) -> tuple[str, DataFacts]:
    """Text of a config at `out` for these files, and the facts it is based on."""
    from forgefield.config.loading import load_config, override_keys
    from forgefield.config.starter import starter_config, starter_yaml
    from forgefield.config.typed import select, update
    from forgefield.data.inspection.suspicions import label_warnings
    from forgefield.data.labels.label_reader import LabelReader
    from forgefield.data.readers import read_frames
    from forgefield.data.store.table import FrameTable
    from forgefield.settings import as_dict

    settings = load_config({"name": name}, overrides)
    spec: Any = files[0] if len(files) == 1 else files
    reader = LabelReader(settings.data.labels, settings.data.units)
    frames = read_frames(spec, settings.data.labels, settings.data.units, reader=reader)
    facts = survey(frames, _portable(files, out))
    if not any(facts.labels.values()):
        seen = "; ".join(reader.hints().values()) or "name the labels, as in data.labels.energy=my_energy"
        raise ForgefieldError(
            f"{', '.join(files)}: no frame carries energy, forces or stress under their usual names, so there is "
            f"nothing to train on; {seen}."
        )
    missing = [f"no frame carries {label}; {hint}" for label, hint in reader.hints().items() if not facts.labels[label]]
    facts = replace(facts, doubts=[*missing, *label_warnings(FrameTable.from_frames(frames))])
    values, notes = starter_config(facts, name=name)
    chosen = as_dict(settings)
    for key in override_keys(overrides):
        update(values, key, select(chosen, key))
        notes = {noted: text for noted, text in notes.items() if noted != key}
    return starter_yaml(values, notes, file=str(out)), facts


def survey(frames: Sequence[Frame], files: list[str]) -> DataFacts:
    """What a first config depends on."""
    import numpy as np
    from ase.data import chemical_symbols

    from forgefield.config.starter import CUTOFFS, DataFacts

    sizes = [len(frame.numbers) for frame in frames]
    counts = Counter(int(number) for frame in frames for number in frame.numbers)
    forces = [frame.forces for frame in frames if frame.forces is not None]
    squares = np.concatenate(forces) ** 2 if forces else None
    many = [frame for frame, size in zip(frames, sizes) if size > 1] or list(frames)
    sample = many[:: max(1, len(many) // SURVEYED)]
    return DataFacts(
        files=files,
        n_frames=len(frames),
        smallest=min(sizes),
        largest=max(sizes),
        mean_atoms=sum(sizes) / len(sizes),
        species={chemical_symbols[number]: counts[number] for number in sorted(counts)},
        labels={
            label: sum(getattr(frame, label) is not None for frame in frames)
            for label in ("energy", "forces", "stress")
        },
        forces_rms=None if squares is None else float(np.sqrt(squares.mean())),
        mean_neighbours={cutoff: _mean_neighbours(sample, cutoff) for cutoff in CUTOFFS},
    )


def _mean_neighbours(frames: Sequence[Frame], cutoff: float) -> float:
    from forgefield.data.neighbours.graph import neighbour_list

    edges = sum(len(neighbour_list(frame.positions, frame.cell, frame.pbc, cutoff)[0]) for frame in frames)
    return edges / sum(len(frame.numbers) for frame in frames)


def _stem(files: list[str]) -> str:
    stem = Path(files[0].rstrip("/")).stem.strip("*?[]")
    return stem or "config"


def _portable(files: list[str], out: Path) -> list[str]:
    """Paths that hold for the config's place: as given if it lies here, else absolute."""
    here = out.absolute().parent == Path.cwd()
    return [file if here else os.path.abspath(file) for file in files]


def _refuse_output(out: Path, *, force: bool) -> None:
    if out.suffix not in (".yaml", ".yml"):
        raise ForgefieldError(f"{out}: a config ends in .yaml.")
    if not out.absolute().parent.is_dir():
        raise ForgefieldError(f"{out}: there is no folder {out.parent}.")
    if out.exists() and not force:
        raise ForgefieldError(f"{out} exists already; --force overwrites it, -o FILE names another.")
