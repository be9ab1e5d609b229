"""Find out how far a model can be trusted, use it for simulations, and choose what to compute next."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ase import Atoms

from forgefield.api.sources import ConfigSource, RunSource, Source, Structures, require_first_rank
from forgefield.data.options import DataOptions
from forgefield.errors import ForgefieldError
from forgefield.inference.structures import as_files, has_structures
from forgefield.report.page import write_report
from forgefield.results import Checks
from forgefield.runs import PACKAGE_SUFFIX, Run
from forgefield.settings import Config
from forgefield.trust.ensembles import calibrate_ensemble
from forgefield.trust.selection import Selection, select_frames
from forgefield.trust.uncertainty import fit_uncertainty, heads_of, training_data

if TYPE_CHECKING:
    from forgefield.trust.evaluate import EvaluationReport
    from forgefield.trust.loop.learn import Learning
    from forgefield.trust.relaxation import Relaxation
    from forgefield.trust.simulation import Simulation


def uncertainty(
    run: RunSource, *, device: str = "cpu", directions: int | None = None, trust_code: bool = False
) -> Path:
    """Compute the uncertainties of a run's best weights from its training data and return the file.

    A model with several branches has a file for each of them; that of the first is returned.
    For an ensemble, whose uncertainties are the deviations of its members, calibrate them with the validation frames.

    Parameters
    ----------
    run
        Name or path of a run whose training data is available.
    device, trust_code
        As in `load`.
    directions
        Directions along which features of each training frame are differentiated, for the uncertainty of forces; 0: all
        coordinates, exactly. Default: between 1 and 10 random ones, depending on the number of frames.
    """
    require_first_rank("uncertainty")
    run = Run.open(run, trust_code=trust_code)
    if run.members:
        if directions is not None:
            raise ForgefieldError(f"directions has no effect for an ensemble, and run {run.name} is one.")
        calibrate_ensemble(run, training_data(run), device=device)
        return run.path / "run.json"
    data = training_data(run)
    heads = heads_of(run)
    for head in heads:
        fit_uncertainty(run, data=data, device=device, directions=directions, head=head)
    return run.uncertainty_path(heads[0])


def select(
    run: RunSource,
    pool: Source | Sequence[Atoms],
    n: int,
    out: str | os.PathLike[str] | None = None,
    *,
    by: str = "both",
    method: str = "farthest",
    tolerance: float | None = None,
    device: str = "cpu",
    figure: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    options: DataOptions | None = None,
    notify: Callable[[str], None] = lambda text: None,
    trust_code: bool = False,
) -> Selection:
    """Choose structures of a pool to compute next, and return them.

    Parameters
    ----------
    run
        Name or path of a run whose training data is available. Its uncertainties are computed if it has none.
    pool
        A file, folder, glob or list of them, which is not held in memory, or a list of structures.
    n
        Number of structures to choose.
    out
        File for them (`.extxyz`).
    by
        `uncertainty`: the most uncertain structures; `distance`: structures that cover feature space and are far from the
        training data; `both`: the second among the 10 n most uncertain ones.
    method
        How feature space is covered: `farthest` points, centres of `kmeans` clusters, or `d-optimal` design.
    tolerance
        Structures closer than this to a training frame or to a chosen one are left out, eV per atom. Default: a tenth of the
        median distance between training frames that are nearest neighbours.
    device, trust_code
        As in `load`.
    figure
        File for a picture of pool, training set and selection (`.png`, `.svg`, `.pdf`).
    overwrite
        Replace the file `out` if it exists.
    options
        Labels and units of the pool; default: as in training.
    notify
        Called with messages.
    """
    require_first_rank("select")
    return select_frames(
        Run.open(run, trust_code=trust_code),
        pool,
        n,
        out,
        by=by,
        method=method,
        tolerance=tolerance,
        device=device,
        figure=figure,
        overwrite=overwrite,
        options=options,
        notify=notify,
    )


def md(
    run: RunSource,
    structures: Any,
    out: str | os.PathLike[str] = "md.extxyz",
    *,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda text: None,
    trust_code: bool = False,
    **options: Any,
) -> Simulation:
    """Molecular dynamics of each structure with the model of a run. Calling it again continues an interrupted simulation.

    Parameters
    ----------
    run
        Name or path of a run.
    structures
        Where to start: a file, folder or glob, `Atoms`, or a list of them. Momenta are used if there are any.
    out
        Trajectory to write: .extxyz, .xyz or .traj.
    which, device, head, trust_code
        As in `load`.
    overwrite
        Start over if `out` exists.
    notify
        Called with progress messages: `print`, for example.
    **options
        Fields of `forgefield.trust.options.DynamicsOptions`: `ensemble="nvt"`, `temperature=300` (K), `pressure=0` (GPa),
        `ps=10`, `timestep=1` (fs), `seed=0`, ...
    """
    from forgefield.trust.verbs import run_md

    require_first_rank("md")
    opened = Run.open(run, trust_code=trust_code)
    return run_md(
        opened, structures, out, options, which=which, device=device, head=head, overwrite=overwrite, notify=notify
    )


def relax(
    run: RunSource,
    structures: Any,
    out: str | os.PathLike[str] = "relaxed.extxyz",
    *,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda text: None,
    trust_code: bool = False,
    **options: Any,
) -> Relaxation:
    """Relax each structure with the model of a run. Calling it again continues an interrupted relaxation.

    Parameters
    ----------
    run, structures, which, device, head, overwrite, notify, trust_code
        As in `md`.
    out
        File of the relaxed structures: .extxyz, .xyz or .traj.
    **options
        Fields of `forgefield.trust.options.RelaxOptions`: `cell=False`, `pressure=0` (GPa), `fmax=0.01` (eV/A), `steps=500`,
        `optimiser="lbfgs"`.
    """
    from forgefield.trust.verbs import run_relax

    require_first_rank("relax")
    opened = Run.open(run, trust_code=trust_code)
    return run_relax(
        opened, structures, out, options, which=which, device=device, head=head, overwrite=overwrite, notify=notify
    )


def evaluate(
    run: RunSource,
    *,
    suite: str | None = None,
    structures: Any = None,
    reference: str | None = None,
    only: Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    notify: Callable[[str], None] = lambda text: None,
    trust_code: bool = False,
    **options: Any,
) -> EvaluationReport:
    """Physical properties with the model of a run, next to a reference. Calling it again resumes an interrupted evaluation.

    Parameters
    ----------
    run
        Name or path of a run.
    suite
        `crystal`, `molecule` or `liquid`; default: by the periodicity of the structures.
    structures
        As in `md`; default: crystals of the elements, or the first frame of the training data.
    reference
        Import path of an ASE calculator, a run, a file with labelled frames, or a JSON file with numbers.
    only
        Names of evaluations to do; default: all of the suite.
    out
        Folder of the results; default: `evaluation` in the run.
    which, device, head, trust_code
        As in `load`.
    notify
        Called with progress messages.
    **options
        Fields of `forgefield.trust.suites.measurement.EvaluationOptions`: `temperature=300`, `ps=5`, ...
    """
    from forgefield.trust.evaluate import run_evaluation

    require_first_rank("evaluate")
    report = run_evaluation(
        Run.open(run, trust_code=trust_code),
        options,
        suite=suite,
        structures=structures,
        reference=reference,
        only=only,
        out=Path(out) if out is not None else None,
        which=which,
        device=device,
        head=head,
        notify=notify,
    )
    opened = Run.open(run, trust_code=trust_code)
    if out is None and (opened.path / "report.html").is_file():
        write_report(opened.path)
    return report


def learn(
    loop: str | os.PathLike[str],
    *overrides: str,
    device: str = "cpu",
    notify: Callable[[str], None] = lambda text: None,
) -> Learning:
    """Active learning as a file describes it. Calling it again resumes the loop; no label is computed twice.

    Parameters
    ----------
    loop
        YAML file with the options in `forgefield.trust.loop.options.LoopOptions`.
    *overrides
        `key=value` strings, as on the command line.
    device
        Where simulations run.
    notify
        Called with progress messages.
    """
    from forgefield.trust.loop.learn import run_loop

    require_first_rank("learn")
    return run_loop(loop, overrides, device=device, notify=notify)


def check(
    target: RunSource | ConfigSource,
    *overrides: str,
    data: Source | Structures | None = None,
    frames: int = 4,
    which: str = "best",
    head: str | None = None,
    seed: int = 0,
    trust_code: bool = False,
) -> Checks:
    """Check symmetry, exact derivatives, smoothness and locality of a model on data, in float64; returns a result for each law.

    Parameters
    ----------
    target
        A run, whose trained model is checked, or a config (a YAML file, a dictionary or a loaded config), for which a model
        with new weights is built.
    *overrides
        `key=value` strings, as on the command line.
    data
        Structures to check on: a file, folder or glob, or a list of `ase.Atoms`; default: the training data.
    frames
        Number of structures to draw from them.
    which, head, trust_code
        As in `load`.
    seed
        Seed for choosing structures, rotations and directions.
    """
    from forgefield.checks.suite import Subject

    require_first_rank("check")
    if frames < 1:
        raise ForgefieldError(f"frames must be 1 or more, not {frames}.")
    is_file = (
        isinstance(target, (str, os.PathLike)) and Path(target).is_file() and Path(target).suffix != PACKAGE_SUFFIX
    )
    with tempfile.TemporaryDirectory(prefix="forgefield-") as folder:
        if data is not None and has_structures(data):
            data = as_files(data, Path(folder))
        if is_file or isinstance(target, (dict, Config)):
            config = Path(target) if isinstance(target, (str, os.PathLike)) else target
            assert not isinstance(config, Run), "runs have no suffix of a config"
            subject = Subject.of_config(config, overrides, data=data, head=head, trust_code=trust_code)
        else:
            assert isinstance(target, (str, os.PathLike, Run)), "everything else is a config"
            opened = Run.open(target, trust_code=trust_code)
            subject = Subject.of_run(opened, overrides, data=data, which=which, head=head, trust_code=trust_code)
        generator = np.random.default_rng(seed)
        return Checks(subject.check(subject.choose_frames(frames, generator), generator), subject.radial_tables())
