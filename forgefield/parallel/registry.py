"""Names of strategies: ours registered with Lightning, and those that cannot work here refused with the reason."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.parallel.environment import MPIEnvironment
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.parallel.xpu import SingleXPUStrategy, XPUAccelerator, XPUDDPStrategy

DEFAULT = "simple_ddp"
"""The strategy of a training in several processes when the config names none."""

ALONE = ("auto", "single_device", "single_xpu")
TOGETHER = (
    "simple_ddp",
    "ddp",
    "ddp_find_unused_parameters_false",
    "ddp_find_unused_parameters_true",
    "ddp_with_mpi",
    "ddp_with_ccl",
    "ddp_with_xpu",
)

_REASONS = {
    "fsdp": "it shards the parameters, and a model whose forces are derivatives taken inside the forward pass needs them whole "
    "during both backward passes",
    "deepspeed": "it brings its own optimiser step and its own checkpoints, which would break the exact resume",
    "ddp_spawn": "processes that torch forks or spawns cannot be resumed or watched",
    "ddp_fork": "processes that torch forks or spawns cannot be resumed or watched",
    "ddp_notebook": "processes that torch forks or spawns cannot be resumed or watched",
}


class MPIDDPStrategy(DDPStrategy):
    """Lightning's DDP in processes started by MPI.

    process_group_backend: default `mpi` where this torch is built with it, else what suits the device (nccl, gloo).
    """

    def __init__(self, process_group_backend: str | None = None, **options: Any) -> None:
        if process_group_backend == "mpi" and not dist.is_mpi_available():
            raise ForgefieldError(
                "process_group_backend=mpi: this torch is built without MPI; leave the backend out and the processes that "
                "mpirun starts talk through nccl (GPU) or gloo (CPU)."
            )
        if process_group_backend is None and dist.is_mpi_available() and not dist.is_initialized():
            process_group_backend = "mpi"
        if options.get("cluster_environment") is None and not dist.is_initialized():
            options["cluster_environment"] = MPIEnvironment()
        super().__init__(process_group_backend=process_group_backend, **options)


class CCLDDPStrategy(MPIDDPStrategy):
    """The same with Intel's oneCCL."""

    def __init__(self, **options: Any) -> None:
        if find_spec("oneccl_bindings_for_pytorch") is None:
            raise ForgefieldError(
                "ddp_with_ccl: the package oneccl_bindings_for_pytorch is not installed; without it use simple_ddp or ddp, "
                "which talk through gloo on CPU, or ddp_with_xpu on Intel GPUs."
            )
        import oneccl_bindings_for_pytorch  # type: ignore[import-not-found]  # noqa: F401  registers the backend

        super().__init__(process_group_backend="ccl", **options)


def register_strategies() -> None:
    """Make our names known to `lightning.Trainer(strategy=...)`. Calling it again changes nothing."""
    for name, strategy, description in (
        ("simple_ddp", SimpleDDPStrategy, "gradients averaged once, after the complete backward pass"),
        ("ddp_with_mpi", MPIDDPStrategy, "Lightning's DDP in processes started by MPI"),
        ("ddp_with_ccl", CCLDDPStrategy, "Lightning's DDP with Intel's oneCCL"),
        ("ddp_with_xpu", XPUDDPStrategy, "Lightning's DDP on Intel GPUs"),
        ("single_xpu", SingleXPUStrategy, "one Intel GPU"),
    ):
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=description)
    if "xpu" not in AcceleratorRegistry:
        AcceleratorRegistry.register("xpu", XPUAccelerator, description="Intel GPU")


def check_strategy(strategy: object, *, world_size: int) -> None:
    """Refuse what cannot be exact or cannot work here, before any work is done."""
    if strategy is None or not isinstance(strategy, str):
        return
    family = next((name for name in _REASONS if strategy.startswith(name)), None)
    if family is not None:
        raise ForgefieldError(
            f"trainer.strategy={strategy} cannot be used: {_REASONS[family]}. Use simple_ddp (the default) or ddp."
        )
    if strategy not in (*ALONE, *TOGETHER):
        names = (*ALONE, *TOGETHER)
        raise ForgefieldError(
            f"trainer.strategy={strategy} is not known.{did_you_mean(strategy, names)} Known: {', '.join(names)}; "
            "an own one is {name: import.path, argument: value}."
        )
    if world_size > 1 and strategy in ("single_device", "single_xpu"):
        raise ForgefieldError(f"trainer.strategy={strategy} is for one process, and {world_size} were started.")
