"""Optimisers and learning-rate schedulers by name: any of torch's, those of `schedules`, or the user's own by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from forgefield.config.components import check_signature, import_class
from forgefield.config.nearest import did_you_mean
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.training.optim.schedules import SCHEDULES, StepSchedule


def build_optimiser(
    spec: Any, parameters: list[torch.nn.Parameter] | list[dict[str, Any]], *, lr: float
) -> torch.optim.Optimizer:
    """spec: a name, an import path, or {name: ..., option: value}. parameters: or groups of them, each with its rate."""
    name, options = _name_and_options(spec, "training.optimizer")
    cls = _find(torch.optim, name, torch.optim.Optimizer, "training.optimizer")
    if "lr" in options:
        raise ForgefieldError("training.optimizer.lr: set the learning rate with training.lr, in one place.")
    check_signature(cls, options, where="training.optimizer")
    try:
        return cls(parameters, lr=lr, **options)
    except (TypeError, ValueError) as error:
        raise ForgefieldError(f"training.optimizer: {cls.__name__} cannot be built: {error}.") from error


def build_scheduler(
    spec: Any,
    optimiser: torch.optim.Optimizer,
    *,
    monitor: str,
    validate_every: int,
    epochs: int,
    steps: Callable[[], int],
    lr_factor: float = 1.0,
) -> dict[str, Any]:
    """Lightning's description of a scheduler. spec may hold `interval: epoch | step` beside the scheduler's options.

    epochs, steps(): length of the run, -1 where it has no limit; `CosineAnnealingLR` and the schedules by step take their T_max
    from it if not told.
    lr_factor: multiplies every option that is itself a learning rate, as it does the optimiser's.
    """
    name, options = _name_and_options(spec, "training.scheduler")
    base = torch.optim.lr_scheduler.LRScheduler
    cls = _find(torch.optim.lr_scheduler, name, base, "training.scheduler", SCHEDULES)
    by_step = issubclass(cls, StepSchedule)
    interval = options.pop("interval", "step" if by_step else "epoch")
    if interval not in (("step",) if by_step else ("epoch", "step")):
        valid = "step" if by_step else "epoch or step"
        raise ForgefieldError(f"training.scheduler.interval is {valid} for {name}, not '{interval}'.")
    check_signature(cls, options, where="training.scheduler", supplied=("optimizer",))
    if (by_step or cls is torch.optim.lr_scheduler.CosineAnnealingLR) and "T_max" not in options:
        options["T_max"] = _length(interval, epochs, steps)
    options = {key: _scaled(item, lr_factor) if key in _RATES else item for key, item in options.items()}
    if not by_step:
        options = {key: _for_groups(key, item, optimiser) for key, item in options.items()}
    try:
        scheduler = cls(optimiser, **options)
    except (TypeError, ValueError) as error:
        raise ForgefieldError(f"training.scheduler: {cls.__name__} cannot be built: {error}.") from error
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if plateau and interval == "step":
        raise ForgefieldError("training.scheduler: ReduceLROnPlateau follows validations; use interval: epoch.")
    # A plateau scheduler is stepped with each validation, not with a stale value between two of them.
    frequency = validate_every if plateau else 1
    return {"scheduler": scheduler, "interval": interval, "frequency": frequency, "monitor": monitor, "strict": True}


def fit_length(scheduler: Any, length: int, *, in_proportion: bool) -> None:
    """Make a loaded schedule that is as long as the run end with it, where the run has another number of steps or epochs now.

    in_proportion: steps are larger or smaller than before (another number of ranks), so the schedule resumes at the same share
    of its length; otherwise the run was made longer or shorter, and the schedule resumes at the same step of the new curve.
    """
    if isinstance(scheduler, StepSchedule):  # which takes its new length when it is loaded
        if in_proportion:
            scheduler.fit(length)
    elif scheduler.T_max != length:
        if in_proportion:
            scheduler.last_epoch = round(scheduler.last_epoch * length / scheduler.T_max)
        scheduler.T_max = length
        # torch computes each rate from the one before it: at the end of the old curve that would be zero for ever.
        scheduler._last_lr = scheduler._get_closed_form_lr()
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr):
            group["lr"] = rate


class ManualSchedule:
    """Steps the scheduler of a training with manual optimisation as Lightning would with automatic optimisation.

    schedule: Lightning's description of the scheduler, as `build_scheduler` returns it, or None.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, schedule: Mapping[str, Any] | None, monitor: str) -> None:
        self.optimiser, self.monitor = optimiser, monitor
        self.scheduler: Any = None if schedule is None else schedule["scheduler"]
        self.by_step = schedule is not None and schedule["interval"] == "step"

    def next_rates(self) -> list[float]:
        """Learning rates of the next step, one for each parameter group; schedules by step are advanced after it."""
        rates = [float(group["lr"]) for group in self.optimiser.param_groups]
        if self.by_step:
            self.scheduler.step()
        return rates

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        """metrics: those of the training so far, of which a plateau scheduler reads `monitor`."""
        if self.scheduler is None or self.by_step:
            return
        if not self._is_plateau:
            self.scheduler.step()
        elif self.monitor.startswith("train/"):
            self._step_plateau(metrics)

    def end_validation(self, metrics: Mapping[str, Any]) -> None:
        if self._is_plateau and not self.monitor.startswith("train/"):
            self._step_plateau(metrics)

    @property
    def _is_plateau(self) -> bool:
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def _step_plateau(self, metrics: Mapping[str, Any]) -> None:
        if (value := metrics.get(self.monitor)) is not None:
            self.scheduler.step(float(value))


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
"""The same as torch stores them in the state of optimisers and schedulers."""


