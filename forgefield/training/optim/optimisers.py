"""Optimisers and learning-rate schedulers by name: those of torch, those of `schedules`, or user-defined ones by import
path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from forgefield.config.components import check_signature, import_class
from forgefield.config.nearest import did_you_mean
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.training.optim.muon import Muon, muon_groups
from forgefield.training.optim.schedule_free import SCHEDULE_FREE
from forgefield.training.optim.schedules import SCHEDULES, StepSchedule

Spec = str | Mapping[str, Any]
"""The setting of an optimiser or scheduler: a name, an import path, or {name: ..., option: value}."""
Parameters = list[torch.nn.Parameter] | list[dict[str, Any]]
"""Parameters, or groups of parameters with a learning rate for each."""
T = TypeVar("T")
ADDITIONAL: dict[str, type[torch.optim.Optimizer]] = {**SCHEDULE_FREE, "Muon": Muon}
"""Optimisers of Forgefield by name; Muon takes the place of torch's, which trains nothing but matrices."""


def build_optimiser(
    spec: Spec, parameters: Parameters, *, lr: float, module: nn.Module | None = None
) -> torch.optim.Optimizer:
    """The optimiser that `training.optimizer` describes. module: to which the parameters belong, for their names."""
    name, options = _name_and_options(spec, "training.optimizer")
    cls = _find(torch.optim, name, torch.optim.Optimizer, "training.optimizer", ADDITIONAL)
    if cls.__module__.partition(".")[0] == "schedulefree":
        raise ForgefieldError(
            f"training.optimizer: {name} has to be switched between training and evaluation; use name={cls.__name__}, "
            "Forgefield's optimiser with the same numbers, if it exists."
        )
    build: Callable[..., torch.optim.Optimizer] = cls
    if "lr" in options:
        raise ForgefieldError("training.optimizer.lr: set the learning rate with training.lr instead.")
    if cls is Muon:
        parameters = _muon_groups(module, parameters, options, lr)
    check_signature(cls, options, where="training.optimizer")
    try:
        return build(parameters, lr=lr, **options)
    except (TypeError, ValueError) as error:
        raise ForgefieldError(f"training.optimizer: {cls.__name__} cannot be built: {error}.") from error


def _muon_groups(module: nn.Module | None, parameters: Parameters, options: dict[str, Any], lr: float) -> Parameters:
    """Groups of parameters for Muon; removes the options that describe them."""
    patterns, factor = options.pop("adamw", None), options.pop("adamw_factor", 1.0)
    scale_by = options.pop("scale_by", "outputs")
    if scale_by not in ("outputs", "inputs"):
        raise ForgefieldError(f"training.optimizer.scale_by is {scale_by!r}; choose outputs or inputs.")
    if patterns is not None and not (isinstance(patterns, list) and all(isinstance(item, str) for item in patterns)):
        raise ForgefieldError(f"training.optimizer.adamw is {patterns!r}; it must be a list of patterns of names.")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
        raise ForgefieldError(f"training.optimizer.adamw_factor is {factor!r}; it must be a positive number.")
    if module is None:  # only the options are of interest
        module, patterns = nn.ParameterList(p for p in parameters if isinstance(p, nn.Parameter)), None
    return muon_groups(module, parameters, lr=lr, adamw=patterns, adamw_factor=float(factor), scale_by=scale_by)


def build_scheduler(
    spec: Spec,
    optimiser: torch.optim.Optimizer,
    *,
    monitor: str,
    validate_every: int,
    epochs: int,
    steps: Callable[[], int],
    lr_factor: float = 1.0,
) -> LRSchedulerConfigType:
    """The scheduler that `training.scheduler` describes.

    spec: may contain `interval: epoch | step` in addition to the options of the scheduler.
    epochs, steps(): length of the run, -1 without limit; the default of T_max.
    lr_factor: factor of options that are learning rates.
    """
    name, options = _name_and_options(spec, "training.scheduler")
    cls = _find(torch.optim.lr_scheduler, name, LRScheduler, "training.scheduler", SCHEDULES)
    by_step = issubclass(cls, StepSchedule)
    interval = options.pop("interval", "step" if by_step else "epoch")
    if interval not in (("step",) if by_step else ("epoch", "step")):
        valid = "step" if by_step else "epoch or step"
        raise ForgefieldError(f"training.scheduler.interval must be {valid} for {name}, not '{interval}'.")
    if issubclass(cls, COMBINED):
        options["schedulers"] = _members(options.get("schedulers"), name, optimiser, lr_factor)
    check_signature(cls, options, where="training.scheduler", supplied=("optimizer",))
    if (by_step or cls is CosineAnnealingLR) and "T_max" not in options:
        options["T_max"] = _length(interval, epochs, steps)
    options = {key: _scaled(item, lr_factor) if key in _RATES else item for key, item in options.items()}
    if not by_step:
        options = {key: _for_groups(key, item, optimiser) for key, item in options.items()}
    try:
        # A chain takes the optimiser from its members, and has it as an option after them.
        scheduler = cls(**options) if cls is ChainedScheduler else cls(optimiser, **options)
    except (TypeError, ValueError) as error:
        raise ForgefieldError(f"training.scheduler: {cls.__name__} cannot be built: {error}.") from error
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if plateau and interval == "step":
        raise ForgefieldError(
            "training.scheduler: ReduceLROnPlateau needs results of validations; use interval: epoch."
        )
    # A plateau scheduler is stepped after each validation.
    frequency = validate_every if plateau else 1
    return {"scheduler": scheduler, "interval": interval, "frequency": frequency, "monitor": monitor, "strict": True}


