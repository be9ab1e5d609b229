"""`ForwardNaNDetection`: names the module that first gave NaN or Inf in a forward pass, and the frames it happened on.

By default the loss is watched. When it is not finite, before the optimiser acts on it, the batch is evaluated once more,
eagerly and with a hook on every module; so it works with compiled and captured steps too, whose modules are not called. The
host reads the loss once a step, which on a GPU means to wait for it: a tool for the hunt, not for every day.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.training.callbacks.diagnosis import Diagnosis
from forgefield.training.callbacks.probing import frames_of, listed, loss_of, outputs_of_modules, rehearsal, tensors_in

_NO_MODULE = (
    "ForwardNaNDetection(always=true): {} calls no module, it is compiled or captured, so there is nothing to look at. Use "
    "training.engine=eager, or always=false, which evaluates a bad batch again."
)


class ForwardNaNDetection(Diagnosis):
    """stop: end the training with what was found; else it is said and the training goes on. always: look at the output of every
    module in every step, which also finds what never reaches the loss; eager steps only, and it costs time."""

    name = "forward_nan"

    def __init__(self, stop: bool = True, always: bool = False) -> None:
        super().__init__()
        self.stop, self.always = stop, always
        self.numbers = {"bad": 0}
        self._loss: Tensor | None = None
        self._batch: tuple[Any, int] = (None, 0)
        self._hooks: Any = None
        self._flags: list[tuple[str, Tensor]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch, self._loss = (batch, batch_idx), None
        if self.always and self._calls_modules(pl_module):
            self._flags = []
            self._hooks = outputs_of_modules(pl_module, self._look)

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None
            if not self._flags:
                raise ForgefieldError(_NO_MODULE.format("the step"))
        if self._loss is None:
            self._loss = loss.detach()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        bad_output = self._flags and bool(torch.stack([flag for _, flag in self._flags]).any())
        if self._loss is None or (bool(self._loss.isfinite()) and not bad_output):
            return
        self.numbers["bad"] += 1
        where = first_bad_module(pl_module, *self._batch)
        frames = self._frames(trainer, pl_module)
        loss = "the loss is not finite" if not bool(self._loss.isfinite()) else "an output is not finite"
        what = f"{loss}; {where}{'' if frames is None else f', on {listed(frames)}'}."
        advice = (
            "Look at its formula (root, logarithm or division at zero, overflow) and at its inputs on these frames."
        )
        self.find(trainer, pl_module, where, what, advice, trainer.global_step + 1)
        if self.stop:
            raise ForgefieldError(f"ForwardNaNDetection: step {trainer.global_step + 1}: {what} {advice}")

    def _look(self, name: str, sub: nn.Module, inputs: Any, output: Any) -> None:
        self._flags += [(name, ~tensor.detach().isfinite().all()) for tensor in tensors_in(output)]

    def _calls_modules(self, pl_module: Any) -> bool:
        """Whether there is something to hook. A module of ours chooses its engine on the first batch, which is left out."""
        if not hasattr(pl_module, "eager_loss"):
            return True
        engine = pl_module.engine
        if engine is not None and engine.name != "eager":
            raise ForgefieldError(_NO_MODULE.format(f"the step of engine {engine.name}"))
        return engine is not None

    def _frames(self, trainer: L.Trainer, pl_module: Any) -> list[str] | None:
        parts = frames_of(trainer, pl_module, *self._batch)
        if parts is None:
            return None
        bad = []
        with rehearsal(pl_module):
            for name, part in parts:
                loss = loss_of(pl_module, part, self._batch[1])
                if loss is not None and not bool(loss.isfinite()):
                    bad.append(name)
        return bad or None


def first_bad_module(module: Any, batch: Any, batch_idx: int) -> str:
    """Words that name the first module whose output is not finite although what it was given is."""
    found: list[tuple[str, nn.Module, bool]] = []

    def look(name: str, sub: nn.Module, inputs: Any, output: Any) -> None:
        if not _all_finite(output):
            found.append((name, sub, _all_finite(inputs)))

    with rehearsal(module), torch.enable_grad(), outputs_of_modules(module, look):
        loss_of(module, batch, batch_idx)
    if not found:
        return "every module gave finite numbers, so it arises in the loss itself, or from the labels"
    name, sub, inputs_finite = next((entry for entry in found if entry[2]), found[0])
    kind = type(sub).__name__
    weights = [key for key, tensor in sub.named_parameters() if not bool(tensor.isfinite().all())]
    if weights:
        return f"module {name} ({kind}) is the first, and its own weights are not finite any more ({listed(weights)})"
    given = "though all it was given is finite" if inputs_finite else "and what it was given is not finite already"
    return f"module {name} ({kind}) is the first that gave NaN or Inf, {given}"


def _all_finite(value: Any) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors_in(value))
