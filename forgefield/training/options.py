"""Options of the section `training` of a config, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import option
from forgefield.config.sources import Sources, check_choice, wrong
from forgefield.errors import ForgefieldError

FEWEST_KNOTS, MOST_KNOTS = 256, 2**15 - 1
"""Limits of the number of intervals of a table: for its precision, and because kernels use 16-bit indices."""
PRECISIONS = ("float64", "float32", "tf32", "bf16-mixed", "fp16-mixed")
CHECKPOINT_SECONDS = 30.0
"""Seconds between checkpoints, unless the config sets when they are saved."""
SCHEDULE = ("start", "finish", "finish_epochs", "finish_steps")
"""Keys of a schedule of precisions."""


@dataclass
class CheckpointOptions:
    every_seconds: float | None = option(None, above=0)
    """Save a checkpoint when N seconds have passed since the last one, also within an epoch. Default: 30 if neither
    `every_epochs` nor `every_steps` is set, else never. The end of a training and requests to stop are always saved."""
    every_epochs: int | None = option(None, above=0)
    """Save a checkpoint every N epochs."""
    every_steps: int | None = option(None, above=0)
    """Save a checkpoint every N optimiser steps, also within an epoch."""
    keep: int = option(2, above=0)
    """Number of checkpoints to keep; older ones are deleted."""
    requeue_exit: int = 75
    """Exit code of a training that a batch system stopped (SIGTERM, SIGUSR1) and that should be started again."""

    @property
    def seconds(self) -> float | None:
        """Seconds between checkpoints; None if they are not saved by time."""
        if self.every_seconds is None and self.every_epochs is None and self.every_steps is None:
            return CHECKPOINT_SECONDS
        return self.every_seconds


@dataclass
class EarlyStoppingOptions:
    patience: int = option(50, above=0)
    """Number of validations without improvement after which the training stops."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""
    monitor: str | None = None
    """Metric to monitor. Default: `training.monitor`."""


@dataclass
class SwaOptions:
    """Stochastic weight averaging: the mean of the weights over the last part of a training."""

    start: float = option(0.75, above=0, expected="a share of the training, or a number of steps")
    """Start of the average: a fraction of the training, or, from 1 on, a number of optimiser steps."""
    every: int | None = option(None, at_least=1, expected="a number of steps, 1 or more")
    """Number of steps between weights that enter the mean. Default: one epoch."""


@dataclass
class CompileOptions:
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of PyTorch's Inductor, such as {max_autotune: true}."""


@dataclass
class GraphsOptions:
    sizes: int = option(4, above=0)
    """Maximum number of different batch sizes to which batches are padded."""
    compiled: bool = True
    """Capture the compiled step. false captures the eager step, which starts faster and runs slower. For grid points in tf32
    and bf16-mixed, true uses Forgefield's kernels where they are supported, or the uncompiled step if it is faster."""


@dataclass
class KernelOptions:
    radial: str = option("table", choices=("table", "exact"))
    """Source of the radial weights: a table of cubic polynomials, recomputed in every step and accurate to float32 precision,
    or the exact value of the network for every pair of atoms. float64 is always exact."""
    knots: int = option(1024, at_least=FEWEST_KNOTS, at_most=MOST_KNOTS)
    """Number of intervals of the table. `forgefield check` reports its deviation from the network."""
    storage: str = option("float32", choices=("float32", "bfloat16"))
    """Storage type of the table, the gathered features and the rows of edges in a training step. bfloat16 halves the memory and
    rounds gradients to about 3e-3; arithmetic and validation remain float32. Not with float64."""
    edges: bool = True
    """Use kernels for sums over edges and couplings of models that have them (Allegro), with every engine, on an NVIDIA GPU
    with Triton; and compiled C code for convolutions, radial weights (NequIP) and sums over edges (Allegro), with the eager
    engine, on a CPU with a C compiler. false uses PyTorch operations."""


@dataclass
class MemoryOptions:
    parts: int = option(1, above=0)
    """Compute each batch in N parts, one after another: the same gradients with about 1/N of the memory."""
    split: bool = False
    """Compute a batch that does not fit into memory in parts. Otherwise the training stops with advice."""


