"""The engine of a training on points: selected by rules, compared with autograd on training rows before its first step."""

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
from forgefield.ldos.training.fused import current_factor_dtype, fused_obstacle
from forgefield.ldos.training.gradient import AutogradGradient, Gradient, ManualGradient
from forgefield.ldos.training.reference import (
    TOLERANCES,
    kernel_difference,
    largest_difference,
    pack_rows,
    synthetic_targets,
)
from forgefield.ldos.training.snapshots import SnapshotMeasure, TermGradient
from forgefield.settings import Config
from forgefield.training.engines.choose import engine_refusal, inductor_options
from forgefield.training.module import TrainingModule
from forgefield.training.optim.update import Update, capture_refusal, use_fused
from forgefield.training.options import TrainingOptions
from forgefield.training.precision import Precision
from forgefield.training.problem.problem import TrainingSession

if TYPE_CHECKING:
    from forgefield.ldos.training.executor import PointsExecutor

SHORT = 2e8
"""Floating-point operations of a step below which the cost of Lightning's loop is noticeable with blocks of 16 steps."""
COMPARED = 256
"""Largest number of points on which an engine that is not compiled is compared with autograd."""


def block_size(training: TrainingOptions, options: dict[str, Any], steps: int, flops: float) -> int:
    """Number of steps per block: as set in the config, or suitable for their duration; validations and checkpoints within an
    epoch fall between blocks. options: of the trainer. steps: per epoch."""
    block = int(training.block) if training.block is not None else (64 if flops < SHORT else 16)
    interval = options.get("val_check_interval")
    if options.get("check_val_every_n_epoch", 1) is None:
        return 1  # validations are counted through epochs, whose last blocks are short
    if isinstance(interval, float):
        block = min(block, max(1, int(interval * steps)))
    block = min(block, steps)
    if isinstance(interval, int) and not isinstance(interval, bool):
        block = max(size for size in range(1, block + 1) if _aligns_with_validation(size, interval, steps))
    if training.checkpoint.every_steps:
        block = max(size for size in range(1, block + 1) if block % size == training.checkpoint.every_steps % size == 0)
    return block


