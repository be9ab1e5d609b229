"""The config that `forgefield init` proposes for a data set: rules of thumb for a first run, each explained in a comment of the
config where it was applied.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from forgefield.config.loading import load_config, override_keys
from forgefield.config.option import field_docs, first_sentence
from forgefield.config.template import require_config_path, write_config, yaml_with_comments
from forgefield.config.typed import select, update
from forgefield.data.frame import Frame
from forgefield.data.inspection.suspicions import LARGE_FORCES, label_warnings
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.neighbours.graph import neighbour_list
from forgefield.data.options import BatchOptions, DataOptions
from forgefield.data.property_starter import Property, add_properties, properties_of
from forgefield.data.readers import read_frames
from forgefield.data.recipe import accurate_config
from forgefield.data.sampling.batching import default_frames
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.settings import Config, as_dict, default_weights

MODEL = {"name": "nequip", "preset": "S"}
"""The model of a first run."""
STEPS = 5000
"""Optimiser steps of a first run."""
MANY_NEIGHBOURS = 60
"""Mean neighbours per atom above which a smaller cutoff is proposed."""
CUTOFFS = (5.0, 4.5, 4.0)
SURVEYED = 64
"""Number of frames whose neighbours are counted."""


@dataclass(frozen=True)
class DataFacts:
    """The facts about a data set on which a first config is based."""

    files: list[str]
    n_frames: int
    smallest: int
    largest: int
    mean_atoms: float
    species: dict[str, int]
    """Symbol -> number of atoms, by atomic number."""
    labels: dict[str, int]
    """energy, forces, stress -> number of frames that have it."""
    forces_rms: float | None
    """eV/A."""
    mean_neighbours: dict[float, float]
    """Cutoff, A -> mean neighbours per atom."""
    properties: dict[str, Property] = field(default_factory=dict)
    """Targets of data without energy, forces and stress, by name."""
    remarks: list[str] = field(default_factory=list)
    """What looks wrong in the data, and values that may be labels under unusual names; each a sentence."""

    def __repr__(self) -> str:
        return f"DataFacts({describe(self).rstrip('.')})"


def propose_config(
    files: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    out: str | os.PathLike[str] | None = None,
    name: str | None = None,
    overwrite: bool = False,
    accurate: bool = False,
) -> tuple[Path, DataFacts]:
    """Write a commented config for data, as `forgefield init`; returns its path and the facts on which it is based.

    Parameters
    ----------
    files
        Files, folders or patterns to train on.
    overrides
        `key=value` settings for the config; `data.labels` and `data.units` also apply to reading the data.
    out
        The config to write; default: the name of the data with the ending .yaml.
    name
        Name of the run; default: that of the config.
    overwrite
        Replace an existing config.
    accurate
        Settings for small errors, whose training takes long: a GPU is recommended.
    """
    path = Path(out) if out is not None else Path(f"{Path(files[0].rstrip('/')).stem.strip('*?[]') or 'config'}.yaml")
    require_config_path(path, overwrite=overwrite)
    text, facts = starter_text(files, overrides, out=path, name=name or path.stem, accurate=accurate)
    return write_config(path, text), facts


def starter_text(
    files: Sequence[str], overrides: Sequence[str], *, out: Path, name: str, accurate: bool
) -> tuple[str, DataFacts]:
    """Text of a config at `out` for these files, and the facts on which it is based."""
    settings = load_config({"name": name}, overrides)
    reader = LabelReader(settings.data.labels, settings.data.units)
    spec = files[0] if len(files) == 1 else list(files)
    frames = read_frames(spec, settings.data.labels, settings.data.units, reader=reader)
    is_here = out.absolute().parent == Path.cwd()  # else relative paths would not hold for the config
    facts = survey(frames, [file if is_here else os.path.abspath(file) for file in files])
    if not any(facts.labels.values()):
        candidates = reader.properties()
        if settings.data.labels.fields is not None or candidates:
            properties, remarks = properties_of(spec, settings.data, candidates)
            facts = replace(facts, properties=properties, remarks=remarks)
    if not any(facts.labels.values()) and not facts.properties:
        hint = "; ".join(reader.hints().values()) or "name the labels, as in data.labels.energy=my_energy"
        raise ForgefieldError(
            f"{', '.join(files)}: no frame has energy, forces or stress under their usual names, so there is nothing to train "
            f"on; {hint}."
        )
    missing = [f"no frame has {label}; {hint}" for label, hint in reader.hints().items() if not facts.labels[label]]
    facts = replace(facts, remarks=[*facts.remarks, *missing, *label_warnings(FrameTable.from_frames(frames))])
    if accurate and facts.properties:
        raise ForgefieldError(
            f"--accurate has settings for energies, forces and stress, and {', '.join(files)} has none of them; leave it out."
        )
    chosen = as_dict(settings)
    given = {key: select(chosen, key) for key in override_keys(overrides)}
    values, notes = starter_config(facts, name=name, accurate=accurate, given=given)
    if facts.properties:
        add_properties(facts.properties, values, notes)
    for key, value in given.items():
        update(values, key, _relative(value) if is_here and key.startswith("data.") else value)
        notes.pop(key, None)
    header = f"Written by `forgefield init`. Change what you like, then:  forgefield train {out}"
    return yaml_with_comments(values, header=header, notes=notes), facts


def survey(frames: Sequence[Frame], files: list[str]) -> DataFacts:
    """The facts about frames on which a first config is based. files: their paths, as the config names them."""
    sizes = [len(frame.numbers) for frame in frames]
    counts = Counter(int(number) for frame in frames for number in frame.numbers)
    forces = [frame.forces for frame in frames if frame.forces is not None]
    squares = np.concatenate(forces) ** 2 if forces else None
    with_pairs = [frame for frame, size in zip(frames, sizes) if size > 1] or list(frames)
    sample = with_pairs[:: max(1, len(with_pairs) // SURVEYED)]
    return DataFacts(
        files=files,
        n_frames=len(frames),
        smallest=min(sizes),
        largest=max(sizes),
        mean_atoms=sum(sizes) / len(sizes),
        species={chemical_symbols[number]: counts[number] for number in sorted(counts)},
        labels={
            "energy": sum(frame.energy is not None for frame in frames),
            "forces": len(forces),
            "stress": sum(frame.stress is not None for frame in frames),
        },
        forces_rms=None if squares is None else float(np.sqrt(squares.mean())),
        mean_neighbours={cutoff: _mean_neighbours(sample, cutoff) for cutoff in CUTOFFS},
    )


def _mean_neighbours(frames: Sequence[Frame], cutoff: float) -> float:
    edges = sum(len(neighbour_list(frame.positions, frame.cell, frame.pbc, cutoff)[0]) for frame in frames)
    return edges / sum(len(frame.numbers) for frame in frames)


def _relative(value: Any) -> Any:
    """Paths below the working directory, relative to it; anything else as it is."""
    if isinstance(value, str):
        return value.removeprefix(f"{Path.cwd()}{os.sep}")
    if isinstance(value, list):
        return [_relative(item) for item in value]
    return {key: _relative(item) for key, item in value.items()} if isinstance(value, dict) else value


def starter_config(
    facts: DataFacts, *, name: str, accurate: bool = False, given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The proposed settings, and the comments on some of them by dotted key.

    given: settings of the user by dotted key, which decide how many frames train and how long an epoch is.
    """
    given = given or {}
    cutoff = propose_cutoff(facts.mean_neighbours)
    val, test = propose_split(facts.n_frames)
    split = (given.get("data.val", val), given.get("data.test", test))
    n_train = max(1, facts.n_frames - sum(_frames(share, facts.n_frames) for share in split))
    if accurate:
        sections = accurate_config(facts.labels, n_train, facts.mean_atoms)
    else:
        sections = _quick_config(facts, n_train, given.get("data.batch.frames"))
    frames = given.get("data.batch.frames") or sections["batch"]["frames"]
    epochs = given.get("trainer.max_epochs") or sections["trainer"]["max_epochs"]
    steps = math.ceil(n_train / frames)
    values = {
        "name": name,
        "seed": 0,
        "data": {
            "train": facts.files[0] if len(facts.files) == 1 else facts.files,
            "val": val,
            "test": test,
            "cutoff": cutoff,
            "batch": sections["batch"],
            "species": list(facts.species),
            "units": {"energy": "eV", "length": "A"},
            "reference_energies": "auto",
        },
        **{name: sections[name] for name in ("model", "task", "training", "trainer")},
    }
    neighbours = facts.mean_neighbours[cutoff]
    notes = {
        "data.train": describe(facts),
        "data.cutoff": f"{_summary(DataOptions, 'cutoff')}, A: {neighbours:.0f} neighbours per atom on average.",
        "data.batch.frames": f"{_summary(BatchOptions, 'frames')}: about {frames * facts.mean_atoms:.0f} atoms.",
        "data.species": f"{_summary(DataOptions, 'species')}: those in the data.",
        "data.units": unit_note(facts),
        "trainer.max_epochs": f"{steps} batches make an epoch; {epochs * steps} optimiser steps in all.",
        "trainer": f"{_summary(Config, 'trainer')}: devices, max_time, check_val_every_n_epoch, ...",
    }
    if accurate:
        notes["training"] = "Settings for small errors; the training takes long, and a GPU is recommended."
    return values, notes


