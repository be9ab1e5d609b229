"""`LossSpike`: notices a loss far above what it was, by robust statistics, and on request goes back to the last good state.

The logarithm of the loss is compared with the median of the last steps, in units of their median deviation; a loss that is not
finite is a spike always. With `rollback` weights, optimiser state and average of weights are those of the last snapshot again,
the step under way is not made, and the training goes on with the next batches. Snapshots are part of checkpoints, so a resumed
run does the same. The loss is that of all ranks, so they decide alike. On a GPU it is read `lag` steps later.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import lightning as L
import torch
from torch import Tensor

from forgefield.diagnosis.figures import thinned
from forgefield.errors import ForgefieldError
from forgefield.training.callbacks.diagnosis import Diagnosis, say
from forgefield.training.callbacks.probing import mean_over_ranks, take_gradients_away, trained

TO_SIGMA = 1.4826
"""A median deviation times this is the standard deviation of a normal distribution."""
KEPT = 4000
"""Losses that are kept for the curve."""


class LossSpike(Diagnosis):
    """window: steps that say what is usual. threshold: in their robust standard deviations. factor: a spike is at least so many
    times the usual loss. rollback: go back to the last good state. snapshot_every: steps between snapshots. most: rollbacks
    after which the training stops. lag: steps by which the loss is read later (default 0 on a CPU, else 2).
    """

    name = "loss_spike"

    def __init__(
        self,
        window: int = 64,
        threshold: float = 8.0,
        factor: float = 3.0,
        rollback: bool = False,
        snapshot_every: int = 50,
        most: int = 10,
        lag: int | None = None,
    ) -> None:
        super().__init__()
        if window < 4 or threshold <= 0 or factor <= 1 or snapshot_every < 1 or most < 1 or (lag or 0) < 0:
            raise ForgefieldError(
                "LossSpike: window is at least 4, threshold positive, factor above 1, snapshot_every and most at least 1, lag "
                "not negative."
            )
        self.window, self.threshold, self.factor, self.rollback = window, threshold, factor, rollback
        self.snapshot_every, self.most, self.lag = snapshot_every, most, lag
        self.numbers = {"spikes": [], "losses": {"step": [], "loss": []}}
        self.memory = {"recent": [], "snapshots": [], "rollbacks": 0, "waiting": [], "every": 1}
        self._loss: Tensor | None = None
        self._seen = 0
        self._arriving: deque[tuple[int, Tensor]] = deque()

    @property
    def count(self) -> int:
        return len(self.numbers["spikes"])

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise ForgefieldError("LossSpike needs automatic optimisation.")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._arriving = deque((step, torch.tensor(loss)) for step, loss in self.memory["waiting"])

    def state_dict(self) -> dict[str, Any]:
        self.memory["waiting"] = [[step, float(loss)] for step, loss in self._arriving]
        return super().state_dict()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._seen = 0
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._loss = None

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if self._seen == 0:  # some optimisers and callbacks evaluate a batch several times
            judged = getattr(pl_module, "judged_loss", None)  # without what is learnt beside the model
            part = (loss if judged is None else judged).detach().double()
            self._loss = part if self._loss is None else self._loss + part
        self._seen += 1

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self._loss is None:
            return
        lag = self.lag if self.lag is not None else (0 if self._loss.device.type == "cpu" else 2)
        self._arriving.append((trainer.global_step + 1, mean_over_ranks(self._loss)))
        while len(self._arriving) > lag:
            step, loss = self._arriving.popleft()
            if self._judge(trainer, pl_module, optimizer, step, float(loss)):
                self._arriving.clear()  # losses of the weights that are gone
                return
        if self.rollback and trainer.global_step % self.snapshot_every == 0:
            self._take_snapshot(trainer, pl_module, optimizer)

    # ---- judging

    def _judge(self, trainer: L.Trainer, pl_module: Any, optimizer: Any, step: int, loss: float) -> bool:
        """Whether the training went back."""
        self._keep(step, loss)
        usual = self.usual(loss)
        if usual is None:
            if loss > 0 and math.isfinite(loss):
                self.memory["recent"] = [*self.memory["recent"], math.log(loss)][-self.window :]
            return False
        action = "rolled back" if self.rollback and self.memory["snapshots"] else "noticed"
        self.numbers["spikes"].append({"step": step, "loss": loss, "usual": usual, "action": action})
        what = f"the loss is {loss:.4g}, where {usual:.4g} was usual."
        advice = (
            "Lower training.lr, set training.clip_norm, or look at the frames of this batch; LossSpike(rollback=true) goes "
            "back to the last good state."
        )
        if action == "rolled back":
            self._go_back(trainer, pl_module, optimizer, what)
        elif self.find(trainer, pl_module, "spike", what, advice, step) is None:
            say(trainer, pl_module, f"LossSpike: Step {step}: {what}")
        return action == "rolled back"

    def usual(self, loss: float) -> float | None:
        """What would be usual, where this loss is a spike; else None."""
        recent = self.memory["recent"]
        if len(recent) < max(4, self.window // 4):
            return None
        if 0 < loss <= self.factor * math.exp(min(recent)):  # below any limit
            return None
        middle = statistics.median(recent)
        spread = TO_SIGMA * statistics.median([abs(x - middle) for x in recent])
        limit = middle + max(self.threshold * spread, math.log(self.factor))
        is_spike = not math.isfinite(loss) or (loss > 0 and math.log(loss) > limit)
        return math.exp(middle) if is_spike else None

    def _keep(self, step: int, loss: float) -> None:
        """Losses for the curve, thinned by half whenever they become many."""
        losses = self.numbers["losses"]
        if step % self.memory["every"] == 0:
            losses["step"].append(step)
            losses["loss"].append(loss)
        if len(losses["step"]) > KEPT:
            self.memory["every"] *= 2
            self.numbers["losses"] = {key: values[::2] for key, values in losses.items()}

    # ---- going back

    @torch.no_grad()
    def _take_snapshot(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """The state before the step under way. Two are kept: the newest may hold what leads to a spike already."""
        states = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(p, {}).items()
            }
            for p in _parameters(optimizer)
        ]
        average = getattr(pl_module, "ema", None)
        snapshot = {
            "step": trainer.global_step,
            "used": 0,
            "weights": {name: p.detach().clone() for name, p in trained(pl_module).items()},
            "buffers": {name: buffer.detach().clone() for name, buffer in pl_module.named_buffers()},
            "optimiser": states,
            "average": None if average is None else average.state_dict(),
        }
        self.memory["snapshots"] = [*self.memory["snapshots"], snapshot][-2:]

    @torch.no_grad()
    def _go_back(self, trainer: L.Trainer, pl_module: Any, optimizer: Any, what: str) -> None:
        snapshot = self._good_snapshot(trainer.global_step)
        parameters, buffers = trained(pl_module), dict(pl_module.named_buffers())
        for name, tensor in snapshot["weights"].items():
            parameters[name].copy_(tensor)
        for name, tensor in snapshot["buffers"].items():
            buffers[name].copy_(tensor)
        for parameter, state in zip(_parameters(optimizer), snapshot["optimiser"]):
            _restore(optimizer.state, parameter, state)
        average = getattr(pl_module, "ema", None)
        if average is not None and snapshot["average"] is not None:
            average.load_state_dict(snapshot["average"])
        take_gradients_away(optimizer)
        if hasattr(pl_module, "leave_out"):
            pl_module.leave_out()
        self.memory["rollbacks"] += 1
        step = trainer.global_step + 1
        advice = "If this happens often, lower training.lr or set training.clip_norm."
        done = f"{what} Weights, optimiser and average are those of step {snapshot['step']} again."
        if self.find(trainer, pl_module, "rollback", done, advice, step) is None:
            say(trainer, pl_module, f"LossSpike: Step {step}: {done}")
        if self.memory["rollbacks"] > self.most:
            raise ForgefieldError(
                f"LossSpike: step {step}: {what} The training went back {self.most} times already (most); lower training.lr, "
                "set training.clip_norm, or look at the data."
            )

    def _good_snapshot(self, step: int) -> dict[str, Any]:
        """The newest that is old enough to be free of what led to the spike and did not lead to one before; else the oldest."""
        kept = self.memory["snapshots"]
        while len(kept) > 1 and (step - kept[-1]["step"] < self.snapshot_every // 5 or kept[-1]["used"]):
            kept.pop()
        kept[-1]["used"] += 1
        return kept[-1]

    def record(self) -> dict[str, Any]:
        losses = self.numbers["losses"]
        steps, values = thinned(losses["step"], losses["loss"], most=800)
        return {**super().record(), "losses": {"step": steps, "loss": values}}


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _restore(states: Any, parameter: torch.nn.Parameter, kept: dict[str, Any]) -> None:
    """The optimiser's state of a parameter as it was; tensors stay where they are, for captured steps read them there."""
    if not kept:
        states.pop(parameter, None)
        return
    live = states[parameter]
    for key, value in kept.items():
        if isinstance(value, Tensor) and isinstance(live.get(key), Tensor):
            live[key].copy_(value)
        else:
            live[key] = value.clone() if isinstance(value, Tensor) else value
