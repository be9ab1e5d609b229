"""A batch put in front of blank frames, into tensors of fixed addresses that a captured step reads.

Where Triton is installed the captured step begins with a kernel that copies everything; before a replay the host says where the
batch lies. Elsewhere tensors are copied before the replay, those of one type by one launch.
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from forgefield.kernels.core.availability import can_launch
from forgefield.kernels.step.copies import Copies

Batch = dict[str, Tensor]
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
