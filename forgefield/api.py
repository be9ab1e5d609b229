"""The verbs of Forgefield as Python functions; `import forgefield` offers them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ase import Atoms
from ase.io import iread

from forgefield.config.components import environment_of_children
from forgefield.config.deepmd import convert_input
from forgefield.config.loading import load_config, override_keys, preset_path, require_training_data
from forgefield.config.sources import read_yaml
from forgefield.config.template import commented_yaml
from forgefield.data.conversion import convert_data, sample_data
from forgefield.data.inspection.show import inspect_data
from forgefield.data.options import DataOptions
from forgefield.data.paths import is_named
from forgefield.data.starter import propose_config
from forgefield.errors import ForgefieldError
from forgefield.evaluation import name_of_test
from forgefield.inference.ase import Calculator
from forgefield.inference.ensemble import Ensemble
from forgefield.inference.predict import predict_file
from forgefield.inference.structures import as_files, has_structures
from forgefield.inference.uncertainty import uncertainty_path, with_uncertainty
from forgefield.ldos.inference.files import predict_run
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.options import ElectronOptions
from forgefield.models.importing import ImportedModel, ImportRequest
from forgefield.models.potential import Potential
from forgefield.models.registry import exporter
from forgefield.parallel.launch import detect_launch
from forgefield.parallel.session import abort_all_on_error, current_ranks
from forgefield.parallel.spawn import run_ranks
from forgefield.report.notebook import report
from forgefield.report.page import write_report
from forgefield.results import Checks, Errors
from forgefield.runs import PACKAGE_SUFFIX, Run, create_run_from_import, run_exists
from forgefield.settings import Config
from forgefield.training.fit import TrainingResult
from forgefield.training.problem.preflight import check_model_section
from forgefield.training.run.folder import config_of_run
from forgefield.training.run.journal import Journal
from forgefield.training.trainer import requested_processes
from forgefield.trust.ensembles import calibrate_ensemble, train_run
from forgefield.trust.selection import Selection, select_frames
from forgefield.trust.uncertainty import fit_after_training, fit_uncertainty, training_data

if TYPE_CHECKING:
    from forgefield.trust.evaluate import EvaluationReport
    from forgefield.trust.loop.learn import Learning
    from forgefield.trust.relaxation import Relaxation
    from forgefield.trust.simulation import Simulation

ConfigSource = str | Path | dict[str, Any] | Config
"""A YAML file, a dictionary or a loaded config."""
RunSource = str | os.PathLike[str] | Run
"""Name or path of a run, or a `Run`."""
Structures = Atoms | Sequence[Atoms]
"""One structure or several, in memory."""
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Structures or snapshots: a file, folder, glob or store, or a list of them."""

__all__ = [
    "Calculator",
    "ElectronOptions",
    "Ensemble",
    "Run",
    "check",
    "convert_data",
    "convert_input",
    "evaluate",
    "export",
    "import_mala",
    "import_model",
    "inspect_data",
    "learn",
    "load",
    "load_run",
    "md",
    "predict",
    "propose_config",
    "relax",
    "report",
    "run_exists",
    "sample_data",
    "select",
    "test",
    "train",
    "train_example",
    "tune",
    "uncertainty",
]


def train(
    config: ConfigSource,
    *overrides: str,
    data: Structures | Mapping[str, Any] | None = None,
    fresh: bool = False,
    trust_code: bool = False,
) -> Run:
    """Train a model from a config and return the run. Calling it again resumes the run.

    Parameters
    ----------
    config
        A YAML file, a dictionary, a loaded config, or the folder of a run to resume with the settings stored there.
    *overrides
        `key=value` strings, as on the command line.
    data
        Training data in place of `data.train`: a list of `ase.Atoms` with labels, or `{"train": ..., "val": ..., "test": ...}`,
        each a list of structures or anything that the config takes. In a dictionary, structures may also be under `data.train`
        and the others. They are written to `OUT/structures`, from where a resumed run reads them; the same structures are the
        same file.
    fresh
        Start over even if the run exists; the existing one is renamed.
    trust_code
        Whether to import code to which a run refers (`model.from`, or a run that is resumed) and the config does not.
    """
    with abort_all_on_error(current_ranks()):
        if isinstance(config, (str, Path)) and (Path(config) / "run.json").is_file():
            if data is not None:
                raise ForgefieldError(f"{config} is a run, which is resumed with its own data; leave out data=.")
            loaded = config_of_run(Run(Path(config)), overrides, trust_code=trust_code)
        else:
            loaded = _config_with_structures(config, overrides, data, trust_code=trust_code)
        require_training_data(loaded)
        fitted = train_with_outcome(loaded, fresh=fresh, trust_code=trust_code)
    if fitted.outcome == "failed":
        raise ForgefieldError(
            f"The training in several processes ended with exit code {fitted.exit_code}; see the messages above."
        )
    return fitted.run


