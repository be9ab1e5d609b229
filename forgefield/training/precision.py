"""What `training.precision` means: the type of the weights, the arithmetic of each step, and when a schedule changes it.

Weights, gradients and optimiser state are float32 (float64 for float64); geometry, radial basis, harmonics and energy sums are
float64 always. Lower precisions touch products and sums of products alone: tf32 all float32 matrix products on the GPU, by
torch's setting for the process, and what generated kernels hold for the gradient of radial tables; bf16-mixed and fp16-mixed
products of features with weights (`forgefield.ops.products`). What is validated and deployed is computed in the precision of
the weights.
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
"""Largest relative difference between two ways to compute the same step, by precision. They are below what the rounding itself
changes: all engines and both derivative forms round the same factors, so that only the order of sums is left to differ by.
Kernels in tf32 round others, which 1e-2 has room for."""
STORAGE_TOLERANCES = {"float32": 0.0, "bfloat16": 3e-2}
"""The same for what kernels store rows in, compared with steps that store everything in float32: here rounding itself is seen,
which changes gradients of a small batch by up to 1e-2."""
KERNEL_TOLERANCES = {None: 0.0, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The same for kernels, by what factors of products are rounded to. They do not round all that plain operations do: the product
of embeddings in the first layer and, where weights are read from tables, those of radial networks are exact."""
_LOWERED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_IN_WORDS = {
    "float64": "float64 throughout",
    "float32": "float32 inside the network",
    "tf32": "float32 inside the network, matrix products in tf32",
    "bf16-mixed": "float32 inside the network, products with weights in bfloat16",
    "fp16-mixed": "float32 inside the network, products with weights in float16",
}


class Precision:
    """A setting such as `tf32` or `{start: tf32, finish: float32, finish_epochs: 10}`.

    start, finish: precisions by name; alike where there is no schedule. last: how many epochs or steps, as `unit` says, run in
    `finish`.
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
                    f"training.precision is one of {', '.join(PRECISIONS)}, not '{name}'.{did_you_mean(name, PRECISIONS)}"
                )
        self._effective: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The precisions that steps are made in, in the order of their use."""
        return tuple(dict.fromkeys((self.start, self.finish)))

    @property
    def weights(self) -> str:
        """Type of the weights, as `build_model` takes it; also the precision of validation."""
        return "float64" if self.start == "float64" else "float32"

    @property
    def tolerance(self) -> float:
        """For the comparison of engines, at the start or after a change."""
        return max(TOLERANCES[name] for name in self.names)

    def at(self, *, epoch: int, epochs: int | None, step: int, steps: int) -> str:
        """Precision of the step that follows so many epochs and steps. epochs, steps: of the whole training."""
        done, total = (epoch, epochs or -1) if self.unit == "epochs" else (step, steps)
        return self.finish if self.last and total > 0 and done >= total - self.last else self.start

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """Inside, steps are made in the named precision. Belongs around the forward and around the backward pass."""
        with _tf32(name == "tf32"), products_in(_LOWERED.get(name)) as lowering:
            try:
                yield
            finally:
                if lowering is not None and lowering.count:
                    self._effective.add(name)

    def require_effect(self, name: str) -> None:
        """After a first step: refuse a model in which the precision has changed nothing."""
        if name in _LOWERED and name not in self._effective:
            raise ForgefieldError(
                f"training.precision={name} changes nothing in this model: it makes no product by "
                "forgefield.ops.products.product. Use that function where features meet weight matrices, or "
                "torch.autocast inside the model with training.precision=float32."
            )

    def require_device(self, device: torch.device) -> None:
        """Refuse what the device does not have."""
        if "tf32" in self.names and (device.type != "cuda" or _generation(device) < 8):
            raise ForgefieldError(
                f"training.precision=tf32 is arithmetic of NVIDIA GPUs from Ampere on, and this run is on {_name(device)}; use "
                "float32."
            )
        if "bf16-mixed" in self.names and device.type == "cuda" and _generation(device) < 8:
            raise ForgefieldError(
                f"training.precision=bf16-mixed: {_name(device)} has no arithmetic in bfloat16; use fp16-mixed or float32."
            )

    def require_end(self, *, epochs: int | None, steps: int) -> None:
        """Refuse a schedule that counts from an end nobody knows, or that leaves nothing to its start.

        epochs, steps: limits of the training as Lightning holds them, None or -1 where there is none.
        """
        limit = steps if self.unit == "steps" and steps > 0 else (epochs or -1)
        if not self.last:
            return
        key = f"training.precision.finish_{self.unit}"
        if self.unit == "epochs" and steps > 0:
            raise ForgefieldError(
                f"{key} counts from the last epoch, but trainer.max_steps={steps} ends the training; give finish_steps instead."
            )
        if limit < 0:
            raise ForgefieldError(
                f"{key} counts from the end of the training; set trainer.max_epochs or trainer.max_steps."
            )
        if self.last >= limit and (self.unit == "epochs" or steps > 0):
            raise ForgefieldError(
                f"{key}={self.last} leaves nothing to {self.start}: the whole training has {limit} {self.unit}."
            )

    def describe(self) -> str:
        """For the start of a run, in one line."""
        if not self.last:
            return f"{self.start} ({_IN_WORDS[self.start]}; geometry and energy sums float64)"
        unit = self.unit if self.last > 1 else self.unit[:-1]
        return f"{self.start}, the last {self.last} {unit} {self.finish} (geometry and energy sums float64)"


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Float32 matrix products of the process in tf32, or not in tf32; afterwards as before.

    `set_float32_matmul_precision` is the one setting that torch's older and newer ways of asking both understand.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    if wanted == (before == "tf32"):
        yield
        return
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest" if wanted else "high")
        if torch.backends.cuda.matmul.fp32_precision != before:
            torch.backends.cuda.matmul.fp32_precision = before


def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"
