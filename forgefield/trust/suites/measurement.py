"""What an evaluation returns: numbers with units and curves for figures, which are stored as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from forgefield.config.option import option, seed_option


class NotApplicable(Exception):
    """The reason why an evaluation does not apply to a structure."""


@dataclass
class EvaluationOptions:
    """Options of the evaluations."""

    temperature: float = option(300.0, above=0, unit="K")
    """Temperature of molecular dynamics."""
    pressure: float = option(0.0, unit="GPa")
    """Pressure at which the density is computed."""
    ps: float = option(5.0, above=0, unit="ps")
    """Length of each simulation."""
    timestep: float | None = option(None, above=0, unit="fs")
    """Time step. Default: 0.5 fs for structures with hydrogen, else 1 fs."""
    supercell: float = option(9.0, above=0, unit="A")
    """Smallest distance between periodic images of a defect, a displaced atom or a simulated cell."""
    strain: float = option(0.005, above=0, below=0.1)
    """Strain for elastic constants."""
    displacement: float = option(0.01, above=0, unit="A")
    """Displacement for phonons and vibrations."""
    rattle: float = option(0.1, above=0, unit="A")
    """Standard deviation of the displacements that relaxations start from."""
    seed: int = seed_option(0)
    """Seed of displacements and velocities."""


@dataclass
class Curve:
    """One line of a figure. marker: whether points are shown instead of a line."""

    x: list[float]
    y: list[float]
    label: str = ""
    marker: bool = False


@dataclass
class Panel:
    """One figure. ticks: positions and names on the horizontal axis, instead of numbers."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    ticks: list[tuple[float, str]] = field(default_factory=list)


@dataclass
class Measurement:
    """Numbers, by name, with their units; figures; and sentences about what happened."""

    values: dict[str, tuple[float | None, str]] = field(default_factory=dict)
    panels: list[Panel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self, name: str, value: float | None, unit: str) -> None:
        """Add a number; one that is not finite is stored as missing."""
        self.values[name] = (None if value is None or not math.isfinite(value) else float(value), unit)


@dataclass
class Setting:
    """What an evaluation works with."""

    structure: Atoms
    """The structure, without a calculator."""
    calculator: Any
    options: EvaluationOptions
    folder: Path
    """Where trajectories are written; their names start with `stem`."""
    stem: str
    species: tuple[str, ...]
    """Elements of the model."""
    cutoff: float
    """Cutoff of the model, A."""
    identity: str
    """What identifies the calculator."""
    notify: Callable[[str], None]
    labelled: Sequence[Atoms] = ()
    """Labelled frames of the reference, with their labels as results of a calculator."""

    def atoms(self) -> Atoms:
        """A copy of the structure with the calculator."""
        atoms = self.structure.copy()
        atoms.calc = self.calculator
        return atoms


@dataclass(frozen=True)
class Evaluation:
    """One kind of evaluation. per_structure: whether it is done for every structure, or once for the model."""

    name: str
    title: str
    measure: Callable[[Setting], Measurement]
    per_structure: bool = True


def curve(
    x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, label: str = "", *, marker: bool = False
) -> Curve:
    """A curve of any sequences of numbers."""
    return Curve([float(value) for value in x], [float(value) for value in y], label, marker)


def repeats(atoms: Atoms, length: float) -> tuple[int, int, int]:
    """How often to repeat a cell so that periodic images are at least `length` apart, A."""
    heights = 1 / np.linalg.norm(np.linalg.pinv(np.array(atoms.cell)), axis=0)
    n = [max(1, math.ceil(length / height - 1e-9)) if periodic else 1 for height, periodic in zip(heights, atoms.pbc)]
    return n[0], n[1], n[2]
