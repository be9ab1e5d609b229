"""Compiles the kernels of all layers in parallel, before the first of them is launched.

Triton compiles a kernel when it is first launched, one after the other. Those of the convolution take seconds each, and Triton
spends most of that time in code that does not hold Python's global lock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forgefield.kernels.convolution.form import Form
from forgefield.kernels.convolution.kind import Kind
from forgefield.kernels.convolution.passes import Convolution, Motion, Radial, in_manner, writes_much
from forgefield.kernels.core.availability import interpreted, storage_type, weight_cotangent_type
from forgefield.kernels.core.fields import Field
from forgefield.ops.graph import EdgeGraph

_done: set[Any] = set()
MOST_THREADS = 16


class Compiled(Convolution):
    """A convolution whose passes compile their kernels and compute nothing."""

    def launcher(self, kernel: Any) -> Any:
        return _Warmed(kernel)

    def _sum(self, rows: Any, to_x: Field | None, place: int, first: int = 0) -> None:
        pass

    def _forward(self, kind: Any, x: Field, out: Field, **tensors: Any) -> None:
        self._launch(kind, {"x": self._read(x), "out": out.flat, **tensors})

    def passes(self, x: Field, z: Field, to_x: Field, to_z: Field) -> None:
        """All four passes of a training."""
        weights = None if self.radial.in_table else self.radial.weights
        motion = Motion(self.harmonics, weights=weights, place=self.radial.place)
        columns = 4 if self.radial.in_table else self.form.n_harmonics
        parts = self.harmonics.new_empty((self.form.n_chunks, self.graph.n_edges, columns))
        self.back(x, to_z, to_x, motion, lambda rows: None)
        self.tangents(x, z, motion)
        self.forces(x, to_z, None if self.still else to_x, parts)
        self.values(x, z)


class _Warmed:
    """A Triton function that is compiled for the arguments of a launch instead of being launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.kernel.warmup(grid=grid, **arguments)


@dataclass(frozen=True)
class Planned:
    """A convolution that will be launched, with its fields. still: features have no tangents."""

    form: Form
    radial: Radial
    still: bool
    x: Field
    z: Field
    to_x: Field
    to_z: Field

    def key(self, graph: EdgeGraph, harmonics: Tensor) -> Any:
        """Everything that determines which kernels its passes launch."""
        kind = Kind(table=self.radial.in_table, packed=self.radial.packed, still=self.still)
        large = writes_much(self.form, graph.n_edges, harmonics.dtype)
        stored = (storage_type(harmonics.dtype), weight_cotangent_type(harmonics.dtype))
        types = (harmonics.dtype, *stored, self.radial.row.dtype, harmonics.device)
        return self.form, in_manner(kind, self.form, graph.n_atoms), large, types


def compile_together(layers: Sequence[Planned], graph: EdgeGraph, harmonics: Tensor) -> None:
    """Compile the kernels of those convolutions that this process has not compiled yet."""
    if not harmonics.is_cuda or interpreted():
        return
    new = {layer.key(graph, harmonics): layer for layer in layers}
    new = {key: layer for key, layer in new.items() if key not in _done}
    if not new:
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # not part of the public API; kernels are then compiled one after the other
        return
    with ThreadPoolExecutor(_threads()) as executor, AsyncCompileMode(executor, ignore_errors=True):
        for layer in new.values():
            passes = Compiled(layer.form, graph, harmonics, layer.radial, still=layer.still)
            passes.passes(layer.x, layer.z, layer.to_x, layer.to_z)
    _done.update(new)


def _threads() -> int:
    """At most the number of cores that this process may use: several processes share a machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(MOST_THREADS, cores)
