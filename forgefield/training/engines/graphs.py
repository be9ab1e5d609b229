"""The `graphs` engine: the step captured once per size of a batch as a CUDA graph, and replayed.

A replay launches everything at once, so that a small step takes what its kernels take and not what launching them one by one
takes. Contract: a batch is filled up with blank frames (`padding.py`) to a size of the plan and copied into tensors of fixed
addresses (`Loader`); weights are read where they lie and changed only in place; gradients and sums appear in tensors of
fixed addresses, valid until the next step. All graphs share one pool of memory, since only one of them runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from forgefield.data.batch import Batch
from forgefield.kernels.core.runtime import can_launch, joined
from forgefield.kernels.step.copies import Copies
from forgefield.training.engines.capture import capture
from forgefield.training.engines.engine import Denominators, Engine, Step
from forgefield.training.engines.padding import Size, SizePlan, blank_frames, sizes
from forgefield.training.engines.step import Differentiated, Measured

_IN_ROWS = "edge_index"
"""The one tensor whose rows, and not the whole, begin with those of a batch: (2, edges)."""


class Loader:
    """batch, denominators: what the step reads; denominators where there are several ranks."""

    def __init__(self, blank: Batch, denominators: Tensor | None) -> None:
        """blank: nothing but blank frames. denominators: any like those of a step."""
        self.batch = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in blank.items()}
        self.denominators = None if denominators is None else denominators.clone(memory_format=torch.contiguous_format)
        self._blank = {key: tensor.contiguous() for key, tensor in blank.items()}
        self._converted: list[Tensor] = []
        first = next(iter(self.batch.values()))
        self._copies: Copies | None = None
        if can_launch(first):
            to, rest = self._parts(self.batch), self._parts(self._blank)
            if self.denominators is not None:
                to, rest = [*to, self.denominators], [*rest, self.denominators]
            self._copies = Copies(to, rest)

    @staticmethod
    def _parts(batch: Batch) -> list[Tensor]:
        return [part for key, tensor in batch.items() for part in (tensor.unbind() if key == _IN_ROWS else (tensor,))]

    def load(self, batch: Batch, denominators: Tensor | None) -> None:
        """To be called before a replay."""
        if self._copies is None:
            self._copy(batch)
            if self.denominators is not None and denominators is not None:
                self.denominators.copy_(denominators)
            return
        self._converted.clear()
        numbers: list[int] = []
        for key, like in self.batch.items():
            tensor = self._as_in(batch[key], like)
            if key == _IN_ROWS:
                n = tensor.shape[1]
                numbers += (tensor.data_ptr(), n, tensor.data_ptr() + n * tensor.element_size(), n)
            elif tensor.shape[1:] != like.shape[1:]:
                raise ValueError(f"rows of {key} have the shape {(*tensor.shape[1:],)}, not {(*like.shape[1:],)}")
            else:
                numbers += (tensor.data_ptr(), tensor.numel())
        if self.denominators is not None:
            known = self.denominators if denominators is None else self._as_in(denominators, self.denominators)
            numbers += (known.data_ptr(), known.numel())
        self._copies.aim(numbers)

    def launch(self) -> None:
        """The captured part."""
        if self._copies is not None:
            self._copies.launch()

    def _as_in(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Of the same type, in one piece and on the same device; kept until the next batch where it had to be made."""
        if tensor.dtype is like.dtype and tensor.is_contiguous() and tensor.get_device() == like.get_device():
            return tensor
        self._converted.append(tensor.to(like.device, like.dtype).contiguous())
        return self._converted[-1]

    def _copy(self, batch: Batch) -> None:
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for key, tensor in self.batch.items():
            parts = [(tensor, batch[key], self._blank[key])]
            for whole, real, rest in zip(*parts[0]) if key == _IN_ROWS else parts:
                to, of = copies.setdefault(tensor.dtype, ([], []))
                n = real.shape[0]
                to += [whole[:n], whole[n:]]
                of += [real, rest[n:]]
        for to, of in copies.values():
            filled = [part.numel() > 0 for part in to]
            torch._foreach_copy_(list(compress(to, filled)), list(compress(of, filled)))


WARM_UPS = 2
"""Steps before a capture."""


@dataclass
class _CapturedStep:
    """loader: holds the inputs of the graph. result: its outputs, overwritten by every replay."""

    graph: torch.cuda.CUDAGraph
    loader: Loader
    result: Differentiated


class GraphsEngine(Engine):
    """inner: the engine whose step is captured, eager or compiled. Evaluation is left to it."""

    name = "graphs"

    def __init__(self, inner: Engine, *, plan: SizePlan, notify: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(inner.function, world_size=inner.world_size)
        self.inner, self.plan, self.notify = inner, plan, notify
        self.reach = inner.function.potential.adaptive_cutoff or inner.function.potential.cutoff
        self._captured: dict[Size, _CapturedStep] = {}
        self._latest: Differentiated | None = None
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def captures(self) -> int:
        return len(self._captured)

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        return self._given(self.differentiate(batch, denominators))

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        """The result is overwritten by the next step."""
        known = None if denominators is None else denominators()
        size = self.plan.fit(*sizes(batch))
        if size not in self._captured:
            self._captured[size] = self._capture(size, batch, known)
        captured = self._captured[size]
        captured.loader.load(batch, known)
        captured.graph.replay()
        self._latest = captured.result
        return captured.result

    def bring_gradients(self) -> None:
        """Let the weights' `grad` be the gradients of the latest step, where they lie."""
        assert self._latest is not None
        for weight, gradient in zip(self.function.trained_weights(), self._latest.gradients):
            weight.grad = gradient

    def evaluate(self, batch: Batch) -> Measured:
        return self.inner.evaluate(batch)

    def forget(self) -> None:
        self._captured.clear()
        self.inner.forget()

    def _with_strides_of_weights(self, result: Differentiated) -> Differentiated:
        """The result with gradients that have the memory layout of their weights, which fused optimisers require."""
        gradients = [
            gradient
            if gradient is None or gradient.stride() == weight.stride()
            else torch.empty_like(weight).copy_(gradient)
            for gradient, weight in zip(result.gradients, self.function.trained_weights())
        ]
        return result._replace(gradients=gradients)

    def _capture(self, size: Size, like: Batch, known: Tensor | None) -> _CapturedStep:
        self.notify(f"Capturing the step for {size.frames} frames, {size.atoms} atoms, {size.edges} edges.")
        blank = blank_frames(
            like,
            frames=size.frames,
            atoms=size.atoms,
            edges=size.edges,
            reach=self.reach,
            shapes=self.function.shapes,
            targets=self.function.task.outputs,
        )
        loader = Loader(blank, known)
        loader.load(like, known)
        loader.launch()
        denominators = loader.denominators
        get_denominators = None if denominators is None else lambda: denominators

        def differentiate() -> Differentiated:
            return self.inner.differentiate(loader.batch, get_denominators)

        def load_and_differentiate() -> Differentiated:
            with joined():
                loader.launch()
                return self._with_strides_of_weights(differentiate())

        graph, result = capture(load_and_differentiate, warm_up=differentiate, warm_ups=WARM_UPS, pool=self._pool)
        return _CapturedStep(graph, loader, result)
