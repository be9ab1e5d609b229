"""`ModelAutocorrelation`: how strongly parameters and gradients of successive steps are correlated.

Adam assumes that gradients of successive steps are nearly independent. Where they become correlated, its estimate of their
variance is too small and its updates are too large; this shows before losses spike (Molybog et al., 2023). The values of the
last steps are kept on the device at sampled coordinates; the autocorrelation of each coordinate's series is computed and
averaged over coordinates.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from forgefield.diagnosis.callback import Diagnosis
from forgefield.diagnosis.records import Record, thinned
from forgefield.errors import ForgefieldError
from forgefield.training.probing import trained_parameters

TENSORS = 8
"""Number of parameters, spread over the model, that coordinates are sampled from."""


class ModelAutocorrelation(Diagnosis):
    """Reports gradients that are correlated from step to step.

    window: number of latest steps in the series. every: steps between two analyses. coordinates: how many are sampled.
    threshold: mean autocorrelation of gradients at lag 1 above which it is reported. seed: selects the coordinates.
    """

    name = "autocorrelation"

    def __init__(
        self, window: int = 128, every: int = 100, coordinates: int = 256, threshold: float = 0.6, seed: int = 0
    ) -> None:
        super().__init__()
        if window < 8 or every < 1 or coordinates < 1 or not 0 < threshold < 1:
            raise ForgefieldError(
                "ModelAutocorrelation: window is at least 8, every and coordinates at least 1, threshold between 0 and 1."
            )
        self.window, self.every, self.coordinates, self.threshold = window, every, coordinates, threshold
        self.seed = seed
        self.numbers = {"threshold": threshold, "history": {"step": [], "gradients": [], "parameters": []}}
        self.memory = {"taken": 0, "gradients": None, "parameters": None}
        self._samples: list[tuple[torch.nn.Parameter, Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._samples = self._sample(pl_module)
        n = sum(len(rows) for _, rows in self._samples)
        for kind in ("gradients", "parameters"):
            series = self.memory[kind]
            if series is None or series.shape != (self.window, n):
                series = torch.zeros(self.window, n, dtype=torch.float32)
                self.memory["taken"] = 0
            self.memory[kind] = series.to(pl_module.device)

    def _sample(self, pl_module: L.LightningModule) -> list[tuple[torch.nn.Parameter, Tensor]]:
        """Parameters spread over the model, with the flat indices of sampled elements; the same whenever a run is started."""
        generator = torch.Generator().manual_seed(self.seed)
        parameters = [p for p in trained_parameters(pl_module).values() if p.numel() > 0]
        step = max(len(parameters) / TENSORS, 1.0)
        chosen = [parameters[int(i * step)] for i in range(min(TENSORS, len(parameters)))]
        each = max(self.coordinates // max(len(chosen), 1), 1)
        return [(p, torch.randperm(p.numel(), generator=generator)[:each].sort().values.to(p.device)) for p in chosen]

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        row = self.memory["taken"] % self.window
        with torch.no_grad():
            weights = [torch.take(p, rows) for p, rows in self._samples]
            gradients = [
                torch.zeros_like(w) if p.grad is None else torch.take(p.grad, rows)
                for w, (p, rows) in zip(weights, self._samples)
            ]
            self.memory["parameters"][row] = torch.cat(weights)
            self.memory["gradients"][row] = torch.cat(gradients)
        self.memory["taken"] += 1
        taken = self.memory["taken"]
        if taken >= self.window and (taken - self.window) % self.every == 0:
            self._analyse(trainer, pl_module)

    def _analyse(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = trainer.global_step + 1
        history = self.numbers["history"]
        history["step"].append(step)
        for kind in ("gradients", "parameters"):
            series = self.memory[kind].double().cpu().roll(-(self.memory["taken"] % self.window), 0)
            correlation = autocorrelation(series, self.window // 2)
            quartiles = torch.nanquantile(correlation, torch.tensor([0.25, 0.75], dtype=torch.float64), dim=1)
            mean = correlation.nanmean(1)
            self.numbers["lags"] = list(range(correlation.shape[0]))
            self.numbers[kind] = {"mean": mean.tolist(), "low": quartiles[0].tolist(), "high": quartiles[1].tolist()}
            history[kind].append(float(mean[1]))
            self.scalar(trainer, f"autocorrelation_{kind}", float(mean[1]))
        is_settled = len(history["gradients"]) > 2  # at first gradients drift with the loss
        if is_settled and min(history["gradients"][-2:]) > self.threshold:
            self.find(
                trainer,
                pl_module,
                "correlated gradients",
                f"gradients of successive steps are correlated ({history['gradients'][-1]:.2f} at lag 1, over the last "
                f"{self.window} steps).",
                "Adam then underestimates their variance, and losses spike: lower the learning rate, raise Adam's eps, clip "
                "gradients, or use larger batches; if frames are not shuffled, shuffle them.",
                step,
            )

    def record(self) -> Record:
        history = self.numbers["history"]
        steps, gradients, parameters = thinned(history["step"], history["gradients"], history["parameters"])
        return {**super().record(), "history": {"step": steps, "gradients": gradients, "parameters": parameters}}


def autocorrelation(series: Tensor, lags: int) -> Tensor:
    """(lags + 1, n) autocorrelation of each column of (time, n) about its own mean, 1 at lag 0; NaN for a constant column.

    sum over t of d(t) d(t + lag) / sum over t of d(t)^2, with d the deviation from the mean.
    """
    length = series.shape[0]
    deviation = series - series.mean(0)
    spectrum = torch.fft.rfft(deviation, n=2 * length, dim=0)
    products = torch.fft.irfft(spectrum.abs().square(), n=2 * length, dim=0)[: lags + 1]
    variance = deviation.square().sum(0)
    constant = variance <= 1e-14 * series.square().sum(0)
    return torch.where(constant, torch.nan, products / torch.where(constant, 1.0, variance))
