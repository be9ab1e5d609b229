"""The rest of `training`, and `validating`: how long, how often measured and saved, with which engine."""

from __future__ import annotations

import math
from typing import Any

from forgefield.config.deepmd.outputs import OutputTask
from forgefield.config.deepmd.section import Section
from forgefield.errors import ForgefieldError

CURVE = "forgefield.training.callbacks.lcurve.LearningCurve"
STEPS = ("stop_batch", "num_step", "num_steps", "numb_step")
EPOCHS = ("num_epochs", "num_epoch", "numb_epochs")
METRICS = {"e": "energy", "f": "forces", "v": "virial"}
"""Letters of `validation_metric`."""
IN_THE_FOLDER = "everything of a run lies in its folder"


def translate_length(section: Section, data: dict[str, Any]) -> dict[str, int]:
    """`max_steps` or `max_epochs`. data: our `data` section."""
    steps = section.integer("numb_steps", at_least=1, also=STEPS)
    epochs = section.number("numb_epoch", above=0, also=EPOCHS)
    if _counts_epochs(data):  # one epoch is the whole training
        if steps is not None or epochs is not None:
            raise section.refused("num_epoch_dict", "and numb_steps or numb_epoch say the same thing; keep one")
        return {"max_epochs": 1}
    if (steps is None) == (epochs is None):
        why = "say the same thing; keep one" if steps is not None else "are both missing; give one"
        raise ForgefieldError(f"{section.file}: 'training.numb_steps' and 'training.numb_epoch' {why}.")
    if steps is not None:
        return {"max_steps": steps}
    if epochs != int(epochs):
        raise section.refused(
            "numb_epoch", f"is {epochs:g}; epochs are counted whole here, so give training.numb_steps"
        )
    return {"max_epochs": int(epochs)}


def _counts_epochs(data: dict[str, Any]) -> bool:
    """Whether the data of each branch is used a given number of times."""
    sampling = data.get("sampling")
    return isinstance(sampling, dict) and "epochs" in sampling


def refuse_epochs_of_draws(section: Section, length: dict[str, int], data: dict[str, Any]) -> None:
    if "max_steps" not in length and "sampling" in data and not _counts_epochs(data):
        raise section.refused(
            "numb_epoch", "means something else where systems are drawn by probability; give training.numb_steps"
        )


def translate_run(section: Section, length: dict[str, int], learnt: OutputTask, *, validates: bool) -> dict[str, Any]:
    """The sections `training`, `trainer` and `callbacks`, and `seed`, from the input. learnt: what is trained."""
    task = learnt.task
    seed = section.integer("seed", 0)
    every = section.integer("disp_freq", 1000, at_least=1)
    training = {"checkpoint": _checkpoints(section, length), **_average(section), **_engine(section)}
    norm = section.number("gradient_max_norm", at_least=0)
    if norm:
        training["clip_norm"] = norm
    trainer: dict[str, Any] = {**length, **_profiler(section)}
    if validates:
        trainer |= {"val_check_interval": every, "check_val_every_n_epoch": None}
    training["tensorboard"], frequency = _tensorboard(section)
    if frequency is not None:
        trainer["log_every_n_steps"] = frequency
    watched = "forces" if "forces" in task else next(iter(task))
    error = "loss" if watched == "branches" else f"{watched}_rmse"
    training["monitor"] = f"{'val' if validates else 'train'}/{error}"
    callbacks = _learning_curve(section, every, learnt)
    _without_effect(section)
    section.finish()
    return {"seed": seed, "training": training, "trainer": trainer, "callbacks": callbacks}


def _learning_curve(section: Section, every: int, learnt: OutputTask) -> list[dict[str, Any]]:
    file = section.text("disp_file", "lcurve.out")
    how: dict[str, Any] = {"columns": learnt.columns} if learnt.columns else {}
    groups = learnt.task.get("branches", {"": learnt.task}).values()
    if not learnt.columns and any(target["loss"] == "mae" for targets in groups for target in targets.values()):
        how = {"errors": "mae"}
    return [{"name": CURVE, "file": file, "every": every, **how}] if section.flag("disp_training", True) else []


def _checkpoints(section: Section, length: dict[str, int]) -> dict[str, Any]:
    every = section.integer("save_freq", 1000, at_least=1)
    keep = section.integer("max_ckpt_keep", 5, at_least=1)
    ratio = section.number("ckpt_keep_ratio", above=0, below=1)
    if ratio is not None:
        if "max_steps" not in length:
            raise section.refused("ckpt_keep_ratio", "needs training.numb_steps; training.max_ckpt_keep is a number")
        keep = math.ceil(ratio * math.ceil(length["max_steps"] / every))
    section.note("save_ckpt", f"{IN_THE_FOLDER}: checkpoints are in its folder 'checkpoints'.", unless=["model.ckpt"])
    section.note("save_dir", f"{IN_THE_FOLDER}: checkpoints are in its folder 'checkpoints'.")
    return {"every_epochs": None, "every_steps": every, "keep": keep}


