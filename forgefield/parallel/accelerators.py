"""Which accelerator a training runs on. Lightning chooses; here is what it does not know: that geometry and energy sums are
float64, which Apple's MPS does not have, and that there are Intel GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.parallel.xpu import SingleXPUStrategy, require_xpu

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "xpu")
_NO_FLOAT64 = (
    "geometry, radial functions and energy sums are float64 here, and Apple's MPS has no float64 at all; use "
    "trainer.accelerator=cpu"
)


def resolve_accelerator(options: dict[str, Any], *, world_size: int = 1) -> str | None:
    """Complete `accelerator` and, where it needs one of its own, `strategy` in the config's `trainer` section, in place.

    Returns a sentence where something was decided that a user may wonder about. Refuses what cannot work.
    """
    wanted = options.get("accelerator", "auto") or "auto"
    if not isinstance(wanted, str):
        return None
    if wanted == "mps":
        raise ForgefieldError(f"trainer.accelerator=mps: {_NO_FLOAT64}.")
    if wanted in ("tpu", "hpu") or wanted not in ACCELERATORS:
        raise ForgefieldError(
            f"trainer.accelerator={wanted}: there are {', '.join(ACCELERATORS)}.{did_you_mean(wanted, ACCELERATORS)}"
        )
    note = None
    if wanted in ("auto", "gpu") and not torch.cuda.is_available():
        if torch.xpu.is_available():
            wanted = options["accelerator"] = "xpu"
        elif wanted == "gpu" and _has_mps():
            raise ForgefieldError(f"trainer.accelerator=gpu would be mps here, but {_NO_FLOAT64}.")
        elif wanted == "gpu":
            raise ForgefieldError(
                "trainer.accelerator=gpu: torch finds no GPU on this machine; leave it out to run on the CPU."
            )
        elif _has_mps():
            options["accelerator"] = "cpu"
            note = f"The training runs on the CPU: {_NO_FLOAT64.partition(';')[0]}."
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ForgefieldError(
            "trainer.accelerator=cuda: torch finds no CUDA device on this machine (is this torch built for it, is a driver "
            "installed?); leave it out to run on the CPU."
        )
    if wanted == "xpu":
        _settle_xpu(options, world_size)
    return note


def device_count(accelerator: object) -> int:
    """How many devices of that kind this process sees; 0 where it is the CPU."""
    accelerator = accelerator or "auto"
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    if accelerator in ("auto", "gpu", "xpu") and torch.xpu.is_available():
        return torch.xpu.device_count()
    return 0


def evaluation_device(accelerator: object) -> str:
    """Where a model is evaluated outside of Lightning, in the words of torch."""
    if accelerator in (None, "auto", "gpu", "cuda") and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    if accelerator in (None, "auto", "gpu", "xpu") and torch.xpu.is_available():
        return f"xpu:{torch.xpu.current_device()}"
    return "cpu"


def accelerator_random_state() -> dict[str, Any]:
    """State of the random numbers of each kind of device that is there, beside the CPU."""
    return {name: module.get_rng_state() for name, module in _random_modules().items()}


def set_accelerator_random_state(state: dict[str, Any]) -> None:
    for name, module in _random_modules().items():
        if state.get(name) is not None:
            module.set_rng_state(state[name])


def _random_modules() -> dict[str, Any]:
    found: dict[str, Any] = {"cuda": torch.cuda} if torch.cuda.is_available() else {}
    if torch.xpu.is_available():
        found["xpu"] = torch.xpu
    return found


def _settle_xpu(options: dict[str, Any], world_size: int) -> None:
    require_xpu("trainer.accelerator=xpu")
    if world_size > 1 or options.get("strategy") not in (None, "auto", "single_device"):
        return
    devices = options.get("devices")
    chosen = devices[0] if isinstance(devices, (list, tuple)) and devices else 0
    options["strategy"] = SingleXPUStrategy(device=f"xpu:{chosen}")  # Lightning would take the CPU for one device
    options["devices"] = [chosen]


def _has_mps() -> bool:
    return torch.backends.mps.is_available()
