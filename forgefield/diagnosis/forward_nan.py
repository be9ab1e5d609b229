"""`ForwardNaNDetection`: names the first module whose output is NaN or Inf, and the frames for which it happens.

By default only the loss is checked. If it is not finite, the batch is evaluated again before the optimiser steps, eagerly and
with a hook on every module; this also works for compiled and captured steps, whose modules are not called. The host reads the
loss in every step, which on a GPU means waiting for it: use this to find a problem, not in every training.
"""

from __future__ import annotations

from collections.abc import Collection

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgefield.diagnosis.callback import Diagnosis
from forgefield.errors import ForgefieldError
from forgefield.training.probing import (
    OutputHooks,
    frames_of,
    join_names,
    label_addresses,
    loss_of,
    probed,
    tensors_in,
    without_side_effects,
)

_NO_MODULE = (
    "ForwardNaNDetection(always=true): {} is compiled or captured and does not call modules, so there are no outputs to check. "
    "Use training.engine=eager, or always=false, which evaluates a bad batch again."
)


class ForwardNaNDetection(Diagnosis):
    """Finds the origin of NaN and Inf in forward passes.

    stop: end the training with an error; otherwise report it and continue. always: check the output of every module in every
    step, which also finds values that never reach the loss; for eager steps only, and it costs time.
    """

    name = "forward_nan"

    def __init__(self, stop: bool = True, always: bool = False) -> None:
        super().__init__()
        self.stop, self.always = stop, always
        self.numbers = {"bad": 0}
        self._losses: list[tuple[Tensor, object, int]] = []
        """Loss, batch and batch number of each batch of the current optimiser step."""
        self._batch: tuple[object, int] = (None, 0)
        self._labels: set[int] = set()
        self._hooks: OutputHooks | None = None
        self._flags: list[tuple[str, Tensor]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._batch, self._labels = (batch, batch_idx), label_addresses(batch, pl_module)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._losses = []
        if self.always and self._calls_modules(pl_module):
            self._flags = [] if not self._losses else self._flags
            self._hooks = OutputHooks(pl_module, self._check_output)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
            if not self._flags:
                raise ForgefieldError(_NO_MODULE.format("the step"))
        if (
            not self._losses or self._losses[-1][1] is not self._batch[0]
        ):  # some optimisers evaluate a batch several times
            self._losses.append((loss.detach(), *self._batch))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        bad_output = self._flags and bool(torch.stack([flag for _, flag in self._flags]).any())
        bad = next((entry for entry in self._losses if not bool(entry[0].isfinite())), None)
        if bad is None and not (bad_output and self._losses):
            return
        self.numbers["bad"] += 1
        batch = self._batch if bad is None else bad[1:]
        where = first_bad_module(pl_module, *batch)
        frames = self._frames(trainer, pl_module, *batch)
        loss = "an output is not finite" if bad is None else "the loss is not finite"
        what = f"{loss}; {where}{'' if frames is None else f', on {join_names(frames)}'}."
        advice = (
            "Look at its formula (root, logarithm or division at zero, overflow) and at its inputs on these frames."
        )
        self.find(trainer, pl_module, where, what, advice, trainer.global_step + 1)
        if self.stop:
            raise ForgefieldError(f"ForwardNaNDetection: step {trainer.global_step + 1}: {what} {advice}")

    def _check_output(self, name: str, sub: nn.Module, inputs: object, output: object) -> None:
        self._flags += [(name, ~tensor.detach().isfinite().all()) for tensor in tensors_in(output, self._labels)]

    def _calls_modules(self, pl_module: L.LightningModule) -> bool:
        """Whether there are calls to hook. Forgefield's modules choose their engine on the first batch, which is skipped."""
        inspected = probed(pl_module)
        if inspected is None:
            return True
        engine = inspected.engine
        if engine is not None and engine.name != "eager":
            raise ForgefieldError(_NO_MODULE.format(f"the step of engine {engine.name}"))
        return engine is not None

    def _frames(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> list[str] | None:
        parts = frames_of(trainer, pl_module, batch, batch_idx)
        if parts is None:
            return None
        bad = []
        with without_side_effects(pl_module):
            for name, part in parts:
                loss = loss_of(pl_module, part, batch_idx)
                if loss is not None and not bool(loss.isfinite()):
                    bad.append(name)
        return bad or None


def first_bad_module(module: L.LightningModule, batch: object, batch_idx: int) -> str:
    """Where NaN or Inf arises: the first module whose inputs are finite and whose output is not, and parameters that are not
    finite, if any. Missing labels (NaN in Forgefield's batches) are not inputs."""
    labels = label_addresses(batch, module)
    bad_outputs: list[tuple[str, nn.Module, bool]] = []

    def check(name: str, sub: nn.Module, inputs_finite: bool, output: object) -> None:
        if not _all_finite(output, labels):
            bad_outputs.append((name, sub, inputs_finite))

    def inputs_finite(*inputs: object) -> bool:
        return _all_finite(inputs, labels)

    with without_side_effects(module), torch.enable_grad(), OutputHooks(module, check, inputs_finite):
        loss_of(module, batch, batch_idx)
    name, sub, finite = next(
        (entry for entry in bad_outputs if entry[2]), bad_outputs[0] if bad_outputs else ("", module, True)
    )
    weights = [key for key, tensor in sub.named_parameters() if not bool(tensor.isfinite().all())]
    if not bad_outputs:
        if weights:
            return f"all outputs of modules are finite, but parameters are no longer finite ({join_names(weights)})"
        return "all outputs of modules are finite, so it arises in the loss or in the labels"
    kind = type(sub).__name__
    if weights:
        return f"module {name} ({kind}) is the first, and its weights are no longer finite ({join_names(weights)})"
    if finite:
        return f"module {name} ({kind}) is the first with NaN or Inf in its output, although all its inputs are finite"
    elsewhere = [key for key, tensor in module.named_parameters() if not bool(tensor.isfinite().all())]
    if elsewhere:
        return (
            f"module {name} ({kind}) is the first with NaN or Inf, and parameters are no longer finite "
            f"({join_names(elsewhere)})"
        )
    if not _all_finite(batch, labels):
        return f"module {name} ({kind}) is the first with NaN or Inf, and the batch itself contains NaN or Inf"
    return (
        f"module {name} ({kind}) is the first with NaN or Inf, and its inputs were not finite: it arises before this module, "
        "outside of other modules"
    )


def _all_finite(value: object, excluded: Collection[int] = ()) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors_in(value, excluded))