def _quick_config(facts: DataFacts, n_train: int, frames: int | None = None) -> dict[str, Any]:
    """Sections of a first run, as those of `accurate_config`. frames: of a batch; default: about 128 atoms."""
    frames = frames or default_frames(facts.mean_atoms, n_train)
    epochs = min(max(math.ceil(STEPS / math.ceil(n_train / frames)), 10), 1000)
    return {
        "batch": {"frames": frames},
        "model": dict(MODEL),
        "task": {name: {"weight": weight} for name, weight in default_weights(facts.labels).items()},
        "training": {"lr": 0.01, "ema": 0.99, "precision": "float32", "scheduler": None},
        "trainer": {"max_epochs": epochs},
    }


def _summary(section: type, option: str) -> str:
    return first_sentence(field_docs(section)[option])


def describe(facts: DataFacts) -> str:
    """One line: 123 frames of 8-64 atoms; Cu 300, Au 200; labels: energy in all, stress in 20."""
    size = f"{facts.smallest}" if facts.smallest == facts.largest else f"{facts.smallest}-{facts.largest}"
    species = ", ".join(f"{symbol} {count}" for symbol, count in facts.species.items())
    counts = facts.labels | {name: shown.n_frames for name, shown in facts.properties.items()}
    labels = ", ".join(
        f"{label} in {'all' if count == facts.n_frames else count}" for label, count in counts.items() if count
    )
    frames = "1 frame" if facts.n_frames == 1 else f"{facts.n_frames} frames"
    atoms = "atom" if size == "1" else "atoms"
    return f"{frames} of {size} {atoms}; {species}; labels: {labels or 'none'}."


