"""The checks of what concerns grid points: values of `data.points`, its descriptors and its task, and settings that apply to
points or to frames alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ase.data import atomic_numbers
from omegaconf import DictConfig, OmegaConf

from forgefield.config.nearest import did_you_mean
from forgefield.config.refusals import check_choice, wrong
from forgefield.config.sources import Sources
from forgefield.errors import ForgefieldError

TARGETS = ("ldos", "density")
SCALINGS = ("none", "standard", "minmax", "feature-wise-standard", "feature-wise-minmax")
OBSERVABLES = ("band_energy", "total_energy", "fermi_energy", "density", "dos", "electrons")
FERMI = ("self_consistent", "given")
MODEL = "ldos"
DESCRIPTOR_TYPES = ("bispectrum", "gaussian")
DESCRIPTOR_KERNELS = ("auto", "compiled", "torch")
DESCRIPTOR_PRECISIONS = ("float64", "float32")
LARGEST_TWOJMAX = 20
_ONLY_FOR = {
    "twojmax": "bispectrum",
    "switch": "bispectrum",
    "rfac0": "bispectrum",
    "rmin0": "bispectrum",
    "element_weights": "bispectrum",
    "kernel": "bispectrum",
    "sigma": "gaussian",
    "species": "gaussian",
}

FRAMES_ONLY = (
    "data.indices",
    "data.cutoff",
    "data.adaptive_cutoff",
    "data.max_neighbours",
    "data.sampling",
    "data.devset",
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
    "training.memory",
    "training.graphs.sizes",
    "training.accumulate",
    "training.swa",
    "training.weighting",
    "training.freeze",
    "training.lr_groups",
    "training.lora",
)
"""Settings that say nothing about grid points."""
POINTS_ONLY = ("data.fast", "data.batch.points", "training.block")
"""Settings that say nothing about frames."""
_INSTEAD = {
    "data.cutoff": "the radius of descriptors is data.points.descriptors.cutoff",
    "data.lazy": "data.points.keep=disk leaves the data on disk",
    "data.units": "the unit of targets is data.points.units",
    "data.batch.frames": "a batch is counted in points: data.batch.points",
    "data.batch.atoms": "a batch is counted in points: data.batch.points",
    "data.batch.edges": "a batch is counted in points: data.batch.points",
    "training.accumulate": "a step of several batches is one of a larger data.batch.points",
    "training.memory": "a step that does not fit needs a smaller data.batch.points",
}
_NOT_YET = ("trainer.accumulate_grad_batches", "trainer.overfit_batches")
"""Settings of Lightning that have no meaning for blocks of steps."""


def check_frames_only(config: DictConfig, sources: Sources) -> None:
    """Refuse settings of points in a config of frames."""
    for key in POINTS_ONLY:
        if OmegaConf.select(config, key) is not None:
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}' applies to grid points only, and there is no section 'data.points'."
            )
    model = config.model
    if isinstance(model, Mapping) and model.get("name") == MODEL:
        raise ForgefieldError(
            f"{sources.where('model.name')}: the model {MODEL} learns from grid points; say so with a section 'data.points', "
            "for example data.points={energies: {first: -5.0, spacing: 2.5, levels: 11}}."
        )


def require_frames(config: DictConfig, verb: str, instead: str) -> None:
    """Refuse a config of points for a verb that is about frames. instead: what does the like for points."""
    if config.data.points is not None:
        raise ForgefieldError(
            f"{verb} is about models of frames, and this config is of grid points (data.points); {instead}."
        )


def check_points(config: DictConfig, sources: Sources) -> None:
    """Refuse settings of frames in a config of points, and settings of points without a meaning."""
    for key in FRAMES_ONLY:
        if sources.explicit(key) or not _is_default(config, key):
            instead = f"; {_INSTEAD[key]}" if key in _INSTEAD else ""
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}' does not apply to grid points (data.points){instead}."
            )
    for key in _NOT_YET:
        if OmegaConf.select(config, key) not in (None, 0, 1, 0.0):
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
    _check_section(config.data.points, sources)
    if config.task is not None:
        _check_task(config.task.points, config.data.points, sources)


def _check_section(points: DictConfig, sources: Sources) -> None:
    key = "data.points"
    if points.target == "dos":
        raise ForgefieldError(
            f"{sources.where(f'{key}.target')}: '{key}.target' is ldos or density: a DOS is one row for a whole snapshot, not "
            "a target of its points. Train on the LDOS; its DOS follows, and task.dos adds it to the loss."
        )
    check_choice(points.target, TARGETS, f"{key}.target", sources)
    for side in ("inputs", "outputs"):
        check_choice(points.scaling[side], SCALINGS, f"{key}.scaling.{side}", sources)
    check_choice(points.keep, ("auto", "device", "memory", "disk"), f"{key}.keep", sources)
    if points.target == "density" and points.energies is not None:
        raise ForgefieldError(
            f"{sources.where(f'{key}.energies')}: '{key}.energies' are the levels of an LDOS, and the target is a density."
        )
    if points.energies is not None:
        _check_energies(points.energies, f"{key}.energies", sources)
    elif points.target == "ldos":
        raise ForgefieldError(
            f"{sources.where(key)}: '{key}.energies' is missing: which energies do the levels of the LDOS stand for? For "
            "example {first: -5.0, spacing: 2.5, levels: 11}, eV."
        )
    if points.descriptors is not None:
        _check_descriptors(points.descriptors, f"{key}.descriptors", sources)


def _check_descriptors(descriptors: Any, key: str, sources: Sources) -> None:
    if not isinstance(descriptors, Mapping):
        raise wrong(sources, key, descriptors, "a section such as {type: bispectrum, twojmax: 10}")
    settings: Any = OmegaConf.to_container(descriptors) if OmegaConf.is_config(descriptors) else dict(descriptors)
    try:
        DescriptorOptions.from_mapping(settings, key)
    except ForgefieldError as error:
        raise ForgefieldError(f"{sources.where(key)}: {error}") from None


def _check_energies(energies: Any, key: str, sources: Sources) -> None:
    windows: Any = OmegaConf.to_container(energies) if OmegaConf.is_config(energies) else energies
    for window in windows if isinstance(windows, list) and windows else [windows]:
        if not isinstance(window, Mapping) or set(window) != {"first", "spacing", "levels"}:
            raise wrong(sources, key, windows, "{first: ..., spacing: ..., levels: ...}, or a list of such windows")
        for name, value in window.items():
            good = isinstance(value, int) if name == "levels" else isinstance(value, (int, float))
            if isinstance(value, bool) or not good or (name != "first" and not value > 0):
                expected = "a positive whole number" if name == "levels" else "a positive number of eV"
                raise wrong(sources, f"{key}.{name}", value, "a number of eV" if name == "first" else expected)


def _check_task(task: DictConfig, points: DictConfig, sources: Sources) -> None:
    for name in TARGETS:
        if task[name] is not None and name != points.target:
            raise ForgefieldError(
                f"{sources.where(f'task.{name}')}: 'task.{name}' needs data.points.target={name}, which is {points.target}."
            )
    terms = [name for name in ("dos", "electrons", "band_energy") if task[name] is not None]
    if terms and points.target != "ldos":
        raise ForgefieldError(
            f"{sources.where(f'task.{terms[0]}')}: 'task.{terms[0]}' follows from an LDOS, not a density."
        )
    if task[points.target] is None and not terms:
        raise ForgefieldError(f"{sources.where('task')}: 'task' trains nothing; give task.{points.target}.")
    if task[points.target] is not None:
        _check_target(task[points.target], f"task.{points.target}", sources)
    for name in terms:
        _positive(task[name].every, f"task.{name}.every", sources)
    for name in (points.target, *terms):
        if task[name] is not None and task[name].weight < 0:
            raise wrong(sources, f"task.{name}.weight", task[name].weight, "zero or positive")
    if task.observables is not None:
        _check_observables(task.observables, points, sources)


def _check_target(options: DictConfig, key: str, sources: Sources) -> None:
    check_choice(options.loss, ("mse", "mae", "huber"), f"{key}.loss", sources)
    if not options.huber_delta > 0:
        raise wrong(sources, f"{key}.huber_delta", options.huber_delta, "a positive number")
    if options.loss != "huber" and sources.explicit(f"{key}.huber_delta"):
        raise ForgefieldError(
            f"{sources.where(f'{key}.huber_delta')}: '{key}.huber_delta' applies to loss huber only, and '{key}.loss' is "
            f"{options.loss}."
        )
    weights = options.level_weights
    if weights is not None and (not weights or min(weights) < 0 or max(weights) == 0):
        raise wrong(
            sources, f"{key}.level_weights", list(weights), "a number for each level, none negative, not all zero"
        )


def _check_observables(options: DictConfig, points: DictConfig, sources: Sources) -> None:
    key = "task.observables"
    for name in options.metrics:
        check_choice(name, OBSERVABLES, f"{key}.metrics", sources)
        if points.target == "density" and name != "density":
            raise ForgefieldError(
                f"{sources.where(f'{key}.metrics')}: {name} follows from an LDOS, not from a density."
            )
    if not options.metrics or len(set(options.metrics)) != len(options.metrics):
        raise wrong(sources, f"{key}.metrics", list(options.metrics), f"different ones of {', '.join(OBSERVABLES)}")
    _positive(options.every, f"{key}.every", sources)
    check_choice(options.fermi, FERMI, f"{key}.fermi", sources)


def _positive(value: Any, key: str, sources: Sources) -> None:
    if not value > 0:
        raise wrong(sources, key, value, "a positive whole number")


def _is_default(config: DictConfig, key: str) -> bool:
    value = OmegaConf.select(config, key)
    found = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    default: Any = _defaults()
    for part in key.split("."):
        default = default[part]
    return found == default


@functools.cache
def _defaults() -> dict[str, Any]:
    """Defaults of the sections that hold settings of frames, as plain values."""
    from forgefield.config.schema import DataOptions, TrainingOptions

    return {"data": asdict(DataOptions()), "training": asdict(TrainingOptions())}


# ---- descriptors


@dataclass(frozen=True)
class DescriptorOptions:
    """How descriptors of points are computed from the atoms around them."""

    type: str = "bispectrum"
    """bispectrum (SNAP, as LAMMPS' sna/grid) or gaussian (density of Gaussians on the atoms, one column per species)."""
    twojmax: int = 10
    """Bispectrum: largest degree, twice the largest angular momentum; 10 gives 91 components."""
    cutoff: float = 4.67637
    """Radius within which atoms are seen, A."""
    switch: bool = True
    """Bispectrum: whether the weight of an atom falls to 0 at the cutoff (half a cosine)."""
    rfac0: float = 0.99363
    """Bispectrum: largest angle on the sphere of four dimensions, reached at the cutoff, in units of pi."""
    rmin0: float = 0.0
    """Bispectrum: the distance that has angle 0, A."""
    element_weights: Mapping[str, float] | None = None
    """Bispectrum: weight of the atoms of each element, {Al: 1.0, O: 0.5}. Default: 1 for all."""
    sigma: float | None = None
    """Gaussian: width, A. Default: 0.2 A for a grid spacing of 0.08099 A, and in proportion to it."""
    species: Sequence[str] | None = None
    """Gaussian: elements in the order of the columns, [Al, O]. MALA and LAMMPS order them by symbol, `forgefield data
    descriptors` by atomic number; with several elements it has to be said."""
    precision: str = "float64"
    """float64, or float32 for the sums over neighbours and what follows; geometry is always float64."""
    kernel: str = "auto"
    """Bispectrum on a CPU: compiled (a loop in C, made by the C compiler at hand), torch, or auto: compiled if possible and if
    there are points enough."""

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], where: str = "descriptors") -> DescriptorOptions:
        """Options from a section of a config; `where` is its key, for messages."""
        names = [entry.name for entry in fields(cls)]
        for name in settings:
            if name not in names:
                raise ForgefieldError(
                    f"{where}.{name}: there is no such setting.{did_you_mean(str(name), names)} "
                    f"Settings of descriptors are {', '.join(names)}."
                )
        kind = settings.get("type", cls.type)
        for name in settings:
            if kind in DESCRIPTOR_TYPES and _ONLY_FOR.get(name, kind) != kind:
                raise ForgefieldError(
                    f"{where}.{name} is a setting of type={_ONLY_FOR[name]}; with type={kind} it has no "
                    "meaning and should be left out"
                )
        try:
            return cls(**settings)
        except ForgefieldError as error:
            raise ForgefieldError(f"{where}.{error}") from None

    def __post_init__(self) -> None:
        _require(
            self.type in DESCRIPTOR_TYPES,
            "type",
            self.type,
            f"{' or '.join(DESCRIPTOR_TYPES)}.{did_you_mean(str(self.type), DESCRIPTOR_TYPES)}",
        )
        _require(_is_number(self.cutoff) and self.cutoff > 0, "cutoff", self.cutoff, "a radius in A above 0")
        _require(
            self.precision in DESCRIPTOR_PRECISIONS, "precision", self.precision, " or ".join(DESCRIPTOR_PRECISIONS)
        )
        for entry in fields(self):
            mine = _ONLY_FOR.get(entry.name, self.type) == self.type
            _require(mine or getattr(self, entry.name) == entry.default, entry.name, getattr(self, entry.name),
                     f"left out, since it has no meaning with type={self.type}")  # fmt: skip
        if self.type == "gaussian":
            _require(self.sigma is None or (_is_number(self.sigma) and self.sigma > 0), "sigma", self.sigma,
                     "a width in A above 0")  # fmt: skip
            self._check_species()
        else:
            self._check_bispectrum()

    def _check_species(self) -> None:
        if self.species is None:
            return
        listed = isinstance(self.species, Sequence) and not isinstance(self.species, str)
        right = "elements in the order of the columns, each once, such as [Al, O]"
        _require(listed and len(self.species) > 0, "species", self.species, right)
        known = all(isinstance(symbol, str) and symbol in atomic_numbers and symbol != "X" for symbol in self.species)
        _require(known and len(set(self.species)) == len(self.species), "species", list(self.species), right)

    def _check_bispectrum(self) -> None:
        whole = isinstance(self.twojmax, int) and not isinstance(self.twojmax, bool)
        _require(whole and 0 <= self.twojmax <= LARGEST_TWOJMAX, "twojmax", self.twojmax,
                 f"a whole number from 0 to {LARGEST_TWOJMAX}")  # fmt: skip
        _require(self.kernel in DESCRIPTOR_KERNELS, "kernel", self.kernel, " or ".join(DESCRIPTOR_KERNELS))
        _require(isinstance(self.switch, bool), "switch", self.switch, "true or false")
        _require(_is_number(self.rfac0) and 0 < self.rfac0 <= 1, "rfac0", self.rfac0, "above 0 and at most 1")
        _require(_is_number(self.rmin0) and 0 <= self.rmin0 < self.cutoff, "rmin0", self.rmin0,
                 f"a distance in A from 0 to below the cutoff, {self.cutoff}")  # fmt: skip
        if self.element_weights is None:
            return
        _require(isinstance(self.element_weights, Mapping), "element_weights", self.element_weights,
                 "weights by element, such as {Al: 1.0, O: 0.5}")  # fmt: skip
        for symbol, weight in self.element_weights.items():
            _require(symbol in atomic_numbers, "element_weights", symbol, "a chemical symbol, such as Al")
            _require(_is_number(weight), f"element_weights.{symbol}", weight, "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(met: bool, key: str, value: object, right: str) -> None:
    if not met:
        raise ForgefieldError(f"{key}={value!r} is not valid: it should be {right}")
