"""The file that `forgefield learn` reads: what to explore, which structures to select, how to label them, how to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from forgefield.config.checking import typed_section
from forgefield.config.option import IMPORT_PATH, option, seed_option
from forgefield.config.sources import Sources, read_text, read_yaml, wrong
from forgefield.config.typed import update
from forgefield.errors import ForgefieldError
from forgefield.files import find_path
from forgefield.trust.choosing import METHODS
from forgefield.trust.options import THERMOSTATS
from forgefield.trust.selection import BY

RANDOM = "random"
LIMIT_FACTOR = 5.0
"""Default of `explore.limit`, in units of `explore.threshold`."""


@dataclass
class ExploreOptions:
    """Molecular dynamics that looks for structures of which the model is uncertain."""

    structures: str | list[Any] | None = None
    """Starting structures: a file, folder or glob pattern, or a list of them."""
    starts: int = option(8, above=0)
    """Number of starting structures of each iteration, drawn at random. Each is simulated at every temperature and pressure."""
    temperatures: list[float] = option([300.0], above=0, unit="K")
    """Temperatures."""
    pressures: list[float] = option([], unit="GPa")
    """Pressures (npt); an empty list keeps the cells (nvt)."""
    ps: float = option(1.0, above=0, unit="ps")
    """Length of each simulation."""
    timestep: float | None = option(None, above=0, unit="fs")
    """Time step. Default: 0.5 fs for structures with hydrogen, else 1 fs."""
    thermostat: str = option("langevin", choices=THERMOSTATS)
    """Thermostat, if there are no pressures."""
    every: int = option(10, above=0, unit="steps")
    """Steps between structures whose uncertainty is computed."""
    engine: str = option("ase", choices=("ase", "torch-sim"))
    """ase simulates one structure after another; torch-sim many at the same time, which uses a GPU better (nvt with a Langevin
    thermostat)."""
    together: int = option(32, above=0)
    """Simulations in one batch of torch-sim."""
    measure: str = option("forces", choices=("forces", "energy"))
    """Uncertainty of a structure: the largest one of the force on an atom (eV/A), or of the energy of an atom (eV), which costs
    less."""
    threshold: float = option(0.1, above=0)
    """Structures with a larger uncertainty are candidates for labels; in eV/A or eV, as `measure`. The loop ends when there are
    none."""
    limit: float | None = option(None, above=0)
    """A simulation ends at a larger uncertainty; that structure is its last candidate. Default: five times the threshold."""


@dataclass
class SelectOptions:
    """Which candidates are labelled."""

    frames: int = option(20, above=0)
    """Number of structures to label in each iteration, at most."""
    by: str = option("both", choices=(*BY, RANDOM))
    """uncertainty, distance (in feature space, from each other and from the training data), both, or random."""
    method: str = option("farthest", choices=tuple(METHODS))
    """How feature space is covered."""
    tolerance: float | None = option(None, at_least=0, unit="eV")
    """Structures closer than this to a training frame or to each other are left out. Default: a tenth of the typical distance
    of training frames."""


@dataclass
class LabelOptions:
    """How structures are labelled: a calculator or a command."""

    calculator: str | None = option(None, open_choices=IMPORT_PATH)
    """Import path of an ASE calculator, ase.calculators.emt.EMT, or of a function annotated to return one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the calculator."""
    command: str | None = None
    """Shell command that reads structures from {input} and writes them with energies and forces to {output}, both extxyz."""
    max_force: float | None = option(None, above=0, unit="eV/A")
    """Structures with a larger force are set aside: a model that is still bad may drive atoms into each other, and such labels
    spoil a training. Default: no limit."""
    frames_per_job: int = option(1, above=0)
    """Structures that one command labels."""
    sbatch: list[str] | None = None
    """Options of sbatch, such as [--time=01:00:00, --ntasks=16]: the commands are run as SLURM jobs."""
    poll: float = option(5.0, above=0, unit="s")
    """Time between two looks at the SLURM queue."""


@dataclass
class LoopOptions:
    """A learning loop."""

    name: str | None = None
    """Name of the loop. Default: that of the file."""
    out: str = "learning"
    """Folder of loops; the results are in OUT/NAME."""
    config: str | None = None
    """Config of the trainings. Its data.train, if any, are the first labelled structures; otherwise the starting structures are
    labelled first."""
    iterations: int = option(10, above=0)
    """Largest number of iterations."""
    start: str = option("weights", choices=("weights", "scratch"))
    """Each training starts from the weights of the iteration before (weights), or from random ones (scratch)."""
    seed: int = seed_option(0)
    """Seed of starting structures, velocities and random selection."""
    explore: ExploreOptions = field(default_factory=ExploreOptions)
    """Molecular dynamics."""
    select: SelectOptions = field(default_factory=SelectOptions)
    """Selection."""
    label: LabelOptions = field(default_factory=LabelOptions)
    """Labels."""

    @property
    def folder(self) -> Path:
        return Path(self.out) / str(self.name)

    @property
    def limit(self) -> float:
        return self.explore.limit or LIMIT_FACTOR * self.explore.threshold


def load_loop(path: Path, overrides: Sequence[str] = ()) -> LoopOptions:
    """The checked options of a file, with `key=value` overrides. Files that it names are absolute afterwards."""
    values, sources = read_yaml(path), Sources(main=path)
    sources.add_text(read_text(path), path)
    for text in overrides:
        key, _, value = text.partition("=")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ForgefieldError(f"command line ('{text}'): '{value}' cannot be read as YAML.") from error
        update(values, key, parsed)
        sources.add_override(key, parsed, text)
    options = typed_section(LoopOptions, values, sources)
    _check(options, sources)
    options.name = options.name or path.stem
    folders = [Path.cwd(), path.parent]
    options.config = find_path(str(options.config), folders)
    named = options.explore.structures
    options.explore.structures = [
        find_path(str(item), folders) for item in (named if isinstance(named, list) else [named])
    ]
    return options


def _check(options: LoopOptions, sources: Sources) -> None:
    """Refuse settings that are missing or contradict each other."""
    if options.config is None:
        raise wrong(sources, "config", None, "the config of the trainings, a file such as train.yaml")
    if not options.explore.structures:
        raise wrong(sources, "explore.structures", options.explore.structures, "a file with starting structures")
    if not options.explore.temperatures:
        raise wrong(sources, "explore.temperatures", [], "a list such as [300, 600]")
    if options.explore.limit is not None and options.explore.limit < options.explore.threshold:
        raise wrong(sources, "explore.limit", options.explore.limit, "larger than explore.threshold")
    if options.explore.engine == "torch-sim":
        if options.explore.pressures:
            raise ForgefieldError(
                f"{sources.where('explore.pressures')}: with explore.engine: torch-sim the cells are kept; leave "
                "'explore.pressures' out, or use explore.engine: ase."
            )
        if options.explore.thermostat != "langevin":
            raise wrong(
                sources, "explore.thermostat", options.explore.thermostat, "langevin with explore.engine: torch-sim"
            )
    elif options.explore.together != ExploreOptions().together:
        raise ForgefieldError(
            f"{sources.where('explore.together')}: 'explore.together' applies to explore.engine: torch-sim."
        )
    label = options.label
    if (label.calculator is None) == (label.command is None):
        raise ForgefieldError(f"{sources.where('label')}: 'label' needs either a calculator or a command.")
    if label.command is not None:
        if "{input}" not in label.command or "{output}" not in label.command:
            raise wrong(sources, "label.command", label.command, "a command with {input} and {output}")
        if label.options:
            raise ForgefieldError(f"{sources.where('label.options')}: 'label.options' are those of a calculator.")
    elif label.sbatch is not None or label.frames_per_job != 1:
        key = "sbatch" if label.sbatch is not None else "frames_per_job"
        raise ForgefieldError(
            f"{sources.where(f'label.{key}')}: 'label.{key}' applies to label.command, not to a calculator."
        )
