"""One training from config to trained weights: open or continue the run folder, prepare data and model, run Lightning.

Read top to bottom, `fit` is the whole story. Whether a run is new, continued or already complete is decided here, and said.
With several processes all of them run it; rank 0 decides and writes, the others are told.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig

from forgefield.config.nearest import did_you_mean
from forgefield.config.template import commented_yaml
from forgefield.data.batch import batch_shapes
from forgefield.data.module import DataModule
from forgefield.data.readers import plain
from forgefield.data.sampling.loader import FrameLoader
from forgefield.errors import ForgefieldError
from forgefield.files import write_whole
from forgefield.models.potential import Potential
from forgefield.models.registry import branch_names, build_model
from forgefield.parallel.accelerators import evaluation_device, settle_accelerator
from forgefield.parallel.exchange import StepExchange
from forgefield.parallel.group import Ranks
from forgefield.parallel.learning_rate import learning_rate_factor
from forgefield.runs import Run, versions
from forgefield.tasks.task import Task
from forgefield.training.adaptation import add_low_rank, freeze, require_trained
from forgefield.training.callbacks.best_model import BestModel
from forgefield.training.callbacks.metrics_log import MetricsLog
from forgefield.training.callbacks.pace import Pace
from forgefield.training.callbacks.progress import RunProgress
from forgefield.training.callbacks.run_checkpoint import RunCheckpoint
from forgefield.training.callbacks.tensorboard import TensorBoardLog
from forgefield.training.checkpoint import Restart, find_restart
from forgefield.training.engines.choose import refuse_engine
from forgefield.training.engines.size_plan import plan_sizes
from forgefield.training.engines.start import EngineStarter
from forgefield.training.folder import compare_with_stored_config, has_begun, run_folder
from forgefield.training.initial_model import InitialModel, initial_model
from forgefield.training.journal import Journal
from forgefield.training.module import TrainingModule
from forgefield.training.precision import Precision
from forgefield.training.preflight import (
    check_settings,
    require_any_label,
    require_inputs,
    require_same_data,
    require_same_settings,
)
from forgefield.training.requeue import ask_slurm_to_requeue
from forgefield.training.resolved_model import built_task, resolved_model, wanted_task
from forgefield.training.signals import StopRequested, StopWish
from forgefield.training.start_summary import summarise
from forgefield.training.trainer import (
    build_trainer,
    early_stopping,
    lightning_errors,
    take_max_seconds,
    user_callbacks,
)
from forgefield.training.transfer import Transfer, transfer

_LIMITS = ("trainer.max_epochs", "trainer.max_steps", "training.early_stopping")


@dataclass(frozen=True)
class Fitted:
    """run: the folder. data: what it was trained on, None where other processes did it. outcome: `finished`, `complete` (it was
    so before), `stopped`, `quick`, or `failed` in other processes.

    changed: settings that differ from when the run was started.
    """

    run: Run
    data: DataModule | None
    outcome: str
    exit_code: int = 0
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Party:
    """Who trains, how they tell the user, and whether they are asked to stop. lr_factor: what their number does to learning
    rates."""

    ranks: Ranks
    journal: Journal
    stop: StopWish
    lr_factor: float


@dataclass(frozen=True)
class _Record:
    """What `run.json` says about a run beside its settings."""

    task: Task
    model: dict[str, Any]
    fingerprint: str
    parameters: int
    initial_model: dict[str, Any] | None = None

    def write(self, run: Run, config: DictConfig, data: DataModule, ranks: Ranks) -> None:
        """Store settings and record, when it is certain that they will be used."""
        if not ranks.is_first:
            return
        status = run.info["status"] if has_begun(run) else "new"
        setting = plain(config.training.precision)
        write_whole(run.path / "config.yaml", commented_yaml(config))
        run.write_info(
            name=run.name,
            status=status,
            versions=versions(),
            species=list(data.species.symbols),
            cutoff=float(config.data.cutoff),
            precision=Precision(setting).weights,
            training_precision=setting,
            seed=config.seed,
            model=self.model,
            parameters=self.parameters,
            task=dict(self.task.describe()),
            statistics=asdict(data.statistics),
            data=[list(row) for row in data.describe()],
            data_fingerprint=self.fingerprint,
            world_size=ranks.world_size,
            initial_model=self.initial_model,
        )


@dataclass(frozen=True)
class _Plan:
    """What is trained, on what, with which settings. options: the config's `trainer` section, completed on the way."""

    run: Run
    config: DictConfig
    options: dict[str, Any]
    data: DataModule
    record: _Record

    @property
    def quick(self) -> bool:
        return bool(self.options.get("fast_dev_run"))

    @property
    def has_val(self) -> bool:
        return self.data.val is not None and self.options.get("limit_val_batches") != 0

    @property
    def columns(self) -> list[str]:
        """Every metric that a row may hold."""
        task = self.record.task
        names = ["loss", *task.error_metrics(self.data.species.symbols).names()]
        return [f"{split}/{name}" for split in (("train", "val") if self.has_val else ("train",)) for name in names]


