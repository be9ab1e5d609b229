"""Intel GPUs through torch's own `xpu` device. Lightning has no accelerator for them, so here is one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from forgefield.errors import ForgefieldError


def require_xpu(strategy: str) -> None:
    """One sentence where the hardware, its driver or torch's support for it is missing."""
    if not torch.xpu._is_compiled():
        raise ForgefieldError(f"{strategy}: this torch ({torch.__version__}) is built without XPU support.")
    if not torch.xpu.is_available():
        raise ForgefieldError(f"{strategy}: torch finds no Intel GPU (or no driver for it) on this machine.")


class XPUAccelerator(Accelerator):
    """`accelerator: xpu`."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "xpu":
            raise ForgefieldError(f"the XPU accelerator was given the device {device}.")
        torch.xpu.set_device(device)

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        return torch.xpu.memory_stats(device)

    def teardown(self) -> None:
        torch.xpu.empty_cache()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        if isinstance(devices, int):
            return list(range(torch.xpu.device_count() if devices == -1 else devices))
        return [int(device) for device in devices]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("xpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.xpu.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.xpu.is_available()

    @staticmethod
    def name() -> str:
        return "xpu"


class SingleXPUStrategy(SingleDeviceStrategy):
    """One Intel GPU."""

    def __init__(self, device: str = "xpu:0", **options: Any) -> None:
        require_xpu("single_xpu")
        super().__init__(device=device, accelerator=XPUAccelerator(), **options)


class XPUDDPStrategy(DDPStrategy):
    """Lightning's DDP on Intel GPUs. Lightning opens a CUDA stream around the wrapper; here it is an XPU stream."""

    def __init__(self, process_group_backend: str | None = None, **options: Any) -> None:
        require_xpu("ddp_with_xpu")
        backend = process_group_backend or "xccl"
        if backend == "xccl" and not dist.is_xccl_available():
            raise ForgefieldError("ddp_with_xpu: this torch has no xccl, its collectives for Intel GPUs.")
        super().__init__(accelerator=XPUAccelerator(), process_group_backend=backend, **options)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.parallel.DistributedDataParallel:
        with torch.xpu.stream(torch.xpu.Stream()):
            return torch.nn.parallel.DistributedDataParallel(
                module=model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
            )
