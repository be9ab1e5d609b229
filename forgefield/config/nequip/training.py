"""The sections `training_module` and `trainer`: averages, optimiser, schedulers, callbacks and loggers."""

from __future__ import annotations

from typing import Any

from forgefield.config.nequip.loss import LossTranslation, normalised
from forgefield.config.nequip.section import NequIPSection
from forgefield.errors import ForgefieldError

MODULES = ("EMALightningModule", "NequIPLightningModule", "ScheduleFreeLightningModule")
MONITOR = "val0_epoch/weighted_sum"
OPTIMISERS = ("Adam", "AdamW", "SGD", "RAdam", "NAdam", "Adagrad", "Adamax", "RMSprop", "Adadelta", "Rprop", "ASGD")
MUON = "MuonWithAuxAdam"
SCHEDULE_FREE = {"AdamWScheduleFree": 0.0025, "RAdamScheduleFree": 0.0025, "SGDScheduleFree": 1.0}
"""Optimisers of the package schedulefree, and their learning rates by default."""
SCHEDULERS = (
    "ReduceLROnPlateau", "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
    "ConstantLR", "LinearLR", "PolynomialLR", "OneCycleLR", "CyclicLR",
)  # fmt: skip
COMBINED = ("SequentialLR", "ChainedScheduler")
"""Schedulers that are made of others."""
LOGGERS = {name: f"lightning.pytorch.loggers.{name}" for name in ("WandbLogger", "TensorBoardLogger", "CSVLogger")}
CALLBACKS = (
    "EarlyStopping", "ModelCheckpoint", "LearningRateMonitor", "LossCoefficientScheduler", "LinearLossCoefficientScheduler",
    "LossCoefficientMonitor", "SoftAdapt", "TF32Scheduler", "TestTimeXYZFileWriter", "ValTimeXYZFileWriter",
)  # fmt: skip
ALWAYS = {"CSVLogger": "metrics.csv is always written.", "TensorBoardLogger": "events are written by default."}
"""Loggers that have no setting."""
WRITER = ("out_file", "output_fields_from_original_dataset", "extra_fields", "chemical_symbols")
OPTIONS = {
    "ModelCheckpoint": (
        "dirpath", "filename", "verbose", "save_last", "save_top_k", "save_weights_only", "auto_insert_metric_name",
        "every_n_train_steps", "train_time_interval", "every_n_epochs", "save_on_train_epoch_end", "enable_version_counter",
    ),
    "LearningRateMonitor": ("logging_interval", "log_momentum", "log_weight_decay"),
    "LossCoefficientMonitor": ("interval", "frequency"),
    "TestTimeXYZFileWriter": WRITER,
    "ValTimeXYZFileWriter": (*WRITER, "separate_file_per_epoch", "every_n_epochs"),
}  # fmt: skip
"""Options of callbacks that have no influence on the trained model."""
WITHOUT_SETTING = {
    "ModelCheckpoint": "the best and the latest weights are always kept, in the run folder.",
    "LearningRateMonitor": "the learning rate is always logged.",
    "LossCoefficientMonitor": "weights of the loss are not logged; they follow from the config.",
    "TestTimeXYZFileWriter": "use `forgefield predict RUN FILE -o out.extxyz`; errors of the test are in the report.",
    "ValTimeXYZFileWriter": "use `forgefield predict RUN FILE -o out.extxyz`.",
}
"""Callbacks that have no setting in Forgefield."""
OF_LIGHTNING = (
    "accelerator", "devices", "num_nodes", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time",
    "log_every_n_steps",
    "check_val_every_n_epoch", "val_check_interval", "limit_train_batches", "limit_val_batches", "limit_test_batches",
)  # fmt: skip


def translate_module(section: NequIPSection, names: list[str]) -> tuple[dict[str, Any], LossTranslation]:
    """`training` without what model and trainer decide, and the loss."""
    kind = section.target((*MODULES, "ConFIGLightningModule", "EMAConFIGLightningModule"))
    if kind not in MODULES:
        raise section.refused("_target_", f"is {kind}; supported are {', '.join(MODULES)}")
    training: dict[str, Any] = {"ema": None}
    if kind == "EMALightningModule":
        training["ema"] = section.number("ema_decay", 0.999, above=0, below=1)
    loss = section.below("loss")
    if loss is None:
        raise ForgefieldError(f"{section.file}: '{section.path('loss')}' is missing.")
    optimisers = (*OPTIMISERS, MUON) if kind != "ScheduleFreeLightningModule" else tuple(SCHEDULE_FREE)
    training |= _optimiser(section.below("optimizer"), optimisers)
    scheduler = section.below("lr_scheduler")
    if scheduler is not None:
        training["scheduler"] = _scheduler(scheduler)
    for name in ("train_metrics", "test_metrics"):
        if section.take(name) is not None:
            section.notes[section.path(name)] = "MAE and RMSE of all targets are always measured."
    section.only("num_datasets", None, "the data decides it")
    return training, LossTranslation(loss, names)


