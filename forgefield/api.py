"""The verbs of Forgefield as Python functions; most of them are offered by `import forgefield`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forgefield.config.components import environment_of_children
from forgefield.config.loading import load_config, require_training_data
from forgefield.config.schema import Config, DataOptions
from forgefield.config.sources import read_yaml
from forgefield.config.template import commented_yaml
from forgefield.config.test_sets import is_named
from forgefield.errors import ForgefieldError
from forgefield.evaluation import (
    ONLY_NOISE,
    has_outputs,
    is_unmeasured,
    measure,
    name_of_test,
)
from forgefield.inference.ase import Calculator
from forgefield.inference.predict import predict_file
from forgefield.kinds import kind_of_model
from forgefield.ldos.inference.electrons import ElectronModel
from forgefield.ldos.inference.files import predict_electrons
from forgefield.ldos.model import LDOSNetwork
from forgefield.models.importing import ImportedModel, ImportRequest
from forgefield.models.potential import Potential
from forgefield.models.registry import importer
from forgefield.parallel.failures import abort_all_on_error, stop_all_ranks
from forgefield.parallel.launch import detect_launch
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.session import current_ranks
from forgefield.parallel.spawn import run_ranks
from forgefield.report.page import write_report
from forgefield.runs import Run, create_run_from_model, run_exists
from forgefield.training.fit import TrainingResult, code_after, fit
from forgefield.training.run.folder import config_of_run
from forgefield.training.run.journal import Journal
from forgefield.training.run.signals import StopControl, StopNow
from forgefield.training.trainer import processes_wanted

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Structures or snapshots: a file, folder, glob or store, or a list of them."""
TestData = Source | Mapping[str, Source]

__all__ = [
    "Calculator",
    "ElectronOptions",
    "Run",
    "load",
    "load_run",
    "predict",
    "report",
    "run_exists",
    "test",
    "train",
    "train_example",
    "tune",
]