@dataclass
class LoraOptions:
    """Low-rank adaptation: train low-rank changes of the frozen weight matrices of a pretrained model (`model.from`)."""

    rank: int = option(4, above=0)
    """Rank of the changes."""
    alpha: float | None = option(None, above=0)
    """Changes are multiplied by alpha / rank. Default: alpha = rank."""
    targets: list[str] | None = None
    """Patterns of the names of the matrices to change. Default: all of the encoder, [model.*]."""


@dataclass(frozen=True)
class EnsembleOptions:
    """Several models of one configuration."""

    size: int
    """Number of models, which have the seeds `seed`, `seed` + 1, ..."""
    bootstrap: bool = False
    """Train each on frames drawn at random, with replacement, from the training frames (data.bootstrap)."""
    together: int | None = None
    """Number of models that are trained at the same time. None: all on a GPU, one on a CPU."""


def ensemble_options(value: int | Mapping[str, Any] | None) -> EnsembleOptions | None:
    """The options in `training.ensemble`, which has been checked; None for a single model."""
    if value is None or isinstance(value, int):
        return None if value is None else EnsembleOptions(value)
    return EnsembleOptions(**value)


SCHEDULE_FREE = ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")
"""Optimisers that average the weights themselves."""


def is_schedule_free(optimizer: str | Mapping[str, Any]) -> bool:
    """Whether `training.optimizer` names one of these."""
    name = optimizer if isinstance(optimizer, str) else optimizer.get("name", "")
    return str(name).lower() in [known.lower() for known in SCHEDULE_FREE]