def _aligns_with_validation(size: int, interval: int, steps: int) -> bool:
    """Whether validations every `interval` steps fall on block boundaries. The last block of an epoch may be short; no
    validation may be due there."""
    short = steps % size != 0
    return interval % size == 0 and not (short and -(-steps // size) % (interval // size) == 0)


class EngineBuilder:
    """Builds the engine on the first block. terms: returns the observables of training snapshots; called if there are terms."""

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
        """Raise an error if the engine named in the config cannot run."""
        training = config.training
        name = training.engine or "eager"
        compiles = name == "compile" or (name == "graphs" and training.graphs.compiled and device.type == "cuda")
        reason = engine_refusal(name, device) or (engine_refusal("compile", device) if compiles else None)
        if name == "graphs" and world_size > 1:
            reason = reason or "steps of several processes are not captured; use eager or compile."
        if name == "graphs" and config.data.fast is False:
            reason = reason or "data.fast=false is for engine eager or compile: captured steps gather complete batches."
        if reason is not None:
            raise ForgefieldError(f"training.engine={name}: {reason}")

    def __call__(self, executor: PointsExecutor) -> EagerEngine | GraphsEngine:
        with self.session.stop.at_once():  # compiling may take minutes
            return self._build(executor)

    def _build(self, executor: PointsExecutor) -> EagerEngine | GraphsEngine:
        model, task, ranks = executor.model, executor.task, self.session.ranks
        name, compiles = self._choice(executor.module)
        fused_difference = self._fused_difference(model, task) if name == "graphs" and compiles else None
        fuses = fused_difference is not None
        if not fuses and any(executor.choices.values()):
            self.session.journal.notify(
                "The first part of this training used Forgefield's kernels, which are not available here: it resumes with "
                "PyTorch's steps, and the result will not be identical bit for bit."
            )
        compiles = compiles and not fuses
        gradient = self._gradient(model, task, compiles)
        rows = self._first_rows(
            model, full_batch=compiles, packed=name == "graphs" or self.data.train.resident is not None
        )
        difference = self._compare(gradient, model, task, rows)
        difference = difference if fused_difference is None else fused_difference
        optimiser = executor.module.trainer.optimizers[0]
        use_fused(optimiser)
        update = Update(optimiser, executor.module.ema, clip=executor.clip, reduce=executor.reduction())
        inner = EagerEngine(
            model,
            task,
            gradient,
            update,
            resident=self.data.train.resident,
            world_size=ranks.world_size,
            terms=TermGradient(model, task, self.terms(), ranks) if task.terms else None,
            fast=self.config.data.fast is not False,
        )
        label = f"{name} of {'the compiled step' if compiles else 'kernels'}" if compiles or fuses else name
        label = name if name != "graphs" else label
        self.session.journal.notify(
            f"Engine {label}, blocks of {self.block} steps: errors and all gradients equal autograd's "
            f"{f'to {difference:.1e}' if difference else 'exactly'}."
        )
        if name != "graphs":
            return inner
        notify = self.session.journal.notify
        return GraphsEngine(inner, self.block, self.data.batch, fuses=fuses, choices=executor.choices, notify=notify)

    def _fused_difference(self, model: LDOSNetwork, task: PointTask) -> float | None:
        """Largest difference of the fused kernels from autograd on a complete batch, over all precisions of the training that
        they support; None if they do not run or differ too much."""
        precision, points, notify = (
            Precision(self.config.training.precision),
            self.data.batch,
            self.session.journal.notify,
        )
        if fused_obstacle(model, precision.start, points) is not None:
            return None
        rows = self._first_rows(model, full_batch=True, packed=False)
        differences = []
        try:
            for name in (name for name in precision.names if fused_obstacle(model, name, points) is None):
                with precision.applied(name):
                    dtype = current_factor_dtype()
                assert dtype is not None
                with precision.applied("float32"):  # the reference rounds its factors itself
                    differences.append(kernel_difference(model, task, rows, dtype))
                if not differences[-1] < TOLERANCES[dtype]:
                    notify(
                        f"Fused kernels are not used: in {name} their gradients differ from autograd's by "
                        f"{differences[-1]:.1e}, "
                        f"more than {TOLERANCES[dtype]:.1e}."
                    )
                    return None
        except Exception as error:  # a failure of Triton or the driver must not end the training
            notify(
                f"Fused kernels do not run here ({type(error).__name__}: {str(error)[:200]}); the compiled step is used."
            )
            return None
        return max(differences)

    def _choice(self, module: TrainingModule) -> tuple[str, bool]:
        """Name of the engine, and whether its step is compiled. auto compiles nothing: `ManualGradient` needs no
        compilation."""
        training = self.config.training
        name = training.engine or "eager"
        obstacle = capture_refusal(module.trainer.optimizers[0]) if module.device.type == "cuda" else "no GPU"
        obstacle = obstacle or schedule_capture_obstacle(
            None if module.schedule is None else module.schedule["scheduler"]
        )
        if name == "auto":
            captures = obstacle is None and self.session.ranks.world_size == 1 and self.config.data.fast is not False
            return ("graphs" if captures else "eager"), False
        if name == "graphs" and obstacle is not None:
            raise ForgefieldError(f"training.engine=graphs: {obstacle}")
        return name, name == "compile" or (name == "graphs" and training.graphs.compiled)

    def _gradient(self, model: LDOSNetwork, task: PointTask, compiles: bool) -> Gradient:
        if not compiles:
            return ManualGradient(model, task.loss)
        options = inductor_options(self.config.training)
        return AutogradGradient(
            model, task.loss, lambda step: torch.compile(step, dynamic=False, fullgraph=True, options=options or None)
        )

    @torch.no_grad()
    def _compare(self, gradient: Gradient, model: LDOSNetwork, task: PointTask, batch: tuple[Tensor, Tensor]) -> float:
        """Largest difference from autograd on points of the training data, relative to the largest entry. Targets are replaced
        by synthetic ones (in place), so that it does not depend on the progress of the training."""
        factor = task.slope_factor(len(batch[0])).to(batch[0].device, model.dtype)
        reference = AutogradGradient(model, task.loss)
        precision = Precision(self.config.training.precision)
        with precision.applied(precision.start):
            targets = synthetic_targets(model.network(batch[0]), batch[1])
            batch[1].copy_(targets)  # in place, next to the inputs
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
    def _first_rows(self, model: LDOSNetwork, *, full_batch: bool, packed: bool) -> tuple[Tensor, Tensor]:
        """Scaled inputs and targets of the first points. full_batch: as many as a batch has; packed: in the layout of resident
        rows. A compiled step is thus compared as it will be used, and not compiled for another size."""
        n = self.data.batch if full_batch else min(COMPARED, self.data.batch)
        arrays = read_rows(self.data.train.table, 0, n)
        inputs, targets = (torch.from_numpy(array).to(model.weights[0].device) for array in arrays)
        inputs, targets = model.scaled_inputs(inputs), model.scaled_targets(targets)
        return pack_rows(inputs, targets) if packed else (inputs, targets)


def schedule_capture_obstacle(scheduler: object) -> str | None:
    """Reason why steps cannot be captured with a scheduler, or None: captured steps follow learning rates and nothing else."""
    schedulers = getattr(scheduler, "_schedulers", [scheduler])
    if any(getattr(member, "cycle_momentum", False) for member in schedulers):
        name = type(scheduler).__name__
        return (
            f"{name} changes the momentum (betas) from step to step, and captured steps keep it; set "
            "training.scheduler.cycle_momentum=false, or use training.engine=eager."
        )
    return None