def _optimiser(section: NequIPSection | None, classes: tuple[str, ...]) -> dict[str, Any]:
    if section is None:
        return {"lr": 0.001, "optimizer": {"name": "Adam"}}
    name = section.target(classes)
    if name == MUON:
        return _muon(section)
    rate = section.number("lr", SCHEDULE_FREE.get(name, 0.001), above=0)
    section.note("foreach", "parameters are always updated together.")
    options = {key: section.take(key) for key in section.names()}
    return {"lr": rate, "optimizer": {"name": name, **options}}


def _muon(section: NequIPSection) -> dict[str, Any]:
    """Muon for matrices and AdamW for the rest, with the parameters that NequIP gives to each."""
    groups = section.below("param_groups")
    if groups is None:
        raise section.refused("param_groups", "is missing; it is an object MuonParamGroups")
    groups.target(("MuonParamGroups",))
    muon, adam = groups.below("muon"), groups.below("adam")
    if muon is None or adam is None:
        raise groups.refused("muon" if muon is None else "adam", "is missing")
    rate, other = muon.number("lr", 0.02, above=0), adam.number("lr", 0.0003, above=0)
    options = {
        "momentum": muon.number("momentum", 0.95, at_least=0, below=1),
        "weight_decay": muon.number("weight_decay", 0.0, at_least=0),
        "scale_by": "inputs",
        "adamw_factor": other / rate,
        "adamw_betas": [float(beta) for beta in adam.take("betas") or (0.9, 0.95)],
        "adamw_eps": adam.number("eps", 1e-10, above=0),
        "adamw_weight_decay": adam.number("weight_decay", 0.0, at_least=0),
    }
    for part in (muon, adam, groups, section):
        part.finish()
    section.notes[section.path("_target_")] = (
        "steps are orthogonalised in the precision of the weights, not in bfloat16."
    )
    return {"lr": rate, "optimizer": {"name": "Muon", **options}}


def _scheduler(section: NequIPSection) -> dict[str, Any]:
    inner = section.below("scheduler")
    if inner is None:
        raise ForgefieldError(f"{section.file}: '{section.path('scheduler')}' is missing.")
    options = _scheduler_options(inner, (*SCHEDULERS, *COMBINED))
    name = options["name"]
    monitor = section.text("monitor", MONITOR)
    if name == "ReduceLROnPlateau":
        _require_monitor(section, monitor)
    elif monitor != MONITOR:
        section.notes[section.path("monitor")] = f"{name} does not monitor a metric."
    interval = section.choice("interval", "epoch", ("epoch", "step"))
    if interval == "step":
        options["interval"] = "step"
    section.only("frequency", 1, "schedulers advance in every epoch or step")
    section.note("strict", "a monitored metric that does not exist is always an error.")
    section.note("name", "the learning rate is logged as lr.")
    section.finish()
    return options


def _scheduler_options(section: NequIPSection, classes: tuple[str, ...]) -> dict[str, Any]:
    """A scheduler, and the schedulers that it is made of. classes: names that it may have."""
    name = section.target(classes)
    options: dict[str, Any] = {"name": name}
    if name in COMBINED:
        members = [member for member in SCHEDULERS if member != "ReduceLROnPlateau"]
        options["schedulers"] = [_scheduler_options(item, tuple(members)) for item in section.objects("schedulers")]
    return options | {key: section.take(key) for key in section.names()}


def _require_monitor(section: NequIPSection, monitor: object) -> None:
    if monitor != MONITOR:
        raise section.refused("monitor", f"is {monitor}; {MONITOR} is supported, the sum of errors of val_metrics")


def translate_trainer(
    section: NequIPSection, training: dict[str, Any], loss: LossTranslation, precision: str
) -> dict[str, Any]:
    """The section `trainer`; adds to `training` and to the loss what callbacks do."""
    section.target(("Trainer",), "lightning.Trainer")
    trainer = {name: section.take(name) for name in OF_LIGHTNING if name in section.names()}
    trainer = {name: value for name, value in trainer.items() if value is not None}
    clip = section.number("gradient_clip_val", above=0)
    method = section.choice("gradient_clip_algorithm", "norm", ("norm", "value"))
    if clip is not None:
        if method != "norm":
            raise section.refused("gradient_clip_algorithm", "is value; gradients are clipped by their norm")
        training["clip_norm"] = clip
    accumulate = section.integer("accumulate_grad_batches", 1, at_least=1)
    if accumulate > 1:
        training["accumulate"] = accumulate
    training["precision"] = precision
    logger = _loggers(section)
    if logger:
        trainer["logger"] = logger if len(logger) > 1 else logger[0]
    for item in section.objects("callbacks"):
        _callback(item, training, loss)
    _strategy(section)
    for name in (
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "inference_mode",
        "default_root_dir",
    ):
        section.note(name, "Forgefield decides it.", unless=[True])
    section.note("num_sanity_val_steps", "no validation is done before the first step.")
    section.finish()
    return trainer


def _strategy(section: NequIPSection) -> None:
    value = section.take("strategy")
    if isinstance(value, dict) and set(value) == {"_target_"}:
        value = str(value["_target_"]).rpartition(".")[2]
    if value not in (None, "auto", "ddp", "SimpleDDPStrategy"):
        raise section.refused("strategy", "is not translated; SimpleDDPStrategy, ddp and auto are the default here")


