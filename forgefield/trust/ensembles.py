"""`training.ensemble`: several models of one configuration, combined to one run.

Each member is an ordinary run, the same, bit for bit on a CPU, as if it had been trained alone with its seed:

    OUT/NAME/members/seed-0, seed-1, ...   the runs of the members
    OUT/NAME/checkpoints/                  the weights of all members in one file
    OUT/NAME/run.json                      what the members have in common, and the options of their models

The validation and test frames are the same for all members. A training that was interrupted, also with kill -9, resumes with
the member that was being trained; the weights are combined when all members are complete.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from forgefield.config.template import commented_yaml
from forgefield.config.trust import CONFIG
from forgefield.data.module import FrameData, read_data
from forgefield.errors import ForgefieldError
from forgefield.evaluation import Preparation, evaluate_training, is_unmeasured
from forgefield.files import write_atomically
from forgefield.inference.evaluate import predict_dataset
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.ranks import Ranks
from forgefield.runs import MEMBERS, SCALES, WEIGHTS, Run, joined_states, run_exists, versions
from forgefield.settings import Config
from forgefield.training.fit import TrainingResult, fit, is_first_start
from forgefield.training.options import EnsembleOptions, ensemble_options
from forgefield.training.problem.heads import has_energy
from forgefield.training.run.folder import has_begun, run_folder
from forgefield.training.run.journal import Journal
from forgefield.training.run.summary import now
from forgefield.trust.side_by_side import number_together, train_side_by_side
from forgefield.weights import digest, write_weights

_OF_MEMBERS = ("name", "seed", "status", "measured", "stopped_early", "initial_model", MEMBERS)
"""Entries of `run.json` of a member that are not those of the ensemble."""
ONE_DEVIATION = 0.6827
"""Share of normally distributed errors that are smaller than one standard deviation."""
UNFINISHED = ("stopped", "failed")
"""Outcomes of the training of a member after which the others are not trained."""


def train_run(
    config: Config,
    *,
    fresh: bool,
    new_journal: Callable[[], Journal],
    ranks: Ranks,
    trust_code: bool = False,
    prepare: Preparation | None = None,
) -> TrainingResult:
    """Train the model of a config, or its ensemble, and evaluate it. Calling it again resumes.

    fresh: rename an existing run first. new_journal: makes a journal for the messages of each run. prepare: called at the end
    of the training of each model, before it is evaluated.
    """
    journal = new_journal()
    try:
        if (options := ensemble_options(config.training.ensemble)) is not None:
            return _Training(config, options, journal, ranks, new_journal, prepare, trust_code).run(fresh=fresh)
        fitted = fit(config, fresh=fresh, journal=journal, ranks=ranks, trust_code=trust_code)
        if ranks.broadcast(fitted.outcome == "finished" or is_unmeasured(fitted)):
            return evaluate_training(fitted, config, journal, ranks, prepare=prepare)
        return fitted
    finally:
        journal.close()


def member_configs(config: Config, options: EnsembleOptions, folder: Path) -> list[Config]:
    """The configs of the members, whose runs are in `folder`. Their splits have one seed, that of the config."""
    split_seed = config.seed if config.data.split_seed is None else config.data.split_seed
    initial = _initial_runs(config)
    members = []
    for number in range(options.size):
        member = copy.deepcopy(config)
        member.seed = config.seed + number
        member.name, member.out = f"seed-{member.seed}", str(folder)
        member.training.ensemble, member.tune = None, None
        member.data.split_seed = split_seed
        member.data.bootstrap = config.data.bootstrap or options.bootstrap
        if initial:
            member.model["from"] = initial[number % len(initial)]
        members.append(member)
    return members


def _initial_runs(config: Config) -> list[str]:
    """Where members start from (`model.from`): all from one run, or from the members of an ensemble; empty for a new model."""
    name = config.model.get("from")
    if not isinstance(name, str) or not run_exists(name, out=config.out):
        return [] if name is None else [str(name)]
    run = Run.open(name, out=config.out)
    paths = [run.member_path(member) for member in run.members] or [run.path]
    return [str(path.absolute()) for path in paths]


def calibrate_ensemble(run: Run, data: FrameData, *, device: str = "cpu") -> dict[str, float]:
    """Store factors of the deviations of energies and of forces in a run, and return them.

    With them, 68 % of the errors of validation frames are smaller than one deviation. This quantile does not depend on the
    smallest deviations, which the mean of squared ratios would: those of a few members are sometimes tiny by chance.
    """
    if data.val is None:
        raise ForgefieldError(
            f"Run {run.name} has no validation frames (data.val), with which uncertainties are calibrated."
        )
    run.write_info(**{SCALES: None})
    found = predict_dataset(run.load_potential("best", device), data.val, device=device)
    scales = {}
    for name in ("energy", "forces"):
        error, deviation = (found[key].ravel() for key in (f"{name}_pred", f"{name}_uncertainty"))
        error = np.abs(error - found[f"{name}_ref"].ravel())
        counted = np.isfinite(error) & (deviation > 0)
        if counted.any():
            scales[name] = float(np.quantile(error[counted] / deviation[counted], ONE_DEVIATION))
    run.write_info(**{SCALES: scales})
    return scales


def _calibrate(fitted: TrainingResult, config: Config, journal: Journal, ranks: Ranks) -> None:
    """Calibrate an ensemble that has just been trained, if there are validation frames."""
    if not ranks.is_rank_zero or not config.training.uncertainty:
        return
    if fitted.data.val is None:
        journal.notify("The deviations of the ensemble are not calibrated: there are no validation frames.")
        return
    device = evaluation_device(config.trainer.get("accelerator"))
    scales = calibrate_ensemble(fitted.run, fitted.data, device=device)
    factors = ", ".join(f"{factor:.3g} ({name})" for name, factor in scales.items())
    journal.notify(
        f"Deviations of the ensemble are multiplied by {factors} to agree with the errors of validation frames."
    )


class _Training:
    """The training of one ensemble."""

    def __init__(
        self,
        config: Config,
        options: EnsembleOptions,
        journal: Journal,
        ranks: Ranks,
        new_journal: Callable[[], Journal],
        prepare: Preparation | None,
        trust_code: bool,
    ) -> None:
        if config.task is not None and not has_energy(config.task):
            raise ForgefieldError("training.ensemble: only models with an energy are combined to ensembles.")
        self.config, self.options, self.journal, self.ranks = config, options, journal, ranks
        self.new_journal, self.prepare, self.trust_code = new_journal, prepare, trust_code

    def run(self, *, fresh: bool) -> TrainingResult:
        """Train all members one after another or side by side, combine and evaluate them."""
        config, journal, ranks = self.config, self.journal, self.ranks
        quick = bool(config.trainer.get("fast_dev_run"))
        fresh = fresh and is_first_start(journal, ranks)
        with run_folder(config, fresh=fresh, quick=quick, journal=journal, ranks=ranks) as run:
            self._open(run)
            ranks.barrier()
            members = member_configs(config, self.options, run.path / MEMBERS)
            fitted = self._train(run, members)
            if quick or fitted.outcome in UNFINISHED:
                return replace(fitted, run=run)
            run = Run(run.path, trust_code=True)  # the members' trainings have settled that code may be imported
            changed = ranks.broadcast(self._combine(run, members) if ranks.is_rank_zero else None)
            outcome = "finished" if changed else "complete"
            fitted = TrainingResult(run, fitted.data or self._read_data(run), outcome)
            if ranks.broadcast(changed or is_unmeasured(fitted)):
                return evaluate_training(fitted, config, journal, ranks, prepare=_calibrate)
            journal.notify(f"Run {run.name} is complete.")
            return fitted

    def _open(self, run: Run) -> None:
        """Mark the folder as that of an ensemble, or check that it is one."""
        if not self.ranks.is_rank_zero:
            return
        if has_begun(run) or (run.exists and not run.members and run.info.get("status") != "new"):
            raise ForgefieldError(
                f"Run {run.name} is a single model, and the config is that of an ensemble (training.ensemble); name another "
                "run with name=NAME, or start over with --fresh."
            )
        self.journal.keep_in(run.path)
        write_atomically(run.path / "config.yaml", commented_yaml(self.config))
        if not run.exists:
            names = [member.name for member in member_configs(self.config, self.options, run.path / MEMBERS)]
            started = {"status": "running", "started": now(), "versions": versions(), "seed": self.config.seed}
            run.write_info(name=run.name, **started, members={name: {} for name in names})

    def _train(self, run: Run, members: Sequence[Config]) -> TrainingResult:
        """Train the members; the result of the last one, or of the first one that did not end its training."""
        together = number_together(self.options, self.config, self.ranks)
        if together > 1:
            self.journal.notify(f"Training {len(members)} members, {together} at the same time ...")
            return train_side_by_side(members, together, self.journal, trust_code=self.trust_code)
        fitted = TrainingResult(run, None, "complete")
        for number, member in enumerate(members, start=1):
            self.journal.notify(f"Member {number} of {len(members)}: {member.folder}")
            fitted = train_run(
                member,
                fresh=False,
                new_journal=self.new_journal,
                ranks=self.ranks,
                trust_code=self.trust_code,
                prepare=self.prepare,
            )
            if fitted.outcome in UNFINISHED:
                break
        return fitted

    def _combine(self, run: Run, members: Sequence[Config]) -> bool:
        """Write the weights of all members to one file, and what they share to `run.json`; whether anything changed."""
        runs = [Run(member.folder, trust_code=True) for member in members]
        infos = {member.name: member.info for member in runs}
        states = {which: joined_states([member.read_weights(which).state for member in runs]) for which in WEIGHTS}
        options = {name: info["model"] for name, info in infos.items()}
        changed = run.info.get("status") != "finished" or run.members != options
        for which, state in states.items():
            if not run.weights_path(which).exists() or run.read_weights(which).sha256 != digest(state):
                write_weights(run.weights_path(which), state, {MEMBERS: list(options)})
                changed = True
        if changed:
            first = next(iter(infos.values()))
            facts = {key: value for key, value in first.items() if key not in _OF_MEMBERS}
            facts |= {"started": run.info.get("started"), "finished": now(), MEMBERS: options, SCALES: None}
            run.write_info(
                **{**facts, "parameters": sum(info["parameters"] for info in infos.values()), "status": "finished"}
            )
        return changed

    def _read_data(self, run: Run) -> FrameData:
        """The data, where other processes have trained. Its training frames are not used."""
        config = self.config
        if config.data.cutoff is None:  # that of the model in model.from
            config = copy.deepcopy(config)
            config.data.cutoff = run.cutoff
        seed, species = config.seed if config.data.split_seed is None else config.data.split_seed, list(run.species)
        options = replace(config.data, species=species)
        return read_data(options, seed, rank=self.ranks.rank, world_size=self.ranks.world_size, trust=CONFIG)
