"""Cores and GPUs of this machine, and how `forgefield bench` distributes processes over them."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forgefield.config.schema import Config


def count_processes(n: int) -> str:
    return f"{n} process{'es' if n > 1 else ''}"


def n_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slots(config: Config) -> tuple[int, str]:
    """How many processes can run here without sharing a GPU or a core, and which of the two limits them."""
    import torch

    if (config.trainer.get("accelerator") or "auto") == "cpu" or not torch.accelerator.is_available():
        return n_cores(), "core"
    selected = gpu_indices(config)
    return (len(selected) if selected is not None else torch.accelerator.device_count()), "GPU"


def gpu_indices(config: Config) -> list[int] | None:
    """The GPUs that the config lists by index; None where it does not."""
    devices = config.trainer.get("devices")
    if isinstance(devices, str) and "," in devices:
        devices = [int(word) for word in devices.split(",") if word.strip().isdecimal()]
    return list(devices) if isinstance(devices, list) else None


def on_devices(config: Config, n: int, kind: str) -> Config:
    """The config for n processes on this machine, whatever its own number of devices and nodes."""
    changed, selected = copy.deepcopy(config), gpu_indices(config)
    changed.trainer.pop("num_nodes", None)
    changed.trainer["devices"] = selected[:n] if selected is not None and kind == "GPU" else n
    return changed


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`."""
    return [2**i for i in range(limit.bit_length())]


def warnings(n: int, n_slots: int, kind: str) -> list[str]:
    """A warning where n processes have to share GPUs or cores."""
    if n <= n_slots:
        return []
    if kind == "GPU":
        return [
            f"Warning: {count_processes(n)} were requested and there {'is 1 GPU' if n_slots == 1 else f'are {n_slots} GPUs'}. "
            "Processes that share a GPU communicate through gloo, which helps only where steps are too small to keep it busy."
        ]
    return [
        f"Warning: {count_processes(n)} were requested and there {'is 1 core' if n_slots == 1 else f'are {n_slots} cores'}. "
        "Processes that share a core take turns, so no speed-up can be expected from more of them."
    ]
