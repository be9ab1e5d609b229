"""From a training script of Open MatSciML to a Forgefield config: task, data module and trainer.

Every argument is translated, has no setting for a reason in the notes, or is refused with that reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from forgefield.config.deepmd.section import Section
from forgefield.config.deepmd.translation import Translation
from forgefield.config.matsciml.models import translate_encoder
from forgefield.config.matsciml.script import Made, Name, Unknown, calls_of
from forgefield.errors import ForgefieldError

COMMENTS = {
    "training.optimizer": "MatSciML trains with AdamW.",
    "training.ema": "No average of the weights, unless the script has a callback for it.",
}
"""Comments on settings in a converted config."""
TASKS = (
    "ScalarRegressionTask", "ForceRegressionTask", "GradFreeForceRegressionTask", "BinaryClassificationTask",
    "CrystalSymmetryClassificationTask", "NodeDenoisingTask",
)  # fmt: skip
CALLBACKS = {
    "GradientCheckCallback": "gradient_check",
    "TrainingHelperCallback": "training_helper",
    "ModelAutocorrelation": "autocorrelation",
    "ForwardNaNDetection": "forward_nan",
    "ThroughputCallback": "throughput",
    "SAM": "sam",
}
"""Callbacks of MatSciML and Forgefield's; their options have other names."""
KEPT = ("ModelCheckpoint", "LearningRateMonitor", "RichProgressBar", "TQDMProgressBar", "ModelSummary")
"""Callbacks whose work is always done."""
OF_LIGHTNING = (
    "accelerator", "devices", "num_nodes", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run",
    "log_every_n_steps", "check_val_every_n_epoch", "val_check_interval", "limit_train_batches", "limit_val_batches",
    "limit_test_batches",
)  # fmt: skip
WITHOUT_SETTING = (
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "num_sanity_val_steps",
    "profiler",
)
WITHOUT_EFFECT = {
    "PointCloudToGraphTransform": "graphs are not needed; all models read plain tensors.",
    "GraphToGraphTransform": "graphs are not needed; all models read plain tensors.",
    "DistancesTransform": "distances are computed by the model.",
    "MGLDataTransform": "graphs are not needed; all models read plain tensors.",
    "FrameAveraging": "models are invariant or equivariant without it.",
}
"""Transforms that nothing has to replace."""
LOSSES = {"MSELoss": "mse", "L1Loss": "mae", "HuberLoss": "huber", "SmoothL1Loss": "huber", "AtomWeightedMSE": "mse"}


class ScriptSection(Section):
    """The arguments of a call."""

    program: ClassVar[str] = "Open MatSciML"
    comment: ClassVar[str | None] = None

    def take(self, name: str, default: object = None, *, also: Any = ()) -> Any:
        value = super().take(name, default, also=also)
        if isinstance(value, Unknown):
            raise ForgefieldError(
                f"{self.file}, line {value.line}: '{self.path(name)}' is the expression {value.text:.60}, which is not "
                "evaluated, because scripts are not executed; write the value."
            )
        return value


def matsciml_translation(file: Path) -> Translation:
    """The Forgefield config of a training script, with what the user should know."""
    calls = calls_of(file)
    notes: dict[str, str] = {}
    if any(call.name in ("MultiTaskLitModule", "MultiDataModule") for call in calls):
        raise ForgefieldError(
            f"{file} trains several tasks on several data sets, which is not converted; give the targets in `task` and the "
            "data sets in `data.train`, each with its own labels and units (the page 'Coming from Open MatSciML')."
        )
    task_call = _only(calls, TASKS, "a task", file)
    data_call = _only(calls, ("MatSciMLDataModule", "MatSciMLDataModule.from_devset"), "a MatSciMLDataModule", file)
    config: dict[str, Any] = {"name": file.stem}
    seeds = [call.bound(("seed",), file).get("seed") for call in calls if call.name == "seed_everything"]
    config |= {"seed": seeds[-1]} if seeds and isinstance(seeds[-1], int) else {}
    task = _Task(task_call, file, notes)
    data, noise = _data(data_call, file, notes)
    if task.cutoff is not None and data.setdefault("cutoff", task.cutoff) != task.cutoff:
        notes[f"{task_call.name}.encoder_kwargs.cutoff"] = (
            f"it is {task.cutoff:g} A, but edges end at {data['cutoff']:g} A, which is data.cutoff."
        )
    if noise is not None:
        task.targets.setdefault("denoise", {})["sigma"] = noise
    if task.fields:
        data["labels"] = {"fields": task.fields}
    training: dict[str, Any] = {**task.training, "ema": None}
    trainer: dict[str, Any] = {}
    callbacks: list[Any] = []
    trainers = [call for call in calls if call.name == "Trainer"]
    if trainers:
        trainer, callbacks = _trainer(trainers[-1], file, notes, training, task.targets)
    config |= {"data": data, "model": task.model, "task": task.targets, "training": training, "trainer": trainer}
    return Translation(config | ({"callbacks": callbacks} if callbacks else {}), notes)