def propose_cutoff(mean_neighbours: Mapping[float, float]) -> float:
    """The largest cutoff with at most 60 neighbours per atom, else the smallest."""
    fitting = [cutoff for cutoff, count in mean_neighbours.items() if count <= MANY_NEIGHBOURS]
    return max(fitting) if fitting else min(mean_neighbours)


def propose_split(n_frames: int) -> tuple[float | int | None, float | None]:
    """Settings `val` and `test` for this number of frames."""
    if n_frames < 2:
        return None, None
    if n_frames < 20:
        return 1, None
    return 0.1, 0.1 if n_frames >= 100 else None


def _frames(share: object, n: int) -> int:
    """Frames that a setting `val` or `test` takes from the training data; files take none."""
    if not share or not isinstance(share, (int, float)):
        return 0
    return max(1, round(share * n)) if share < 1 else int(share)


def unit_note(facts: DataFacts) -> str:
    """The root mean square of the forces as read, with a question if it is too large to be plausible."""
    general = "Units in the file."
    if facts.forces_rms is None:
        return general
    note = f"{general} Forces read this way have a root mean square of {facts.forces_rms:.3g} eV/A"
    if facts.forces_rms > LARGE_FORCES:
        return f"{note}, which is unusually large: is the file in kcal/mol?"
    return f"{note}."