def fit(config: DictConfig, *, fresh: bool, journal: Journal, ranks: Ranks) -> Fitted:
    """Train as `config` says. With `fresh` an existing run of that name is moved aside, else it is continued."""
    options: dict[str, Any] = plain(config.trainer)
    require_same_settings(config, ranks)
    lr_factor = learning_rate_factor(config.training.scale_lr, ranks.world_size)
    check_settings(config, options, ranks)
    if (note := settle_accelerator(options, world_size=ranks.world_size)) is not None:
        journal.say(note)
    party = Party(ranks, journal, StopWish(take_max_seconds(options)), lr_factor)
    if fresh and max(ranks.everyone(ranks.launch.restarts)):  # not every agent of torchrun counts every restart
        journal.say("The job was started again by its launcher: the run goes on, --fresh held for the first start.")
        fresh = False
    quick = bool(options.get("fast_dev_run"))
    with party.stop, run_folder(config, fresh=fresh, quick=quick, journal=journal, ranks=ranks) as run:
        journal.keep_in(run.path)
        initial = initial_model(run, config, ranks)
        config = config if initial is None else initial.settle(config, journal.say)
        changed = ranks.share(_changed_settings(run, config, party) if ranks.is_first else None)
        whose = None if initial is None else initial.known.whose
        data = DataModule(config.data, config.seed, rank=ranks.rank, world_size=ranks.world_size, species_of=whose)
        data.prepare(converting=_conversion_report(journal.say))
        L.seed_everything(config.seed, verbose=False)
        task, resolved, fingerprint, change = _prepare_model(run, config, data, ranks, initial)
        precision = Precision(config.training.precision).weights
        potential = build_model(resolved, precision=precision, seed=config.seed)
        if initial is not None and change is not None:
            _start_from(initial, change, potential, resolved, data, options, party)
        _choose_trained(potential, config.training, journal.say)
        n_parameters = sum(p.numel() for p in potential.parameters())
        require_inputs(potential, data)
        if potential.needs_keys:
            data.key_frames()
        record = _Record(task, resolved, fingerprint, n_parameters, initial.record if initial is not None else None)
        plan = _Plan(run, config, options, data, record)
        restart, status = ranks.share(_where_to_go_on(run, journal) if ranks.is_first else None)
        limits_changed = any(key.startswith(_LIMITS) for key in changed)
        if restart is not None and status == "finished" and not limits_changed:
            journal.say(f"Run {run.name} is complete ({restart.step} steps); start over with --fresh.")
            record.write(run, config, data, ranks)
            return Fitted(run, data, "complete", changed=changed)
        if (stopped := _asked_already(party)) is not None:
            record.write(run, config, data, ranks)
            return _stopped(plan, stopped, "Stopped before the first step", party)
        return _run_lightning(plan, potential, restart, party)


