"""Options of trainings on grid points, the section `data.points` and the targets of `task`, and their checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forgefield.config.option import option
from forgefield.config.sources import Sources, wrong
from forgefield.config.typed import select
from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptor_options import DescriptorOptions

if TYPE_CHECKING:
    from forgefield.settings import Config

SCALINGS = ("none", "standard", "minmax", "feature-wise-standard", "feature-wise-minmax")
TARGETS = ("ldos", "density")
_NO_DOS = " (the DOS belongs to a snapshot, not to its points: train on the LDOS, and add task.dos to the loss)"
OBSERVABLES = (
    "band_energy",
    "band_energy_actual_fe",
    "total_energy",
    "total_energy_actual_fe",
    "fermi_energy",
    "density",
    "dos",
    "electrons",
)
MODEL = "ldos"

FRAMES_ONLY = (
    "data.indices",
    "data.overlap",
    "data.cutoff",
    "data.adaptive_cutoff",
    "data.max_neighbours",
    "data.sampling",
    "data.devset",
    "data.bootstrap",
    "data.species",
    "data.labels",
    "data.units",
    "data.neighbours",
    "data.lazy",
    "data.reference_energies",
    "data.max_force",
    "data.max_energy_deviation",
    "data.batch.frames",
    "data.batch.atoms",
    "data.batch.edges",
    "data.batch.oversized",
    "data.batch.bound",
    "data.batch.by_source",
    "training.derivative",
    "training.kernels",
    "training.memory",
    "training.graphs.sizes",
    "training.accumulate",
    "training.swa",
    "training.weighting",
    "training.freeze",
    "training.lr_groups",
    "training.lora",
    "training.ensemble",
)
"""Settings that do not apply to grid points."""
POINTS_ONLY = ("data.fast", "data.batch.points", "training.block")
"""Settings that do not apply to frames."""
_INSTEAD = {
    "data.cutoff": "the radius of descriptors is data.points.descriptors.cutoff",
    "data.lazy": "data.points.keep=disk leaves the data on disk",
    "data.keep": "data.points.keep sets where the points are kept",
    "data.units": "the unit of targets is data.points.units",
    "data.batch.frames": "a batch is counted in points: data.batch.points",
    "data.batch.atoms": "a batch is counted in points: data.batch.points",
    "data.batch.edges": "a batch is counted in points: data.batch.points",
    "training.accumulate": "a step of several batches is one of a larger data.batch.points",
    "training.memory": "a step that does not fit needs a smaller data.batch.points",
}
_UNSUPPORTED = ("trainer.accumulate_grad_batches", "trainer.overfit_batches")
"""Settings of Lightning that have no meaning for blocks of steps."""


@dataclass(frozen=True)
class ElectronOptions:
    """Options for predictions of an LDOS run."""

    temperature: float | None = option(None, at_least=0, unit="K")
    """Temperature of the electrons."""
    grid: Sequence[int] | None = None
    """Number of points along each cell vector. Default: spacing of the training snapshots."""
    spacing: float | None = option(None, above=0, unit="A")
    """Distance between grid points, instead of a grid."""
    pseudopotentials: str | os.PathLike[str] | None = None
    """Folder of UPF files, for the free energy. Default: the folder of the run."""
    electrons: float | None = option(None, above=0)
    """Number of electrons in the cell. Default: from the pseudopotentials."""
    ldos: bool = False
    """Also write the LDOS."""

    def changed(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        return [name for name, value in vars(self).items() if value not in (None, False)]


@dataclass
class ScalingOptions:
    """Scaling of inputs and outputs of the network, computed from the training data and stored in the model."""

    inputs: str = option("feature-wise-standard", choices=SCALINGS)
    """Scaling of the descriptors."""
    outputs: str | None = option(None, choices=SCALINGS)
    """Scaling of the targets. Default: feature-wise-standard, so that all levels count alike; minmax for a network with
    model.output_activation, whose outputs may not be negative."""


@dataclass
class PointsOptions:
    """Samples are points of real-space grids, from snapshots such as MALA's files: rows of descriptors and targets."""

    target: str = option("ldos", choices=TARGETS, expected=f"ldos or density{_NO_DOS}")
    """Quantity in the target files: the local density of states or the electron density."""
    units: str | None = None
    """Unit of the target files: 1/(eV*A^3), 1/(eV*Bohr^3), 1/(Ry*Bohr^3); for densities 1/A^3 or 1/Bohr^3. Default: the unit
    stated in the files, else eV and A."""
    energies: dict[str, float] | list[dict[str, float]] | None = None
    """Energy levels of the LDOS, eV: {first: -5.0, spacing: 2.5, levels: 11}, or a list of such windows with different
    spacings."""
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    """Scaling of inputs and outputs of the network."""
    keep: str = option("auto", choices=("auto", "device", "memory", "disk"))
    """Where the rows are stored during the training. disk reads random blocks, for data larger than memory; auto uses the first
    of device, memory and disk with enough space."""
    descriptors: dict[str, Any] | None = option(None, details=DescriptorOptions)
    """How descriptors are computed, {type: bispectrum, twojmax: 10, cutoff: 4.67637}: for predictions from structures, and for
    snapshots without a file of descriptors, which are named by their .info.json."""
    pseudopotentials: str | None = None
    """Folder of the pseudopotential files (UPF), for total energies. Default: the folder of the snapshots."""


