"""Where Forgefield's kernels can run, whether they are used there, and in which types they store numbers.

They run on GPUs where Triton is installed. Everywhere else the reference operations of PyTorch are used, with which kernels
are compared in tests. Whether kernels are used is set in the execution context (`forgefield.ops.execution`).
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ops.execution import STORAGE, current


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1), which is how they are tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_launch(x: Tensor) -> bool:
    """Whether kernels can run on the device of x."""
    return has_triton() and (x.is_cuda or interpreted())


def use_kernels(x: Tensor) -> bool:
    """Whether operations on x are to be computed by kernels."""
    return current().kernels and can_launch(x)


def use_tables(x: Tensor) -> bool:
    """Whether radial weights are to be read from tables. Not in float64, where a table would limit the precision."""
    return current().knots > 0 and x.dtype == torch.float32


def rounds_to_tf32() -> bool:
    """Whether PyTorch's setting allows products whose factors are rounded to the ten bits of tf32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def storage_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which rows of atoms and edges are stored that are computed in `dtype`."""
    storage = current().storage
    if STORAGE[storage] == torch.float32:
        return dtype
    if dtype != torch.float32:
        raise ForgefieldError(
            f"training.kernels.storage={storage} would round what a training in {str(dtype).removeprefix('torch.')} "
            "computes; leave it out, or use training.precision=float32."
        )
    return STORAGE[storage]


def weight_cotangent_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which cotangents of radial weights are stored until they are summed over the edges of an interval: 16 bits
    where products may be rounded to tf32."""
    if dtype == torch.float32 and rounds_to_tf32():
        return torch.bfloat16
    return storage_type(dtype)