def _only(calls: list[Made], names: tuple[str, ...], what: str, file: Path) -> Made:
    found = [call for call in calls if call.name in names]
    if len(found) != 1:
        reason = f"{len(found)} of them" if found else "none"
        raise ForgefieldError(
            f"{file}: a training script constructs {what} ({', '.join(names)}); this one has {reason}."
        )
    return found[0]


class _Task:
    """targets: the section `task`. fields: `data.labels.fields`. cutoff: that of the encoder, A, if it has one."""

    def __init__(self, call: Made, file: Path, notes: dict[str, str]) -> None:
        section = ScriptSection(call.bound(("encoder",), file), file, call.name, notes)
        self.targets: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}
        self._keys(section, call.name)
        self.model, self.cutoff = translate_encoder(section, file)
        self._losses(section)
        self._normalisation(section)
        head = section.take("output_kwargs")
        if head:
            notes[section.path("output_kwargs")] = "heads have Forgefield's defaults; set model.heads.NAME for others."
        rate, decay = section.number("lr", 1e-4, above=0), section.number("weight_decay", 0.0, at_least=0)
        self.training: dict[str, Any] = {"lr": rate, "optimizer": {"name": "AdamW", "weight_decay": decay}}
        schedulers = section.take("scheduler_kwargs") or {}
        if len(schedulers) > 1:
            raise section.refused("scheduler_kwargs", "names several schedulers; a training has one")
        for name, options in schedulers.items():
            self.training["scheduler"] = {"name": name, **{k: v for k, v in options.items() if k != "monitor"}}
        for name in ("log_embeddings", "log_embeddings_every_n_steps", "embedding_reduction_type", "freeze_embedding"):
            section.note(name, "it has no setting.", unless=[False])
        section.finish()

    def _keys(self, section: ScriptSection, kind: str) -> None:
        default = ["energy", "force"] if "Force" in kind else []
        keys = [str(key) for key in section.take("task_keys") or default]
        if kind == "NodeDenoisingTask":
            self.targets["denoise"] = {"sigma": 0.1}
        elif kind == "CrystalSymmetryClassificationTask":
            self.fields["space_group"] = {"key": "symmetry.number"}
            self.targets["space_group"] = {"classes": "auto"}
        elif not keys:
            raise section.refused("task_keys", "is missing; name the targets")
        elif "Force" in kind:
            self.targets = {
                {"force": "forces"}.get(key, key): {} for key in keys if key in ("energy", "force", "forces")
            }
            self.targets.setdefault("forces", {})
            if kind == "ForceRegressionTask":
                self.targets.setdefault("energy", {})
            else:
                self.targets["forces"]["direct"] = True
            section.only("compute_stress", False, "stress is a target here: add task.stress")
        else:
            for key in keys:
                self.targets[key] = {"classes": 2} if kind == "BinaryClassificationTask" else {}
                if key != "energy":
                    self.fields[key] = {}

    def _losses(self, section: ScriptSection) -> None:
        scaling = section.take("task_loss_scaling") or {}
        for key, weight in scaling.items():
            if (target := _target(key)) not in self.targets:
                raise section.refused("task_loss_scaling", f"names {key}, which is not a target")
            self.targets[target]["weight"] = float(weight)
        losses = section.take("loss_func")
        if losses is None:
            return
        by_key = losses if isinstance(losses, dict) else dict.fromkeys(self.targets, losses)
        for key, loss in by_key.items():
            name = loss.name if isinstance(loss, Made) else getattr(loss, "text", "")
            if name not in LOSSES or _target(key) not in self.targets:
                raise section.refused("loss_func", f"is {name or loss!r} for {key}; supported are {', '.join(LOSSES)}")
            self.targets[_target(key)]["loss"] = LOSSES[name]
            if LOSSES[name] == "huber":
                self.targets[_target(key)]["huber_delta"] = 1.0

    def _normalisation(self, section: ScriptSection) -> None:
        given = section.take("normalize_kwargs") or {}
        for key in self.fields:
            mean, scale = given.pop(f"{key}_mean", None), given.pop(f"{key}_std", None)
            if mean is not None and scale is not None:
                self.targets[key]["normalise"] = {"mean": float(mean), "scale": float(scale)}
        if given:
            section.notes[section.path("normalize_kwargs")] = (
                "energies and forces are normalised by statistics of the training data, which become part of the model."
            )