def _loggers(section: NequIPSection) -> list[dict[str, Any]]:
    loggers: list[dict[str, Any]] = []
    if isinstance(section.peek("logger"), bool):
        section.note("logger", "metrics are always written to the run folder.", unless=[True])
    for item in section.objects("logger"):
        name = item.target(LOGGERS)
        folder = item.take("save_dir")
        if folder is not None:
            item.notes[item.path("save_dir")] = "loggers write to the run folder."
        options = {key: item.take(key) for key in item.names()}
        if options.pop("name", None) is not None:
            item.notes[item.path("name")] = "the name of the run is the name of the config."
        if name in ALWAYS:
            item.notes[item.key] = f"{name}: {ALWAYS[name]}{_unused(options)}"
        else:
            loggers.append({"name": LOGGERS[name], **options})
    return loggers


def _callback(item: NequIPSection, training: dict[str, Any], loss: LossTranslation) -> None:
    kind = item.target(CALLBACKS)
    if kind in WITHOUT_SETTING:
        if kind == "ModelCheckpoint":
            if item.take("monitor") not in (None, MONITOR):
                raise item.refused("monitor", f"is not {MONITOR}, the sum of errors of val_metrics")
            item.only("mode", "min", "the monitored error is better when smaller")
        values = {name: item.take(name) for name in OPTIONS[kind]}
        unused = {name: value for name, value in values.items() if value is not None}
        item.notes[item.key] = f"{kind}: {WITHOUT_SETTING[kind]}{_unused(unused)}"
        item.finish()
        return
    if kind == "EarlyStopping":
        _require_monitor(item, item.text("monitor", MONITOR))
        item.only("mode", "min", "the monitored error is better when smaller")
        patience, delta = item.integer("patience", 3, at_least=1), item.number("min_delta", 0.0)
        training["early_stopping"] = {"patience": patience, "min_delta": abs(delta)}
        item.only("check_finite", True, "a training whose loss is not finite is stopped")
        item.note("verbose", "the reason why a training stops is always logged.")
        item.note("check_on_train_epoch_end", "it is checked after every validation.")
        item.note("strict", "a monitored metric that does not exist is always an error.")
        item.note("log_rank_zero_only", "rank 0 writes the log.")
    elif kind == "LossCoefficientScheduler":
        _steps(item, loss)
    elif kind == "LinearLossCoefficientScheduler":
        _ramp(item, loss)
    elif kind == "SoftAdapt":
        beta = item.number("beta", 1.0)
        options = {name: item.take(name) for name in ("interval", "frequency", "eps")}
        unused = {name: value for name, value in options.items() if value is not None}
        training["weighting"] = {"name": "softadapt", "beta": beta}
        item.notes[item.key] = f"SoftAdapt: Forgefield's formula is used, every 50 steps.{_unused(unused)}"
    else:
        _tf32(item, training)
    item.finish()


def _unused(options: dict[str, Any]) -> str:
    """The end of a note: which options have no effect."""
    return f" Options without effect: {', '.join(options)}." if options else ""


def _steps(item: NequIPSection, loss: LossTranslation) -> None:
    schedule = item.mapping("schedule")
    epochs = sorted(int(epoch) for epoch in schedule)
    by_epoch = {int(epoch): _weights(item, loss, values) for epoch, values in schedule.items()}
    if epochs and epochs[0] == 0:
        loss.scale(by_epoch.pop(epochs.pop(0)))
    for target, options in loss.task.items():
        if epochs:
            values = [by_epoch[epoch][target] for epoch in epochs]
            options["schedule"] = {"kind": "step", "unit": "epoch", "at": epochs, "to": values}


def _ramp(item: NequIPSection, loss: LossTranslation) -> None:
    final = _weights(item, loss, item.mapping("final_coeffs"))
    start, length = item.integer("start_epoch", 0, at_least=0), item.integer("transition_epochs", 1, at_least=1)
    for target, options in loss.task.items():
        if "schedule" in options:
            raise item.refused("final_coeffs", "is a second schedule of the loss; one is supported")
        options["schedule"] = {
            "kind": "linear",
            "unit": "epoch",
            "begin": start,
            "end": start + length,
            "to": final[target],
        }


def _weights(item: NequIPSection, loss: LossTranslation, values: dict[str, Any]) -> dict[str, float]:
    unknown = [name for name in values if name not in loss.names]
    if unknown:
        raise item.refused("schedule", f"names {unknown[0]}; the terms of the loss are {', '.join(loss.names)}")
    return normalised({target: float(values.get(name) or 0.0) for name, target in loss.names.items()})


def _tf32(item: NequIPSection, training: dict[str, Any]) -> None:
    schedule = {int(epoch): bool(value) for epoch, value in item.mapping("schedule").items()}
    if training["precision"] != "float32" or set(schedule) != {0}:
        raise item.refused("schedule", "changes the precision; give one value for epoch 0, or training.precision")
    if schedule[0]:
        training["precision"] = "tf32"
