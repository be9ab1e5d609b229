"""Lightning strategies for training in several processes, and their names.

`SimpleDDPStrategy` is Lightning's `DDPStrategy` without the wrapper around the model: gradients are averaged once, after the
complete backward pass. That is exact for models that differentiate inside their forward pass, adds no hooks that would break a
compiled or captured step, and needs only what the launcher provides, on CPU as well as on GPU.

`register_strategies` registers Forgefield's strategies with Lightning; `check_strategy` refuses those that cannot work, with
the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, nn

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.parallel.accelerators import SingleXPUStrategy, XPUAccelerator, XPUDDPStrategy
from forgefield.parallel.environment import MPIEnvironment
from forgefield.parallel.reductions import GradientBuckets

BUCKET_MB = 25.0


class SimpleDDPStrategy(DDPStrategy):
    """Takes the arguments of Lightning's `DDPStrategy`, except those of the wrapper.

    bucket_mb: approximate size of one message of gradients, MiB.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        bucket_mb: float = BUCKET_MB,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if not bucket_mb > 0:
            raise ForgefieldError(f"SimpleDDPStrategy: bucket_mb must be positive, not {bucket_mb}.")
        self.bucket_bytes = int(bucket_mb * 2**20)
        self.buckets: GradientBuckets | None = None
        self.mark: Callable[[str], None] = lambda event: None
        """Called with `reduction begins` and `reduction ends`, for time measurements."""
        self._is_accumulating = False

    def configure_ddp(self) -> None:
        """Give all ranks the same weights and create buckets for their gradients, instead of wrapping the model."""
        model = self.lightning_module
        assert model is not None
        broadcast_weights(model)
        self.buckets = GradientBuckets(list(model.parameters()), bucket_bytes=self.bucket_bytes)

    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if not self._is_accumulating:
            self.average_gradients()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def average_gradients(self) -> None:
        """Replace every gradient by its mean over ranks."""
        assert self.buckets is not None
        self.mark("reduction begins")
        self.buckets.average()
        self.mark("reduction ends")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside the block gradients are accumulated but not averaged: all steps of an accumulation except the last."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def teardown(self) -> None:
        self.buckets = None
        super().teardown()


@torch.no_grad()
def broadcast_weights(module: nn.Module) -> None:
    """Give all ranks the weights and buffers of rank 0, after checking that all have built the same model."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    outline = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    outlines = [(0, "")] * dist.get_world_size()
    dist.all_gather_object(outlines, (len(outline), hashlib.sha256("\n".join(outline).encode()).hexdigest()))
    differing = [rank for rank, other in enumerate(outlines) if other != outlines[0]]
    if differing:
        raise ForgefieldError(
            f"Rank {differing[0]} has built a different model from rank 0 ({outlines[differing[0]][0]} tensors instead of "
            f"{outlines[0][0]}, or other shapes): config, data and the version of Forgefield must be the same on all nodes."
        )
    for _, tensor in named:
        dist.broadcast(tensor.detach(), src=0)


@torch.no_grad()
def first_differing_rank(module: nn.Module) -> int | None:
    """The first rank whose weights and buffers differ from those of rank 0 in any bit; None if all agree."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    digest = hashlib.sha256()
    for tensor in (*module.parameters(), *module.buffers()):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return next((rank for rank, other in enumerate(digests) if other != digests[0]), None)


DEFAULT = "simple_ddp"
"""The strategy of a training in several processes if the config does not set one."""

SINGLE_PROCESS = ("auto", "single_device", "single_xpu")
SEVERAL_PROCESSES = (
    "simple_ddp",
    "ddp",
    "ddp_find_unused_parameters_false",
    "ddp_find_unused_parameters_true",
    "ddp_with_mpi",
    "ddp_with_ccl",
    "ddp_with_xpu",
)

_REASONS = {
    "fsdp": "it shards the parameters, and a model whose forces are derivatives inside the forward pass needs all of them "
    "during both backward passes",
    "deepspeed": "it has an optimiser step and checkpoints of its own, which do not support exact resume",
    "ddp_spawn": "processes that torch forks or spawns cannot be resumed or watched",
    "ddp_fork": "processes that torch forks or spawns cannot be resumed or watched",
    "ddp_notebook": "processes that torch forks or spawns cannot be resumed or watched",
}


class MPIDDPStrategy(DDPStrategy):
    """Lightning's DDP in processes started by MPI.

    process_group_backend: default `mpi` if this torch is built with it, else that of the device (nccl, gloo).
    """

    def __init__(self, process_group_backend: str | None = None, **options: Any) -> None:
        if process_group_backend == "mpi" and not dist.is_mpi_available():
            raise ForgefieldError(
                "process_group_backend=mpi: this torch is built without MPI; leave the backend out, and the processes that "
                "mpirun starts communicate through nccl (GPU) or gloo (CPU)."
            )
        if process_group_backend is None and dist.is_mpi_available() and not dist.is_initialized():
            process_group_backend = "mpi"
        if options.get("cluster_environment") is None and not dist.is_initialized():
            options["cluster_environment"] = MPIEnvironment()
        super().__init__(process_group_backend=process_group_backend, **options)


class CCLDDPStrategy(MPIDDPStrategy):
    """Lightning's DDP in processes started by MPI, with Intel's oneCCL."""

    def __init__(self, **options: Any) -> None:
        if find_spec("oneccl_bindings_for_pytorch") is None:
            raise ForgefieldError(
                "ddp_with_ccl: the package oneccl_bindings_for_pytorch is not installed; without it use simple_ddp or ddp, "
                "which communicate through gloo on CPU, or ddp_with_xpu on Intel GPUs."
            )
        import_module("oneccl_bindings_for_pytorch")  # registers the backend
        super().__init__(process_group_backend="ccl", **options)


def register_strategies() -> None:
    """Register Forgefield's strategies with Lightning, for `lightning.Trainer(strategy=...)`. May be called repeatedly."""
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
    """Refuse strategies that are not exact or not supported, before any work is done."""
    if strategy is None or not isinstance(strategy, str):
        return
    family = next((name for name in _REASONS if strategy.startswith(name)), None)
    if family is not None:
        raise ForgefieldError(
            f"trainer.strategy={strategy} cannot be used: {_REASONS[family]}. Use simple_ddp (the default) or ddp."
        )
    names = (*SINGLE_PROCESS, *SEVERAL_PROCESSES)
    if strategy not in names:
        raise ForgefieldError(
            f"trainer.strategy={strategy} does not exist.{did_you_mean(strategy, names)} Strategies: {', '.join(names)}; "
            "a user-defined one is {name: import.path, argument: value}."
        )
    if world_size > 1 and strategy in ("single_device", "single_xpu"):
        raise ForgefieldError(f"trainer.strategy={strategy} is for one process, but {world_size} were started.")
