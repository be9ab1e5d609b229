"""The kinds of samples that models are trained on, and where the code of each kind is found.

Most of Forgefield is the same for all kinds. Where kinds differ (how a config becomes a training problem, how a model is built,
evaluated, reported and used from ASE), generic packages look up the implementation here. Paths are resolved when they are
needed, so that no generic package imports the package of one kind.

A new kind is one entry of `KINDS`; each field of `SampleKind` documents the object that its path must name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


class ImportPath(str):
    """Import path of a class or function, `package.module.name`."""

    def load(self) -> Any:
        """Import the module and return the object."""
        module, _, name = self.rpartition(".")
        return getattr(import_module(module), name)


@dataclass(frozen=True)
class SampleKind:
    """Implementations for one kind of samples."""

    name: str
    """Name of the samples in messages and in `run.json`."""
    models: Mapping[str, ImportPath]
    """Classes of built-in models that exist for this kind only, by `model.name`."""
    problem: ImportPath
    """Subclass of `training.problem.Problem`: data, model and task of a config."""
    build_model: ImportPath
    """`(resolved, *, precision, seed, trust) -> nn.Module`: a model from the options in `run.json`."""
    calculator: ImportPath
    """ASE calculator, constructed with a `Run` and keyword options."""
    measure: ImportPath
    """`(run, config, data, journal, ranks)`: evaluate the best weights at the end of a training."""
    test: ImportPath
    """`(run, data, options, name, *, which, device, labels_required, head, ranks) -> errors by name`."""
    errors_section: ImportPath
    """`(RunData) -> Html`: the section of the report on errors."""
    usage_section: ImportPath
    """`(RunData) -> Html`: the section of the report on how to use the model."""
    counted: str
    """What the speed of a training is measured in: `atoms` (per second) or `points`."""
    error_units: ImportPath | None = None
    """Units of errors by quantity, where they do not follow from the heads of the model."""


FRAMES = SampleKind(
    name="frames",
    models={},
    problem=ImportPath("forgefield.training.problem.frames.FramesProblem"),
    build_model=ImportPath("forgefield.models.building.build_model"),
    calculator=ImportPath("forgefield.inference.ase.Calculator"),
    measure=ImportPath("forgefield.evaluation.measure_frames"),
    test=ImportPath("forgefield.evaluation.test_frames"),
    errors_section=ImportPath("forgefield.report.sections.errors.errors_section"),
    usage_section=ImportPath("forgefield.report.sections.model.usage_section"),
    counted="atoms",
)
"""Structures with atoms; all models that are not listed for another kind."""
POINTS = SampleKind(
    name="points",
    models={"ldos": ImportPath("forgefield.ldos.model.LDOSNetwork")},
    problem=ImportPath("forgefield.ldos.training.problem.PointsProblem"),
    build_model=ImportPath("forgefield.ldos.model.build_network"),
    calculator=ImportPath("forgefield.ldos.inference.ase.LDOSCalculator"),
    measure=ImportPath("forgefield.ldos.evaluation.measure_points"),
    test=ImportPath("forgefield.ldos.evaluation.test_points"),
    errors_section=ImportPath("forgefield.ldos.report.errors_section"),
    usage_section=ImportPath("forgefield.ldos.report.usage_section"),
    counted="points",
    error_units=ImportPath("forgefield.ldos.observable_units.OBSERVABLE_UNITS"),
)
"""Points of a real-space grid: descriptors and the local density of states or the density."""
KINDS = {kind.name: kind for kind in (FRAMES, POINTS)}


def kind_of_model(name: object) -> SampleKind:
    """The kind of samples that the model of this name takes. name: `model.name`, of a built-in or a user-defined model."""
    return next((kind for kind in KINDS.values() if name in kind.models), FRAMES)


EVALUATE_ATOMS = ImportPath("forgefield.inference.structures.evaluate_atoms")
"""`(potential, atoms) -> Evaluation`: what `potential(atoms)` computes, which needs neighbour lists."""
ENSEMBLE = ImportPath("forgefield.inference.ensemble.Ensemble")
"""`(potentials, *, device) -> Potential`: the mean of several potentials."""
PLOT_RUN = ImportPath("forgefield.report.curves.plot_run")
"""`(folder) -> Figure`: the learning curves of a run."""
RUN_HTML = ImportPath("forgefield.report.curves.run_html")
"""`(folder) -> str`: how a run is displayed in a notebook."""
