"""Timing real training steps: a training through `fit` with a timer, on the data of the config or on liquid water.

A measurement runs in a temporary folder. Model, data, optimiser and batch are those of the config; there is no validation, and
no logs or checkpoints are written. The timed steps follow some to warm up; epochs repeat as often as needed, and the smaller
last batch of an epoch is not timed. What happens between two epochs is not part of a step.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.calculators.tip3p import TIP3P
from rich.console import Console

from forgefield.bench.options import process_slots
from forgefield.bench.timer import Measurement, StepTimer
from forgefield.config.loading import load_config
from forgefield.data.options import DataOptions
from forgefield.data.paths import is_named
from forgefield.data.sampling.batching import training_budget
from forgefield.parallel.ranks import Ranks
from forgefield.settings import Config
from forgefield.training.fit import fit
from forgefield.training.options import CheckpointOptions
from forgefield.training.precision import Precision
from forgefield.training.run.journal import Journal

TRAINER_KEYS = (
    "accelerator",
    "strategy",
    "devices",
    "num_nodes",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "use_distributed_sampler",
    "sync_batchnorm",
    "detect_anomaly",
    "plugins",
)
"""Settings of the trainer that change how a step is computed; the others are not part of a measurement."""
NOT_MEASURED = ("logger", "callbacks", "profiler", "overfit_batches")
"""Settings that cost time in a training and are not part of a measurement."""


def measure(
    config: Config, ranks: Ranks, *, steps: int, warmup: int, folder: Path, trust_code: bool = False
) -> tuple[Measurement | None, int]:
    """Train some steps in `folder` and time them. Every rank calls this; rank 0 gets the result. trust_code: as in `fit`.

    Returns the measurement and an exit code; if the training received a request to stop, None and a code other than 0.
    """
    file = folder / "measured.json"
    journal = Journal(Console(quiet=True), ranks=ranks)
    try:
        fitted = fit(
            measured_config(config, steps=steps, warmup=warmup, folder=folder),
            fresh=False,
            journal=journal,
            ranks=ranks,
            trust_code=trust_code,
        )
    finally:
        journal.close()
    if fitted.outcome != "finished" or not ranks.is_rank_zero:
        return None, fitted.exit_code
    return Measurement.from_dict(json.loads(file.read_text())), 0


def measured_config(config: Config, *, steps: int, warmup: int, folder: Path) -> Config:
    """The same training, except for what is not part of a step. It ends when enough has been measured."""
    changed = copy.deepcopy(config)
    changed.name, changed.out = "bench", str(folder / "runs")
    if isinstance(changed.data.val, (str, list)) or is_named(
        changed.data.val
    ):  # separate files, not frames taken from the training data
        changed.data.val = 0
    if isinstance(changed.data.test, (str, list)) or is_named(changed.data.test):
        changed.data.test = 0
    training = changed.training
    training.tensorboard, training.early_stopping, training.monitor = 0, None, "train/loss"
    training.precision = Precision(training.precision).start  # a schedule counts from an end that is not reached
    # On a GPU the steps are run twice, and every epoch may have one step that is not full.
    enough = 2 * (warmup + 2 * steps)
    training.checkpoint = CheckpointOptions(every_epochs=enough)  # none before the end
    changed.trainer = {
        **{key: value for key, value in changed.trainer.items() if key in TRAINER_KEYS},
        "max_steps": enough,
        "max_epochs": enough,  # an epoch has at least one step
        "limit_val_batches": 0,
        "enable_progress_bar": False,
    }
    timer = f"{StepTimer.__module__}.{StepTimer.__qualname__}"
    changed.callbacks = [
        {"name": timer, "file": str(folder / "measured.json"), "steps": steps, "warmup": warmup},
    ]
    return changed


def not_measured(config: Config) -> list[str]:
    """Settings of a config that cost time in a training and are not part of a measurement."""
    names = [f"trainer.{key}" for key in NOT_MEASURED if config.trainer.get(key)]
    return [*names, "callbacks"] if config.callbacks else names


# ---- liquid water


MOLECULES_ALONG_EDGE = 4
BOX = 12.42
"""A; 64 molecules in it are 0.999 g/cm^3."""
CUTOFF = 5.0
"""A, as in NequIP's own benchmarks."""
DISPLACEMENT = 0.05
"""A, standard deviation of each coordinate."""
SEED = 7
FRAMES = 8
"""In a batch, unless overridden."""


def water(rng: np.random.Generator, along_edge: int = MOLECULES_ALONG_EDGE) -> Atoms:
    """along_edge^3 molecules, three atoms each, with TIP3P energy (eV) and forces (eV/A)."""
    spacing = BOX / MOLECULES_ALONG_EDGE
    box = Atoms(cell=[spacing * along_edge] * 3, pbc=True)
    for corner in np.ndindex(along_edge, along_edge, along_edge):
        one = molecule("H2O")
        one.rotate(float(rng.uniform(0, 360)), rng.normal(size=3))
        one.translate(spacing * np.array(corner))
        box += one
    box.positions += DISPLACEMENT * rng.normal(size=box.positions.shape)
    box.calc = TIP3P(rc=min(4.5, 0.45 * spacing * along_edge), width=0.5)
    labels = {"energy": box.get_potential_energy(), "forces": box.get_forces()}
    box.calc = SinglePointCalculator(box, **labels)
    return box


def write_water(path: Path, frames: int) -> None:
    """Write this many different frames, always the same ones."""
    rng = np.random.default_rng(SEED)
    ase.io.write(path, [water(rng) for _ in range(frames)], format="extxyz")


def water_config(path: Path) -> dict[str, Any]:
    """A config that trains on the frames of `path` with preset S; everything in it may be overridden."""
    return {
        "name": "water",
        "data": {"train": str(path), "val": 0, "cutoff": CUTOFF, "batch": {"frames": FRAMES}, "cache": False},
        "model": {"name": "nequip", "preset": "S"},
        "task": {"energy": {"weight": 1.0}, "forces": {"weight": 1.0}},
    }


def frames_for(options: DataOptions, ranks: int) -> int:
    """How many frames a training with this data section needs for full batches on this many ranks."""
    budget, atoms = training_budget(options), 3 * MOLECULES_ALONG_EDGE**3
    per_frame = {"frames": 1, "atoms": atoms, "edges": 55 * atoms}[budget.kind]
    return max(4, (1 + budget.size // per_frame) * ranks)


@contextmanager
def water_training(
    file: str | None, overrides: list[str], ranks: Ranks, *, most: int | None, trust_code: bool = False
) -> Iterator[Config]:
    """Inside, the config of a training on water, whose frames are in a temporary folder of the same name on every node.

    file: config whose model and training are used; default: preset S of NequIP. most: number of processes to write frames for;
    default: all that fit on this machine or were started by a launcher.
    """
    folder = Path(tempfile.gettempdir()) / ranks.broadcast(f"forgefield-water-{os.getpid()}-{os.urandom(4).hex()}")
    path = folder / "water.extxyz"
    water = load_config(water_config(path), overrides if file is None else [])
    config = water if file is None else load_config(file, overrides, trust_code=trust_code)
    if file is not None:  # the config without its data
        data = config.data
        config.data = replace(water.data, cutoff=data.cutoff, batch=data.batch, neighbours=data.neighbours)
        config.task = water.task
    if most is None:
        most = ranks.world_size if ranks.launch.launcher != "none" else process_slots(config)[0]
    writes = ranks.launch.local_rank == 0
    try:
        if writes:
            folder.mkdir(mode=0o700)
            write_water(path, frames_for(config.data, most))
        ranks.barrier()
        yield config
    finally:
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