@dataclass
class PointTargetOptions:
    """A target at each grid point. Errors are those of the scaled target."""

    weight: float = option(1.0, at_least=0, expected="at least 0")
    """Weight of this target in the loss."""
    loss: str = option("mse", choices=("mse", "mae", "huber"))
    """Loss function."""
    huber_delta: float = option(0.1, above=0)
    """Error at which the Huber loss changes from quadratic to linear, in units of the scaled target."""
    level_weights: list[float] | None = None
    """Weight of each energy level (column of the target). Default: 1."""


@dataclass
class SnapshotTermOptions:
    """A loss term for a quantity of a complete snapshot, with its exact gradient. It is added every N steps, for one training
    snapshot after another."""

    weight: float = option(0.001, at_least=0, expected="at least 0")
    """Weight of this term in the loss. It should be small, because the errors of an untrained network are large."""
    every: int = option(10, above=0, expected="a positive whole number")
    """Number of optimiser steps between two steps with this term."""


@dataclass
class ObservablesOptions:
    """Physical quantities of complete snapshots, computed from predictions and from targets and compared."""

    metrics: list[str] = option(["band_energy", "density"], choices=OBSERVABLES)
    """Quantities to evaluate."""
    every: int = option(1, above=0, expected="a positive whole number")
    """Evaluate at every N-th validation; also before the first and after the last step."""
    snapshots: str | list[Any] | dict[str, Any] | None = None
    """Snapshot files to evaluate. Default: those of data.val."""
    training: bool = False
    """Evaluate the training snapshots as well; their metrics are called train/band_energy_mae and so on."""
    fermi: str = option("self_consistent", choices=("self_consistent", "given"))
    """Fermi energy of the predictions: determined from the number of electrons (self_consistent), or that of the DFT
    calculation for predictions and targets (given)."""


@dataclass
class PointTaskOptions:
    """Targets of a training on grid points, and the observables that are evaluated."""

    ldos: PointTargetOptions | None = None
    """LDOS at each point."""
    density: PointTargetOptions | None = None
    """Electron density at each point (data.points.target=density)."""
    dos: SnapshotTermOptions | None = None
    """Density of states of a snapshot: mean squared error over the levels, (states/eV per electron)^2."""
    electrons: SnapshotTermOptions | None = None
    """Number of electrons at the Fermi energy of the targets: squared relative error."""
    band_energy: SnapshotTermOptions | None = None
    """Band energy at the self-consistent Fermi energy: squared error, (eV/atom)^2."""
    observables: ObservablesOptions | None = None
    """Observables of complete snapshots to evaluate."""


def check_frames_only(config: Config, sources: Sources) -> None:
    """Refuse settings of points in a config of frames."""
    for key in POINTS_ONLY:
        if select(config, key) is not None:
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}' applies to grid points only, and there is no section 'data.points'."
            )
    model = config.model
    if isinstance(model, Mapping) and model.get("name") == MODEL:
        raise ForgefieldError(
            f"{sources.where('model.name')}: the model {MODEL} learns from grid points; add a section 'data.points', "
            "for example data.points={energies: {first: -5.0, spacing: 2.5, levels: 11}}."
        )


def require_frames(config: Config, verb: str, instead: str) -> None:
    """Refuse a config of points for a verb that applies to frames. instead: the alternative for points."""
    if config.data.points is not None:
        raise ForgefieldError(
            f"{verb} applies to models of frames, but this config is for grid points (data.points); {instead}."
        )


def check_points(config: Config, sources: Sources) -> None:
    """Refuse settings of frames in a config of points, and invalid settings of points."""
    for key in FRAMES_ONLY:
        if sources.explicit(key) or not _is_default(config, key):
            instead = f"; {_INSTEAD[key]}" if key in _INSTEAD else ""
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}' does not apply to grid points (data.points){instead}."
            )
    for key in _UNSUPPORTED:
        if select(config, key) not in (None, 0, 1, 0.0):
            raise ForgefieldError(f"{sources.where(key)}: '{key}' does not apply to grid points (data.points).")
    model = config.model
    if isinstance(model, Mapping) and "from" not in model and model.get("name") != MODEL:
        raise ForgefieldError(
            f"{sources.where('model.name')}: 'model.name' is {model.get('name')}, which learns from frames; for grid points "
            f"(data.points) it is {MODEL}."
        )
    if config.training.engine == "script":
        raise ForgefieldError(
            f"{sources.where('training.engine')}: 'training.engine' is eager, compile, graphs or auto for grid points."
        )
    _check_section(config.points, sources)
    if config.task is not None and config.task.points is not None:
        _check_task(config.task.points, config.points, sources)


