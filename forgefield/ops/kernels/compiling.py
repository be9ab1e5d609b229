"""Compiles the kernels of all layers side by side, before the first of them is launched.

Triton compiles a kernel when it is first launched, one after the other. Those of the convolution take seconds each, and most of
that time Triton spends where other threads can go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forgefield.ops.kernels.convolution import Convolution, Motion
from forgefield.ops.kernels.fields import Field
from forgefield.ops.kernels.setting import interpreted

_done: set[Any] = set()
MOST_THREADS = 16


class Compiled(Convolution):
    """A convolution whose passes compile their kernels, and compute nothing."""

    def launcher(self, kernel: Any) -> Any:
        return _Warmed(kernel)

    def _sum(self, rows: Any, to_x: Field | None, place: int) -> None:
        pass

    def _forward(self, kind: Any, x: Field, out: Field, **tensors: Any) -> None:
        self._launch(kind, x=self._read(x), out=out.flat, **tensors)

    @property
    def key(self) -> Any:
        """What decides which kernels its passes launch."""
        return self.form, self._kind(still=self.still), self.harmonics.dtype, self.radial.row.dtype

    def passes(self, x: Field, z: Field, to_x: Field, to_z: Field) -> None:
        """All four of a training."""
        motion = Motion(self.harmonics, weights=self.radial.weights, place=self.radial.place)
        columns = 4 if self.radial.in_table else self.form.n_harmonics
        parts = self.harmonics.new_empty((self.form.n_chunks, self.graph.n_edges, columns))
        self.back(x, to_z, to_x, motion)
        self.tangents(x, z, motion)
        self.forces(x, to_z, None if self.still else to_x, parts)
        self.values(x, z)


class _Warmed:
    """A Triton function that is compiled for what it would be launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **options: self.kernel.warmup(*given, grid=grid, **options)


def compile_together(layers: Iterable[tuple[Compiled, tuple[Field, Field, Field, Field]]]) -> None:
    """Those of these convolutions whose kernels this process does not have yet, each with its fields x, z, to_x, to_z."""
    new = {one.key: (one, fields) for one, fields in layers if one.harmonics.is_cuda and one.key not in _done}
    if not new or interpreted():
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # not part of what Triton promises to have; kernels are then compiled one after the other
        return
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as executor, AsyncCompileMode(executor, ignore_errors=True):
        for one, fields in new.values():
            one.passes(*fields)
    _done.update(new)