def _conversion_report(say: Callable[[str], None]) -> Callable[[int, int | None], None]:
    """Tells in ten steps how far `data.lazy` is with its one conversion."""
    told = -1

    def report(done: int, total: int | None) -> None:
        nonlocal told
        step = 10 * done // total if total else done // 50_000
        if step > told:
            told = step
            of = f" of {total}" if total else ""
            say(f"data.lazy: the data is converted once ({done}{of} frames); later runs use what is kept.")

    return report


def _asked_already(party: Party) -> StopRequested | None:
    """Whether any rank was asked to stop while data was read; the same answer on all."""
    flags = party.ranks.everyone(party.stop.flags())
    return party.stop.look_together([sum(column) for column in zip(*flags)])


def _changed_settings(run: Run, config: DictConfig, party: Party) -> list[str]:
    before = int(run.info.get("world_size", 1)) if run.exists else party.ranks.world_size
    return [
        change.key
        for change in compare_with_stored_config(
            run, config, party.journal, world_sizes=(before, party.ranks.world_size)
        )
    ]


def _where_to_go_on(run: Run, journal: Journal) -> tuple[Restart | None, str | None]:
    restart = find_restart(run.checkpoints, journal.say)
    return restart, run.info.get("status") if run.exists else None


def _run_lightning(plan: _Plan, potential: Potential, restart: Restart | None, party: Party) -> Fitted:
    run, config, data, ranks, journal = plan.run, plan.config, plan.data, party.ranks, party.journal
    monitor = _monitor(config.training, plan.columns, plan.has_val, journal)
    exchange = StepExchange(party.stop.flags) if ranks.world_size > 1 else None
    module = TrainingModule(
        potential,
        plan.record.task,
        config.training,
        data.species.symbols,
        monitor=monitor,
        ranks=ranks,
        exchange=exchange,
        lr_factor=party.lr_factor,
        starter=_engine_starter(plan, party, restart),
        shapes=batch_shapes(data.train.fields),
    )
    first = RunCheckpoint(
        run.checkpoints,
        config.training.checkpoint,
        party.stop,
        ranks=ranks,
        exchange=exchange,
        enabled=not plan.quick,
    )
    metrics_log = MetricsLog(run.path, plan.columns)
    callbacks = [metrics_log, *_callbacks(plan, monitor, restart.step if restart else 0, party, exchange)]
    trainer = build_trainer(config, plan.options, folder=run.path, first=first, callbacks=callbacks, ranks=ranks)
    if restart is not None and trainer.max_epochs not in (None, -1) and restart.epoch > trainer.max_epochs:
        raise ForgefieldError(
            f"Run {run.name} has {restart.epoch} epochs behind it already, more than trainer.max_epochs={trainer.max_epochs}."
        )
    precision = Precision(config.training.precision)
    precision.require_device(trainer.strategy.root_device)
    refuse_engine(config.training, trainer.strategy.root_device)
    if not plan.quick:
        precision.require_end(epochs=trainer.max_epochs, steps=trainer.max_steps)
    plan.record.write(run, config, data, ranks)
    if ranks.is_first:
        metrics_log.start(restart.rows if restart else 0)
    if trainer.strategy.root_device.type == "cuda":
        data.train_on_gpu()
    loader = data.train_dataloader()
    if plan.options.get("overfit_batches"):
        journal.say("trainer.overfit_batches is set: the same frames are used every epoch, without shuffling.")
        loader.keep_order()
    if restart is not None:
        first.first_batch = _go_on(loader, restart, plan, party)
    summarise(journal, run, config, data, plan.record.task, potential, trainer, monitor, ranks, party.lr_factor)
    _write_status(run, ranks, status="running")
    try:
        with lightning_errors("trainer or training"):
            trainer.fit(
                module,
                train_dataloaders=loader,
                val_dataloaders=data.val_dataloader() if plan.has_val else None,
                ckpt_path=str(restart.path) if restart else None,
                weights_only=True,
            )
    except StopRequested as stopped:
        return _stopped(plan, stopped, f"Stopped after step {trainer.global_step}", party)
    if plan.quick:
        return Fitted(run, data, "quick")
    _write_status(run, ranks, status="finished", steps=trainer.global_step, epochs=trainer.current_epoch)
    return Fitted(run, data, "finished")