def rescale_learning_rates(checkpoint: dict[str, Any], ratio: float) -> None:
    """Multiply every learning rate that a checkpoint holds: the run goes on with another factor than it was saved with."""
    if ratio == 1.0:
        return
    groups = [group for state in checkpoint["optimizer_states"] for group in state["param_groups"]]
    for holder in [*groups, *checkpoint["lr_schedulers"]]:
        for key in _STORED_RATES:
            if key in holder:
                holder[key] = _scaled(holder[key], ratio)


def _for_groups(key: str, value: Any, optimiser: torch.optim.Optimizer) -> Any:
    """A rate that a scheduler is told, for each group of parameters by its factor."""
    factors = [group.get("factor", 1.0) for group in optimiser.param_groups]
    if key not in _RATES or isinstance(value, (list, tuple)) or not value or all(factor == 1.0 for factor in factors):
        return value
    if key == "eta_min":
        raise ForgefieldError(
            "training.scheduler.eta_min is one rate for all parameters, and training.lr_groups or training.weighting.lr gives "
            "them several; use "
            "{name: cosine_to, stop_lr: ...}, whose last rate follows the groups."
        )
    return [value * factor for factor in factors]


def _scaled(value: Any, factor: float) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return type(value)(_scaled(item, factor) for item in value)
    return value * factor


def _length(interval: str, epochs: int, steps: Callable[[], int]) -> int:
    length = epochs if interval == "epoch" else steps()
    if length is None or length <= 0:
        raise ForgefieldError(f"training.scheduler: the run has no fixed number of {interval}s; set T_max.")
    return int(length)


def _name_and_options(spec: Any, where: str) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    options = dict(spec)
    if "name" not in options:
        raise ForgefieldError(f"{where} needs a name, for example {where}.name=adamw.")
    return str(options.pop("name")), options


def _find(module: Any, name: str, base: type, where: str, own: Mapping[str, type] | None = None) -> type:
    """A class of `module` or one of our `own` by name, whatever the case, or of any module by import path."""
    if "." in name:
        return import_class(name, base, where=where, trust=CONFIG)
    known = {
        key.lower(): value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not key.startswith("_")
    }
    own = own or {}
    if name.lower() in own:
        return own[name.lower()]
    aliases = {"plateau": "reducelronplateau", "cosine": "cosineannealinglr"}
    key = aliases.get(name.lower(), name.lower())
    if key not in known:
        names = [*own, *sorted(value.__name__ for value in known.values())]
        raise ForgefieldError(f"{where}: there is no '{name}'.{did_you_mean(name, names)} Known: {', '.join(names)}.")
    return known[key]