def _target(key: str) -> str:
    return "forces" if key == "force" else str(key)


def _data(call: Made, file: Path, notes: dict[str, str]) -> tuple[dict[str, Any], float | None]:
    """The section `data`, and the width of the noise of a transform, A."""
    names = ("dataset", "train_path") if call.name == "MatSciMLDataModule" else ("dataset",)
    section = ScriptSection(call.bound(names, file), file, "MatSciMLDataModule", notes)
    if call.name.endswith("from_devset"):
        raise section.refused("from_devset", "reads files inside of MatSciML's package; name them with train_path")
    dataset = section.take("dataset")
    name = dataset if isinstance(dataset, str) else getattr(dataset, "text", None)
    if name is not None:
        notes[section.path("dataset")] = f"files are recognised by their content ({name})."
    data: dict[str, Any] = {"train": section.text("train_path")}
    if data["train"] is None:
        raise section.refused("train_path", "is missing; name the training data")
    for theirs, ours in (("val_split", "val"), ("test_split", "test")):
        value = section.take(theirs)
        data[ours] = value if value else None
    data["batch"] = {"frames": section.integer("batch_size", 32, at_least=1)}
    seed = section.integer("seed")
    data |= {} if seed is None else {"split_seed": seed}
    for name in ("num_workers", "persistent_workers", "pred_split"):
        section.note(name, "batches are prepared by threads (data.workers).", unless=[0, False])
    noise, options = None, section.below("dset_kwargs")
    if options is not None:
        for transform in options.take("transforms") or []:
            noise = _transform(transform, data, noise, file, notes)
        options.finish()
    section.finish()
    return data, noise


def _transform(
    transform: object, data: dict[str, Any], noise: float | None, file: Path, notes: dict[str, str]
) -> float | None:
    """Adds what a transform sets to `data`; the width of noise after it."""
    name = transform.name if isinstance(transform, Made) else ""
    key = f"transforms.{name}"
    if isinstance(transform, Made) and name == "PeriodicPropertiesTransform":
        section = ScriptSection(transform.bound(("cutoff_radius", "adaptive_cutoff"), file), file, key, notes)
        data["cutoff"] = section.number("cutoff_radius", 6.5, above=0)
        if section.flag("adaptive_cutoff", False):
            notes[section.path("adaptive_cutoff")] = (
                "set data.adaptive_cutoff to the largest radius (MatSciML's is 30 A) if atoms would have no neighbours; "
                "`forgefield data info` finds them."
            )
        neighbours = section.integer("max_neighbors", None, at_least=1)
        if neighbours is not None:
            notes[section.path("max_neighbors")] = "MatSciML ignores it, and so does the config."
        for option in (
            "backend",
            "convert_to_unit_cell",
            "is_cartesian",
            "allow_self_loops",
            "is_undirected",
            "max_dist",
        ):
            section.note(option, "neighbour lists contain all periodic images in both directions.")
        section.finish()
    elif isinstance(transform, Made) and name == "NoisyPositions":
        section = ScriptSection(transform.bound(("scale",), file), file, key, notes)
        noise = section.number("scale", 0.1, above=0)
        section.note("normalize", "errors are measured in units of sigma.")
        section.finish()
    elif isinstance(transform, Made) and name in WITHOUT_EFFECT:
        notes[key] = WITHOUT_EFFECT[name]
        distance = transform.options.get("cutoff_dist")
        if isinstance(distance, (int, float)) and "cutoff" not in data:
            data["cutoff"] = float(distance)
    else:
        raise ForgefieldError(
            f"{file}: the transform {name or repr(transform):.60} has no counterpart; write a function and name it in "
            "data.transforms."
        )
    return noise