def _engine_starter(plan: _Plan, party: Party, restart: Restart | None) -> EngineStarter:
    """A resumed run goes on with the engine it was started with, unless the config names another."""
    run, ranks = plan.run, party.ranks
    before = run.info.get("engine") if ranks.is_first and restart is not None else None
    return EngineStarter(
        plan.config.training,
        ranks,
        plan=lambda: plan_sizes(plan.data.train_dataloader().batch_sizes(), at_most=plan.config.training.graphs.sizes),
        tolerance=Precision(plan.config.training.precision).tolerance,
        say=party.journal.say,
        chosen_before=ranks.share(before),
        keep=lambda choice: None if plan.quick else _write_status(run, ranks, engine=choice),
    )


def _callbacks(plan: _Plan, monitor: str, step: int, party: Party, exchange: StepExchange | None) -> list[Callback]:
    """All but the two that must be there and come first, in the order in which they act. step: where a run goes on."""
    run, training, ranks = plan.run, plan.config.training, party.ranks
    shows_progress = ranks.is_first and plan.options.get("enable_progress_bar", True)
    if not ranks.is_first:
        plan.options["enable_progress_bar"] = False
    return [
        *([] if plan.quick else [BestModel(run.checkpoints, monitor)]),
        *([TensorBoardLog(run.path / "tensorboard", training.tensorboard, step)] if training.tensorboard else []),
        *([early] if (early := early_stopping(training.early_stopping, monitor)) else []),
        *([Pace(ranks, party.journal, exchange)] if ranks.world_size > 1 else []),
        *(
            [
                RunProgress(
                    party.journal.console,
                    monitor=monitor,
                    max_seconds=party.stop.seconds_left(),
                    units=plan.record.task.units,
                )
            ]
            if shows_progress
            else []
        ),
        *user_callbacks(plan.config.callbacks),
    ]


def _go_on(loader: FrameLoader, restart: Restart, plan: _Plan, party: Party) -> int:
    """Let the loader begin where the run was saved. Returns the number of the batch it begins with."""
    say, n = party.journal.say, party.ranks.world_size
    loader.set_epoch(restart.epoch)
    first_batch = loader.start_at(restart.sample)
    say(f"Continuing run {plan.run.name} after step {restart.step} (epoch {restart.epoch + 1}), {restart.path.name}.")
    if restart.world_size != n:
        rates = " Learning rates follow training.scale_lr." if plan.config.training.scale_lr != "none" else ""
        say(
            f"It was saved on {restart.world_size} ranks and goes on with {n}: what is left of the epoch is seen exactly "
            f"once.{rates}"
        )
    return first_batch


def _stopped(plan: _Plan, stopped: StopRequested, when: str, party: Party) -> Fitted:
    _write_status(plan.run, party.ranks, status="stopped")
    party.journal.say(f"{when}: {stopped.reason}. Run the same command to go on.")
    code = _exit_code(stopped, plan.config.training.checkpoint.requeue_exit, party)
    return Fitted(plan.run, plan.data, "stopped", exit_code=code)


def _write_status(run: Run, ranks: Ranks, **values: Any) -> None:
    if ranks.is_first:
        run.write_info(**values)


def _exit_code(stopped: StopRequested, requeue_exit: int, party: Party) -> int:
    """A time limit the user set is a success, Ctrl-C is what a shell reports, a batch system gets the code to start again."""
    if stopped.signal_number is None:
        return 0
    if stopped.signal_number == signal.SIGINT:
        return 128 + signal.SIGINT
    if stopped.signal_number == signal.SIGUSR1 and party.ranks.is_first:
        ask_slurm_to_requeue(party.journal.say)
    return requeue_exit


