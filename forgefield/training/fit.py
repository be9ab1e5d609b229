"""One training from config to trained weights: open the run folder, prepare data and model, run Lightning.

`fit` is the same for all kinds of samples; what differs between frames and points is in `problem.Problem`. Whether a run is
new, resumed or already complete is decided here and reported. With several processes all of them run `fit`; rank 0 decides and
writes, and sends its decisions to the others.
"""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.config.nearest import did_you_mean
from forgefield.config.template import commented_yaml
from forgefield.config.typed import select
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.parallel.accelerators import resolve_accelerator
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.reductions import StepExchange
from forgefield.parallel.session import stop_all_ranks
from forgefield.runs import Run, versions
from forgefield.settings import Config
from forgefield.training.callbacks.logs import MetricsLog, StepLog, TensorBoardLog
from forgefield.training.callbacks.monitor import BestModel, EarlyStop
from forgefield.training.callbacks.pace import Pace
from forgefield.training.callbacks.progress import RunProgress
from forgefield.training.callbacks.run_checkpoint import RunCheckpoint
from forgefield.training.optim.schedules import learning_rate_factor
from forgefield.training.options import EarlyStoppingOptions, TrainingOptions
from forgefield.training.precision import Precision
from forgefield.training.problem.preflight import check_settings, require_same_settings
from forgefield.training.problem.problem import Problem, TrainingSession, problem_for
from forgefield.training.run.checkpoint import ResumePoint, find_resume_point
from forgefield.training.run.folder import compare_with_stored_config, has_begun, run_folder
from forgefield.training.run.journal import Journal
from forgefield.training.run.signals import StopControl, StopNow, StopRequested, ask_slurm_to_requeue, exit_code
from forgefield.training.run.start_summary import summarise
from forgefield.training.run.summary import hardware, now
from forgefield.training.run.writer import BackgroundWriter
from forgefield.training.step_loop import install_step_loop
from forgefield.training.trainer import (
    Loader,
    build_callbacks,
    build_trainer,
    lightning_errors,
    merge_training_options,
    pop_max_seconds,
)

_LIMITS = ("trainer.max_epochs", "trainer.max_steps", "training.early_stopping")
"""Settings that decide when training ends."""


@dataclass(frozen=True)
class TrainingResult:
    """run: the run folder. data: the training data; None if other processes trained. outcome: `finished`, `complete` (there
    was nothing left to train), `stopped`, `quick`, or `failed` in other processes.

    changed: settings that differ from those the run was started with.
    """

    run: Run
    data: Any
    outcome: str
    exit_code: int = 0
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """A prepared training. options: the config's `trainer` section, completed on the way."""

    run: Run
    config: Config
    options: dict[str, Any]
    problem: Problem
    callbacks: Sequence[Callback] = ()

    @property
    def quick(self) -> bool:
        return bool(self.options.get("fast_dev_run"))

    @property
    def columns(self) -> list[str]:
        """Names of all metrics that a row may have."""
        validated = self.problem.validated if self.problem.has_val else []
        names = [f"{split}/{name}" for split in ("train", *validated) for name in self.problem.metric_names(split)]
        sums = [f"{split}/weighted_sum" for split in validated] if self.config.training.monitor_weights else []
        return [*names, *sums]

    def write_record(self, ranks: Ranks) -> None:
        """Store settings and `run.json`, once it is certain that they will be used."""
        if not ranks.is_rank_zero:
            return
        run, problem = self.run, self.problem
        status = run.info["status"] if has_begun(run) else "new"
        setting = self.config.training.precision
        write_atomically(run.path / "config.yaml", commented_yaml(self.config))
        run.write_info(
            name=run.name,
            status=status,
            versions=versions(),
            precision=Precision(setting).weights,
            training_precision=setting,
            seed=self.config.seed,
            model=problem.resolved,
            parameters=sum(p.numel() for p in problem.model.parameters()),
            task=dict(problem.task.describe()),
            data=[list(row) for row in problem.data.describe()],
            data_fingerprint=problem.fingerprint,
            world_size=ranks.world_size,
            started=(run.info.get("started") if run.exists else None) or now(),
            **problem.facts(),
        )


