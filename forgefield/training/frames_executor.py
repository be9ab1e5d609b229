"""Training and validation steps on frames, for potentials and predictors with any engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from forgefield.data.batch import SHAPES, Batch, Shapes, to_device, with_edges
from forgefield.data.sampling.loader import FrameLoader
from forgefield.errors import ForgefieldError
from forgefield.models.potential import Potential
from forgefield.ops.execution import C_LATEST
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.training.engines.choose import EngineStarter, table_knots
from forgefield.training.engines.engine import Engine, MemoryLimitedEngine, raise_memory_error
from forgefield.training.engines.frame_steps import FrameSteps
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.step import Measured, StepFunction
from forgefield.training.executor import StepExecutor
from forgefield.training.module import LossMeter, TrainingModule, sums_of_rank
from forgefield.training.optim import trainable
from forgefield.training.optim.averages import StochasticAverage, WeightAverage
from forgefield.training.optim.captured_optimiser import CapturedOptimiser
from forgefield.training.optim.optimisers import Parameters, build_optimiser
from forgefield.training.optim.update import capture_refusal
from forgefield.training.options import TrainingOptions, measures_maxima
from forgefield.training.probing import ProbedModule
from forgefield.training.trainer import is_quick
from forgefield.training.validation_batches import ValidationBatches
from forgefield.training.weighting import SoftAdapt, Uncertainty, build_weighting


class _TargetWeights(MutableMapping[str, float]):
    """The weights of a task by name, for callbacks that change them."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __getitem__(self, name: str) -> float:
        return {target.name: target.weight for target in self.task.targets}[name]

    def __setitem__(self, name: str, value: float) -> None:
        if self.task.targets[self.task.names.index(name)].schedule is not None:
            raise ForgefieldError(f"The weight of {name} follows task.{name}.schedule; leave one of the two out.")
        self.task.set_weight(name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("targets of a task cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self.task.names)

    def __len__(self) -> int:
        return len(self.task.names)


class FramesExecutor(StepExecutor[Batch, Batch], ProbedModule):
    """Trains `potential` on `task` with the settings of the config's `training` section.

    starter: starts the engine on the first batch; None for the eager engine.
    validation: chooses the size of batches of the validation after that; None to leave it as it is.
    shapes: of the tensors of a batch.
    val_sets: names of validation sets with metrics of their own, in the order of the validation data.
    """

    model_name = "potential"
    samples = ("frames", "atoms")
    task: Task
    engine: Engine | None
    train_errors: ErrorMetrics
    val_errors: ErrorMetrics

    def __init__(
        self,
        potential: Potential,
        task: Task,
        options: TrainingOptions,
        species: tuple[str, ...],
        *,
        starter: EngineStarter | None = None,
        validation: ValidationBatches | None = None,
        shapes: Shapes = SHAPES,
        val_sets: Sequence[str] = (),
    ) -> None:
        val_errors = task.error_metrics(species, maxima=measures_maxima(options))
        super().__init__(potential, task, options, task.error_metrics(species), val_errors)
        self.potential = potential
        self.set_errors = {name: task.error_metrics(species, maxima=val_errors.maxima) for name in val_sets}
        self.starter, self.validation = starter, validation
        self.shapes = shapes
        self.weighting = build_weighting(options.weighting, task, options.optimizer)
        self._eager = Engine(self._step_function("double"))
        self._update: CapturedOptimiser | None = None
        self._splits_batches = options.memory.parts > 1 or options.memory.split
        self._evaluation_is_checked = False
        self._steps_averaged = 0
        self._measured = (-1, -1)
        self._sums_before: list[Tensor] | None = None
        self.task_loss: Tensor | None = None
        self._discarded: Tensor | bool = False

    def attach(self, module: TrainingModule) -> None:
        super().attach(module)
        module.task_loss_scaling = _TargetWeights(self.task)
        if isinstance(self.weighting, Uncertainty):
            module.add_module("weighting", self.weighting)

    @property
    def ema(self) -> WeightAverage | None:  # type: ignore[override]
        return self.module.ema

    def notify(self, text: str) -> None:
        (self.starter.notify if self.starter else print)(text)

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        return to_device(batch, device)

    def after_transfer(self, batch: Batch) -> Batch:
        return with_edges(batch, self.potential.cutoff)

    # ---- training

    def before_training(self) -> None:
        counts_steps = self.module.precision.unit == "steps" or self.task.is_scheduled
        self.module.total_steps = self.steps_of_fit() if counts_steps else -1
        self._check_weight_schedules()
        if isinstance(self.ema, StochasticAverage):
            batches = int(self.module.trainer.num_training_batches)
            of_epoch = -(-batches // self.module.trainer.accumulate_grad_batches)
            quick = is_quick(self.module.trainer)
            self.ema.plan(steps=self.steps_of_fit(), steps_of_epoch=of_epoch, quick=quick)
        # Not in `on_fit_start`: a resumed run restores the step after it.
        self._steps_averaged = self.module.trainer.global_step

    def on_train_batch_start(self, batch: Batch) -> None:
        """Start the engine before the optimiser's `step`, which calls `training_step` and which the engine may replace."""
        self.module.follow_precision()
        if self.task.is_scheduled:
            self.task.follow(self.module.step_state())
        if self.weighting is not None:
            self.weighting.before_batch(
                self.module.trainer.global_step, self.task, self.module.ranks, self.module.device
            )
        if self.engine is None:
            with self.module.precision.applied(self.module.precision_now):
                self.engine = self._start_engine(batch)
            if self.validation is not None:
                self.validation.enlarge(self.module.trainer, self.module.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        engine = self.engine
        assert engine is not None
        denominators = None
        if self.module.exchange is not None:
            self.module.exchange.send(self.task.counts(batch))
            denominators = functools.cache(self.module.exchange.counts)
        with self.module.precision.applied(self.module.precision_now):
            # Gradients of captured steps are assigned to the weights without autograd.
            step = engine.measure(batch, denominators) if self.keeps_gradients else engine.step(batch, denominators)
        self.module.precision.require_effect(self.module.precision_now)
        if (self.module.current_epoch, batch_idx) != self._measured:  # some optimisers evaluate a batch several times
            self._measured = (self.module.current_epoch, batch_idx)
            if batch_idx % self.module.trainer.accumulate_grad_batches == 0:
                self._sums_before = [meter.sums for meter in self._meters()]  # adding makes new tensors
            self.module.train_loss.add(step.measured.sums)
            self.train_errors.add(step.measured.errors)
            if isinstance(self.weighting, SoftAdapt):
                self.weighting.add(step.measured.sums)
        self._batch = batch
        self.task_loss = step.loss.detach()
        if not isinstance(self.weighting, Uncertainty):
            return step.loss
        sums, counts = step.measured.sums
        counts = counts if denominators is None else denominators()
        weights = self.task.configured_weights_on(sums.device)
        return step.loss + self.weighting.loss(sums * self.module.ranks.world_size, counts, weights)

    def whole_step(self, batch: Batch) -> Tensor | None:
        steps = self._whole_steps()
        if steps is None or not steps.can_run:
            return None
        try:
            loss = steps.run(batch)
        except Exception as error:
            raise_memory_error(error, batch)
            raise
        self.module.precision.require_effect(self.module.precision_now)
        self._batch, self.task_loss, self._sums_before = batch, loss, None
        return loss

    def _whole_steps(self) -> FrameSteps | None:
        """Steps that are captured with their updates; None if something has to be done between the two, or is done to
        batches or losses of single steps."""
        update, module = self._update, self.module
        if update is None or self.weighting is not None or module.exchange is not None or not self.keeps_gradients:
            return None
        assert isinstance(self.engine, MemoryLimitedEngine)
        assert isinstance(self.engine.inner, GraphsEngine)
        if vars(update.optimiser).get("step") != update.step:  # it was replaced
            return None
        engine, trainer = self.engine.inner, module.trainer
        if engine.steps is None:
            meters = (module.train_loss, self.train_errors)
            precision = module.precision
            engine.steps = FrameSteps(
                engine, update.update, meters, setting=lambda: precision.applied(module.precision_now)
            )
        self.clips_gradients(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        return engine.steps

    def eager_loss(self, batch: Batch) -> Tensor:
        with self.module.precision.applied(self.module.precision_now):
            return self._eager.step(batch).loss

    def discard_step(self, condition: Tensor | None = None, *, average: bool = True) -> None:
        if self._sums_before is not None:
            for meter, before in zip(self._meters(), self._sums_before):
                before = before.to(meter.sums.device)
                meter.sums = before.clone() if condition is None else torch.where(condition, before, meter.sums)
        if average:
            self._discarded = True if condition is None else condition

    def _meters(self) -> list[LossMeter | ErrorMetrics | SoftAdapt]:
        """Accumulators of sums over batches."""
        meters: list[LossMeter | ErrorMetrics | SoftAdapt] = [self.module.train_loss, self.train_errors]
        return [*meters, self.weighting] if isinstance(self.weighting, SoftAdapt) else meters

    def _check_weight_schedules(self) -> None:
        """Raise ForgefieldError for weight schedules that need a limit of the training, or that it does not complete."""
        for target in self.task.targets:
            if target.schedule is not None and not is_quick(self.module.trainer):
                length = self.module.step_state().epochs if target.schedule.unit == "epoch" else self.module.total_steps
                target.schedule.require_fit(length, key=f"task.{target.name}.schedule")

    def _start_engine(self, batch: Batch) -> Engine:
        """The engine, after a comparison with the eager one on the first batch."""
        inner = Engine(self._eager.function, world_size=self.module.ranks.world_size)
        if self.starter is not None:
            steps = self.steps_of_fit()
            refusal = self._graphs_refusal()
            inner = self.starter.start(self._step_function, batch, steps=steps, graphs_refusal=refusal)
            self._eager.function.c_code = inner.function.c_code
        if isinstance(inner, GraphsEngine):
            optimiser = self.module.trainer.optimizers[0]
            self._update = CapturedOptimiser(optimiser, self.ema, static_gradients=lambda: self.keeps_gradients)
        memory = self.options.memory
        return MemoryLimitedEngine(inner, parts=memory.parts, split=memory.split, notify=self.notify)

    def _graphs_refusal(self) -> str | None:
        """Why steps cannot be captured; None if they can."""
        strategy = self.module.trainer.strategy
        if isinstance(strategy, DDPStrategy) and not isinstance(strategy, SimpleDDPStrategy):
            return (
                f"{type(strategy).__name__} needs the backward pass of autograd; leave trainer.strategy out, or use "
                "another engine."
            )
        return capture_refusal(self.module.trainer.optimizers[0])

    def _step_function(self, derivative: str) -> StepFunction:
        return StepFunction(
            self.potential,
            self.task,
            self.train_errors,
            derivative=derivative,
            knots=table_knots(self.options),
            storage=self.options.kernels.storage,
            edge_kernels=self.options.kernels.edges,
            c_code=C_LATEST if self.starter is None else self.starter.c_code,
            shapes=self.shapes,
            evaluation_errors=self.val_errors,
        )

    @property
    def keeps_gradients(self) -> bool:
        """Whether the captured update reads the gradients of captured steps directly, without accumulation."""
        return (
            self._update is not None and self.module.trainer.accumulate_grad_batches == 1 and not self._splits_batches
        )

    def backward(self, loss: Tensor) -> None:
        if self.keeps_gradients:
            assert isinstance(self.engine, MemoryLimitedEngine)
            assert isinstance(self.engine.inner, GraphsEngine)
            self.engine.inner.assign_gradients()
            if isinstance(self.weighting, Uncertainty):
                self.weighting.assign_gradient()
            return
        try:
            with self.module.precision.applied(self.module.precision_now):
                loss.backward()
        except Exception as error:
            raise_memory_error(error, self._batch)
            raise

    def clips_gradients(self, value: float | None, algorithm: str | None) -> bool:
        if self._update is None:
            return False
        self._update.clip = (value, str(algorithm or "norm").split(".")[-1].lower())
        return True

    def on_train_batch_end(self, batch: Batch, batch_idx: int) -> None:
        if self.ema is not None and self._update is None and self.module.trainer.global_step > self._steps_averaged:
            self._average(self.ema)
        self._discarded = False
        self._steps_averaged = self.module.trainer.global_step
        loader = self.module.trainer.train_dataloader
        assert isinstance(loader, FrameLoader)
        n_frames = loader.own_frames(batch_idx)
        self.module.throughput.count(frames=n_frames, atoms=batch["positions"].shape[0] if n_frames else 0)

    def _average(self, average: WeightAverage) -> None:
        if self._discarded is False:
            average.update()
        else:  # the step is counted, but its weights do not enter the average
            share = average.next_share()
            if isinstance(self._discarded, Tensor):
                average.update_with_share(torch.where(self._discarded, 0.0, share))

    # ---- validation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        with self.module.precision.applied(self.module.precision.weights):
            measured = self._evaluate(batch)
        self.module.val_loss.add(measured.sums)
        self.val_errors.add(measured.errors)
        if self.set_errors:
            loader = self.module.trainer.val_dataloaders
            assert isinstance(loader, FrameLoader)
            list(self.set_errors.values())[loader.set_of(batch_idx)].add(measured.errors)

    def _evaluate(self, batch: Batch) -> Measured:
        # The eager engine may need more memory than others.
        eager = MemoryLimitedEngine(self._eager, split=False)
        if self.engine is None:
            return eager.evaluate(batch)
        if not self._evaluation_is_checked and self.starter is not None:
            self.starter.check_evaluation(self.engine, eager, batch)
            self._evaluation_is_checked = True
        return self.engine.evaluate(batch)

    # ---- optimiser, and state beyond weights

    def parameter_groups(self, lr: float) -> Parameters:
        factors = self.options.lr_groups
        if not factors and not isinstance(self.weighting, Uncertainty):
            return [p for p in self.potential.parameters() if p.requires_grad]
        groups = trainable.parameter_groups(self.potential, factors or {}, lr)
        if isinstance(self.weighting, Uncertainty):
            factor = self.weighting.options.lr
            groups.append({"params": [self.weighting.log_variances], "lr": lr * factor, "factor": factor})
            if _decays(self.options.optimizer):
                groups[-1]["weight_decay"] = 0.0
        return groups

    def state(self) -> dict[str, Any]:
        if not isinstance(self.weighting, SoftAdapt):
            return {}
        sums = {"sums": self.weighting.sums.cpu().clone()}
        return {"weighting": {"sums": self.module.ranks.gather(sums), **self.weighting.state_dict()}}

    def load_state(self, state: dict[str, Any]) -> None:
        if isinstance(self.weighting, SoftAdapt):
            stored = state["weighting"]
            self.weighting.load_state_dict(stored)
            self.weighting.sums = sums_of_rank(stored["sums"], self.module.ranks)["sums"]

    def deployed_state(self) -> dict[str, Tensor]:
        return trainable.merged_state(self.potential)


def _decays(optimizer: str | dict[str, Any]) -> bool:
    """Whether the optimiser has a weight decay, which must not apply to variances."""
    example = build_optimiser(optimizer, [torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)
    return "weight_decay" in example.defaults
