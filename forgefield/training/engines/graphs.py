"""The `graphs` engine: the step, and the evaluation of a batch, are captured once per batch size as CUDA graphs, and replayed.

A replay launches all kernels at once, so that small steps are not limited by launching kernels one by one. Contract: a batch is
padded with blank frames (`padding.py`) to a size of the plan and copied into tensors of fixed addresses (`StaticInputs`);
weights are changed only in place; gradients and sums are in tensors of fixed addresses, valid until the next step. All graphs
share one memory pool, because only one of them runs at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from forgefield.data.batch import Batch
from forgefield.data.padding import Size, SizePlan, blank_frames, sizes
from forgefield.errors import ForgefieldError
from forgefield.inference.capture import Replays, shared_pool
from forgefield.kernels.core.runtime import can_launch, joined
from forgefield.kernels.step.copies import Copies
from forgefield.training.engines.engine import Denominators, Engine, Step
from forgefield.training.engines.step import Differentiated, Measured

if TYPE_CHECKING:
    from torch.cuda.graphs import _POOL_HANDLE

    from forgefield.training.engines.frame_steps import FrameSteps

_IN_ROWS = "edge_index"
"""The tensor of shape (2, n_edges): each of its two rows is padded."""


class StaticInputs:
    """Inputs of a captured step in tensors of fixed addresses: `batch` and, with several ranks, `denominators`."""

    def __init__(self, blank: Batch, denominators: Tensor | None) -> None:
        """blank: a batch of blank frames only. denominators: with the shape and type of those of a step."""
        self.batch = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in blank.items()}
        self.denominators = None if denominators is None else denominators.clone(memory_format=torch.contiguous_format)
        self._blank = {key: tensor.contiguous() for key, tensor in blank.items()}
        self._converted: list[Tensor] = []
        first = next(iter(self.batch.values()))
        self._copies: Copies | None = None
        if can_launch(first):
            targets, padding = self._rows(self.batch), self._rows(self._blank)
            if self.denominators is not None:
                targets, padding = [*targets, self.denominators], [*padding, self.denominators]
            self._copies = Copies(targets, padding)

    @property
    def get_denominators(self) -> Denominators | None:
        """As an argument of steps."""
        values = self.denominators
        return None if values is None else lambda: values

    @staticmethod
    def _rows(batch: Batch) -> list[Tensor]:
        """The tensors of a batch, and each row of the edge index as a tensor."""
        return [rows for key, tensor in batch.items() for rows in (tensor.unbind() if key == _IN_ROWS else (tensor,))]

    def load(self, batch: Batch, denominators: Tensor | None) -> None:
        """Set the inputs of the next replay."""
        if self._copies is None:
            self._copy(batch)
            if self.denominators is not None and denominators is not None:
                self.denominators.copy_(denominators)
            return
        self._converted.clear()
        numbers: list[int] = []
        for key, like in self.batch.items():
            tensor = self._converted_to(like, batch[key])
            if key == _IN_ROWS:
                n = tensor.shape[1]
                numbers += (tensor.data_ptr(), n, tensor.data_ptr() + n * tensor.element_size(), n)
            elif tensor.shape[1:] != like.shape[1:]:
                raise ValueError(f"rows of {key} have the shape {(*tensor.shape[1:],)}, not {(*like.shape[1:],)}")
            else:
                numbers += (tensor.data_ptr(), tensor.numel())
        if self.denominators is not None:
            values = self.denominators
            if denominators is not None:
                values = self._converted_to(self.denominators, denominators)
            numbers += (values.data_ptr(), values.numel())
        self._copies.set_sources(numbers)

    def launch(self) -> None:
        """Launch the copies; part of the captured step."""
        if self._copies is not None:
            self._copies.launch()

    def _converted_to(self, like: Tensor, tensor: Tensor) -> Tensor:
        """The tensor, contiguous and with the type and device of `like`. A copy is referenced until the next batch."""
        if tensor.dtype is like.dtype and tensor.is_contiguous() and tensor.get_device() == like.get_device():
            return tensor
        self._converted.append(tensor.to(like.device, like.dtype).contiguous())
        return self._converted[-1]

    def _copy(self, batch: Batch) -> None:
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for key, tensor in self.batch.items():
            triples = [(tensor, batch[key], self._blank[key])]
            for static, real, blank in zip(*triples[0]) if key == _IN_ROWS else triples:
                targets, sources = copies.setdefault(tensor.dtype, ([], []))
                n = real.shape[0]
                targets += [static[:n], static[n:]]
                sources += [real, blank[n:]]
        for targets, sources in copies.values():
            not_empty = [target.numel() > 0 for target in targets]
            torch._foreach_copy_(list(compress(targets, not_empty)), list(compress(sources, not_empty)))


WARM_UPS = 2
"""Steps before a capture."""


R = TypeVar("R")


class _BatchReplays(Replays[R]):
    """Functions of a batch, one for each size, and the inputs of each."""

    def __init__(self, device: torch.device, pool: _POOL_HANDLE | None) -> None:
        super().__init__(device, warm_ups=WARM_UPS, pool=pool)
        self.inputs: dict[Size, StaticInputs] = {}

    def run_on(self, size: Size, batch: Batch, denominators: Tensor | None) -> R:
        self.inputs[size].load(batch, denominators)
        return self.run(size)

    def clear(self) -> None:
        super().clear()
        self.inputs.clear()


class GraphsEngine(Engine):
    """inner: the engine whose step and evaluation are captured, eager or compiled.

    plan: sizes to which batches of the training are padded. evaluation_plan: returns those of the validation; called for its
    first batch.
    """

    name = "graphs"

    def __init__(
        self,
        inner: Engine,
        *,
        plan: SizePlan,
        evaluation_plan: Callable[[], SizePlan] = lambda: SizePlan(()),
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(inner.function, world_size=inner.world_size)
        self.inner, self.plan, self.notify = inner, plan, notify
        self.evaluation_plan = functools.cache(evaluation_plan)
        self.cutoff = inner.function.potential.adaptive_cutoff or inner.function.potential.cutoff
        device = next(inner.function.potential.parameters()).device
        self.steps: FrameSteps | None = None
        """Whole steps, if they are captured as well."""
        self.pool = shared_pool(device)
        self._captured: _BatchReplays[Differentiated] = _BatchReplays(device, self.pool)
        self._evaluations: _BatchReplays[Measured] = _BatchReplays(device, self.pool)
        self._captures_evaluation = True
        self._announced: set[Size] = set()
        """Sizes whose capture was reported."""
        self._latest: Differentiated | None = None

    @property
    def captures(self) -> int:
        return len(self._captured)

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        return self._as_step(self.differentiate(batch, denominators))

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        """The result is overwritten by the next step."""
        values = None if denominators is None else denominators()
        size = self.plan.fit(*sizes(batch))
        if size not in self._captured:
            inputs = self.inputs_for_step(size, batch, values)
            self._capture(self._captured, size, inputs, self.differentiated)
        self._latest = self._captured.run_on(size, batch, values)
        return self._latest

    def assign_gradients(self) -> None:
        """Set `grad` of the weights to the gradients of the latest step, without copying them."""
        assert self._latest is not None
        for weight, gradient in zip(self.function.trained_weights(), self._latest.gradients):
            weight.grad = gradient

    def evaluate(self, batch: Batch) -> Measured:
        size = self.evaluation_plan().fit(*sizes(batch))
        if self._captures_evaluation and size not in self._evaluations:
            try:
                inputs = self._inputs_for(size, batch, None)
                self._capture(self._evaluations, size, inputs, lambda inputs: self.inner.evaluate(inputs.batch))
            except ForgefieldError as error:
                self._captures_evaluation = False
                self.notify(f"Validation is not captured, and slower for that: {error}")
        if not self._captures_evaluation:
            return self.inner.evaluate(batch)
        result = self._evaluations.run_on(size, batch, None)
        return Measured(*(tensor.clone() for tensor in result))

    def reset(self) -> None:
        self._captured.clear()
        self._evaluations.clear()
        self._announced.clear()
        if self.steps is not None:
            self.steps.reset()
        self.inner.reset()

    def differentiated(self, inputs: StaticInputs) -> Differentiated:
        """The gradients of a step on static inputs, not replayed."""
        return self._with_strides_of_weights(self.inner.differentiate(inputs.batch, inputs.get_denominators))

    def _with_strides_of_weights(self, result: Differentiated) -> Differentiated:
        """The result with gradients that have the memory layout of their weights, which fused optimisers require."""
        gradients = [
            gradient
            if gradient is None or gradient.stride() == weight.stride()
            else torch.empty_like(weight).copy_(gradient)
            for gradient, weight in zip(result.gradients, self.function.trained_weights())
        ]
        return result._replace(gradients=gradients)

    def _capture(
        self, replays: _BatchReplays[R], size: Size, inputs: StaticInputs, compute: Callable[[StaticInputs], R]
    ) -> None:
        """Capture `compute` for batches padded to `size`."""

        def load_and_compute() -> R:
            with joined():
                inputs.launch()
                return compute(inputs)

        replays.add(size, load_and_compute, warm_up=lambda: compute(inputs))
        replays.inputs[size] = inputs

    def inputs_for_step(self, size: Size, like: Batch, denominators: Tensor | None) -> StaticInputs:
        """Inputs of captured steps, with the batch `like` in place."""
        if size not in self._announced:
            self._announced.add(size)
            self.notify(f"Capturing the step for {size.frames} frames, {size.atoms} atoms, {size.edges} edges.")
        return self._inputs_for(size, like, denominators)

    def _inputs_for(self, size: Size, like: Batch, denominators: Tensor | None) -> StaticInputs:
        blank = blank_frames(
            like,
            frames=size.frames,
            atoms=size.atoms,
            edges=size.edges,
            cutoff=self.cutoff,
            shapes=self.function.shapes,
            targets=self.function.task.outputs,
        )
        inputs = StaticInputs(blank, denominators)
        inputs.load(like, denominators)
        inputs.launch()
        return inputs