_SETS = ("train", "val", "test")


def _config_with_structures(
    config: ConfigSource, overrides: Sequence[str], data: Structures | Mapping[str, Any] | None, *, trust_code: bool
) -> Config:
    """The loaded config, in which structures in memory are replaced by files in the folder of its runs."""
    given = dict(data) if isinstance(data, Mapping) else {} if data is None else {"train": data}
    if unknown := [str(name) for name in given if name not in _SETS]:
        raise ForgefieldError(f"data= has '{unknown[0]}'; it takes {', '.join(_SETS)}.")
    section = config.get("data") if isinstance(config, dict) else None
    if isinstance(config, dict) and isinstance(section, Mapping):
        named = {name: value for name, value in section.items() if name in _SETS and has_structures(value)}
        if twice := sorted(named.keys() & given.keys()):
            raise ForgefieldError(f"data.{twice[0]} is given twice, in the config and as data=; leave one of them out.")
        given = {**named, **given}
        config = {**config, "data": {name: value for name, value in section.items() if name not in named}}
    loaded = load_config(config, list(overrides), trust_code=trust_code)
    if not given:
        return loaded
    for key in override_keys(overrides):
        if key.removeprefix("data.") in given:
            raise ForgefieldError(f"{key} is given twice, as an override and as structures; leave one of them out.")
    first = current_ranks().is_rank_zero
    files = as_files(given, Path(loaded.out) / "structures", write=first)
    current_ranks().barrier()
    for name, value in files.items():
        setattr(loaded.data, name, value)
    return load_config(loaded, trust_code=trust_code)


def train_with_outcome(
    config: Config,
    *,
    fresh: bool = False,
    log: Path | None = None,
    log_mode: str = "master",
    trust_code: bool = False,
) -> TrainingResult:
    """Train, evaluate the best model on validation and test frames, and write the report.

    Under a launcher (torchrun, srun, mpirun) every process calls this, inside `abort_all_on_error`. In a single process with
    `trainer.devices` above one, the processes are started here.

    Parameters
    ----------
    config
        The config to train.
    fresh, trust_code
        As in `train`.
    log
        File for all messages, in addition to the log in the run folder.
    log_mode
        Ranks that write to `log`: `master`, `collect` or `workers`.
    """
    ranks = current_ranks()
    n = requested_processes(config) if ranks.launch.launcher == "none" else 1
    if n > 1:
        return _train_in_processes(config, n, fresh=fresh, log=log, log_mode=log_mode, trust_code=trust_code)
    return train_run(
        config,
        fresh=fresh,
        new_journal=lambda: Journal(ranks=ranks, file=log, mode=log_mode),
        ranks=ranks,
        trust_code=trust_code,
        prepare=fit_after_training,
    )


def _train_in_processes(
    config: Config, n: int, *, fresh: bool, log: Path | None, log_mode: str, trust_code: bool
) -> TrainingResult:
    """Start n processes on this machine that train together, and wait for them."""
    check_model_section(config)  # the processes read a copy of the config, whose lines are not those of the user's file
    with tempfile.TemporaryDirectory(prefix="forgefield-") as folder:
        path = Path(folder) / f"{config.name}.yaml"
        path.write_text(commented_yaml(config))
        command = [sys.executable, "-m", "forgefield", "train", str(path), "-m", log_mode]
        command += ["--fresh"] if fresh else []
        command += ["--trust-code"] if trust_code else []
        command += ["-l", str(log)] if log is not None else []
        code = run_ranks(command, n, environ=environment_of_children())
    run = Run(config.folder, trust_code=code == 0)  # the config named its code, or the user allowed it
    if code == 0:
        return TrainingResult(run, None, "quick" if config.trainer.get("fast_dev_run") else "finished")
    stopped = code in (config.training.checkpoint.requeue_exit, 128 + signal.SIGINT)
    return TrainingResult(run, None, "stopped" if stopped else "failed", exit_code=code)


def train_example(overrides: list[str] | None = None, *, fresh: bool = False) -> TrainingResult:
    """Train the built-in example, which generates a small data set with a classical potential."""
    ranks = current_ranks()
    with abort_all_on_error(ranks):
        config = example_config(overrides or [], make=ranks.is_rank_zero)
        ranks.barrier()
        return train_with_outcome(config, fresh=fresh)


