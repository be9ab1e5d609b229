"""This machine, as `forgefield bench` sees it: cores and GPUs, and how processes are put on them."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forgefield.config.schema import Config


def processes(n: int) -> str:
    return f"{n} process{'es' if n > 1 else ''}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def places(config: Config) -> tuple[int, str]:
    """How many processes can run beside each other here without sharing a GPU or a core, and which of the two it is."""
    import torch

    if (config.trainer.get("accelerator") or "auto") == "cpu" or not torch.accelerator.is_available():
        return cores(), "core"
    named = indices(config)
    return (len(named) if named is not None else torch.accelerator.device_count()), "GPU"


def indices(config: Config) -> list[int] | None:
    """The GPUs that the config names one by one; None where it does not."""

    devices = config.trainer.get("devices")
    if isinstance(devices, str) and "," in devices:
        devices = [int(word) for word in devices.split(",") if word.strip().isdecimal()]
    return list(devices) if isinstance(devices, list) else None


def on_devices(config: Config, n: int, kind: str) -> Config:
    """The config for n processes on this machine, whatever number of devices and nodes it was written for."""
    changed, named = copy.deepcopy(config), indices(config)
    changed.trainer.pop("num_nodes", None)
    changed.trainer["devices"] = named[:n] if named is not None and kind == "GPU" else n
    return changed


def doubling(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def warnings(n: int, places: int, kind: str) -> list[str]:
    if n <= places:
        return []
    if kind == "GPU":
        return [
            f"Warning: {processes(n)} are asked for and there {'is 1 GPU' if places == 1 else f'are {places} GPUs'}. "
            "Processes that share a GPU talk through gloo; it pays only where a step is too small to keep the GPU busy."
        ]
    return [
        f"Warning: {processes(n)} are asked for and there {'is 1 core' if places == 1 else f'are {places} cores'}. "
        "Processes that share a core take turns, so no speed-up can be expected from more of them."
    ]
