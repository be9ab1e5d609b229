"""Whether the generated kernels are used, of the whole process, as torch's own settings for arithmetic are.

They run on GPUs where Triton is installed. Without them everything is computed by plain operations of torch, which is what they
are compared with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError

STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Names of what rows of atoms and edges are stored in while a step is computed; arithmetic is float32 with both."""
KNOTS = 1024
"""Intervals of a table unless something else is asked for: as precise as float32 weights are."""


@dataclass(frozen=True)
class KernelSetting:
    """enabled: kernels are used where they can run. knots: intervals of the tables that radial weights are read from; zero: no
    tables, weights are computed for every pair of atoms. storage: what convolutions read for edges and write for them is stored
    in this type."""

    enabled: bool = False
    knots: int = KNOTS
    storage: str = "float32"

    def stored_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which numbers that are computed in `dtype` are stored."""
        if STORAGE[self.storage] == torch.float32:
            return dtype
        if dtype != torch.float32:
            raise ForgefieldError(
                f"training.kernels.storage={self.storage} would round what a training in {str(dtype).removeprefix('torch.')} "
                "computes; leave it out, or use training.precision=float32."
            )
        return STORAGE[self.storage]

    def held_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which cotangents of weights are held until they are summed over the edges of an interval: 16 bits where a
        training was told that factors may be rounded to tf32."""
        if dtype == torch.float32 and rounds_to_tf32():
            return torch.bfloat16
        return self.stored_as(dtype)


class _Current:
    setting = KernelSetting()


_current = _Current()


def setting() -> KernelSetting:
    """The setting in force."""
    return _current.setting


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def kernels(
    *, enabled: bool | None = None, knots: int | None = None, storage: str | None = None
) -> Iterator[KernelSetting]:
    """Inside, kernels are used or not; what is not given stays."""
    before = _current.setting
    changes = {"enabled": enabled, "knots": knots, "storage": storage}
    _current.setting = replace(before, **{key: value for key, value in changes.items() if value is not None})  # type: ignore[arg-type]
    try:
        yield _current.setting
    finally:
        _current.setting = before


def use_kernels(x: Tensor) -> bool:
    """Whether what is computed from x is to go through kernels."""
    return _current.setting.enabled and can_launch(x)


def can_launch(x: Tensor) -> bool:
    """Whether kernels can run where x lies."""
    return has_triton() and (x.is_cuda or interpreted())


def use_tables(x: Tensor) -> bool:
    """Whether radial weights are to be read from tables: in float64 a table would be what limits the precision."""
    return _current.setting.knots > 0 and x.dtype == torch.float32


def interpreted() -> bool:
    """Whether Triton is told to run kernels on the CPU, step by step, which is how they are tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def rounds_to_tf32() -> bool:
    """Whether a training was told that products may be rounded to the ten bits of tf32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