def train(
    config: str | Path | dict[str, Any] | Config,
    *overrides: str,
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
    fresh
        Start over even if the run exists; the existing one is renamed.
    trust_code
        Whether to import code to which a run refers (`model.from`, or a run that is resumed) and the config does not.
    """
    with abort_all_on_error(current_ranks()):
        if isinstance(config, (str, Path)) and (Path(config) / "run.json").is_file():
            loaded = config_of_run(Run(Path(config)), overrides, trust_code=trust_code)
        else:
            loaded = load_config(config, list(overrides), trust_code=trust_code)
        require_training_data(loaded)
        fitted = train_with_outcome(loaded, fresh=fresh, trust_code=trust_code)
    if fitted.outcome == "failed":
        raise ForgefieldError(
            f"The training in several processes ended with exit code {fitted.exit_code}; see the messages above."
        )
    return fitted.run


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
    n = processes_wanted(config) if ranks.launch.launcher == "none" else 1
    if n > 1:
        return _train_in_processes(config, n, fresh=fresh, log=log, log_mode=log_mode, trust_code=trust_code)
    journal = Journal(ranks=ranks, file=log, mode=log_mode)
    try:
        fitted = fit(config, fresh=fresh, journal=journal, ranks=ranks, trust_code=trust_code)
        if ranks.broadcast(fitted.outcome == "finished" or is_unmeasured(fitted)):
            return _measured(fitted, config, journal, ranks)
        return fitted
    finally:
        journal.close()


def _measured(fitted: TrainingResult, config: Config, journal: Journal, ranks: Ranks) -> TrainingResult:
    """Evaluate the best model and write the report. A request to stop ends this at once; run the same command to finish it."""
    requeue_exit = config.training.checkpoint.requeue_exit
    try:
        with StopControl(None, requeue_exit=requeue_exit) as stop, stop.at_once():
            measure(fitted, config, journal, ranks)
    except StopNow as stopped:
        reason = stopped.request.reason
        sentence = f"Stopped during the final evaluation: {reason}. Run the same command to finish it."
        if ranks.is_rank_zero:
            journal.notify(sentence)
        code = code_after(stopped.request, requeue_exit, ranks, journal)
        stop_all_ranks(ranks, sentence, code)
        return replace(fitted, outcome="stopped", exit_code=code)
    return fitted


def _train_in_processes(
    config: Config, n: int, *, fresh: bool, log: Path | None, log_mode: str, trust_code: bool
) -> TrainingResult:
    """Start n processes on this machine that train together, and wait for them."""
    with tempfile.TemporaryDirectory(prefix="forgefield-") as folder:
        path = Path(folder) / f"{config.name}.yaml"
        path.write_text(commented_yaml(config))
        command = [sys.executable, "-m", "forgefield", "train", str(path), "-m", log_mode]
        command += ["--fresh"] if fresh else []
        command += ["--trust-code"] if trust_code else []
        command += ["-l", str(log)] if log is not None else []
        code = run_ranks(command, n, environ=environment_of_children())
    run = Run(config.folder, trust_code=code == 0)  # what it names, the config named or the user allowed
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
    """The config of the built-in example. make: whether to generate its data if it does not exist."""
    from importlib.resources import as_file, files

    from forgefield.data.example import make_example

    with as_file(files("forgefield.config") / "presets" / "example.yaml") as path:
        folder = Path(read_yaml(path)["data"]["train"]).parent
        if make and not all((folder / name).exists() for name in ("train.extxyz", "test.extxyz")):
            print(f"Making a small data set with ASE's EMT (copper-gold alloys) in {folder} ...", flush=True)
            make_example(folder, seed=0)
        return load_config(path, overrides)


def load(
    run: str | os.PathLike[str] | Run,
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
    run: str | os.PathLike[str] | Run,
    data: TestData,
    *,
    options: DataOptions | None = None,
    which: str = "best",
    device: str = "cpu",
    labels_required: bool = False,
    head: str | None = None,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Errors of a run's model on labelled frames, in meV/atom, meV/A and GPa. They are stored in the run with a parity plot.

    Parameters
    ----------
    run
        Name or path of a run.
    data
        A file, folder, glob or list of them; or several sets by name, `{"300K": "a.xyz", "600K": "b.xyz"}`, whose errors are
        then returned by name.
    options
        Labels and units of the data; default: as in training.
    which, device, head, trust_code
        As in `load`.
    labels_required
        Whether every label that `options` names must be in the data.
    """
    ranks = current_ranks()
    with abort_all_on_error(ranks):
        run = Run.open(run, trust_code=trust_code)
        run.require_head(head)
        settings = options if options is not None else _data_options(run)
        sets: Mapping[str, TestData] = data if isinstance(data, Mapping) and is_named(data) else {"": data}
        test_data, errors = run.kind.test.load(), {}
        for name, files in sets.items():
            errors[name] = test_data(
                run,
                files,
                settings,
                name_of_test(run, files, which=which, head=head, called=name),
                which=which,
                device=device,
                labels_required=labels_required,
                head=head,
                ranks=ranks,
            )
        if ranks.is_rank_zero:
            write_report(run.path)
        return errors if is_named(data) else errors[""]


def predict(
    run: str | os.PathLike[str] | Run,
    source: Source,
    out: str | os.PathLike[str],
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
) -> Path:
    """Predict the structures of `source` and return the path of the result.

    A potential writes the structures with energies, forces and stress to the file `out`; an LDOS run writes densities, DOS and
    energies to the new folder `out`.

    Parameters
    ----------
    run
        Name or path of a run.
    source
        A file, folder, glob or list of them. Labels are not needed; labels and other values in the files are kept.
    out
        File or folder to write.
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
    """
    _require_first_rank("predict")
    run = Run.open(run, trust_code=trust_code)
    run.require_head(head)
    options = options if options is not None else _data_options(run)
    if run.of_points:
        if overwrite:
            raise ForgefieldError(
                f"--force: run {run.name} is a run of grid points, which writes to a new folder only."
            )
        if batch is not None:
            raise ForgefieldError(
                f"data.batch.frames: run {run.name} is a run of grid points, which predicts one structure at a time."
            )
        return _predict_electrons(run, source, out, options, electrons or ElectronOptions(), which, device, notify)
    if electrons is not None and (changed := electrons.changed()):
        raise ForgefieldError(f"{changed[0]} is for LDOS runs; run {run.name} is a potential without electrons.")
    if not has_outputs(run):
        raise ForgefieldError(ONLY_NOISE.format(run.name))
    potential = run.load_potential(which, device, head=head)
    return predict_file(
        potential,
        source,
        Path(out),
        batch or 16,
        labels=options.labels,
        units=options.units,
        labels_required=labels_required,
        overwrite=overwrite,
    )


@dataclass(frozen=True)
class ElectronOptions:
    """Options for predictions of an LDOS run.

    temperature: of the electrons, K. grid: number of points along each cell vector; or spacing: their distance, A; default: as
    in the training snapshots. pseudopotentials: folder of UPF files. electrons: number of electrons in the cell. ldos: whether
    to write the LDOS, too.
    """

    temperature: float | None = None
    grid: Sequence[int] | None = None
    spacing: float | None = None
    pseudopotentials: str | os.PathLike[str] | None = None
    electrons: float | None = None
    ldos: bool = False

    def changed(self) -> list[str]:
        """Names of the options that are not the default."""
        return [name for name, value in vars(self).items() if value not in (None, False)]


def _predict_electrons(
    run: Run,
    source: Source,
    out: str | os.PathLike[str],
    options: DataOptions,
    asked: ElectronOptions,
    which: str,
    device: str,
    notify: Callable[[str], None],
) -> Path:
    settings = {name: value for name, value in vars(asked).items() if name not in ("temperature", "ldos")}
    model = ElectronModel(run, which=which, device=device, **settings)
    return predict_electrons(
        model, source, out, temperature=asked.temperature, ldos=asked.ldos, units=options.units, notify=notify
    )


def tune(
    config: str | Path | dict[str, Any] | Config,
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
    folder, code = tune_with_outcome(
        config, list(overrides), space=space, trials=trials, fresh=fresh, trust_code=trust_code
    )
    if code != 0:
        raise ForgefieldError(f"The search was stopped (exit code {code}); call it again to resume.")
    return folder


def tune_with_outcome(
    config: str | Path | dict[str, Any] | Config,
    overrides: list[str],
    *,
    space: Sequence[str] = (),
    trials: int | None = None,
    workers: int = 1,
    fresh: bool = False,
    worker: int | None = None,
    trust_code: bool = False,
) -> tuple[Path, int]:
    """Search and return the folder of the search and an exit code. worker: the number of this process among the workers that
    one command has started. Other parameters: as in `tune`."""
    from forgefield.tuning.page import write_page
    from forgefield.tuning.search import Stopped, move_aside, prepare, work, write_best
    from forgefield.tuning.workers import run_workers

    search = prepare(config, overrides, space=space, trials=trials, trust_code=trust_code)
    if fresh:
        move_aside(search)
    code = 0
    if workers > 1:
        search.open()
        words = [str(config), *overrides, *(word for spec in space for word in ("--space", spec))]
        words += ["--trust-code"] if trust_code else []
        code = run_workers([*words, *(["--trials", str(trials)] if trials is not None else [])], workers)
        study = search.open()
    else:
        try:
            study = work(search, worker=worker or 0)
        except Stopped as stopped:
            print("Stopped; run the same command to resume.")
            return search.folder, stopped.code
    if worker is not None:
        return search.folder, code
    best, page = write_best(search, study), write_page(search, study)
    if best is not None:
        print(f"best: {search.monitor} {study.best_value:.6g}, trial {study.best_trial.number}; {best}")
        print(f"its run: {search.folder / 'trials' / study.best_trial.user_attrs['folder']}")
    print(f"figures: {page}")
    return search.folder, code


def import_model(
    program: str, request: ImportRequest, *, name: str | None = None, out: str | os.PathLike[str] = "runs"
) -> tuple[Run, ImportedModel]:
    """A run around a model of another program, and what was read. program: see `models.registry.import_formats`.

    name: of the run; default: that of the file.
    """
    reader = importer(program)
    reader.check(request, program)
    imported = reader.read(request)
    build = kind_of_model(imported.resolved["name"]).build_model.load()
    model = build(imported.resolved, precision=imported.precision, seed=0, trust=reader.trust)
    model.load_state_dict(imported.state)
    created = create_run_from_model(
        name=name or reader.run_name(request),
        out=out,
        resolved=imported.resolved,
        potential=model,
        origin=imported.origin,
        precision=imported.precision,
        settings=imported.settings,
        facts=imported.facts,
    )
    return created, imported


def import_mala(file: str | os.PathLike[str], *, name: str | None = None, out: str | os.PathLike[str] = "runs") -> Run:
    """A run with the model in an archive of MALA's `save_run`. name: of the run; default: that of the file."""
    return import_model("mala", ImportRequest(str(file)), name=name, out=out)[0]


def report(run: str | os.PathLike[str] | Run) -> Path:
    """Rewrite `report.html` of a run and return its path."""
    _require_first_rank("report")
    return write_report(Run.open(run).path)


def _require_first_rank(verb: str) -> None:
    launch = detect_launch(os.environ)
    if launch.rank > 0:
        raise ForgefieldError(f"{verb} runs in one process: call it on rank 0 alone (this is rank {launch.rank}).")


def _data_options(run: Run) -> DataOptions:
    """The data section of the run; for an imported model, the defaults. Fields that the model predicts are read as in training,
    where a store said what they are, too."""
    options = run.config.data
    if options.labels.fields is None and run.heads:
        options.labels.fields = {
            name: {"per": head["per"], "shape": head["shape"], "unit": head["unit"]} for name, head in run.heads.items()
        }
    return options