def _trainer(
    call: Made, file: Path, notes: dict[str, str], training: dict[str, Any], targets: dict[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    section = ScriptSection(call.bound((), file), file, "Trainer", notes)
    trainer = {name: section.take(name) for name in OF_LIGHTNING if name in section.names()}
    clip = section.number("gradient_clip_val", above=0)
    training |= {} if clip is None else {"clip_norm": clip}
    accumulate = section.integer("accumulate_grad_batches", 1, at_least=1)
    training |= {"accumulate": accumulate} if accumulate > 1 else {}
    strategy = section.take("strategy")
    if isinstance(strategy, str) and strategy not in ("auto", "ddp"):
        trainer["strategy"] = strategy
    elif strategy is not None and not isinstance(strategy, str):
        raise section.refused("strategy", "is an object; name it in trainer.strategy")
    section.only("overfit_batches", 0, "Forgefield has a command for it: forgefield check --overfit CONFIG")
    for name in WITHOUT_SETTING:
        section.note(name, "Forgefield decides it.", unless=[True])
    logger = section.take("logger")
    if isinstance(logger, Made) and logger.name in ("WandbLogger", "CSVLogger", "TensorBoardLogger", "MLFlowLogger"):
        options = {k: v for k, v in logger.options.items() if not isinstance(v, (Made, Name, Unknown))}
        trainer["logger"] = {"name": f"lightning.pytorch.loggers.{logger.name}"}
        trainer["logger"] |= {k: v for k, v in options.items() if k not in ("name", "save_dir")}
    elif logger not in (None, True, False):
        raise section.refused("logger", "is an object that is not translated; name it in trainer.logger")
    callbacks: list[Any] = []
    given = section.take("callbacks") or []
    for item in given if isinstance(given, list) else [given]:
        if not isinstance(item, Made):
            raise section.refused(
                "callbacks", f"has {item!r:.60}, which is not followed; construct callbacks in the list"
            )
        callbacks += _callback(item, file, notes, training, targets)
    section.finish()
    return trainer, callbacks


def _callback(
    call: Made, file: Path, notes: dict[str, str], training: dict[str, Any], targets: dict[str, Any]
) -> list[Any]:
    """The callback's entry in `callbacks`; none if it is a setting instead."""
    key = f"callbacks.{call.name}"
    if call.name in CALLBACKS:
        if call.name == "SAM":
            return [{"name": "sam", "rho": float(call.bound(("rho",), file).get("rho", 0.05))}]
        if call.args or call.options:
            notes[key] = "its options have other names; see the page on diagnosis callbacks."
        return [CALLBACKS[call.name]]
    if call.name == "ExponentialMovingAverageCallback":
        training["ema"] = float(call.bound(("decay",), file).get("decay", 0.99))
    elif call.name == "EarlyStopping":
        options = call.bound(("monitor", "min_delta", "patience"), file)
        kept = {name: options[name] for name in ("patience", "min_delta") if name in options}
        training["early_stopping"] = {"patience": 3} | kept
        notes[f"{key}.monitor"] = "the loss of the validation is monitored; set training.monitor for another metric."
    elif call.name == "LossScalingScheduler":
        for schedule in call.args:
            _schedule(schedule, file, notes, targets)
    elif call.name in KEPT:
        notes[key] = "it is always done."
    else:
        raise ForgefieldError(f"{file}, line {call.line}: the callback {call.name} has no counterpart; remove it.")
    return []


def _schedule(schedule: object, file: Path, notes: dict[str, str], targets: dict[str, Any]) -> None:
    kinds = {"LinearScalingSchedule": "linear", "SigmoidScalingSchedule": "sigmoid"}
    if not isinstance(schedule, Made) or schedule.name not in kinds:
        raise ForgefieldError(f"{file}: LossScalingScheduler takes {' and '.join(kinds)}, not {schedule!r:.60}.")
    values = schedule.bound(("key", "initial_value", "end_value", "step_frequency"), file)
    section = ScriptSection(values, file, schedule.name, notes)
    target = _target(section.text("key"))
    if target not in targets:
        raise section.refused("key", f"is {target}, which is not a target")
    targets[target]["weight"] = section.number("initial_value", at_least=0)
    kind, unit = kinds[schedule.name], section.choice("step_frequency", "epoch", ("epoch", "step"))
    entry: dict[str, Any] = {"kind": kind, "to": section.number("end_value", at_least=0), "unit": unit}
    if kind == "sigmoid":
        entry["centre"] = section.number("center_frac", 0.5, at_least=0, at_most=1)
        section.note("curvature", "the steepness is schedule.slope, with another formula.")
    section.finish()
    targets[target]["schedule"] = entry
