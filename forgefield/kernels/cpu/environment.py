"""Sums of weighted harmonics over the edges of atoms, and their adjoint, by compiled C code on a CPU: the passes that
`kernels/edges/environment.py` differentiates. Nothing of the size of edges times components times channels is ever stored.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import isqrt

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.cpu.compiler import load_c
from forgefield.kernels.cpu.convolution import REAL, call, can_use_c, runs_on_cpu
from forgefield.kernels.cpu.environment_source import INPUTS, OUTPUTS, Pass, environment_source
from forgefield.ops.execution import C_SPLINES, current
from forgefield.ops.graph import Segments


def use_environment_in_c(harmonics: Tensor) -> bool:
    """Whether sums over edges of weighted harmonics are computed by C code."""
    return current().c_code >= C_SPLINES and runs_on_cpu(harmonics) and forward_ad._current_level < 0 and can_use_c()


class CEnvironment:
    """The operators `environment` and `project` of `kernels/edges/environment.py`, and their derivatives."""

    def __init__(self, edges: Segments, shared: bool) -> None:
        self.edges, self.shared = edges, shared

    def __call__(self, name: str, *inputs: Tensor | bool) -> Tensor | tuple[Tensor, ...]:
        """name, inputs: of an operator. The last input of derivatives is whether cotangents of harmonics are computed; these
        have no rows where they are not."""
        projection, order = name.startswith("project"), name.count("_backward") + name.count("double")
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        of_harmonics = bool(order and inputs[-1])
        rows = ("q", "w", "y") if projection else ("w", "y")
        along = tuple(f"a{row}" for row in rows) if order == 2 else ()
        before = () if order == 0 else ("p",) if projection else ("q",)
        by_name = dict(zip((*along, *before, *rows), tensors, strict=True))
        w, y = by_name["w"], by_name["y"]
        n_atoms, n_harmonics = self.edges.count, y.shape[1]
        channels = w.shape[1] // (1 if self.shared else isqrt(n_harmonics))
        outputs: dict[str, Tensor] = {}
        if projection and order != 1:
            outputs["to_p"] = w.new_empty(w.shape[0], channels)
        if (order > 0) if projection else (order != 1):
            outputs["out"] = w.new_empty(n_harmonics, n_atoms, channels)
        if order:
            outputs["to_w"] = torch.empty_like(w, memory_format=torch.contiguous_format)
            outputs["to_y"] = w.new_empty(y.shape if of_harmonics else (0, n_harmonics))
        function = getattr(
            _library(isqrt(n_harmonics) - 1, self.shared, w.dtype), Pass(projection, order, of_harmonics).name
        )
        arguments = [*(by_name.get(key) for key in INPUTS), *(outputs.get(key) for key in OUTPUTS)]
        call(function, *arguments, self.edges.pointers, n_atoms, channels)
        n_edges = int(self.edges.pointers[-1])
        if n_edges < w.shape[0]:  # edges that belong to no atom
            for name in outputs.keys() - {"out"}:
                outputs[name][n_edges:] = 0
        return outputs["out" if "out" in outputs else "to_p"] if order == 0 else tuple(outputs.values())


@lru_cache(maxsize=64)
def _library(l_max: int, shared: bool, dtype: torch.dtype) -> ctypes.CDLL:
    return load_c(environment_source(l_max, shared, REAL[dtype]))