def example_config(overrides: list[str], *, make: bool) -> Config:
    """The config of the built-in example. make: whether to generate missing data."""
    from forgefield.data.example import make_example

    path = preset_path("example")
    folder = Path(read_yaml(path)["data"]["train"]).parent
    if make and not all((folder / name).exists() for name in ("train.extxyz", "test.extxyz")):
        print(f"Making a small data set with ASE's EMT (copper-gold alloys) in {folder} ...", flush=True)
        make_example(folder, seed=0)
    return load_config(path, overrides)


def load(
    run: RunSource,
    *,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    trust_code: bool = False,
) -> Potential | LDOSNetwork:
    """The trained model of a run in evaluation mode: a potential, or a network for grid points.

    Parameters
    ----------
    run
        Name or path of a run.
    which
        `best` or `last` weights.
    device
        Where to put the model.
    head
        Branch of a model with several branches.
    trust_code
        Whether to import code to which the run refers, such as a user-defined model. Importing executes it.
    """
    run = Run.open(run, trust_code=trust_code)
    run.require_head(head)
    model = run.load_model(which, device, head=head)
    assert isinstance(model, (Potential, LDOSNetwork)), "there are models of these two kinds"
    return model


def load_run(name: str | os.PathLike[str], *, out: str | os.PathLike[str] = "runs", trust_code: bool = False) -> Run:
    """The run of that name or path: its config, metrics, statistics and model. trust_code: as in `load`."""
    return Run.open(name, out=out, trust_code=trust_code)


def test(
    run: RunSource,
    data: Source | Structures | Mapping[str, Source | Structures],
    *,
    options: DataOptions | None = None,
    which: str = "best",
    device: str = "cpu",
    labels_required: bool = False,
    head: str | None = None,
    trust_code: bool = False,
    uncertainty: str | None = None,
) -> dict[str, Any]:
    """Errors of a run's model on labelled frames, in meV/atom, meV/A and GPa. They are stored in the run with a parity plot.

    Parameters
    ----------
    run
        Name or path of a run.
    data
        A file, folder, glob or list of them, or a list of `ase.Atoms` with labels, which are stored in the run; or several
        sets by name, `{"300K": "a.xyz", "600K": "b.xyz"}`, whose errors are then returned by name.
    options
        Labels and units of the data; default: as in training.
    which, device, head, trust_code
        As in `load`.
    labels_required
        Whether every label that `options` names must be in the data.
    uncertainty
        `energy` or `forces`, whose uncertainties are compared with the errors. Default: of energies, if the run has any.
    """
    ranks = current_ranks()
    with abort_all_on_error(ranks):
        run = Run.open(run, trust_code=trust_code)
        if uncertainty is not None and run.of_points:
            raise ForgefieldError(f"Run {run.name} was trained on grid points; it has no uncertainties of energies.")
        run.require_head(head)
        if ranks.is_rank_zero:
            run.writable()
        ranks.barrier()
        run = run.writable()
        if has_structures(data):
            data = as_files(data, run.path / "structures", write=ranks.is_rank_zero)
            ranks.barrier()
        options = options if options is not None else run.data_options()
        sets: Mapping[str, object] = data if isinstance(data, Mapping) and is_named(data) else {"": data}
        test_data, errors = run.kind.test.load(), {}
        for name, files in sets.items():
            results_name = name_of_test(run, files, which=which, head=head, title=name)
            errors[name] = test_data(
                run,
                files,
                options,
                results_name,
                which=which,
                device=device,
                labels_required=labels_required,
                head=head,
                ranks=ranks,
                **({} if uncertainty is None else {"uncertainty": uncertainty}),
            )
        if ranks.is_rank_zero:
            write_report(run.path)
        units = run.units | (run.kind.error_units.load() if run.kind.error_units is not None else {})
        shown = {name: Errors(values, units) for name, values in errors.items()}
        return shown if is_named(data) else shown[""]


