"""`GradientCheck`: detects gradients that are not finite before they change the weights.

The gradient of every step is checked after it was averaged over ranks and before it is clipped, so that all ranks see the same
values and act alike. Layer, step and frames are reported: the batch of a bad gradient is evaluated again, frame by frame.

Contract. `stop` and `skip` leave weights, the optimiser's state and the average of weights exactly as they were before the
step, and the batch is not part of any metric; a skipped step still counts as a step (schedules advance). On a CPU the result
is available at once. On a GPU, an optimiser with a fused kernel (`fused: true`, or engine `graphs` with Adam in float32) reads
on the device whether to step, and the host reads the result `lag` steps later without waiting; any other optimiser keeps
counters on the host, so there the host waits for the gradient in every step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgefield.config.nearest import did_you_mean
from forgefield.diagnosis.callback import Diagnosis, is_worth_reporting, notify
from forgefield.diagnosis.records import Record, thinned
from forgefield.errors import ForgefieldError
from forgefield.training.probing import (
    all_gather,
    drop_gradients,
    frames_of,
    join_names,
    loss_of,
    probed,
    trained_parameters,
    without_side_effects,
)

POLICIES = ("stop", "skip", "zero")
MAX_EVENTS = 100
"""Number of events stored with their layers and frames; all events are counted."""
LAG = 2
"""Steps after which a result is read from a GPU."""


@dataclass
class _PendingCheck:
    """The check of one step, not yet read. largest: (n,), largest element of each gradient, on its way to the host. arrived:
    the event after which it can be read; None if it can be read at once."""

    step: int
    names: list[str]
    largest: Tensor
    arrived: torch.cuda.Event | None
    batches: list[tuple[object, int]]

    def bad(self) -> dict[str, str]:
        """Parameters whose gradient is not finite, and whether it is NaN or Inf."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values = zip(self.names, self.largest.tolist())
        return {name: "NaN" if value != value else "Inf" for name, value in values if not abs(value) < float("inf")}


def _any_not_finite(gradients: list[Tensor], flag: Tensor) -> Tensor:
    """Write 1 or 0 into `flag`, on the device, with the check of torch's gradient scalers: one call for all gradients."""
    if flag.device.type not in ("cpu", "cuda"):
        return flag.copy_(~torch.stack([g.isfinite().all() for g in gradients]).all())
    flag.zero_()
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    for group in by_type.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, torch.ones_like(flag))
    return flag


def _largest(gradients: list[Tensor]) -> Tensor:
    return torch.stack([n.double() for n in torch._foreach_norm(gradients, ord=float("inf"))])