def _monitor(training: Any, columns: list[str], has_val: bool, journal: Journal) -> str:
    """What picks the best model; every value that is to be watched must be one that will exist."""
    monitor = training.monitor
    if not has_val and monitor == "val/loss":
        monitor = "train/loss"
        journal.say("There is no validation: the best model is the one with the lowest training loss.")
    watched = {"training.monitor": monitor}
    if training.early_stopping is not None and training.early_stopping.monitor:
        watched["training.early_stopping.monitor"] = training.early_stopping.monitor
    for setting, name in watched.items():
        if name in columns and name.endswith(("_accuracy", "_f1")):
            raise ForgefieldError(
                f"{setting}={name}: what is watched is the better the smaller it is; watch "
                f"{name.rpartition('_')[0]}_cross_entropy or val/loss."
            )
        if name not in columns:
            reason = "; without validation only train/... can be watched" if not has_val else ""
            raise ForgefieldError(f"{setting}={name} is not a value of this run{reason}.{did_you_mean(name, columns)}")
    return monitor


def _choose_trained(potential: Potential, training: Any, say: Callable[[str], None]) -> None:
    """Freeze what is not to be trained, and say how much is."""
    lora = training.lora
    changed = []
    frozen = freeze(potential, training.freeze) if training.freeze else []
    if lora is not None:
        changed = add_low_rank(potential, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        say(f"training.lora: changes of rank {lora.rank} of {len(changed)} matrices are trained, the matrices are not.")
    if training.freeze or lora is not None:
        require_trained(potential)
        counts = [p.numel() for p in potential.parameters() if p.requires_grad]
        say(f"{sum(counts)} parameters are trained; frozen: {len(frozen)} tensors, named by training.freeze.")


def _start_from(
    initial: InitialModel,
    change: Transfer,
    potential: Potential,
    resolved: dict[str, Any],
    data: DataModule,
    options: dict[str, Any],
    party: Party,
) -> None:
    """The first weights from another run, and what is to be said about them."""
    device = evaluation_device(options.get("accelerator"))
    changed = initial.start(potential, resolved, data.train, device, party.ranks, change)
    if initial.state is not None:
        party.journal.say(f"Starting from the {initial.record['which']} weights of {initial.known.whose}.")
        if change.changes_anything():
            party.journal.say(change.describe())
    if changed is not None:
        party.journal.say(changed)


def _tell_branches(config: DictConfig, data: DataModule, initial: InitialModel | None) -> None:
    """Let batches say which branch of the model a frame is for, where it has several."""
    names = branch_names(plain(config.model) if initial is None else initial.known.resolved)
    if names:
        data.tell_branches(names)
    elif (named := data.train.frames.branches) not in ([None], []):
        raise ForgefieldError(
            f"data.train has sources for the branch {named[-1]}, and the model has no branches; leave `branch` out, or name "
            "them in model.branches."
        )


def _prepare_model(
    run: Run, config: DictConfig, data: DataModule, ranks: Ranks, initial: InitialModel | None
) -> tuple[Task, dict[str, Any], str, Transfer | None]:
    """Task, model options in full, fingerprint of the data, and what became of the model of another run. A run that has begun
    keeps the options it has."""
    data.statistics = ranks.share(data.statistics)
    _tell_branches(config, data, initial)
    options = wanted_task(config, data)
    for name, dataset in (("val", data.val), ("test", data.test)):
        require_any_label(options, name, dataset)
    fingerprint = " ".join(part.frames.fingerprint for part in (data.train, data.val) if part is not None)
    require_same_data(fingerprint, ranks)
    if data.test is not None:
        require_same_data(data.test.frames.fingerprint, ranks)
    resolved: dict[str, Any] = {}
    change: Transfer | None = None
    if ranks.is_first:
        begun = has_begun(run)
        if initial is not None:
            known = initial.known.resolved if begun else initial.options(config, data)
            change = transfer(known, initial.known.section, config, options, data)
        if not begun:
            resolved = resolved_model(config, data) if change is None else change.resolved
        else:
            if run.info["data_fingerprint"] != fingerprint:
                raise ForgefieldError(
                    f"The data of run {run.name} is not the data it was started with (a file or the split changed); "
                    "restore it, or start over with --fresh."
                )
            resolved = run.info["model"]
    resolved, change = ranks.share((resolved, change))
    return built_task(options, resolved), resolved, fingerprint, change