def _members(specs: object, name: str, optimiser: torch.optim.Optimizer, lr_factor: float) -> list[LRScheduler]:
    """The schedulers in the list `training.scheduler.schedulers` of a sequence or a chain."""
    if not isinstance(specs, Sequence) or isinstance(specs, str) or not specs:
        raise ForgefieldError(
            f"training.scheduler.schedulers: {name} needs a list of schedulers, such as [{{name: LinearLR, total_iters: 5}}, "
            "{name: CosineAnnealingLR, T_max: 95}]."
        )
    built = []
    for number, spec in enumerate(specs):
        where = f"training.scheduler.schedulers.{number}"
        member, options = _name_and_options(spec, where)
        cls = _find(torch.optim.lr_scheduler, member, LRScheduler, where)
        if issubclass(cls, (*COMBINED, ReduceLROnPlateau)):
            raise ForgefieldError(f"{where}: {cls.__name__} cannot be one of the schedulers of {name}.")
        if "interval" in options:
            raise ForgefieldError(
                f"{where}.interval: set training.scheduler.interval, which all schedulers have in common."
            )
        if cls is CosineAnnealingLR and "T_max" not in options:
            raise ForgefieldError(f"{where}: set T_max, the number of epochs or steps (interval) of this part.")
        check_signature(cls, options, where=where, supplied=("optimizer",))
        options = {key: _scaled(item, lr_factor) if key in _RATES else item for key, item in options.items()}
        options = {key: _for_groups(key, item, optimiser) for key, item in options.items()}
        try:
            built.append(cls(optimiser, **options))
        except (TypeError, ValueError) as error:
            raise ForgefieldError(f"{where}: {cls.__name__} cannot be built: {error}.") from error
    return built


def fit_length(scheduler: LRScheduler, length: int, *, in_proportion: bool) -> None:
    """Adapt a restored schedule over the length of the run to a new number of steps or epochs, `length`.

    in_proportion: batches are larger or smaller than before (another number of ranks), so the schedule resumes at the same
    fraction of its length; otherwise the run was made longer or shorter, and the schedule resumes at the same step of the new
    curve.
    """
    if isinstance(scheduler, StepSchedule):  # it gets its new length when it is loaded
        if in_proportion:
            scheduler.fit(length)
    elif isinstance(scheduler, CosineAnnealingLR) and scheduler.T_max != length:
        if in_proportion:
            scheduler.last_epoch = round(scheduler.last_epoch * length / scheduler.T_max)
        scheduler.T_max = length
        # torch computes each rate from the previous one, which is zero at the end of the old curve.
        scheduler._last_lr = scheduler._get_closed_form_lr()
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr):
            group["lr"] = rate


