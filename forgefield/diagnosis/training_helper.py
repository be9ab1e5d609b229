"""`TrainingHelper`: inspects a training at intervals and reports common problems.

It inspects the first batch, one early step and then every N-th step for: embeddings that explode, die or are all the same;
labels that are outliers or constant; gradients that do not reach the encoder; unused parameters; updates so large or small
that the learning rate is wrong; predictions no better than the mean. Everything is reported once. The embeddings of
Forgefield's modules come from an additional evaluation of the batch, so that all engines are treated alike; other modules get
hooks for that step. With several ranks, each inspects its batches and rank 0 reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgefield.data.batch import Batch
from forgefield.diagnosis import rules
from forgefield.diagnosis.callback import Diagnosis
from forgefield.diagnosis.records import Record, thinned
from forgefield.diagnosis.rules import Labels, label_tensors
from forgefield.errors import ForgefieldError
from forgefield.models.potential import Potential
from forgefield.training.probing import (
    OutputHooks,
    probed,
    tensors_in,
    trained_parameters,
    without_side_effects,
)


class TrainingHelper(Diagnosis):
    """Reports common defects of models, labels and settings.

    every: steps between two inspections. encoder: name of the submodule that computes embeddings (default: `encoder`, else
    the model). targets: names of labels in batches that are dictionaries. patience: number of inspections that have to agree
    before an uncertain finding is reported.
    """

    name = "training_helper"

    def __init__(
        self, every: int = 100, encoder: str | None = None, targets: Sequence[str] | None = None, patience: int = 3
    ) -> None:
        super().__init__()
        if every < 1 or patience < 1:
            raise ForgefieldError("TrainingHelper: every and patience are at least 1.")
        self.every, self.encoder, self.patience = every, encoder, patience
        self.targets = None if targets is None else tuple(targets)
        self.numbers = {"looks": 0, "history": {"step": [], "update": [], "loss": []}}
        self.memory = {
            "sizes": {},
            "zero": {},
            "same": 0,
            "without": None,
            "silent": None,
            "labels": {},
            "mean": {},
            "flat": {},
        }
        self._labels_at_start: Labels | None = None
        self._inspects = False
        self._hooks: OutputHooks | None = None
        self._outputs: dict[str, list[Tensor]] = {}
        self._last: tuple[str, Tensor] | None = None
        self._labels: dict[str, Tensor] = {}
        self._matching: dict[str, Tensor] = {}
        self._before: list[Tensor] | None = None
        self._loss: Tensor | None = None

    # ---- hooks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._labels_at_start = Labels.of_training(trainer, pl_module)
        if self._labels_at_start is not None:
            self._report_all(trainer, pl_module, self._labels_at_start.judge())
            self.memory["mean"] = {**dict.fromkeys(self._labels_at_start.spreads, 0), **self.memory["mean"]}
        _encoder_name(pl_module, self.encoder)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step
        is_due = step in (0, max(self.every // 10, 1)) or step % self.every == 0
        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        self._inspects = is_due and is_first
        if is_first:  # of the batches accumulated for one step, the first is inspected
            self._outputs, self._matching, self._last, self._loss, self._before = {}, {}, None, None, None
        if self._labels_at_start is None:
            self._collect_labels(trainer, pl_module, batch)
        if not self._inspects:
            return
        if (inspected := probed(pl_module)) is not None:
            with OutputHooks(inspected.potential, self._store_output), without_side_effects(pl_module):
                _evaluate(inspected.potential, batch)
        else:
            self._hooks = OutputHooks(pl_module, self._store_output)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
            if not self._outputs and self._last is None:
                self.find(
                    trainer,
                    pl_module,
                    "embeddings not seen",
                    "no submodule with features was called in this step, so embeddings are not inspected.",
                    "A compiled module calls no submodules; train without torch.compile to have embeddings inspected.",
                )
        if self._inspects and self._loss is None:
            self._loss = loss.detach() * trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._loss is None or self._before is not None:
            return
        parameters = trained_parameters(pl_module)
        self._judge_gradients(trainer, pl_module, parameters)
        self._before = [p.detach().clone() for p in parameters.values()]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        if all(p.grad is None for p in trained_parameters(pl_module).values()):  # another callback skipped the step
            return
        assert self._loss is not None
        update = _relative_change(self._before, list(trained_parameters(pl_module).values()))
        self.numbers["looks"] += 1
        loss = float(self._loss)
        history = self.numbers["history"]
        for key, value in (("step", trainer.global_step), ("update", update), ("loss", loss)):
            history[key].append(value)
        self.scalar(trainer, "update_ratio", update)
        self._judge_embeddings(trainer, pl_module)
        self._judge_rate(trainer, pl_module)
        self._judge_predictions(trainer, pl_module)
        self._before = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._judge_rows(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._judge_unused(trainer, pl_module, at_end=True)
        super().on_train_end(trainer, pl_module)

    # ---- embeddings

    def _store_output(self, name: str, sub: nn.Module, inputs: object, output: object) -> None:
        tensor = next(tensors_in(output), None)
        if tensor is None or tensor.numel() == 0:
            return
        tensor = tensor.detach()
        self._last = (name, tensor) if tensor.dim() >= 2 and tensor.shape[-1] >= 2 else self._last
        for label, values in self._labels.items():
            if values.numel() == tensor.numel() and values.shape[0] == tensor.shape[0]:
                self._matching[label] = tensor
        if tensor.dim() >= 2 and tensor.shape[-1] >= 2:
            self._outputs[name] = [tensor.double().square().mean().sqrt(), tensor.abs().max().double()]

    def _judge_embeddings(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._outputs:
            return
        table = torch.stack([torch.stack(numbers) for numbers in self._outputs.values()]).tolist()
        sizes = {name: row[0] for name, row in zip(self._outputs, table)}
        self.memory["sizes"] = {**sizes, **self.memory["sizes"]}
        zero = self.memory["zero"]
        for name, (_, largest) in zip(self._outputs, table):
            zero[name] = zero.get(name, 0) + 1 if largest == 0 else 0
        findings = [rules.exploding(self.memory["sizes"], sizes), rules.dead(zero, min(self.patience, 2))]
        if self._last is not None:
            name, tensor = self._last
            rows = tensor.double().reshape(tensor.shape[0], -1)
            same = rows.shape[0] > 1 and bool((rows - rows[0]).abs().max() <= 1e-9 * rows.abs().max())
            self.memory["same"] = self.memory["same"] + 1 if same else 0
            findings.append(rules.collapsed(name, self.memory["same"], self.patience))
        self._report_all(trainer, pl_module, findings)

    # ---- labels and predictions

    def _collect_labels(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object) -> None:
        """Collect the labels of the first batches and of every inspection, and judge them once there are enough."""
        self._labels = {}
        collected: dict[str, list[float]] = self.memory["labels"]
        many = min((len(values) for values in collected.values()), default=0)
        if not self._inspects and many >= Labels.ENOUGH:
            return
        self._labels = {name: t.detach() for name, t in label_tensors(batch, self.targets).items()}
        for name, values in self._labels.items():
            room = 4 * Labels.ENOUGH - len(collected.setdefault(name, []))
            collected[name] += values.reshape(-1)[: max(room, 0)].double().cpu().tolist()
            if len(collected[name]) >= Labels.ENOUGH or (trainer.is_last_batch and len(collected[name]) >= rules.FEW):
                labels = np.array(collected[name])
                self._report_all(trainer, pl_module, [rules.constant_label(name, labels), rules.outliers(name, labels)])

    def _judge_predictions(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """For other modules than Forgefield's: the last output with the shape of the labels is taken as the prediction."""
        flat = self.memory["flat"]
        for name, prediction in self._matching.items():
            labels = self._labels[name].double().reshape(-1)
            values = prediction.double().reshape(-1)
            spread = float(labels.std()) if labels.numel() > 1 else 0.0
            is_flat = spread > 0 and float(values.std()) < 0.02 * spread and len(self.numbers["history"]["step"]) > 1
            flat[name] = flat.get(name, 0) + 1 if is_flat else 0
            if flat[name] >= self.patience:
                error = float((values - labels).square().mean().sqrt())
                self._report_all(trainer, pl_module, [rules.output_is_mean(name, error, spread)])

    def _judge_rows(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """For Forgefield's modules: compare the errors in the latest metrics with the spread of the labels."""
        metrics = trainer.callback_metrics
        if self._labels_at_start is None:
            return
        for name, spread in self._labels_at_start.spreads.items():
            error = metrics.get(f"train/{name}_rmse")
            if error is None:
                continue
            value = float(error) / (1000.0 if name in ("energy", "forces") else 1.0)
            mean = self.memory["mean"]
            mean[name] = mean.get(name, 0) + 1 if value > 0.95 * spread else 0
            if mean[name] >= self.patience and trainer.global_step >= 5 * self.every:
                unit = {"energy": " eV/atom", "forces": " eV/A"}.get(name, "")
                self._report_all(trainer, pl_module, [rules.output_is_mean(name, value, spread, unit)])

    # ---- gradients and updates

    def _judge_gradients(
        self, trainer: L.Trainer, pl_module: L.LightningModule, parameters: dict[str, nn.Parameter]
    ) -> None:
        gradients = {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None}
        if not gradients:
            return
        each = torch._foreach_norm(list(gradients.values()))
        norms = dict(zip(gradients, torch.stack([norm.double() for norm in each]).tolist()))
        without = [name for name in parameters if name not in gradients]
        silent = [name for name, norm in norms.items() if norm == 0]
        for key, names in (("without", without), ("silent", silent)):
            before = self.memory[key]
            self.memory[key] = names if before is None else [name for name in before if name in set(names)]
        prefix = _encoder_name(pl_module, self.encoder)
        inside = [norms.get(name, 0.0) for name in parameters if name.startswith(prefix + ".")]
        outside = [norm for name, norm in norms.items() if not name.startswith(prefix + ".")]
        if inside and outside and self.numbers["looks"] >= 1:
            finding = rules.not_reached(math.hypot(*inside), math.hypot(*outside), prefix)
            self._report_all(trainer, pl_module, [finding])
        self._judge_unused(trainer, pl_module)

    def _judge_unused(self, trainer: L.Trainer, pl_module: L.LightningModule, *, at_end: bool = False) -> None:
        looks = self.numbers["looks"] + (0 if at_end else 1)
        if looks >= self.patience or (at_end and looks > 0):
            self._report_all(
                trainer, pl_module, [rules.unused(self.memory["without"] or [], self.memory["silent"] or [])]
            )

    def _judge_rate(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        history = self.numbers["history"]
        updates, losses = history["update"], history["loss"]
        findings = [rules.rate_too_high(updates[-1], losses)]
        if len(updates) > self.patience:
            findings.append(rules.rate_too_low(updates[-self.patience :], losses[-1], losses[0]))
        self._report_all(trainer, pl_module, findings)

    def _report_all(
        self, trainer: L.Trainer, pl_module: L.LightningModule, findings: Sequence[rules.Rule | None]
    ) -> None:
        for rule in findings:
            if rule is not None:
                self.find(trainer, pl_module, *rule)

    def record(self) -> Record:
        history = self.numbers["history"]
        steps, updates, losses = thinned(history["step"], history["update"], history["loss"])
        return {**super().record(), "history": {"step": steps, "update": updates, "loss": losses}}


def _encoder_name(pl_module: L.LightningModule, requested: str | None) -> str:
    """The name of the encoder in the module; empty where there is none."""
    names = (requested,) if requested is not None else ("encoder", "potential.model")
    modules = dict(pl_module.named_modules())
    for name in names:
        if name in modules:
            return name
    if requested is not None:
        children = ", ".join(name for name, _ in pl_module.named_children())
        raise ForgefieldError(f"TrainingHelper: the module has no submodule '{requested}'; it has {children}.")
    return ""


def _evaluate(potential: Potential, batch: object) -> None:
    """Evaluate the potential without gradients in the weights."""
    was_training = potential.training
    potential.eval()
    try:
        with torch.no_grad():
            potential(cast(Batch, batch), forces=False, stress=False)
    finally:
        potential.train(was_training)


@torch.no_grad()
def _relative_change(before: list[Tensor], now: list[nn.Parameter]) -> float:
    """Norm of the change of all weights, relative to their norm."""
    changes = torch._foreach_sub([p.detach() for p in now], before)
    change = torch.stack([n.double() for n in torch._foreach_norm(changes)]).norm()
    size = torch.stack([n.double() for n in torch._foreach_norm(before)]).norm()
    return float(change / size) if float(size) > 0 else 0.0
