"""Settings of trainings whose samples are grid points: the section `data.points` and what `task` holds then.

As in `schema.py`, the docstring under each field is its documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forgefield.config.option import option

SCALINGS = ("none", "standard", "minmax", "feature-wise-standard", "feature-wise-minmax")
DEFAULT_POINTS = 1000
"""Points of a batch where nothing is said."""


@dataclass
class ScalingOptions:
    """What the network sees: none, standard, minmax, feature-wise-standard or feature-wise-minmax. It is part of the model; the
    data stays as it is."""

    inputs: str = option("feature-wise-standard", choices=SCALINGS)
    """Scaling of the descriptors."""
    outputs: str = option("minmax", choices=SCALINGS)
    """Scaling of the targets."""


@dataclass
class PointsOptions:
    """Samples are points of real-space grids: rows of (descriptors -> LDOS) in snapshots, such as MALA's files."""

    target: str = "ldos"
    """What the target files hold at each point: ldos or density."""
    units: str | None = None
    """Unit of the target files: 1/(eV*A^3), 1/(eV*Bohr^3), 1/(Ry*Bohr^3); of densities 1/A^3 or 1/Bohr^3. Default: what the
    files state, else the one in eV and A."""
    energies: dict[str, float] | list[dict[str, float]] | None = None
    """The levels of an LDOS, eV: {first: -5.0, spacing: 2.5, levels: 11}; a list of such windows where the spacing changes."""
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    """How inputs and outputs of the network are scaled, from the training data."""
    keep: str = option("auto", choices=("auto", "device", "memory", "disk"))
    """Where rows are kept: device, memory, disk (read in random blocks, for data that is larger than memory); auto: the first
    of these that has room."""
    descriptors: dict[str, Any] | None = None
    """How the inputs were made, for predictions from structures: {type: bispectrum, twojmax: 10, cutoff: 4.67637}."""
    pseudopotentials: str | None = None
    """Folder of the pseudopotential files (UPF), for total energies. Default: beside the snapshots."""


@dataclass
class PointTargetOptions:
    """The target at each point. Errors are those of the scaled target, as the network sees it."""

    weight: float = option(1.0, at_least=0, expected="zero or positive")
    """Weight of this term in the loss."""
    loss: str = option("mse", choices=("mse", "mae", "huber"))
    """mse, mae or huber."""
    huber_delta: float = option(0.1, above=0)
    """Where Huber turns from quadratic to linear, in units of the scaled target."""
    level_weights: list[float] | None = None
    """Weight of each level (column of the target). Default: 1 for all."""


@dataclass
class SnapshotTermOptions:
    """A term on what whole snapshots add up to. Every so many steps, the loss of a step holds it for one training snapshot, the
    next one each time; its gradient is exact."""

    weight: float = option(0.001, at_least=0, expected="zero or positive")
    """Weight of this term in the loss of those steps. Errors of a network that has learnt nothing yet are large: it is to be
    small."""
    every: int = option(10, above=0, expected="a positive whole number")
    """Once in so many optimiser steps."""


@dataclass
class ObservablesOptions:
    """What is computed from the predictions on whole snapshots and compared with the same of their targets."""

    metrics: list[str] = field(default_factory=lambda: ["band_energy", "density"])
    """Of band_energy, total_energy, fermi_energy, density, dos, electrons."""
    every: int = option(1, above=0, expected="a positive whole number")
    """At every so many validations; also before the first step and after the last."""
    snapshots: str | list[Any] | dict[str, Any] | None = None
    """Snapshot files to measure on. Default: those of data.val."""
    fermi: str = option("self_consistent", choices=("self_consistent", "given"))
    """Fermi energy of the predictions: self_consistent (that which gives the number of electrons) or given (that of the
    calculation, for predictions and targets)."""


@dataclass
class PointTaskOptions:
    """What is trained on points, and which observables are measured."""

    ldos: PointTargetOptions | None = None
    """The LDOS at each point."""
    density: PointTargetOptions | None = None
    """The electron density at each point (data.points.target=density)."""
    dos: SnapshotTermOptions | None = None
    """The density of states of a snapshot: mean squared error over levels, (states/eV per electron)^2."""
    electrons: SnapshotTermOptions | None = None
    """The number of electrons at the Fermi energy of the targets: squared error, relative to their number."""
    band_energy: SnapshotTermOptions | None = None
    """The band energy at the self-consistent Fermi energy: squared error, (eV/atom)^2."""
    observables: ObservablesOptions | None = None
    """Physical metrics on whole snapshots."""