def predict(
    run: RunSource,
    source: Source | Structures,
    out: str | os.PathLike[str] | None = None,
    *,
    options: DataOptions | None = None,
    which: str = "best",
    device: str = "cpu",
    labels_required: bool = False,
    head: str | None = None,
    electrons: ElectronOptions | None = None,
    overwrite: bool = False,
    batch: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
    trust_code: bool = False,
    uncertainty: str | None = None,
    ensemble: Sequence[RunSource] = (),
    model_devi: str | os.PathLike[str] | None = None,
    as_labels: bool = False,
) -> Path | list[Atoms]:
    """Predict the structures of `source` and return the path of the result, or without `out` the structures with predictions.

    Without `out`, the predictions are the calculator results of the structures: `atoms.get_potential_energy()` (eV),
    `atoms.get_forces()` (eV/A), `atoms.get_stress()`; labels are kept as `REF_energy` and so on.
    With `out`, a potential writes the structures with energies, forces and stress to that file; an LDOS run writes densities,
    DOS and energies to that new folder.

    Parameters
    ----------
    run
        Name or path of a run.
    source
        A file, folder, glob or list of them, or a list of `ase.Atoms`. Labels are not needed; labels and other values are kept.
    out
        File or folder to write. Default: none, for a potential.
    options
        Labels and units of `source`; default: as in training.
    which, device, head, trust_code
        As in `load`.
    labels_required
        Whether every label that `options` names must be in the data.
    electrons
        For an LDOS run, temperature and grid.
    overwrite
        Replace the file `out` if it exists.
    batch
        Number of frames predicted together; default: 16.
    notify
        Called with messages about the predictions of an LDOS run.
    uncertainty
        `energy` or `forces`: also write uncertainties of energies, or of energies and forces, as `energy_uncertainty`,
        `energies_uncertainty` (of atoms) and `forces_uncertainty`. The run must have them (`forgefield uncertainty RUN`).
    as_labels
        Write training data: the predictions are read as labels, and labels of `source` are left out.
    ensemble
        Additional runs; predictions are the means of all of them, with uncertainties and DeePMD-kit's deviations.
    model_devi
        File for the deviations of an ensemble, in DeePMD-kit's format.
    """
    _require_first_rank("predict")
    run = Run.open(run, trust_code=trust_code)
    run.require_head(head)
    if out is None or has_structures(source):
        if out is None and run.of_points:
            raise ForgefieldError(
                f"Run {run.name} was trained on grid points; name a folder for its predictions: out=FOLDER."
            )
        with tempfile.TemporaryDirectory(prefix="forgefield-") as folder:
            file = Path(folder) / "predicted.extxyz"
            result = predict(
                run,
                as_files(source, Path(folder)),
                file if out is None else out,
                options=options,
                which=which,
                device=device,
                labels_required=labels_required,
                head=head,
                electrons=electrons,
                overwrite=overwrite,
                batch=batch,
                notify=notify,
                trust_code=trust_code,
                uncertainty=uncertainty,
                ensemble=ensemble,
                model_devi=model_devi,
                as_labels=as_labels,
            )
            return list(iread(file, index=":")) if out is None else result
    options = options if options is not None else run.data_options()
    if run.of_points:
        if uncertainty is not None or ensemble:
            raise ForgefieldError(f"Run {run.name} was trained on grid points; it has no uncertainties of energies.")
        if overwrite:
            raise ForgefieldError(
                f"--force: run {run.name} was trained on grid points and writes to a new folder only."
            )
        if batch is not None:
            raise ForgefieldError(
                f"data.batch.frames: run {run.name} was trained on grid points and predicts one structure at a time."
            )
        electrons = electrons or ElectronOptions()
        return predict_run(run, source, out, electrons, which=which, device=device, units=options.units, notify=notify)
    if electrons is not None and (changed := electrons.changed()):
        raise ForgefieldError(f"{changed[0]} is for LDOS runs; run {run.name} is a potential without electrons.")
    run.require_outputs()
    return predict_file(
        _potential(run, ensemble, which, device, head, uncertainty, trust_code),
        source,
        Path(out),
        batch or 16,
        labels=options.labels,
        units=options.units,
        labels_required=labels_required,
        overwrite=overwrite,
        model_devi=model_devi,
        as_labels=as_labels,
    )


def _potential(
    run: Run,
    ensemble: Sequence[RunSource],
    which: str,
    device: str,
    head: str | None,
    uncertainty: str | None,
    trust_code: bool,
) -> Potential:
    """The model of a run, with uncertainties if requested, or that of an ensemble."""
    if not ensemble:
        return with_uncertainty(run.load_potential(which, device, head=head), run, which, uncertainty)
    if head is not None:
        raise ForgefieldError("--head: the members of an ensemble have one energy each.")
    return Ensemble([run, *ensemble], which=which, device=device, trust_code=trust_code)


