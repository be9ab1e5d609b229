"""Train models: `train` and `tune`, and the built-in example."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgefield.api.sources import ConfigSource, Structures
from forgefield.config.components import environment_of_children
from forgefield.config.loading import load_config, override_keys, preset_path, require_training_data
from forgefield.config.sources import read_yaml
from forgefield.config.template import commented_yaml
from forgefield.errors import ForgefieldError
from forgefield.inference.structures import as_files, has_structures
from forgefield.parallel.session import abort_all_on_error, current_ranks
from forgefield.parallel.spawn import run_ranks
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.fit import TrainingResult
from forgefield.training.problem.preflight import check_model_section
from forgefield.training.run.folder import config_of_run
from forgefield.training.run.journal import Journal
from forgefield.training.trainer import requested_processes
from forgefield.trust.ensembles import train_run
from forgefield.trust.uncertainty import fit_after_training


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
    if fitted.outcome == "finished":
        fitted.run.results_are_printed()
    return fitted.run


_SETS = ("train", "val", "test")


def _config_with_structures(
    config: ConfigSource, overrides: Sequence[str], data: Structures | Mapping[str, Any] | None, *, trust_code: bool
) -> Config:
    """The loaded config, in which structures in memory are replaced by files in the folder of its runs."""
    in_memory = dict(data) if isinstance(data, Mapping) else {} if data is None else {"train": data}
    if unknown := [str(name) for name in in_memory if name not in _SETS]:
        raise ForgefieldError(f"data= has '{unknown[0]}'; it takes {', '.join(_SETS)}.")
    section = config.get("data") if isinstance(config, dict) else None
    if isinstance(config, dict) and isinstance(section, Mapping):
        named = {name: value for name, value in section.items() if name in _SETS and has_structures(value)}
        if twice := sorted(named.keys() & in_memory.keys()):
            raise ForgefieldError(f"data.{twice[0]} is given twice, in the config and as data=; leave one of them out.")
        in_memory = {**named, **in_memory}
        config = {**config, "data": {name: value for name, value in section.items() if name not in named}}
    loaded = load_config(config, list(overrides), trust_code=trust_code)
    if not in_memory:
        return loaded
    for key in override_keys(overrides):
        if key.removeprefix("data.") in in_memory:
            raise ForgefieldError(f"{key} is given twice, as an override and as structures; leave one of them out.")
    first = current_ranks().is_rank_zero
    files = as_files(in_memory, Path(loaded.out) / "structures", write=first)
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
