"""The engine of a training on points: chosen by rule, compared with autograd on real rows before its first step, and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.loss import PointTask
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training.data import PointData, read_rows
from forgefield.ldos.training.engines import EagerEngine, GraphsEngine
from forgefield.ldos.training.fused import factors_now, why_not_fused
from forgefield.ldos.training.gradient import ByAutograd, Gradient, Written
from forgefield.ldos.training.observing import SnapshotMeasure
from forgefield.ldos.training.reference import (
    TOLERANCES,
    difference_of_kernels,
    largest_difference,
    made_up_targets,
    packed_rows,
)
from forgefield.ldos.training.terms import TermGradient
from forgefield.settings import Config
from forgefield.training.engines.choose import engine_refusal, inductor_options
from forgefield.training.module import TrainingModule
from forgefield.training.optim.update import Update, capture_refusal
from forgefield.training.options import TrainingOptions
from forgefield.training.precision import Precision
from forgefield.training.problem.problem import TrainingSession

if TYPE_CHECKING:
    from forgefield.ldos.training.executor import PointsExecutor

SHORT = 2e8
"""Floating-point operations of a step below which Lightning's loop would be felt in blocks of 16."""
COMPARED = 256
"""Points on which an engine that is not compiled is compared with autograd, at most."""


def block_size(training: TrainingOptions, options: dict[str, Any], steps: int, flops: float) -> int:
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
        self,
        config: Config,
        session: TrainingSession,
        data: PointData,
        block: int,
        terms: Callable[[], SnapshotMeasure],
    ) -> None:
        self.config, self.session, self.data, self.block, self.terms = config, session, data, block, terms

    @staticmethod
    def refuse(config: Config, device: torch.device, world_size: int) -> None:
        """Stop where the engine that the config names cannot run."""
        training = config.training
        name = training.engine or "eager"
        compiles = name == "compile" or (name == "graphs" and training.graphs.compiled and device.type == "cuda")
        reason = engine_refusal(name, device) or (engine_refusal("compile", device) if compiles else None)
        if name == "graphs" and world_size > 1:
            reason = reason or "steps of several processes are not captured; use eager or compile."
        if name == "graphs" and config.data.fast is False:
            reason = reason or "data.fast=false is for engine eager or compile: captured steps take whole batches."
        if reason is not None:
            raise ForgefieldError(f"training.engine={name}: {reason}")

    def __call__(self, executor: PointsExecutor) -> EagerEngine | GraphsEngine:
        with self.session.stop.at_once():  # compiling may take minutes
            return self._make(executor)

    def _make(self, executor: PointsExecutor) -> EagerEngine | GraphsEngine:
        model, task, ranks = executor.model, executor.task, self.session.ranks
        name, compiles = self._choice(executor.module)
        of_kernels = self._fuses(model, task) if name == "graphs" and compiles else None
        fuses = of_kernels is not None
        if not fuses and any(executor.choices.values()):
            self.session.journal.notify(
                "The part of this training that is done was made by own kernels, which this one cannot use: it goes on with "
                "torch's steps and will not end bit for bit as it would have."
            )
        compiles = compiles and not fuses
        gradient = self._gradient(model, task, compiles)
        rows = self._first_rows(model, whole=compiles, packed=name == "graphs" or self.data.train.kept is not None)
        difference = self._compare(gradient, model, task, rows)
        difference = difference if of_kernels is None else of_kernels
        update = Update(
            executor.module.trainer.optimizers[0], executor.module.ema, clip=executor.clip, reduce=executor.reduction()
        )
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
        kind = f"{name} of {'the compiled step' if compiles else 'own kernels'}" if compiles or fuses else name
        kind = name if name != "graphs" else kind
        self.session.journal.notify(
            f"Engine {kind}, blocks of {self.block} steps: errors and all gradients equal autograd's "
            f"{f'to {difference:.1e}' if difference else 'exactly'}."
        )
        if name != "graphs":
            return inner
        notify = self.session.journal.notify
        return GraphsEngine(inner, self.block, self.data.batch, fuses=fuses, choices=executor.choices, notify=notify)

    def _fuses(self, model: LDOSNetwork, task: PointTask) -> float | None:
        """How far kernels of our own are from autograd on a whole batch, in every precision of the training they know; None
        where they do not run or are too far."""
        precision, points, notify = (
            Precision(self.config.training.precision),
            self.data.batch,
            self.session.journal.notify,
        )
        if why_not_fused(model, precision.start, points) is not None:
            return None
        rows = self._first_rows(model, whole=True, packed=False)
        found = []
        try:
            for name in (name for name in precision.names if why_not_fused(model, name, points) is None):
                with precision.applied(name):
                    dtype = factors_now()
                assert dtype is not None
                with precision.applied("float32"):  # the reference rounds its factors itself
                    found.append(difference_of_kernels(model, task, rows, dtype))
                if not found[-1] < TOLERANCES[dtype]:
                    notify(
                        f"Own kernels are not used: in {name} their gradients differ from autograd's by {found[-1]:.1e}, "
                        f"more than {TOLERANCES[dtype]:.1e}."
                    )
                    return None
        except Exception as error:  # what Triton or the driver does not manage is no reason to stop
            notify(
                f"Own kernels do not run here ({type(error).__name__}: {str(error)[:200]}); the compiled step is used."
            )
            return None
        return max(found)

    def _choice(self, module: TrainingModule) -> tuple[str, bool]:
        """The engine, and whether its step is compiled. auto compiles nothing: the written step is there at once."""
        training = self.config.training
        name = training.engine or "eager"
        against = capture_refusal(module.trainer.optimizers[0]) if module.device.type == "cuda" else "no GPU"
        against = against or why_no_captured_schedule(None if module.schedule is None else module.schedule["scheduler"])
        if name == "auto":
            captures = against is None and self.session.ranks.world_size == 1 and self.config.data.fast is not False
            return ("graphs" if captures else "eager"), False
        if name == "graphs" and against is not None:
            raise ForgefieldError(f"training.engine=graphs: {against}")
        return name, name == "compile" or (name == "graphs" and training.graphs.compiled)

    def _gradient(self, model: LDOSNetwork, task: PointTask, compiles: bool) -> Gradient:
        if not compiles:
            return Written(model, task.loss)
        options = inductor_options(self.config.training)
        return ByAutograd(
            model, task.loss, lambda step: torch.compile(step, dynamic=False, fullgraph=True, options=options or None)
        )

    @torch.no_grad()
    def _compare(self, gradient: Gradient, model: LDOSNetwork, task: PointTask, batch: tuple[Tensor, Tensor]) -> float:
        """Largest difference from autograd on points of the training data, relative to the largest entry. Targets are made up
        (in place), so that it does not depend on how far a training is."""
        factor = task.slope_factor(len(batch[0])).to(batch[0].device, model.dtype)
        reference = ByAutograd(model, task.loss)
        precision = Precision(self.config.training.precision)
        with precision.applied(precision.start):
            targets = made_up_targets(model.network(batch[0]), batch[1])
            batch[1].copy_(targets)  # in its place beside the inputs
            pairs = [(gradient(*batch, factor, None), reference(*batch, factor, None))]
            pairs += zip(gradient.gradients, reference.gradients)
        difference = largest_difference(pairs)
        if not difference < precision.tolerance:
            raise ForgefieldError(
                f"training.engine: the gradients differ from those of autograd by {difference:.1e}, more than "
                f"{precision.tolerance:g}; use training.engine=eager, or another precision."
            )
        return difference

    @torch.no_grad()
    def _first_rows(self, model: LDOSNetwork, *, whole: bool, packed: bool) -> tuple[Tensor, Tensor]:
        """Scaled inputs and targets of the first points. whole: as many as a batch has; packed: side by side as in kept rows.
        So a compiled step is compared as it will be used, and not compiled for another size."""
        n = self.data.batch if whole else min(COMPARED, self.data.batch)
        arrays = read_rows(self.data.train.table, 0, n)
        inputs, targets = (torch.from_numpy(array).to(model.weights[0].device) for array in arrays)
        inputs, targets = model.scaled_inputs(inputs), model.scaled_targets(targets)
        return packed_rows(inputs, targets) if packed else (inputs, targets)


def why_no_captured_schedule(scheduler: Any) -> str | None:
    """What stands against captured steps under a scheduler: they read learning rates anew, and nothing else."""
    parts = getattr(scheduler, "_schedulers", [scheduler])
    if any(getattr(part, "cycle_momentum", False) for part in parts):
        kind = type(scheduler).__name__
        return (
            f"{kind} changes the momentum (betas) from step to step, and captured steps keep it; set "
            "training.scheduler.cycle_momentum=false, or use training.engine=eager."
        )
    return None