def fit(
    config: Config,
    *,
    fresh: bool,
    journal: Journal,
    ranks: Ranks,
    callbacks: Sequence[Callback] = (),
    trust_code: bool = False,
) -> TrainingResult:
    """Train as described by `config`.

    fresh: move an existing run of that name aside; without it, the run is resumed. callbacks: in addition to those of the
    config. trust_code: whether code that a run names, and not the config, may be imported.
    """
    options = copy.deepcopy(config.trainer)
    require_same_settings(config, ranks)
    lr_factor = learning_rate_factor(config.training.scale_lr, ranks.world_size)
    check_settings(config, options, ranks)
    if (note := resolve_accelerator(options, world_size=ranks.world_size)) is not None:
        journal.notify(note)
    merge_training_options(options, config.training)
    requeue_exit = config.training.checkpoint.requeue_exit
    stop = StopControl(pop_max_seconds(options), requeue_exit=requeue_exit)
    session = TrainingSession(ranks, journal, stop, lr_factor, trust_code)
    fresh = fresh and is_first_start(journal, ranks)
    quick = bool(options.get("fast_dev_run"))
    with (
        session.stop,
        run_folder(
            config, fresh=fresh, quick=quick, journal=journal, ranks=ranks, hears_signals=session.stop.hears_signals
        ) as run,
    ):
        journal.keep_in(run.path)
        try:
            return _fit_in(run, config, options, callbacks, session)
        except StopNow as stopped:
            return _stopped_at_once(run, stopped.request, requeue_exit, session)


def is_first_start(journal: Journal, ranks: Ranks) -> bool:
    """Whether the launcher has not restarted the job; a restart is reported, because --fresh does not apply to it."""
    if not max(ranks.all_gather(ranks.launch.restarts)):  # not every agent of torchrun counts every restart
        return True
    journal.notify(
        "The launcher has restarted the job: the run resumes, because --fresh applies to the first start only."
    )
    return False


def _fit_in(
    run: Run, config: Config, options: dict[str, Any], callbacks: Sequence[Callback], session: TrainingSession
) -> TrainingResult:
    """Train in a run folder that this process has locked."""
    ranks, journal = session.ranks, session.journal
    problem = problem_for(run, config, options, session)
    config = problem.config
    changed = ranks.broadcast(_changed_settings(run, config, session) if ranks.is_rank_zero else None)
    L.seed_everything(config.seed, verbose=False)
    problem.prepare()
    run = Run(run.path, trust_code=True)  # `prepare` has settled that code it names may be imported
    plan = _Plan(run, config, options, problem, callbacks)
    restart, is_done, has_outputs = ranks.broadcast(
        _where_to_resume(plan, changed, journal) if ranks.is_rank_zero else None
    )
    if restart is not None and is_done and has_outputs:
        longer = "trainer.max_steps" if options.get("max_epochs") in (None, -1) else "trainer.max_epochs"
        journal.notify(
            f"Run {run.name} is complete ({restart.step} steps); raise {longer} to train longer, or start over with --fresh."
        )
        plan.write_record(ranks)
        return TrainingResult(run, problem.data, "complete", changed=changed)
    if (stopped := _stop_requested(session)) is not None:
        plan.write_record(ranks)
        return _stopped(plan, stopped, "Stopped before the first step", session)
    with BackgroundWriter() as writer:
        return _run_lightning(plan, restart, session, writer, is_done=is_done)


def _stop_requested(session: TrainingSession) -> StopRequested | None:
    """The request to stop that any rank received while data was read, on all ranks; None if there was none."""
    flags = session.ranks.all_gather(session.stop.flags())
    return session.stop.combined_request([sum(column) for column in zip(*flags)])


def _changed_settings(run: Run, config: Config, session: TrainingSession) -> list[str]:
    before = int(run.info.get("world_size", 1)) if run.exists else session.ranks.world_size
    return [
        change.key
        for change in compare_with_stored_config(
            run, config, session.journal, world_sizes=(before, session.ranks.world_size)
        )
    ]


def _where_to_resume(plan: _Plan, changed: list[str], journal: Journal) -> tuple[ResumePoint | None, bool, bool]:
    """The checkpoint to resume from, whether training had ended there, and whether its final weights were written."""
    run = plan.run
    restart = find_resume_point(run.checkpoints, journal.notify)
    if restart is None:
        return None, False, False
    if restart.finished is not None:
        is_done = restart.finished == _limits(plan.config)
    else:  # a checkpoint of an earlier version does not record it
        is_done = run.info.get("status") == "finished" and not any(key.startswith(_LIMITS) for key in changed)
    return restart, is_done, run.info.get("status") == "finished" and _has_weights(run, restart.step)