@dataclass
class TrainingOptions:
    lr: float = option(0.01, above=0)
    """Learning rate."""
    scale_lr: str = option("none", choices=("none", "sqrt", "linear"))
    """How learning rates depend on the number of processes N: not at all, multiplied by sqrt(N), or by N."""
    optimizer: str | dict[str, Any] = "adam"
    """Name of a PyTorch optimiser, an import path, or {name: adamw, weight_decay: 1e-3, ...}. AdamWScheduleFree,
    RAdamScheduleFree and SGDScheduleFree need neither a scheduler nor `ema`. Muon trains matrices of hidden layers, and AdamW
    the rest: {name: Muon, momentum: 0.95, weight_decay: 0, adamw_factor: 1, ...}."""
    scheduler: str | dict[str, Any] | None = None
    """Learning-rate scheduler: the name of a PyTorch scheduler, or {name: ReduceLROnPlateau, patience: 20, ..., interval:
    epoch|step}; {name: SequentialLR, milestones: [5], schedulers: [{name: LinearLR, ...}, {name: StepLR, ...}]} and
    ChainedScheduler; or a schedule over the length of the run as in DeePMD-kit: {name: exp|cosine_to|wsd, stop_lr: 1e-6,
    warmup_steps: 1000, ...}. Default: constant."""
    engine: str | None = option("auto", choices=("auto", "eager", "compile", "graphs", "script"))
    """How a step is executed: eager PyTorch, torch.compile, CUDA graphs or TorchScript. auto measures and uses the fastest."""
    derivative: str = option("auto", choices=("auto", "double", "tangent", "kernels"))
    """How a loss of forces is differentiated: by two backward passes (double), by a forward-mode and a backward pass (tangent),
    or by tangent with generated GPU kernels (kernels). auto: kernels with the graphs engine if supported, else double."""
    kernels: KernelOptions = field(default_factory=KernelOptions)
    """Options of the generated GPU kernels."""
    compile: CompileOptions = field(default_factory=CompileOptions)
    """Options of the compile engine."""
    graphs: GraphsOptions = field(default_factory=GraphsOptions)
    """Options of the graphs engine."""
    precision: str | dict[str, Any] = option("float32", choices=PRECISIONS, open_choices="a schedule")
    """Precision of the network; geometry and energy sums are always float64. A schedule changes the precision during the
    training: {start: tf32, finish: float32, finish_epochs: 10}."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    """Options that reduce memory."""
    block: int | None = option(None, above=0)
    """Grid points only: number of optimiser steps executed together, as one CUDA graph with the graphs engine. Signals and
    checkpoints are handled between blocks. Default: 64 for short steps, else 16."""
    ema: float | None = option(0.99, above=0, below=1, expected="a number between 0 and 1, or null for no average")
    """Decay of the exponential moving average of the weights, which is validated, tested and deployed."""
    swa: SwaOptions | None = None
    """Stochastic weight averaging instead of `ema` (set ema: null): {start: 0.75}."""
    clip_norm: float | None = option(None, above=0)
    """Maximum norm of the gradient; larger gradients are scaled down. Default: no limit."""
    accumulate: int = option(1, above=0)
    """Number of batches per optimiser step."""
    weighting: str | dict[str, Any] | None = None
    """Self-adapting loss weights: softadapt (targets that improve slowly weigh more), uncertainty (learnt variances), or with
    options: {name: softadapt, every: 50, beta: 1.0}, {name: uncertainty, lr: 1.0}. Reported losses use the weights of
    `task`."""
    freeze: list[str] | None = None
    """Parameters that are not trained, as patterns of names: [model.*] is the encoder, [heads.of_gap.*] a head."""
    lr_groups: dict[str, float] | None = None
    """Learning rates of groups of parameters, as factors of `lr` by pattern of names: {model.*: 0.1}. The first match
    counts."""
    lora: LoraOptions | None = None
    """Low-rank adaptation of a pretrained model: {rank: 4, targets: [model.*]}. Saved models contain the merged matrices."""
    monitor: str = "val/loss"
    """Metric that selects the best model, and that ReduceLROnPlateau and early stopping use."""
    monitor_weights: dict[str, float] | None = None
    """Weights of errors in the metric val/weighted_sum, which `monitor` can name: {energy_total_mae: 0.001, forces_mae: 0.001}.
    Errors have the units of the metrics."""
    max_errors: bool = False
    """Report the largest absolute error of each target as well, val/forces_max and so on. Always true if one of them is
    monitored."""
    early_stopping: EarlyStoppingOptions | None = None
    """Stop the training when the monitored metric no longer improves: {patience: 50}. Default: off."""
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    """When checkpoints are saved."""
    uncertainty: bool = True
    """Compute uncertainties of energies and forces when the training ends, from the last layer of the best model and at most
    5000 training frames. Models without a suitable last layer have none."""
    ensemble: int | dict[str, Any] | None = None
    """Train N models with the seeds `seed`, `seed` + 1, ..., and combine them into one run whose predictions are means and
    whose uncertainties are deviations: 4, or {size: 4, bootstrap: true, together: 2}. bootstrap: each on its own draw of the
    training frames; together: how many are trained at the same time (default: all on a GPU, one on a CPU)."""
    tensorboard: int = option(1, choices=(0, 1, 2))
    """TensorBoard output: 0 none, 1 losses and learning rate, 2 also histograms of weights and gradients, which are then sent
    to wandb too if `trainer.logger` names its logger."""


def measures_maxima(training: TrainingOptions) -> bool:
    """Whether the largest errors of the validation are measured."""
    monitored = [training.monitor, *(training.monitor_weights or {})]
    if training.early_stopping is not None:
        monitored.append(training.early_stopping.monitor or "")
    return training.max_errors or any("_max/" in f"{name}/" for name in monitored)


def check_training(training: TrainingOptions, sources: Sources, *, new_model: bool) -> None:
    """Raise ForgefieldError for settings that contradict each other. new_model: whether the model does not come from a run."""
    _check_kernels(training, sources)
    for pattern, factor in (training.lr_groups or {}).items():
        if not 0 < factor < float("inf"):
            hint = f"; to exclude parameters from the training, use training.freeze=[{pattern}]" if factor == 0 else ""
            raise wrong(sources, f"training.lr_groups.{pattern}", factor, f"a positive factor of training.lr{hint}")
    if training.lora is not None and new_model:
        raise ForgefieldError(
            f"{sources.where('training.lora')}: 'training.lora' changes the matrices of a trained model (model.from), but this "
            "model is new."
        )
    _check_swa(training, sources)
    _check_schedule_free(training, sources)
    _check_precision(training.precision, sources)
    _check_ensemble(training.ensemble, sources)


def _check_kernels(training: TrainingOptions, sources: Sources) -> None:
    """Raise ForgefieldError for settings of kernels that are not used."""
    kernels, defaults = training.kernels, KernelOptions()
    if (kernels.radial, kernels.knots, kernels.storage) == (defaults.radial, defaults.knots, defaults.storage):
        return
    for key, value in (
        ("training.derivative", training.derivative),
        ("training.engine", training.engine),
    ):
        if value in ("double", "tangent", "compile", "script"):
            raise ForgefieldError(
                f"{sources.where('training.kernels')}: 'training.kernels' sets up generated kernels, which {key}={value} does "
                "not use; leave it out, or set training.derivative=kernels and training.engine=graphs."
            )
    if kernels.radial == "exact" and kernels.knots != defaults.knots:
        raise ForgefieldError(
            f"{sources.where('training.kernels.knots')}: 'training.kernels.knots' are intervals of a table, and "
            "training.kernels.radial=exact makes none; leave one of them out."
        )
    if kernels.storage == "bfloat16" and training.precision == "float64":
        raise ForgefieldError(
            f"{sources.where('training.kernels.storage')}: 'training.kernels.storage=bfloat16' would round what "
            "training.precision=float64 computes; leave one of them out."
        )


def _check_swa(training: TrainingOptions, sources: Sources) -> None:
    swa = training.swa
    if swa is None:
        return
    if training.ema is not None:
        raise ForgefieldError(
            f"{sources.where('training.swa')}: training.swa replaces training.ema={training.ema:g}; set "
            "training.ema=null."
        )


def _check_schedule_free(training: TrainingOptions, sources: Sources) -> None:
    if not is_schedule_free(training.optimizer):
        return
    for key in ("ema", "swa"):
        if getattr(training, key) is not None:
            raise ForgefieldError(
                f"{sources.where(f'training.{key}')}: schedule-free optimisers average the weights themselves; set "
                f"training.{key}=null."
            )


def _check_ensemble(value: object, sources: Sources) -> None:
    key, names = "training.ensemble", [field.name for field in fields(EnsembleOptions)]
    values = value if isinstance(value, Mapping) else {} if value is None else {"size": value}
    for name, number in values.items():
        if name not in names:
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}' has no key '{name}'; it is a number of models, or "
                f"{{size: 4, bootstrap: true}}.{did_you_mean(str(name), names)}"
            )
        at = f"{key}.{name}" if isinstance(value, Mapping) else key
        if name == "bootstrap":
            if not isinstance(number, bool):
                raise wrong(sources, at, number, "true or false")
        elif number is None and name == "together":
            continue
        elif isinstance(number, bool) or not isinstance(number, int) or number < (2 if name == "size" else 1):
            raise wrong(sources, at, number, "a number of models, 2 or more" if name == "size" else "a positive number")
    if isinstance(value, Mapping) and "size" not in value:
        raise ForgefieldError(f"{sources.where(key)}: '{key}' needs a size: {{size: 4, bootstrap: true}}.")


def _check_precision(value: str | dict[str, Any], sources: Sources) -> None:
    key = "training.precision"
    if not isinstance(value, Mapping):
        return
    for name in value:
        if name not in SCHEDULE:
            hint = did_you_mean(str(name), SCHEDULE)
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}' has no key '{name}'; a schedule is written {{start: tf32, finish: float32, "
                f"finish_epochs: 10}}.{hint}"
            )
    # Weights keep their type through a run.
    for name in ("start", "finish"):
        if name in value or name == "start":
            check_choice(value.get(name), PRECISIONS[1:], f"{key}.{name}", sources)
    if value["start"] == value.get("finish", "float32"):
        raise wrong(sources, f"{key}.finish", value["start"], "different from start")
    last = {name: value[name] for name in SCHEDULE[2:] if value.get(name) is not None}
    if len(last) != 1:
        raise ForgefieldError(f"{sources.where(key)}: '{key}' needs one of finish_epochs and finish_steps.")
    for name, number in last.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise wrong(sources, f"{key}.{name}", number, "a positive whole number")