def _check_section(points: PointsOptions, sources: Sources) -> None:
    key = "data.points"
    if points.target == "density" and points.energies is not None:
        raise ForgefieldError(
            f"{sources.where(f'{key}.energies')}: '{key}.energies' are the levels of an LDOS, and the target is a density."
        )
    if points.energies is not None:
        _check_energies(points.energies, f"{key}.energies", sources)
    elif points.target == "ldos":
        raise ForgefieldError(
            f"{sources.where(key)}: '{key}.energies' is missing: the energies of the levels of the LDOS. For "
            "example {first: -5.0, spacing: 2.5, levels: 11}, eV."
        )
    if points.descriptors is not None:
        _check_descriptors(points.descriptors, f"{key}.descriptors", sources)


def _check_descriptors(descriptors: object, key: str, sources: Sources) -> None:
    if not isinstance(descriptors, Mapping):
        raise wrong(sources, key, descriptors, "a section such as {type: bispectrum, twojmax: 10}")
    try:
        DescriptorOptions.from_mapping(descriptors, key)
    except ForgefieldError as error:
        raise ForgefieldError(f"{sources.where(key)}: {error}") from None


def _check_energies(energies: object, key: str, sources: Sources) -> None:
    for window in energies if isinstance(energies, list) and energies else [energies]:
        if not isinstance(window, Mapping) or set(window) != {"first", "spacing", "levels"}:
            raise wrong(sources, key, energies, "{first: ..., spacing: ..., levels: ...}, or a list of such windows")
        for name, value in window.items():
            has_type = isinstance(value, int) if name == "levels" else isinstance(value, (int, float))
            if isinstance(value, bool) or not has_type or (name != "first" and not value > 0):
                expected = "a positive whole number" if name == "levels" else "a positive energy in eV"
                raise wrong(sources, f"{key}.{name}", value, "an energy in eV" if name == "first" else expected)


def _check_task(task: PointTaskOptions, points: PointsOptions, sources: Sources) -> None:
    for name in TARGETS:
        if getattr(task, name) is not None and name != points.target:
            raise ForgefieldError(
                f"{sources.where(f'task.{name}')}: 'task.{name}' needs data.points.target={name}, which is {points.target}."
            )
    terms = [name for name in ("dos", "electrons", "band_energy") if getattr(task, name) is not None]
    if terms and points.target != "ldos":
        raise ForgefieldError(
            f"{sources.where(f'task.{terms[0]}')}: 'task.{terms[0]}' follows from an LDOS, not a density."
        )
    target: PointTargetOptions | None = getattr(task, points.target)
    if target is None and not terms:
        raise ForgefieldError(f"{sources.where('task')}: 'task' trains nothing; give task.{points.target}.")
    if target is not None:
        _check_target(target, f"task.{points.target}", sources)
    if task.observables is not None:
        _check_observables(task.observables, points, sources)


def _check_target(options: PointTargetOptions, key: str, sources: Sources) -> None:
    if options.loss != "huber" and sources.explicit(f"{key}.huber_delta"):
        raise ForgefieldError(
            f"{sources.where(f'{key}.huber_delta')}: '{key}.huber_delta' applies to loss huber only, and '{key}.loss' is "
            f"{options.loss}."
        )
    weights = options.level_weights
    if weights is not None and (not weights or min(weights) < 0 or max(weights) == 0):
        raise wrong(
            sources,
            f"{key}.level_weights",
            list(weights),
            "a list with one number per level, none negative and not all zero",
        )


def _check_observables(options: ObservablesOptions, points: PointsOptions, sources: Sources) -> None:
    key = "task.observables"
    for name in options.metrics:
        if points.target == "density" and name != "density":
            raise ForgefieldError(
                f"{sources.where(f'{key}.metrics')}: {name} follows from an LDOS, not from a density."
            )
    if not options.metrics or len(set(options.metrics)) != len(options.metrics):
        raise wrong(
            sources, f"{key}.metrics", list(options.metrics), f"a list of different ones of {', '.join(OBSERVABLES)}"
        )


def _is_default(config: Config, key: str) -> bool:
    return bool(select(config, key) == select(type(config)(), key))
