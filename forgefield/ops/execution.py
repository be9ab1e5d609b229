"""The execution context: one object that holds every setting of how operations are computed.

    with execution(kernels=True, storage="bfloat16"):
        ...  # Forgefield's kernels are used where they can run, rows are stored in bfloat16

Settings come from `training.kernels` and `training.precision` of a config, and engines enter them here around a step. Where
nothing has been entered, the reference operations of PyTorch are used in full precision. PyTorch's own setting for tf32
(`torch.backends.cuda.matmul`) is not part of it.

`ExecutionContext` is shared by all threads of the process: PyTorch runs backward passes in threads of its own, which have to
compute as the forward pass did. `operators` alone belongs to the thread that entered it, since calculators may evaluate
models in several threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

KNOTS = 1024
"""Default number of intervals of radial tables: with it they are as precise as float32 weights."""
C_NONE, C_CONVOLUTIONS, C_SPLINES = range(3)
"""What is computed by compiled C code on a CPU; each level includes the lower ones. Runs store theirs, because each rounds
differently: nothing; convolutions; radial weights as splines as well."""
C_LATEST = C_SPLINES
STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Names of the types that rows of atoms and edges can be stored in; arithmetic is float32 with both."""
LOWERED_TYPES = (torch.bfloat16, torch.float16)
"""What the factors of products can be rounded to."""


@dataclass
class Lowering:
    """Rounding of the factors of `ops.products.product`.

    dtype: what factors are rounded to. count: number of products that have been rounded so far.
    """

    dtype: torch.dtype
    count: int = 0


@dataclass(frozen=True)
class ExecutionContext:
    """Settings that all threads share.

    kernels: use Forgefield's kernels where they can run.
    knots: intervals of the tables that radial weights are read from; 0: no tables, weights are computed for every pair.
    storage: type in which convolutions store what they read and write for edges, a name of `STORAGE`.
    lowering: rounding of the factors of products; None: factors are used as they are.
    c_code: what is computed by compiled C code on a CPU where a compiler is available, from `C_NONE` to `C_LATEST`.
    """

    kernels: bool = False
    knots: int = KNOTS
    storage: str = "float32"
    lowering: Lowering | None = None
    c_code: int = C_LATEST


class _Shared:
    context = ExecutionContext()


class _OfThread(threading.local):
    operators: bool | None = None


_shared = _Shared()
_of_thread = _OfThread()


def current() -> ExecutionContext:
    """The settings in force."""
    return _shared.context


def requested_operators() -> bool | None:
    """Whether this thread has requested operators (True), has excluded them (False), or has left the choice open (None)."""
    return _of_thread.operators


@contextmanager
def execution(
    *,
    kernels: bool | None = None,
    knots: int | None = None,
    storage: str | None = None,
    operators: bool | None = None,
    c_code: int | None = None,
) -> Iterator[ExecutionContext]:
    """Change settings inside a `with` block; those that are None stay as they are.

    kernels, knots, storage, c_code: see `ExecutionContext`.
    operators: of this thread. True: convolutions and sums over edges are custom operators of PyTorch, with kernels inside,
        where these can run; False: they never are, and C code is not used either.
    """
    changes: dict[str, object] = {"kernels": kernels, "knots": knots, "storage": storage, "c_code": c_code}
    before = _of_thread.operators
    _of_thread.operators = before if operators is None else operators
    try:
        with _changed({name: value for name, value in changes.items() if value is not None}) as context:
            yield context
    finally:
        _of_thread.operators = before


@contextmanager
def products_in(dtype: torch.dtype | None) -> Iterator[Lowering | None]:
    """Round the factors of `ops.products.product` to `dtype` inside a `with` block; None: do not round.

    Derivatives of products that were computed inside are rounded as well, wherever they are taken.
    """
    if dtype is not None and dtype not in LOWERED_TYPES:
        raise ValueError(f"products can be computed in bfloat16 or float16, not in {dtype}")
    with _changed({"lowering": None if dtype is None else Lowering(dtype)}) as context:
        yield context.lowering


@contextmanager
def _changed(settings: Mapping[str, object]) -> Iterator[ExecutionContext]:
    """Only these settings are changed and restored: another thread may change others meanwhile."""
    before = {name: getattr(_shared.context, name) for name in settings}
    if settings:
        _shared.context = replace(_shared.context, **settings)  # type: ignore[arg-type]
    try:
        yield _shared.context
    finally:
        if settings:
            _shared.context = replace(_shared.context, **before)