class ManualSchedule:
    """Steps the scheduler of a training with manual optimisation as Lightning would with automatic optimisation.

    schedule: from `build_scheduler`, or None.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, schedule: LRSchedulerConfigType | None, monitor: str) -> None:
        self.optimiser, self.monitor = optimiser, monitor
        self.scheduler = None if schedule is None else schedule["scheduler"]
        self.by_step = schedule is not None and schedule["interval"] == "step"

    def next_rates(self) -> list[float]:
        """Learning rates of the next step, one for each parameter group; schedules by step are advanced after it."""
        rates = [float(group["lr"]) for group in self.optimiser.param_groups]
        if self.scheduler is not None and self.by_step:
            self.scheduler.step()
        return rates

    def end_epoch(self, metrics: Mapping[str, Tensor]) -> None:
        """metrics: values so far, of which a plateau scheduler reads `monitor`."""
        if self.scheduler is None or self.by_step:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if self.monitor.startswith("train/"):
                self._step_plateau(self.scheduler, metrics)
        else:
            self.scheduler.step()

    def end_validation(self, metrics: Mapping[str, Tensor]) -> None:
        """metrics: as in `end_epoch`."""
        if isinstance(self.scheduler, ReduceLROnPlateau) and not self.monitor.startswith("train/"):
            self._step_plateau(self.scheduler, metrics)

    def _step_plateau(self, scheduler: ReduceLROnPlateau, metrics: Mapping[str, Tensor]) -> None:
        if (value := metrics.get(self.monitor)) is not None:
            scheduler.step(float(value))


COMBINED = (SequentialLR, ChainedScheduler)
"""Schedulers that are made of others."""
_RATES = ("eta_min", "min_lr", "max_lr", "base_lr", "stop_lr")
"""Options of schedulers that are learning rates."""
_STORED_RATES = (
    "lr",
    "initial_lr",
    "min_lr",
    "max_lr",
    "base_lrs",
    "_last_lr",
    "eta_min",
    "min_lrs",
    "max_lrs",
    "stop_lr",
)
"""Learning rates in the state of optimisers and schedulers, by torch's names."""


def rescale_learning_rates(checkpoint: dict[str, Any], ratio: float) -> None:
    """Multiply every learning rate in a checkpoint by `ratio`: the run resumes with another factor of learning rates."""
    if ratio == 1.0:
        return
    groups = [group for state in checkpoint["optimizer_states"] for group in state["param_groups"]]
    members = [member for state in checkpoint["lr_schedulers"] for member in state.get("_schedulers", ())]
    for holder in [*groups, *checkpoint["lr_schedulers"], *members]:
        for key in _STORED_RATES:
            if key in holder:
                holder[key] = _scaled(holder[key], ratio)
    for stored in checkpoint["optimizer_states"]:
        for group in stored["param_groups"]:
            states = [stored["state"][number] for number in group["params"] if number in stored.get("state", {})]
            for state in states:
                if "lr_max" in state:  # of a schedule-free optimiser
                    state["lr_max"] *= ratio
                    state["weight_sum"] *= ratio ** group["weight_lr_power"]


def _for_groups(key: str, value: T, optimiser: torch.optim.Optimizer) -> T | list[float]:
    """An option of a scheduler; a learning rate as a list of rates if groups of parameters have different factors."""
    factors = [group.get("factor", 1.0) for group in optimiser.param_groups]
    if key not in _RATES or not isinstance(value, (int, float)) or not value or all(f == 1.0 for f in factors):
        return value
    if key == "eta_min":
        raise ForgefieldError(
            "training.scheduler.eta_min is one rate for all parameters, but training.lr_groups or training.weighting.lr sets "
            "several; use {name: cosine_to, stop_lr: ...}, whose last rate is multiplied by the factors of the groups."
        )
    return [value * factor for factor in factors]


def _scaled(value: Any, factor: float) -> Any:  # rates, lists and tuples of them, or None
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return type(value)(_scaled(item, factor) for item in value)
    return value * factor


def _length(interval: str, epochs: int, steps: Callable[[], int]) -> int:
    length = epochs if interval == "epoch" else steps()
    if length <= 0:
        raise ForgefieldError(f"training.scheduler: the run has no fixed number of {interval}s; set T_max.")
    return int(length)


def _name_and_options(spec: Spec, where: str) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    options = dict(spec)
    if "name" not in options:
        raise ForgefieldError(f"{where} needs a name, for example {where}.name=adamw.")
    return str(options.pop("name")), options


def _find(
    module: ModuleType, name: str, base: type[T], where: str, additional: Mapping[str, type[T]] | None = None
) -> type[T]:
    """A class of `module` or of `additional` by its name in any case, or a class by import path."""
    if "." in name:
        found: type[T] = import_class(name, base, where=where, trust=CONFIG)
        return found
    classes = {
        key.lower(): value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not key.startswith("_")
    }
    additional = additional or {}
    for key, value in additional.items():
        if name.lower() == key.lower():
            return value
    aliases = {"plateau": "reducelronplateau", "cosine": "cosineannealinglr"}
    key = aliases.get(name.lower(), name.lower())
    if key not in classes:
        names = list(dict.fromkeys([*additional, *sorted(value.__name__ for value in classes.values())]))
        raise ForgefieldError(
            f"{where}: unknown name '{name}'.{did_you_mean(name, names)} Available: {', '.join(names)}."
        )
    return classes[key]