def _average(section: Section) -> dict[str, Any]:
    on = section.flag("enable_ema")
    decay = section.number("ema_decay", 0.999, at_least=0, below=1)
    section.note("ema_ckpt_keep", "averages are part of the checkpoints.")
    if not on:
        return {"ema": None}
    if decay == 0:
        raise section.wrong("ema_decay", decay, "a number above 0 and below 1, or enable_ema false")
    section.notes[section.path("enable_ema")] = (
        "validated, tested and used is the average; it warms up in the first steps."
    )
    return {"ema": decay}


def _engine(section: Section) -> dict[str, Any]:
    section.only("zero_stage", 0, "optimiser states are not divided among processes here")
    section.only("acc_freq", 1, "steps are counted differently there; use training.accumulate in a config of our own")
    section.only("change_bias_after_training", False, "the bias is not fitted again after the last step")
    section.choice("neighbor_graph_method", "auto", ("auto", "dense", "nv"))
    return {"engine": "compile"} if section.flag("enable_compile") else {}


def precision(section: Section, weights: str) -> str:
    """Our `training.precision`. weights: what the networks have."""
    tf32 = section.flag("enable_tf32")
    mixed = section.below("mixed_precision")
    if mixed is None:
        if tf32 and weights != "float32":
            raise section.refused("enable_tf32", "needs networks in float32 (their key 'precision')")
        return "tf32" if tf32 else weights
    output = mixed.choice("output_prec", "float32", ("float32", "float64"))
    compute = mixed.choice("compute_prec", "float16", ("float16", "bfloat16"))
    mixed.finish()
    if tf32:
        raise section.refused("enable_tf32", "and 'training.mixed_precision' contradict each other; keep one")
    if output == "float64":
        section.notes[section.path("mixed_precision.output_prec")] = (
            "weights are kept in float32; geometry and energies are float64."
        )
    elif weights != "float32":
        raise section.refused("mixed_precision", "needs networks in float32 (their key 'precision')")
    return {"float16": "fp16-mixed", "bfloat16": "bf16-mixed"}[compute]


def _profiler(section: Section) -> dict[str, Any]:
    on = [section.flag("profiling"), section.flag("enable_profiler")]
    file = section.text("profiling_file", "timeline.json")
    if not any(on):
        return {}
    section.notes[section.path("profiling_file")] = f"{IN_THE_FOLDER}: the trace lies there."
    name = "lightning.pytorch.profilers.PyTorchProfiler"
    return {"profiler": {"name": name, "filename": file.rpartition("/")[2].removesuffix(".json")}}


def _tensorboard(section: Section) -> tuple[int, int | None]:
    """Level of detail, and steps between two events."""
    on = section.flag("tensorboard")
    every = section.integer("tensorboard_freq", 1, at_least=1)
    section.note("tensorboard_log_dir", f"{IN_THE_FOLDER}: events are in its folder 'tensorboard'.", unless=["log"])
    return (1, every) if on else (0, None)


def _without_effect(section: Section) -> None:
    """Keys that Forgefield does not need."""
    section.note("stat_file", "statistics are kept by themselves, for any run with the same data.")
    mode = section.choice("stat_file_mode", "update", ("update", "read"))
    if mode == "read":
        section.notes[section.path("stat_file_mode")] = "statistics are kept by themselves."
    section.flag("time_training", True)
    section.flag("disp_avg")
    section.note("numb_test", "it has had no effect since DeePMD-kit 2.0; every validation is over all of its frames.")


def translate_validating(section: Section | None, targets: list[str]) -> dict[str, Any]:
    """Which model is the best, where the section asks for one: `monitor` of our `training`."""
    if section is None:
        return {}
    flags = [section.flag("full_validation"), section.flag("ema_full_validation")]
    text = section.text("validation_metric", "E:MAE")
    start = section.number("full_val_start", 0.5, at_least=0)
    always = "every validation is over all frames, every training.disp_freq steps; the best model is always kept."
    section.note("validation_freq", always, unless=[5000])
    section.flag("save_best", True)
    section.note("save_best_dir", f"{IN_THE_FOLDER}: the best weights are checkpoints/best.safetensors.")
    section.only("max_best_ckpt", 1, "one best model is kept")
    section.note("full_val_file", f"{IN_THE_FOLDER}: see metrics.csv.", unless=["val.log"])
    section.flag("compiled_infer")
    for name in ("tf32_infer", "amp_infer"):
        section.only(name, False, "validation is always in the precision of the weights")
    section.finish()
    return {"monitor": _metric(section, text, targets)} if any(flags) and start != 1 else {}


def _metric(section: Section, text: str, targets: list[str]) -> str:
    letter, _, kind = text.strip().lower().partition(":")
    target = METRICS.get(letter)
    if target is None or kind not in ("mae", "rmse"):
        raise section.wrong("validation_metric", text, "E:MAE, E:RMSE, F:MAE, F:RMSE, V:MAE or V:RMSE")
    if target not in targets:
        raise section.refused("validation_metric", f"is {text}, but {target} is not trained (its prefactors are 0)")
    return f"val/{target}_{kind}"