class GradientCheck(Diagnosis):
    """Checks that all gradients are finite.

    policy: `stop` ends the training, `skip` skips the step, `zero` sets the elements that are not finite to zero and steps.
    patience: number of consecutive bad steps after which the training stops whatever the policy. norms_every: steps between
    two points of the curve of gradient norms, 0 for none. lag: how many steps later the host reads the result (default: 0
    where reading costs nothing or the optimiser needs the result, else 2).
    """

    name = "gradient_check"

    def __init__(self, policy: str = "stop", patience: int = 20, norms_every: int = 20, lag: int | None = None) -> None:
        super().__init__()
        if policy not in POLICIES:
            raise ForgefieldError(
                f"GradientCheck: policy is {', '.join(POLICIES)}, not {policy!r}.{did_you_mean(str(policy), POLICIES)}"
            )
        if patience < 1 or norms_every < 0 or (lag is not None and lag < 0):
            raise ForgefieldError("GradientCheck: patience is at least 1, norms_every and lag are not negative.")
        self.policy, self.patience, self.norms_every, self.lag = policy, patience, norms_every, lag
        self.numbers = {"checked": 0, "bad": 0, "events": [], "norms": {"step": [], "norm": []}}
        self.memory = {"in_a_row": 0}
        self._names: dict[int, str] = {}
        self._waiting: deque[_PendingCheck] = deque()
        self._not_finite: Tensor | None = None
        self._batches: list[tuple[object, int]] = []
        self._trainer: L.Trainer | None = None

    @property
    def count(self) -> int:
        """Steps whose gradient was not finite."""
        return int(self.numbers["bad"])

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ForgefieldError(
                "GradientCheck: with trainer.precision=16-mixed it is normal that gradients overflow, and Lightning's scaler "
                "skips those steps; use bf16-mixed, or remove the check."
            )
        if not pl_module.automatic_optimization:
            raise ForgefieldError(
                "GradientCheck needs automatic optimisation; with manual optimisation, check gradients in your own step."
            )
        self._trainer = trainer
        self._names = {id(parameter): name for name, parameter in trained_parameters(pl_module).items()}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._batches = []
        self._batches.append((batch, batch_idx))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [p.grad.detach() for p in parameters]
        step = trainer.global_step + 1
        self.numbers["checked"] += 1
        if self._not_finite is None or self._not_finite.device != gradients[0].device:
            self._not_finite = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
        not_finite = _any_not_finite(gradients, self._not_finite)
        if self.norms_every and (step - 1) % self.norms_every == 0:
            self._keep_norm(step, gradients)
        lag = self._lag(optimizer, not_finite.device)
        if lag == 0:
            self._set_found_inf(optimizer, None)
            if not bool(not_finite):
                self.memory["in_a_row"] = 0
                return
            check = _PendingCheck(step, self._named(parameters), _largest(gradients), None, list(self._batches))
            bad = check.bad()
            self._act(pl_module, optimizer, gradients)
            self._report(trainer, pl_module, check, bad)
            return
        check = _PendingCheck(step, self._named(parameters), *_to_host(_largest(gradients)), list(self._batches))
        self._act_on_device(pl_module, optimizer, gradients, not_finite)
        self._waiting.append(check)
        while len(self._waiting) > lag:
            self._read(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read_all(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is not None:  # all ranks come here
            self._read_all(self._trainer, self._trainer.lightning_module)
        return super().state_dict()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read_all(trainer, pl_module)
        for optimizer in trainer.optimizers:
            self._set_found_inf(optimizer, None)
        super().on_train_end(trainer, pl_module)

    # ---- acting

    def _lag(self, optimizer: Optimizer, device: torch.device) -> int:
        if self.policy == "zero":
            return self.lag if self.lag is not None else (0 if device.type == "cpu" else LAG)
        ready = all(group.get("fused") for group in optimizer.param_groups) and all(
            p in optimizer.state for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        )
        if not ready:  # its counters are on the host: only the host can keep them from advancing
            return 0
        return self.lag if self.lag is not None else (0 if device.type == "cpu" else LAG)

    def _named(self, parameters: list[nn.Parameter]) -> list[str]:
        return [self._names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]

    def _act(self, pl_module: L.LightningModule, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        if self.policy == "zero":
            for gradient in gradients:
                gradient.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            _discard_step(pl_module, average=False)
        else:
            drop_gradients(optimizer)
            _discard_step(pl_module)

    def _act_on_device(
        self, pl_module: L.LightningModule, optimizer: Optimizer, gradients: list[Tensor], flag: Tensor
    ) -> None:
        not_finite = flag > 0
        if self.policy == "zero":
            for gradient in gradients:
                gradient.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            _discard_step(pl_module, not_finite, average=False)
            return
        self._set_found_inf(optimizer, self._not_finite)
        _discard_step(pl_module, not_finite)

    def _set_found_inf(self, optimizer: Any, value: Tensor | None) -> None:
        """torch's fused optimisers skip a step when their attribute `found_inf`, a number on the device, is 1."""
        if value is not None:
            optimizer.found_inf = value
        elif self._not_finite is not None and getattr(optimizer, "found_inf", None) is self._not_finite:
            del optimizer.found_inf

    # ---- reporting

    def _read_all(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        while self._waiting:
            self._read(trainer, pl_module)

    def _read(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check = self._waiting.popleft()
        if bad := check.bad():
            self._report(trainer, pl_module, check, bad)
        else:
            self.memory["in_a_row"] = 0

    def _report(
        self, trainer: L.Trainer, pl_module: L.LightningModule, check: _PendingCheck, bad: dict[str, str]
    ) -> None:
        self.numbers["bad"] += 1
        self.memory["in_a_row"] += 1
        frames = None
        if self.count <= MAX_EVENTS:
            frames = self._frames(trainer, pl_module, check)
            self.numbers["events"].append({"step": check.step, "layers": list(bad), "frames": frames})
        kinds = " and ".join(sorted(set(bad.values())))
        what = f"the gradient holds {kinds} in {join_names(list(bad))}{_of_frames(frames)}."
        done = {"stop": "The step was not made.", "skip": "The step was skipped.", "zero": "They were set to zero."}
        advice = "Check these frames (labels, overlapping atoms) and the formula (root or division at zero)."
        new = self.find(trainer, pl_module, "gradient", f"{what} {done[self.policy]}", advice, check.step)
        if new is None and is_worth_reporting(self.count):
            notify(trainer, pl_module, f"GradientCheck: Step {check.step}: {what} {done[self.policy]}")
        if self.policy == "stop" or self.memory["in_a_row"] >= self.patience:
            again = "" if self.policy == "stop" else f" It was the {self.memory['in_a_row']}th in a row (patience)."
            raise ForgefieldError(f"GradientCheck: step {check.step}: {what} {done[self.policy]}{again} {advice}")

    def _frames(self, trainer: L.Trainer, pl_module: L.LightningModule, check: _PendingCheck) -> list[str] | None:
        """Frames whose gradient is not finite, over all ranks; None where batches cannot be split into frames."""
        bad_here: list[str] | None = None
        for batch, batch_idx in check.batches:
            parts = frames_of(trainer, pl_module, batch, batch_idx)
            if parts is not None:
                with without_side_effects(pl_module):
                    bad = [name for name, part in parts if not _finite_gradient(pl_module, part, batch_idx)]
                bad_here = [*(bad_here or []), *bad]
        split = [names for names in all_gather(bad_here) if names is not None]
        return [name for names in split for name in names] if split else None

    def _keep_norm(self, step: int, gradients: list[Tensor]) -> None:
        norm = float(torch.stack([n.double() for n in torch._foreach_norm(gradients)]).norm())
        curve = self.numbers["norms"]
        if math.isfinite(norm):
            curve["step"].append(step)
            curve["norm"].append(norm)

    def record(self) -> Record:
        steps, norms = thinned(self.numbers["norms"]["step"], self.numbers["norms"]["norm"])
        return {**super().record(), "norms": {"step": steps, "norm": norms}, "policy": self.policy}


def _finite_gradient(pl_module: L.LightningModule, batch: object, batch_idx: int) -> bool:
    with torch.enable_grad():
        loss = loss_of(pl_module, batch, batch_idx)
        if loss is None or not loss.requires_grad:
            return True
        gradients = torch.autograd.grad(loss, list(trained_parameters(pl_module).values()), allow_unused=True)
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def _discard_step(pl_module: L.LightningModule, condition: Tensor | None = None, *, average: bool = True) -> None:
    if (inspected := probed(pl_module)) is not None:
        inspected.discard_step(condition, average=average)


def _of_frames(frames: list[str] | None) -> str:
    if frames is None:
        return " (this kind of batch cannot be split into frames)"
    if not frames:
        return " (no single frame of the batch causes it)"
    return f", from {join_names(frames)}"


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on its way to the host, and the event to wait for before it is read."""
    if values.device.type != "cuda":
        return values.cpu(), None
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return pinned, arrived
