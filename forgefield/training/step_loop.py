"""The loop over the batches of an epoch: Lightning's, with a shorter way to take a step where nothing depends on the longer.

Lightning passes every step through some forty calls of hooks, profilers and result collections, which take longer on the host
than the kernels of a small step on a GPU. `StepLoop` calls only what does something, in Lightning's order: the result, the
progress counters and so the checkpoints are the same bit for bit, and either way can continue where the other stopped.
Validation, the end of an epoch and the decision when to stop remain Lightning's. Whether a training allows the short way is
decided at the start of every epoch (`reason_for_lightnings_steps`).
"""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from forgefield.parallel.accelerators import SingleXPUStrategy
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.training.module import TrainingModule
from forgefield.training.trainer import callbacks_of

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks that Lightning calls for every callback in every step."""
WITHIN_STEP = STEP_HOOKS[2:]
"""Those that are called before the update, so that it cannot be captured together with the gradient."""
STRATEGIES = (SingleDeviceStrategy, SingleXPUStrategy, SimpleDDPStrategy)
"""Strategies whose backward pass is that of autograd, followed by the mean over ranks."""
Hook = Callable[..., object]


class ObservesSteps(Callback):
    """A callback whose hooks of batches and steps only observe: they do not use `log`, `trainer.should_stop` apart, and leave
    gradients as they are. `StepLoop` calls them directly."""


def skip_empty_hooks(callbacks: list[Callback]) -> None:
    """Spare Lightning the calls of hooks that do nothing, which take a tenth of a millisecond per step. It calls what is
    callable."""
    for callback in callbacks:
        for name in STEP_HOOKS:
            if getattr(callback, name) == getattr(Callback, name).__get__(callback):
                vars(callback)[name] = None


def install_step_loop(trainer: L.Trainer) -> None:
    """Let a trainer run its epochs with `StepLoop`."""
    skip_empty_hooks(callbacks_of(trainer))
    lightning = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = StepLoop(trainer, lightning.min_steps, lightning.max_steps)


class StepLoop(_TrainingEpochLoop):
    """Runs the steps of an epoch."""

    def __init__(self, trainer: L.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._hooks: dict[str, list[Hook]] | None = None
        """Hooks of steps by name; None: Lightning takes the steps."""
        self._takes_whole_steps = self._copies_loss = False

    def _broadcast_sigterm_tensor(self) -> None:
        """Before every batch Lightning broadcasts from rank 0 whether it received SIGTERM, for which all ranks and GPUs wait.
        Here requests to stop of all ranks are sent with the message of every batch."""

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._hooks = None
        if (
            not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
            and reason_for_lightnings_steps(self.trainer) is None
        ):
            callbacks = callbacks_of(self.trainer)
            self._hooks = {name: [hook for c in callbacks if callable(hook := getattr(c, name))] for name in STEP_HOOKS}
            self._takes_whole_steps = not any(self._hooks[name] for name in WITHIN_STEP)
            # The loss of a whole step is overwritten by the next one, which callbacks of a user need not expect.
            self._copies_loss = not all(type(callback).__module__.startswith("forgefield.") for callback in callbacks)

    def advance(self, data_fetcher: _DataFetcher) -> None:
        if self._hooks is None or self.restarting:
            super().advance(data_fetcher)
            return
        self.val_loop.restarting = False
        module, progress = self._module(), self.batch_progress
        batch = next(data_fetcher)[0]
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        device = self.trainer.strategy.root_device
        batch = module.on_after_batch_transfer(module.transfer_batch_to_device(batch, device, 0), 0)
        progress.increment_ready()
        self._call("on_train_batch_start", batch, batch_idx)
        module.on_train_batch_start(batch, batch_idx)
        progress.increment_started()
        outputs = self._step(module, batch, batch_idx)
        progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call("on_train_batch_end", outputs, batch, batch_idx)
        module.on_train_batch_end(outputs, batch, batch_idx)
        progress.increment_completed()

    def _step(self, module: TrainingModule, batch: object, batch_idx: int) -> dict[str, torch.Tensor]:
        """One step of the optimiser; returns what the hooks of the end of a batch get."""
        trainer, counts = self.trainer, self.automatic_optimization.optim_progress.optimizer
        optimiser = trainer.optimizers[0]
        counts.step.increment_ready()
        loss = module.executor.whole_step(batch) if self._takes_whole_steps else None
        if loss is not None:
            counts.zero_grad.increment_ready()
            counts.zero_grad.increment_started()
            counts.zero_grad.increment_completed()
            counts.step.increment_completed()
            return {"loss": loss.clone() if self._copies_loss else loss}
        loss = module.training_step(batch, batch_idx)
        counts.zero_grad.increment_ready()
        self._call("on_before_zero_grad", optimiser)
        counts.zero_grad.increment_started()
        module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimiser)
        counts.zero_grad.increment_completed()
        self._call("on_before_backward", loss)
        module.backward(loss)
        if isinstance(trainer.strategy, SimpleDDPStrategy):
            trainer.strategy.average_gradients()
        self._call("on_after_backward")
        self._call("on_before_optimizer_step", optimiser)
        module.configure_gradient_clipping(optimiser, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        optimiser.step()
        counts.step.increment_completed()
        return {"loss": loss.detach()}

    def _call(self, name: str, *arguments: object) -> None:
        assert self._hooks is not None
        for hook in self._hooks[name]:
            hook(self.trainer, self.trainer.lightning_module, *arguments)

    def _module(self) -> TrainingModule:
        module = self.trainer.lightning_module
        assert isinstance(module, TrainingModule)
        return module


def reason_for_lightnings_steps(trainer: L.Trainer) -> str | None:
    """Why steps of this training are left to Lightning; None if they need not be."""
    module = trainer.lightning_module
    if not isinstance(module, TrainingModule) or not module.automatic_optimization:
        return "a batch contains several steps"
    if trainer.accumulate_grad_batches != 1:
        return "gradients are accumulated"
    if type(trainer.strategy) not in STRATEGIES or type(trainer.strategy.precision_plugin) is not PrecisionPlugin:
        return "the strategy or the precision of Lightning is not a usual one"
    if not isinstance(vars(trainer)["profiler"], PassThroughProfiler):
        return "Lightning's profiler measures parts of steps"
    optimiser = trainer.optimizers[0]
    if not type(optimiser).__module__.startswith("torch.optim.") or isinstance(optimiser, torch.optim.LBFGS):
        return f"{type(optimiser).__name__} may evaluate a step several times"
    for callback in callbacks_of(trainer):
        if not isinstance(callback, ObservesSteps) and any(map(callable, (getattr(callback, n) for n in STEP_HOOKS))):
            return f"{type(callback).__name__} has hooks in every step"
    return None
