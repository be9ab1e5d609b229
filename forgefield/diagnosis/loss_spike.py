"""`LossSpike`: detects a loss far above the recent ones and, on request, rolls back to the last good state.

The logarithm of the loss is compared with the median of the last steps, in units of their median deviation; a loss that is not
finite is always a spike. With `rollback`, weights, optimiser state, average of weights and the recent losses are restored from
the last snapshot, the current step is skipped, and the training continues with the next batches. Snapshots are part of
checkpoints, so a resumed run does the same. The loss is the mean over ranks, so they decide alike. On a GPU it is read `lag`
steps later.

Contract of a rollback. It never goes back beyond the state that an earlier rollback restored. If the training does not reach
its next snapshot after `MAX_CONSECUTIVE` rollbacks, or was rolled back more than `most` times in total, it stops.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from forgefield.diagnosis.callback import Diagnosis, is_worth_reporting, notify
from forgefield.diagnosis.records import Record, thinned
from forgefield.errors import ForgefieldError
from forgefield.training.probing import drop_gradients, mean_over_ranks, probed, trained_parameters

TO_SIGMA = 1.4826
"""A median deviation times this is the standard deviation of a normal distribution."""
MAX_LOSSES = 4000
"""Maximum number of losses kept for the curve."""
MAX_CONSECUTIVE = 2
"""Rollbacks to the same state after which the next one stops the training, since it would only repeat itself."""


class LossSpike(Diagnosis):
    """Reports loss spikes, and can undo them.

    window: number of recent steps to compare with. threshold: in robust standard deviations of these. factor: a spike is at
    least this many times the usual loss. rollback: restore the last good state. snapshot_every: steps between snapshots.
    most: number of rollbacks after which the training stops. lag: how many steps later the loss is read (default: 0 on a
    CPU, else 2).
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
        self._batches = 0
        self._evaluations = 0
        self._arriving: deque[tuple[int, Tensor]] = deque()

    @property
    def count(self) -> int:
        return len(self.numbers["spikes"])

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ForgefieldError("LossSpike needs automatic optimisation.")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._arriving = deque((step, torch.tensor(loss)) for step, loss in self.memory["waiting"])

    def state_dict(self) -> dict[str, Any]:
        self.memory["waiting"] = [[step, float(loss)] for step, loss in self._arriving]
        return super().state_dict()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._evaluations = 0
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._loss, self._batches = None, 0

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._evaluations == 0:  # some optimisers and callbacks evaluate a batch several times
            inspected = probed(pl_module)
            task_loss = inspected.task_loss if inspected is not None else None
            part = (loss * trainer.accumulate_grad_batches if task_loss is None else task_loss).detach().double()
            self._loss = part if self._loss is None else self._loss + part
            self._batches += 1
        self._evaluations += 1

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._loss is None:
            return
        lag = self.lag if self.lag is not None else (0 if self._loss.device.type == "cpu" else 2)
        self._arriving.append((trainer.global_step + 1, mean_over_ranks(self._loss / self._batches)))
        while len(self._arriving) > lag:
            step, loss = self._arriving.popleft()
            if self._judge(trainer, pl_module, optimizer, step, float(loss)):
                self._arriving.clear()  # they belong to weights that were replaced
                return
        if self.rollback and trainer.global_step % self.snapshot_every == 0:
            self._take_snapshot(trainer, pl_module, optimizer)

    # ---- detection

    def _judge(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer, step: int, loss: float
    ) -> bool:
        """Judge the loss of a step. Returns whether the training was rolled back."""
        self._keep(step, loss)
        if not self.is_spike(loss):
            self.memory["above"] = 0
            if loss > 0:
                self.memory["recent"] = [*self.memory["recent"], math.log(loss)][-self.window :]
            return False
        usual = self.usual
        self._accept_new_level(loss)
        action = "rolled back" if self.rollback and self.memory["snapshots"] else "noticed"
        self.numbers["spikes"].append({"step": step, "loss": loss, "usual": usual, "action": action})
        what = f"the loss is {loss:.4g}{'' if usual is None else f', where {usual:.4g} was usual'}."
        advice = (
            "Lower training.lr, set training.clip_norm, or check the frames of this batch; LossSpike(rollback=true) "
            "restores the last good state."
        )
        if self.rollback and action == "noticed":
            advice = "There is no earlier state to restore. Lower training.lr, or check the frames of this batch."
        if action == "rolled back":
            self._roll_back(trainer, pl_module, optimizer, what)
        elif self.find(trainer, pl_module, "spike", what, advice, step) is None and is_worth_reporting(self.count):
            notify(trainer, pl_module, f"LossSpike: Step {step}: {what}")
        return action == "rolled back"

    def _accept_new_level(self, loss: float) -> None:
        """A loss that stays high is not a spike: a loss weight or the data has changed. Accept it after half a window."""
        self.memory["above"] = self.memory.get("above", 0) + 1 if math.isfinite(loss) else 0
        if self.memory["above"] >= self.window // 2:
            self.memory["recent"], self.memory["above"] = [], 0

    @property
    def usual(self) -> float | None:
        """The median of the recent losses; None before the first one."""
        recent = self.memory["recent"]
        return math.exp(statistics.median(recent)) if recent else None

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is not finite, or far above the recent ones, if there are enough of them."""
        recent = self.memory["recent"]
        if not math.isfinite(loss):
            return True
        if loss <= 0 or len(recent) < max(4, self.window // 4) or loss <= self.factor * math.exp(min(recent)):
            return False
        middle = statistics.median(recent)
        spread = TO_SIGMA * statistics.median([abs(x - middle) for x in recent])
        return math.log(loss) > middle + max(self.threshold * spread, math.log(self.factor))

    def _keep(self, step: int, loss: float) -> None:
        """Store the loss for the curve, which is thinned by half whenever it becomes long."""
        losses = self.numbers["losses"]
        if step % self.memory["every"] == 0:
            losses["step"].append(step)
            losses["loss"].append(loss)
        if len(losses["step"]) > MAX_LOSSES:
            self.memory["every"] *= 2
            self.numbers["losses"] = {key: values[::2] for key, values in losses.items()}

    # ---- rollback

    @torch.no_grad()
    def _take_snapshot(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Store the state before the current step. Two are kept, since the newest may already contain the cause of a spike."""
        states = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(p, {}).items()
            }
            for p in _parameters(optimizer)
        ]
        inspected = probed(pl_module)
        average = inspected.ema if inspected is not None else None
        snapshot = {
            "step": trainer.global_step,
            "recent": list(self.memory["recent"]),
            "weights": {name: p.detach().clone() for name, p in trained_parameters(pl_module).items()},
            "buffers": {name: buffer.detach().clone() for name, buffer in pl_module.named_buffers()},
            "optimiser": states,
            "average": None if average is None else average.state_dict(),
        }
        self.memory["snapshots"] = [*self.memory["snapshots"], snapshot][-2:]
        self.memory["in_a_row"] = 0

    @torch.no_grad()
    def _roll_back(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer, what: str) -> None:
        step = trainer.global_step + 1
        snapshot = self._good_snapshot(trainer.global_step)
        self.memory["in_a_row"] = self.memory.get("in_a_row", 0) + 1
        if self.memory["in_a_row"] > MAX_CONSECUTIVE:
            raise ForgefieldError(
                f"LossSpike: step {step}: {what} The training was rolled back to step {snapshot['step']} "
                f"{MAX_CONSECUTIVE} times in a row and did not complete {self.snapshot_every} steps after it (snapshot_every); "
                "lower training.lr, set training.clip_norm, or check the data."
            )
        parameters, buffers = trained_parameters(pl_module), dict(pl_module.named_buffers())
        for name, tensor in snapshot["weights"].items():
            parameters[name].copy_(tensor)
        for name, tensor in snapshot["buffers"].items():
            buffers[name].copy_(tensor)
        for parameter, state in zip(_parameters(optimizer), snapshot["optimiser"]):
            _restore(optimizer.state, parameter, state)
        drop_gradients(optimizer)
        if (inspected := probed(pl_module)) is not None:
            if inspected.ema is not None and snapshot["average"] is not None:
                inspected.ema.load_state_dict(snapshot["average"])
            inspected.discard_step()
        # Compare with the losses of that time: those of a less trained model are higher without being spikes.
        self.memory["recent"] = list(snapshot.get("recent", self.memory["recent"]))
        self.memory["rollbacks"] += 1
        advice = "If this happens often, lower training.lr or set training.clip_norm."
        done = (
            f"{what} Weights, optimiser and average were restored from step {snapshot['step']} (rollback "
            f"{self.memory['rollbacks']} of at most {self.most})."
        )
        if self.find(trainer, pl_module, "rollback", done, advice, step) is None:
            notify(trainer, pl_module, f"LossSpike: Step {step}: {done}")
        if self.memory["rollbacks"] > self.most:
            raise ForgefieldError(
                f"LossSpike: step {step}: {what} The training was rolled back {self.most} times already (most); lower "
                "training.lr, set training.clip_norm, or check the data."
            )

    def _good_snapshot(self, step: int) -> dict[str, Any]:
        """The newest snapshot if it is old enough not to contain the cause of the spike, else the one before it. The other one
        is dropped, so that the next rollback does not go back any further."""
        snapshots = self.memory["snapshots"]
        is_young = step - snapshots[-1]["step"] < self.snapshot_every // 5
        chosen = snapshots[-2] if is_young and len(snapshots) > 1 else snapshots[-1]
        self.memory["snapshots"] = [chosen]
        return chosen

    def record(self) -> Record:
        losses = self.numbers["losses"]
        steps, values = thinned(losses["step"], losses["loss"], most=800)
        return {**super().record(), "losses": {"step": steps, "loss": values}}


def _parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _restore(states: dict[Tensor, dict[str, Any]], parameter: torch.nn.Parameter, stored: dict[str, Any]) -> None:
    """Restore the optimiser's state of a parameter. Tensors keep their address, since captured steps read them there."""
    if not stored:
        states.pop(parameter, None)
        return
    live = states[parameter]
    for key, value in stored.items():
        if isinstance(value, Tensor) and isinstance(live.get(key), Tensor):
            live[key].copy_(value)
        else:
            live[key] = value.clone() if isinstance(value, Tensor) else value
