"""The config that `forgefield init` proposes for a data set, from a few facts about it.

Rules of thumb for a first run, each said in a comment where it was used; nothing here is needed to train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forgefield.config.option import field_docs, first_sentence
from forgefield.config.template import yaml_with_comments
from forgefield.data.options import BatchOptions, DataOptions
from forgefield.settings import Config

MODEL = {"name": "nequip", "preset": "S"}
"""The model of a first run."""
STEPS = 5000
"""Optimiser steps of a first run."""
ATOMS_PER_BATCH = 128
MANY_NEIGHBOURS = 60
"""Mean neighbours per atom above which a smaller cutoff is proposed."""
CUTOFFS = (5.0, 4.5, 4.0)
LARGE_FORCES = 8.0
"""Root mean square force, eV/A, above which another unit is likely."""


@dataclass(frozen=True)
class DataFacts:
    files: list[str]
    n_frames: int
    smallest: int
    largest: int
    mean_atoms: float
    species: dict[str, int]
    """Symbol -> number of atoms, by atomic number."""
    labels: dict[str, int]
    """energy, forces, stress -> number of frames that carry it."""
    forces_rms: float | None
    """eV/A."""
    mean_neighbours: dict[float, float]
    """Cutoff, A -> mean neighbours per atom."""
    doubts: list[str] = field(default_factory=list)
    """What is suspicious about the data, and what may be labels that were not found; each a sentence."""


def starter_config(facts: DataFacts, *, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The proposed settings, and the comments on some of them by dotted key."""
    cutoff = propose_cutoff(facts.mean_neighbours)
    val, test = propose_split(facts.n_frames)
    n_train = facts.n_frames - sum(_frames(share, facts.n_frames) for share in (val, test))
    frames = max(1, min(round(ATOMS_PER_BATCH / facts.mean_atoms), 32, math.ceil(n_train / 4)))
    steps = math.ceil(n_train / frames)
    epochs = min(max(math.ceil(STEPS / steps), 10), 1000)
    values = {
        "name": name,
        "seed": 0,
        "data": {
            "train": facts.files[0] if len(facts.files) == 1 else facts.files,
            "val": val,
            "test": test,
            "cutoff": cutoff,
            "batch": {"frames": frames},
            "species": list(facts.species),
            "units": {"energy": "eV", "length": "A"},
            "reference_energies": "auto",
        },
        "model": dict(MODEL),
        "task": propose_task(facts.labels),
        "training": {"lr": 0.01, "ema": 0.99, "precision": "float32", "scheduler": None},
        "trainer": {"max_epochs": epochs},
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
    return values, notes


def _summary(section: type, option: str) -> str:
    return first_sentence(field_docs(section)[option])


def starter_yaml(values: Mapping[str, Any], notes: Mapping[str, str], *, file: str) -> str:
    """The proposed settings as the text of `file`."""
    header = f"Written by `forgefield init`. Change what you like, then:  forgefield train {file}"
    return yaml_with_comments(values, header=header, notes=notes)


def describe(facts: DataFacts) -> str:
    """One line: 123 frames of 8-64 atoms; Cu 300, Au 200; labels: energy in all, stress in 20."""
    size = f"{facts.smallest}" if facts.smallest == facts.largest else f"{facts.smallest}-{facts.largest}"
    species = ", ".join(f"{symbol} {count}" for symbol, count in facts.species.items())
    labels = ", ".join(
        f"{label} in {'all' if count == facts.n_frames else count}" for label, count in facts.labels.items() if count
    )
    frames = "1 frame" if facts.n_frames == 1 else f"{facts.n_frames} frames"
    atoms = "atom" if size == "1" else "atoms"
    return f"{frames} of {size} {atoms}; {species}; labels: {labels or 'none'}."


def propose_cutoff(mean_neighbours: Mapping[float, float]) -> float:
    """The largest cutoff with at most 60 neighbours per atom, else the smallest."""
    fitting = [cutoff for cutoff, count in mean_neighbours.items() if count <= MANY_NEIGHBOURS]
    return max(fitting) if fitting else min(mean_neighbours)


def propose_split(n_frames: int) -> tuple[float | int | None, float | None]:
    """Settings `val` and `test` for so many frames."""
    if n_frames < 2:
        return None, None
    if n_frames < 20:
        return 1, None
    return 0.1, 0.1 if n_frames >= 100 else None


def propose_task(labels: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """A weight for each label that is there. Stress in eV/A^3 is a small number, so its weight is large."""
    weights = {"energy": 1.0, "forces": 10.0, "stress": 100.0}
    return {label: {"weight": weights[label]} for label, count in labels.items() if count}


def _frames(share: float | int | None, n: int) -> int:
    if not share:
        return 0
    return max(1, round(share * n)) if share < 1 else int(share)


def unit_note(facts: DataFacts) -> str:
    """How large the forces are as read, and a question where that is too large to be right."""
    general = "Units in the file."
    if facts.forces_rms is None:
        return general
    note = f"{general} Forces read this way have a root mean square of {facts.forces_rms:.3g} eV/A"
    if facts.forces_rms > LARGE_FORCES:
        return f"{note}, which is much: is the file in kcal/mol?"
    return f"{note}."
