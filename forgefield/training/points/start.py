"""The engine of a training on points: chosen by rule, compared with autograd on real rows before its first step, and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.ldos import LDOSNetwork
from forgefield.tasks.ldos import PointTask
from forgefield.training.engines.captured_update import why_not_capturable
from forgefield.training.engines.choose import inductor_options, why_not
from forgefield.training.points.data import PointData, read_rows
from forgefield.training.points.engines import EagerEngine, GraphsEngine
from forgefield.training.points.gradient import ByAutograd, Gradient, Written
from forgefield.training.points.observing import SnapshotMeasure
from forgefield.training.points.terms import TermGradient
from forgefield.training.points.update import Update
from forgefield.training.precision import Precision
from forgefield.training.subject import Party

SHORT = 2e8
"""Floating-point operations of a step below which Lightning's loop would be felt in blocks of 16."""
COMPARED = 256
"""Points on which an engine is compared with autograd."""


def block_size(training: Any, options: dict[str, Any], steps: int, flops: float) -> int:
    """Steps of a block: what the config says or what suits their length, and such that validations and checkpoints within an
    epoch fall between blocks. options: the trainer's. steps: of an epoch."""
    wanted = int(training.block) if training.block is not None else (64 if flops < SHORT else 16)
    interval = options.get("val_check_interval")
    if options.get("check_val_every_n_epoch", 1) is None:
        return 1  # validations are counted through epochs, whose last blocks are short
    if isinstance(interval, float):
        wanted = min(wanted, max(1, int(interval * steps)))
    wanted = min(wanted, steps)
    if isinstance(interval, int) and not isinstance(interval, bool):
        wanted = max(size for size in range(1, wanted + 1) if _keeps_time(size, interval, steps))
    if training.checkpoint.every_steps:
        wanted = max(
            size for size in range(1, wanted + 1) if wanted % size == training.checkpoint.every_steps % size == 0
        )
    return wanted


def _keeps_time(size: int, interval: int, steps: int) -> bool:
    """Whether validations after every `interval` steps of an epoch are those after every so many blocks: the last block of an
    epoch may be a short one, at which none is due."""
    short = steps % size != 0
    return interval % size == 0 and not (short and -(-steps // size) % (interval // size) == 0)


class EngineMaker:
    """Builds the engine on the first block. terms: gives what terms on snapshots need; called where there are any."""

    def __init__(
        self, config: DictConfig, party: Party, data: PointData, block: int, terms: Callable[[], SnapshotMeasure]
    ) -> None:
        self.config, self.party, self.data, self.block, self.terms = config, party, data, block, terms

    @staticmethod
    def refuse(training: Any, device: torch.device, world_size: int) -> None:
        """Stop where the engine that the config names cannot run."""
        name = training.engine or "eager"
        compiles = name == "compile" or (name == "graphs" and training.graphs.compiled and device.type == "cuda")
        reason = why_not(name, device) or (why_not("compile", device) if compiles else None)
        if name == "graphs" and world_size > 1:
            reason = reason or "steps of several processes are not captured; use eager or compile."
        if reason is not None:
            raise ForgefieldError(f"training.engine={name}: {reason}")

    def __call__(self, module: Any) -> EagerEngine | GraphsEngine:
        model, task, ranks = module.model, module.task, self.party.ranks
        training, device = self.config.training, module.device
        name = training.engine or "eager"
        against = why_not_capturable(module.trainer.optimizers[0]) if device.type == "cuda" else "no GPU"
        if name == "auto":
            name = "graphs" if device.type == "cuda" and ranks.world_size == 1 and against is None else "eager"
            captured_eagerly = True
        else:
            captured_eagerly = not training.graphs.compiled
        if name == "graphs" and against is not None:
            raise ForgefieldError(f"training.engine=graphs: {against}")
        compiles = name == "compile" or (name == "graphs" and not captured_eagerly)
        gradient = self._gradient(model, task, compiles)
        difference = self._compare(gradient, model, task)
        update = Update(module.trainer.optimizers[0], module.ema, clip=module.clip, reduce=module.reduction())
        inner = EagerEngine(
            model,
            task,
            gradient,
            update,
            kept=self.data.train.kept,
            world_size=ranks.world_size,
            terms=TermGradient(model, task, self.terms(), ranks) if task.terms else None,
            fast=self.config.data.fast is not False,
        )
        kind = f"{name} of the compiled step" if compiles and name == "graphs" else name
        self.party.journal.say(
            f"Engine {kind}, blocks of {self.block} steps: errors and all gradients equal autograd's to {difference:.1e}."
        )
        return inner if name != "graphs" else GraphsEngine(inner, self.block, self.data.batch)

    def _gradient(self, model: LDOSNetwork, task: PointTask, compiles: bool) -> Gradient:
        if not compiles:
            return Written(model, task.loss)
        options = inductor_options(self.config.training)
        return ByAutograd(model, task.loss, lambda step: torch.compile(step, dynamic=False, options=options or None))

    @torch.no_grad()
    def _compare(self, gradient: Gradient, model: LDOSNetwork, task: PointTask) -> float:
        """Largest difference from autograd on the first points of the training data, relative to the largest entry."""
        inputs, targets = (torch.from_numpy(array).to(model.weights[0].device) for array in self._first_rows())
        batch = model.scaled_inputs(inputs), model.scaled_targets(targets)
        factor = task.slope_factor(len(inputs)).to(inputs.device, model.dtype)
        reference = ByAutograd(model, task.loss)
        precision = Precision(self.config.training.precision)
        with precision.applied(precision.start):
            pairs = [(gradient(*batch, factor, None), reference(*batch, factor, None))]
            pairs += zip(gradient.gradients, reference.gradients)
        difference = max(_difference(*pair) for pair in pairs)
        if not difference < precision.tolerance:
            raise ForgefieldError(
                f"training.engine: the gradients differ from those of autograd by {difference:.1e}, more than "
                f"{precision.tolerance:g}; use training.engine=eager, or another precision."
            )
        return difference

    def _first_rows(self) -> tuple[Any, Any]:
        return read_rows(self.data.train.table, 0, min(COMPARED, self.data.batch))


def _difference(a: Tensor, b: Tensor) -> float:
    size = float(b.abs().max())
    return float((a - b).abs().max()) / size if size else float(a.abs().max())
