"""Lightning strategies for training in several processes.

`SimpleDDPStrategy` takes Lightning's `DDPStrategy` and leaves out the wrapper around the model: gradients are averaged once,
after the complete backward pass. That is exact for models that differentiate inside their forward pass, adds no hooks that a
compiled or captured step would trip over, and needs nothing but what the launcher provides, on CPU as well as on GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.parallel.buckets import GradientBuckets

BUCKET_MB = 25.0


class SimpleDDPStrategy(DDPStrategy):
    """Same arguments as Lightning's `DDPStrategy`, but for those of the wrapper that it does not use.

    bucket_mb: about how much gradient goes into one message.
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
            raise ForgefieldError(f"SimpleDDPStrategy: bucket_mb is positive, not {bucket_mb}.")
        self.bucket_bytes = int(bucket_mb * 2**20)
        self.buckets: GradientBuckets | None = None
        self.mark: Callable[[str], None] = lambda moment: None
        """Called with `reduction begins` and `reduction ends`, for whoever measures it."""
        self._held = False

    def configure_ddp(self) -> None:
        """Instead of a wrapper: the same weights everywhere, and buckets for their gradients."""
        model = self.lightning_module
        assert model is not None
        broadcast_weights(model)
        self.buckets = GradientBuckets(list(model.parameters()), bucket_bytes=self.bucket_bytes)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self.lightning_module
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if not self._held:
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
        """Inside, gradients only add up: the steps of an accumulation before the last."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def teardown(self) -> None:
        self.buckets = None
        super().teardown()


@torch.no_grad()
def broadcast_weights(module: nn.Module) -> None:
    """Give all ranks the weights and buffers of rank 0, after making sure that all have built the same model."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    outline = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    outlines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outlines, (len(outline), hashlib.sha256("\n".join(outline).encode()).hexdigest()))
    odd = [rank for rank, seen in enumerate(outlines) if seen != outlines[0]]
    if odd:
        raise ForgefieldError(
            f"Rank {odd[0]} has built another model than rank 0 ({outlines[odd[0]][0]} tensors against {outlines[0][0]}, or "
            "other shapes): is the config, the data and the version of the code the same on all nodes?"
        )
    for _, tensor in named:
        dist.broadcast(tensor.detach(), src=0)


@torch.no_grad()
def first_differing_rank(module: nn.Module) -> int | None:
    """The first rank whose weights and buffers are not, bit for bit, those of rank 0; None where all agree."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    digest = hashlib.sha256()
    for tensor in (*module.parameters(), *module.buffers()):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    outlines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outlines, digest.hexdigest())
    return next((rank for rank, seen in enumerate(outlines) if seen != outlines[0]), None)