def _has_weights(run: Run, step: int) -> bool:
    """Whether the weights of the last step were written and are undamaged."""
    try:
        return run.read_weights("last").about.get("step") == step and run.weights_path("best").exists()
    except ForgefieldError:
        return False


def _limits(config: Config) -> str:
    """The settings that decide when training ends, as text."""
    values = asdict(config)
    return json.dumps({key: select(values, key) for key in _LIMITS}, sort_keys=True, default=str)


def _run_lightning(
    plan: _Plan, restart: ResumePoint | None, session: TrainingSession, writer: BackgroundWriter, *, is_done: bool
) -> TrainingResult:
    """Train; or, if training had ended (`is_done`) without writing its last files, restore the state and write them."""
    run, config, problem, ranks, journal = plan.run, plan.config, plan.problem, session.ranks, session.journal
    monitor = _monitor(config.training, plan.columns, problem.has_val, journal)
    first = RunCheckpoint(
        run.checkpoints,
        config.training.checkpoint,
        session.stop,
        writer,
        ranks=ranks,
        enabled=not plan.quick,
        notify=journal.notify if ranks.is_rank_zero else lambda text: None,
        limits=_limits(config),
        is_done=is_done,
    )
    first.exchange = exchange = StepExchange(first.flags) if ranks.world_size > 1 else None
    module = problem.module(monitor, exchange, restart, plan.quick)
    metrics_log = MetricsLog(run.path, plan.columns, module.throughput.columns, note=journal.note, units=problem.units)
    callbacks = [metrics_log, *_callbacks(plan, monitor, restart.step if restart else 0, session, exchange, writer)]
    trainer = build_trainer(plan.options, folder=run.path, first=first, callbacks=callbacks, ranks=ranks)
    install_step_loop(trainer)
    if restart is not None and trainer.max_epochs not in (None, -1) and restart.epoch > trainer.max_epochs:
        raise ForgefieldError(
            f"Run {run.name} has completed {restart.epoch} epochs, more than trainer.max_epochs={trainer.max_epochs}."
        )
    device = trainer.strategy.root_device
    precision = Precision(config.training.precision)
    precision.require_device(device)
    problem.refuse(device)
    if not plan.quick:
        precision.require_end(epochs=trainer.max_epochs, steps=trainer.max_steps)
    plan.write_record(ranks)
    if ranks.is_rank_zero:
        metrics_log.start(restart.rows if restart else 0)
    loader = problem.loader(device)
    if restart is not None:
        first.first_batch = _start_loader(loader, restart, plan, session)
    summarise(journal, problem, trainer, monitor)
    _write_status(
        run,
        ranks,
        status="running",
        measured=None,
        hardware=hardware(device, ranks.world_size),
        monitor=monitor,
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
    )
    try:
        with lightning_errors("trainer or training"):
            trainer.fit(
                module,
                train_dataloaders=loader,
                val_dataloaders=problem.val_loader() if problem.has_val else None,
                ckpt_path=str(restart.path) if restart else None,
                weights_only=True,
            )
    except StopRequested as stopped:
        writer.wait()
        return _stopped(plan, stopped, f"Stopped after step {trainer.global_step}", session)
    writer.wait()
    if plan.quick:
        return TrainingResult(run, problem.data, "quick")
    stopped_early = next((callback.reason for callback in callbacks if isinstance(callback, EarlyStop)), None)
    _write_status(
        run,
        ranks,
        status="finished",
        steps=trainer.global_step,
        epochs=trainer.current_epoch,
        finished=now(),
        stopped_early=stopped_early,
    )
    return TrainingResult(run, problem.data, "finished")


def _callbacks(
    plan: _Plan,
    monitor: str,
    step: int,
    session: TrainingSession,
    exchange: StepExchange | None,
    writer: BackgroundWriter,
) -> list[Callback]:
    """All callbacks but the two that must come first, in the order in which they act. step: at which the run resumes."""
    run, training, ranks = plan.run, plan.config.training, session.ranks
    shows_progress = ranks.is_rank_zero and plan.options.get("enable_progress_bar", True)
    if not ranks.is_rank_zero:
        plan.options["enable_progress_bar"] = False
    return [
        *([] if plan.quick else [BestModel(run.checkpoints, monitor, writer)]),
        *([TensorBoardLog(run.path / "tensorboard", training.tensorboard, step)] if training.tensorboard else []),
        StepLog(asdict(plan.config), tensorboard=bool(training.tensorboard), from_step=step),
        *([_early_stop(training.early_stopping, monitor, session)] if training.early_stopping is not None else []),
        *([Pace(ranks, session.journal, exchange)] if ranks.world_size > 1 else []),
        *(
            [
                RunProgress(
                    session.journal.console,
                    monitor=monitor,
                    max_seconds=session.stop.seconds_left(),
                    units=plan.problem.units,
                )
            ]
            if shows_progress
            else []
        ),
        *build_callbacks(plan.config.callbacks),
        *plan.callbacks,
    ]


