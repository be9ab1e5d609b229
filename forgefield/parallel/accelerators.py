"""The accelerator a training runs on, and Intel GPUs (`xpu`), for which Lightning has no accelerator.

Lightning selects the accelerator, but geometry and energy sums are float64, which Apple's MPS does not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError


def require_xpu(strategy: str) -> None:
    """Raise ForgefieldError if the hardware, its driver or the support of torch for it is missing."""
    if not torch.xpu._is_compiled():
        raise ForgefieldError(f"{strategy}: this torch ({torch.__version__}) is built without XPU support.")
    if not torch.xpu.is_available():
        raise ForgefieldError(f"{strategy}: torch finds no Intel GPU (or no driver for it) on this machine.")


class XPUAccelerator(Accelerator):
    """`accelerator: xpu`."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "xpu":
            raise ForgefieldError(f"The XPU accelerator does not support the device {device}.")
        torch.xpu.set_device(device)

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        return torch.xpu.memory_stats(device)

    def teardown(self) -> None:
        torch.xpu.empty_cache()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        if isinstance(devices, str):
            devices = [int(index) for index in devices.split(",") if index] if "," in devices else int(devices)
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
    """Lightning's DDP on Intel GPUs. Lightning creates the wrapper in a CUDA stream; this class uses an XPU stream."""

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


ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "xpu")
_NO_FLOAT64 = (
    "geometry, radial functions and energy sums are float64, which Apple's MPS does not support; use "
    "trainer.accelerator=cpu"
)


def resolve_accelerator(options: dict[str, Any], *, world_size: int = 1) -> str | None:
    """Set `accelerator` and, for Intel GPUs, `strategy` in the `trainer` section of the config, in place.

    Returns a note for the user where the choice is not obvious. Raises ForgefieldError for what is not supported.
    """
    accelerator = options.get("accelerator", "auto") or "auto"
    if not isinstance(accelerator, str):
        return None
    if accelerator == "mps":
        raise ForgefieldError(f"trainer.accelerator=mps: {_NO_FLOAT64}.")
    if accelerator not in ACCELERATORS:
        raise ForgefieldError(
            f"trainer.accelerator={accelerator} is not supported; choose one of {', '.join(ACCELERATORS)}."
            f"{did_you_mean(accelerator, ACCELERATORS)}"
        )
    note = None
    if accelerator in ("auto", "gpu") and not torch.cuda.is_available():
        if torch.xpu.is_available():
            accelerator = options["accelerator"] = "xpu"
        elif accelerator == "gpu" and _has_mps():
            raise ForgefieldError(f"trainer.accelerator=gpu would be mps on this machine, but {_NO_FLOAT64}.")
        elif accelerator == "gpu":
            raise ForgefieldError(
                "trainer.accelerator=gpu: torch finds no GPU on this machine; leave it out to run on the CPU."
            )
        elif _has_mps():
            options["accelerator"] = "cpu"
            note = f"The training runs on the CPU: {_NO_FLOAT64.partition(';')[0]}."
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ForgefieldError(
            "trainer.accelerator=cuda: torch finds no CUDA device on this machine (is this torch built for it, is a driver "
            "installed?); leave it out to run on the CPU."
        )
    if accelerator == "xpu":
        _resolve_xpu(options, world_size)
    return note


def device_count(accelerator: object) -> int:
    """Number of devices of that kind visible to this process; 0 for the CPU."""
    accelerator = accelerator or "auto"
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    if accelerator in ("auto", "gpu", "xpu") and torch.xpu.is_available():
        return torch.xpu.device_count()
    return 0


def evaluation_device(accelerator: object) -> str:
    """Device on which a model is evaluated outside of Lightning, as torch names it."""
    if accelerator in (None, "auto", "gpu", "cuda") and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    if accelerator in (None, "auto", "gpu", "xpu") and torch.xpu.is_available():
        return f"xpu:{torch.xpu.current_device()}"
    return "cpu"


def accelerator_random_state() -> dict[str, Tensor]:
    """State of the random number generators of the available devices except the CPU, by device type."""
    states = {}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.xpu.is_available():
        states["xpu"] = torch.xpu.get_rng_state()
    return states


def set_accelerator_random_state(states: Mapping[str, Tensor | None]) -> None:
    """Restore what `accelerator_random_state` returned, for the devices that are available."""
    if torch.cuda.is_available() and (cuda := states.get("cuda")) is not None:
        torch.cuda.set_rng_state(cuda)
    if torch.xpu.is_available() and (xpu := states.get("xpu")) is not None:
        torch.xpu.set_rng_state(xpu)


def _resolve_xpu(options: dict[str, Any], world_size: int) -> None:
    require_xpu("trainer.accelerator=xpu")
    if world_size > 1 or options.get("strategy") not in (None, "auto", "single_device"):
        return
    devices = options.get("devices")
    index = devices[0] if isinstance(devices, (list, tuple)) and devices else 0
    options["strategy"] = SingleXPUStrategy(device=f"xpu:{index}")  # for one device Lightning would use the CPU
    options["devices"] = [index]


def _has_mps() -> bool:
    return torch.backends.mps.is_available()