def uncertainty(
    run: RunSource, *, device: str = "cpu", directions: int | None = None, trust_code: bool = False
) -> Path:
    """Compute the uncertainties of a run's best weights from its training data and return the file.

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
    _require_first_rank("uncertainty")
    run = Run.open(run, trust_code=trust_code)
    if run.members:
        if directions is not None:
            raise ForgefieldError(f"directions has no effect for an ensemble, and run {run.name} is one.")
        calibrate_ensemble(run, training_data(run), device=device)
        return run.path / "run.json"
    fit_uncertainty(run, device=device, directions=directions)
    return uncertainty_path(run)


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
    _require_first_rank("select")
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


def tune(
    config: ConfigSource,
    *overrides: str,
    space: Sequence[str] = (),
    trials: int | None = None,
    fresh: bool = False,
    trust_code: bool = False,
) -> Path:
    """Search for good settings as in the section `tune` of a config, and return the folder of the search.

    The folder holds `best.yaml`, `tune.html`, `trials.csv` and the runs of all trials. Calling it again resumes the search.

    Parameters
    ----------
    config, *overrides
        As in `train`.
    space
        Additional dimensions as `KEY=SPEC` strings.
    trials
        Total number of trainings; default: `tune.trials`.
    fresh
        Start over; an existing search of that name is renamed.
    trust_code
        As in `train`.
    """
    from forgefield.tuning.search import run_search

    folder, code = run_search(config, overrides, space=space, trials=trials, fresh=fresh, trust_code=trust_code)
    if code != 0:
        raise ForgefieldError(f"The search was stopped (exit code {code}); call it again to resume.")
    return folder


def import_model(
    program: str,
    request: ImportRequest | str | os.PathLike[str],
    *,
    name: str | None = None,
    out: str | os.PathLike[str] = "runs",
) -> tuple[Run, ImportedModel]:
    """Import a model of another program as a run; returns the run and a description of the model.

    Parameters
    ----------
    program
        One of `models.registry.import_formats`, such as `nequip`.
    request
        The file, or an `ImportRequest` with the file and how to read it.
    name
        Name of the run; default: that of the file.
    out
        Folder of the run.
    """
    request = request if isinstance(request, ImportRequest) else ImportRequest(os.fspath(request))
    return create_run_from_import(program, request, name=name, out=out)


def import_mala(file: str | os.PathLike[str], *, name: str | None = None, out: str | os.PathLike[str] = "runs") -> Run:
    """Import the model of an archive written by MALA's `save_run` as a run. name, out: as in `import_model`."""
    return import_model("mala", file, name=name, out=out)[0]


def export(
    run: RunSource,
    out: str | os.PathLike[str],
    *,
    to: str | None = None,
    which: str = "best",
    head: str | None = None,
    device: str = "cpu",
    licence: str | None = None,
    sel: Sequence[int] | None = None,
    overwrite: bool = False,
    trust_code: bool = False,
) -> Path:
    """Write the model of a run to a file and return its path.

    Parameters
    ----------
    run
        Name or path of a run.
    out
        File to write.
    to
        Program that will read it: one of `models.registry.export_formats`, or `mliap` (LAMMPS); default: a package (.ff), which
        can be used in place of the run.
    which, head, trust_code
        As in `load`.
    device
        Device on which the exported model will run, for `aoti` and `torchscript`.
    licence
        Licence of the model, stored in the package.
    sel
        For `deepmd`: maximum number of neighbours of each species, if the model was trained without it.
    overwrite
        Replace the file `out` if it exists.
    """
    if Path(out).exists() and not overwrite:
        raise ForgefieldError(f"{out} exists already; --force overwrites it, -o FILE names another.")
    if to is not None and licence is not None:
        raise ForgefieldError(f"--licence is stored in packages only; files of {to} have no field for it.")
    if to in (None, "mliap") and sel is not None:
        raise ForgefieldError("--sel is an option of --to deepmd.")
    run = Run.open(run, trust_code=trust_code)
    run.require_head(head)
    if to is None:
        from forgefield.inference.packages import write_package

        return write_package(run, out, which=which, head=head, licence=licence)
    if to == "mliap":
        from forgefield.inference.lammps.mliap import write_mliap

        return write_mliap(run, out, which=which, head=head)
    run.require_single_model(f"exported to {to}")
    return exporter(to)(run.load_potential(which, device, head=head), out, sel=sel)


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

    _require_first_rank("md")
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

    _require_first_rank("relax")
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
        Import path of an ASE calculator, a run, or a JSON file with numbers.
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

    _require_first_rank("evaluate")
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

    _require_first_rank("learn")
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

    _require_first_rank("check")
    if frames < 1:
        raise ForgefieldError(f"frames is {frames}; it should be 1 or more.")
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


def _require_first_rank(verb: str) -> None:
    launch = detect_launch(os.environ)
    if launch.rank > 0:
        raise ForgefieldError(f"{verb} runs in one process: call it on rank 0 alone (this is rank {launch.rank}).")