def _early_stop(options: EarlyStoppingOptions, monitor: str, session: TrainingSession) -> EarlyStop:
    return EarlyStop(
        options.monitor or monitor,
        patience=options.patience,
        min_delta=options.min_delta,
        notify=session.journal.notify,
    )


def _start_loader(loader: Loader, restart: ResumePoint, plan: _Plan, session: TrainingSession) -> int:
    """Move the loader to the position of the checkpoint. Returns the number of the first batch."""
    notify, n = session.journal.notify, session.ranks.world_size
    loader.set_epoch(restart.epoch)
    first_batch = loader.start_at(restart.sample)
    notify(f"Resuming run {plan.run.name} at step {restart.step} (epoch {restart.epoch + 1}) from {restart.path.name}.")
    if restart.world_size != n:
        rates = " Learning rates follow training.scale_lr." if plan.config.training.scale_lr != "none" else ""
        notify(
            f"It was saved on {restart.world_size} ranks and resumes on {n}: the remaining samples of the epoch are used "
            f"exactly once.{rates}"
        )
    return first_batch


def _stopped(plan: _Plan, stopped: StopRequested, when: str, session: TrainingSession) -> TrainingResult:
    _write_status(plan.run, session.ranks, status="stopped")
    session.journal.notify(f"{when}: {stopped.reason}. Run the same command to resume.")
    code = code_after(stopped, plan.config.training.checkpoint.requeue_exit, session.ranks, session.journal)
    return TrainingResult(plan.run, plan.problem.data, "stopped", exit_code=code)


def _stopped_at_once(run: Run, stopped: StopRequested, requeue_exit: int, session: TrainingSession) -> TrainingResult:
    """Stopped when there was nothing to save: while data was read or an engine was compiled."""
    ranks, journal = session.ranks, session.journal
    has_checkpoint = has_begun(run)
    when = "Stopped before the next step" if has_checkpoint else "Stopped before the first step"
    sentence = f"{when}: {stopped.reason}. Run the same command to resume."
    if ranks.is_rank_zero:
        if run.exists and run.info.get("status") == "running":
            run.write_info(status="stopped")
        journal.notify(sentence)
    code = code_after(stopped, requeue_exit, ranks, journal)
    stop_all_ranks(ranks, sentence, code)
    return TrainingResult(run, None, "stopped", exit_code=code)


def code_after(stopped: StopRequested, requeue_exit: int, ranks: Ranks, journal: Journal) -> int:
    """The exit code of a training that was stopped. If the signal asks for it, SLURM requeues the job."""
    if stopped.signal_number == signal.SIGUSR1 and ranks.is_rank_zero:
        ask_slurm_to_requeue(journal.notify)
    return exit_code(stopped, requeue_exit)


def _write_status(run: Run, ranks: Ranks, **values: Any) -> None:
    if ranks.is_rank_zero:
        run.write_info(**values)


def _monitor(training: TrainingOptions, columns: list[str], has_val: bool, journal: Journal) -> str:
    """The metric that selects the best model. Raises an error for a metric that this run does not have."""
    monitor = training.monitor
    if not has_val and monitor == "val/loss":
        monitor = "train/loss"
        journal.notify("There is no validation: the best model is the one with the lowest training loss.")
    watched = {"training.monitor": monitor}
    if training.early_stopping is not None and training.early_stopping.monitor:
        watched["training.early_stopping.monitor"] = training.early_stopping.monitor
    watched |= {f"training.monitor_weights.{name}": f"val/{name}" for name in training.monitor_weights or {}}
    for setting, name in watched.items():
        if name in columns and name.endswith(("_accuracy", "_f1")):
            raise ForgefieldError(
                f"{setting}={name}: a monitored metric must be one that is better when smaller; use "
                f"{name.rpartition('_')[0]}_cross_entropy or val/loss."
            )
        if name not in columns:
            reason = "; without validation only train/... can be monitored" if not has_val else ""
            raise ForgefieldError(f"{setting}={name} is not a metric of this run{reason}.{did_you_mean(name, columns)}")
    return monitor
