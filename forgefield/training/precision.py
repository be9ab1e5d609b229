"""The setting `training.precision`: the type of the weights, the arithmetic of each step, and schedules that change it.

Weights, gradients and optimiser state are float32 (float64 for float64); geometry, radial basis, harmonics and energy sums are
always float64. Lower precisions apply to products and sums of products only: tf32 to all float32 matrix products on the GPU,
with torch's setting for the process, and to the gradient of radial tables in generated kernels; bf16-mixed and fp16-mixed to
products of features with weights (`forgefield.ops.products`). Validation and deployed models use the precision of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ops.execution import products_in
from forgefield.training.options import PRECISIONS

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "tf32": 1e-2, "bf16-mixed": 3e-3, "fp16-mixed": 1e-3}
"""Largest relative difference between two computations of the same step, by precision. They are below the effect of rounding
itself: all engines and both derivative forms round the same factors, so that only the order of sums differs. Kernels in tf32
round other factors, which 1e-2 allows for."""
STORAGE_TOLERANCES = {"float32": 0.0, "bfloat16": 3e-2}
"""The same by storage type of kernels, compared with steps that store everything in float32: this includes the rounding itself,
which changes gradients of a small batch by up to 1e-2."""
KERNEL_TOLERANCES = {None: 0.0, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The same for kernels, by the type to which factors of products are rounded. Some products that PyTorch operations round are
exact in kernels: that of embeddings in the first layer and, if weights are read from tables, those of radial networks."""
_LOWERED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_DESCRIPTIONS = {
    "float64": "float64 throughout",
    "float32": "float32 inside the network",
    "tf32": "float32 inside the network, matrix products in tf32",
    "bf16-mixed": "float32 inside the network, products with weights in bfloat16",
    "fp16-mixed": "float32 inside the network, products with weights in float16",
}


class Precision:
    """A setting such as `tf32` or `{start: tf32, finish: float32, finish_epochs: 10}`.

    start, finish: names of precisions, equal without a schedule.
    last: number of epochs or steps (`unit`) at the end in `finish`.
    """

    def __init__(self, setting: str | Mapping[str, Any]) -> None:
        schedule = setting if isinstance(setting, Mapping) else {"start": setting}
        self.start: str = schedule["start"]
        self.finish: str = schedule.get("finish", self.start if len(schedule) == 1 else "float32")
        self.unit = "steps" if schedule.get("finish_steps") is not None else "epochs"
        self.last = int(schedule.get(f"finish_{self.unit}") or 0)
        for name in self.names:
            if name not in PRECISIONS:
                raise ForgefieldError(
                    f"training.precision must be one of {', '.join(PRECISIONS)}, not '{name}'."
                    f"{did_you_mean(name, PRECISIONS)}"
                )
        self._effective: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The precisions of steps, in the order of their use."""
        return tuple(dict.fromkeys((self.start, self.finish)))

    @property
    def weights(self) -> str:
        """Type of the weights, for `build_model`; also the precision of validation."""
        return "float64" if self.start == "float64" else "float32"

    @property
    def tolerance(self) -> float:
        """For the comparison of engines, at the start or after a change."""
        return max(TOLERANCES[name] for name in self.names)

    def at(self, *, epoch: int, epochs: int | None, step: int, steps: int) -> str:
        """Precision of a step. epoch, step: indices from 0. epochs, steps: numbers of the training."""
        done, total = (epoch, epochs or -1) if self.unit == "epochs" else (step, steps)
        return self.finish if self.last and total > 0 and done >= total - self.last else self.start

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """Context of the forward and of the backward pass of a step in the named precision."""
        with _tf32(name == "tf32"), products_in(_LOWERED.get(name)) as lowering:
            try:
                yield
            finally:
                if lowering is not None and lowering.count:
                    self._effective.add(name)

    def require_effect(self, name: str) -> None:
        """After a first step: raise ForgefieldError if the precision has no effect in the model."""
        if name in _LOWERED and name not in self._effective:
            raise ForgefieldError(
                f"training.precision={name} has no effect on this model, because it does not use "
                "forgefield.ops.products.product. Use that function for products of features with weight matrices, or "
                "torch.autocast inside the model with training.precision=float32."
            )

    def require_device(self, device: torch.device) -> None:
        """Raise ForgefieldError if the device does not support a precision."""
        if "tf32" in self.names and (device.type != "cuda" or _generation(device) < 8):
            raise ForgefieldError(
                "training.precision=tf32 needs an NVIDIA GPU of the generation Ampere or later, but this run is on "
                f"{_name(device)}; use float32."
            )
        if "bf16-mixed" in self.names and device.type == "cuda" and _generation(device) < 8:
            raise ForgefieldError(
                f"training.precision=bf16-mixed: {_name(device)} does not support bfloat16; use fp16-mixed or float32."
            )

    def require_end(self, *, epochs: int | None, steps: int) -> None:
        """Raise ForgefieldError for a schedule that needs a limit of the training, or that never uses its first precision.

        epochs, steps: limits of the training; None or -1 without limit.
        """
        limit = steps if self.unit == "steps" and steps > 0 else (epochs or -1)
        if not self.last:
            return
        key = f"training.precision.finish_{self.unit}"
        if self.unit == "epochs" and steps > 0:
            raise ForgefieldError(
                f"{key} counts from the last epoch, but the training is limited by trainer.max_steps={steps}; use "
                "finish_steps instead."
            )
        if limit < 0:
            raise ForgefieldError(
                f"{key} counts from the end of the training; set trainer.max_epochs or trainer.max_steps."
            )
        if self.last >= limit and (self.unit == "epochs" or steps > 0):
            raise ForgefieldError(
                f"{key}={self.last}: {self.start} would never be used, because the training has only {limit} {self.unit}."
            )

    def describe(self) -> str:
        """One line for summaries."""
        if not self.last:
            return f"{self.start} ({_DESCRIPTIONS[self.start]}; geometry and energy sums float64)"
        unit = self.unit if self.last > 1 else self.unit[:-1]
        return f"{self.start}, the last {self.last} {unit} {self.finish} (geometry and energy sums float64)"


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    """Inside the block float32 matrix products of the process use tf32, or not.

    `set_float32_matmul_precision` is the setting that both of torch's interfaces, the older and the newer one, understand.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    if enabled == (before == "tf32"):
        yield
        return
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest" if enabled else "high")
        if torch.backends.cuda.matmul.fp32_precision != before:
            torch.backends.cuda.matmul.fp32_precision = before


def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"
