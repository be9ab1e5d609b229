"""Sums over nodes of products of three functions, in one pass through the cache: a loop in C, compiled when it is first used.

In PyTorch these sums take two thirds of the time of a bispectrum on a CPU, since every product is written to memory. Any C
compiler will do (`kernels/cpu/compiler.py`). Without a compiler PyTorch is used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.kernels.cpu.compiler import CompilerUnavailable, load_c

_LOG = logging.getLogger(__name__)
_TRIPLES_PER_LOOP = 10
"""Triples summed in one loop over the nodes, limited by the number of registers."""
_FUNCTION = """
#define BLOCK 128
void triple_sums(const REAL *even, const REAL *odd, long points, long nodes, REAL *sums, int threads)
{{
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (long point = 0; point < points; point++)
    for (long start = 0; start < nodes; start += BLOCK) {{
        const long count = nodes - start < BLOCK ? nodes - start : BLOCK;
        REAL *sum = sums + point * {triples};
        REAL f[{functions}][2 * BLOCK];
        for (long j = 0; j < {functions}; j++) {{
            const long here = (j * points + point) * nodes + start;
            for (long i = 0; i < count; i++) {{
                f[j][i] = even[here + i] + odd[here + i];
                f[j][i + count] = even[here + i] - odd[here + i];
            }}
        }}
{loops}
    }}
}}
"""
_LOOP = """        {{
            REAL {zeros};
            for (long i = 0; i < 2 * count; i++) {{
{products}
{additions}
            }}
            {results}
        }}"""


class TripleSums:
    """Adds, for triples (i, j, k) of functions, the sums over nodes of F_i F_j F_k."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._run = compiled.triple_sums

    def add(self, even: Tensor, odd: Tensor, sums: Tensor) -> None:
        """Arguments, all contiguous and on the CPU:
        even, odd: (n_functions, n_points, n_nodes): half the sum and half the difference of a function at a node and at its
            mirror image.
        sums: (n_points, n_triples), changed in place.
        """
        self._run(
            ctypes.c_void_p(even.data_ptr()),
            ctypes.c_void_p(odd.data_ptr()),
            ctypes.c_long(even.shape[1]),
            ctypes.c_long(even.shape[2]),
            ctypes.c_void_p(sums.data_ptr()),
            ctypes.c_int(torch.get_num_threads()),
        )


def triple_sums(triples: tuple[tuple[int, int, int], ...], dtype: torch.dtype, *, required: bool) -> TripleSums | None:
    """The compiled sums for `triples`; without a working C compiler an error if `required`, else None and a warning."""
    compiled = _compiled(triples, "double" if dtype == torch.float64 else "float")
    if isinstance(compiled, TripleSums):
        return compiled
    if required:
        raise ForgefieldError(
            f"kernel='compiled' needs a working C compiler: {compiled}; otherwise use PyTorch, kernel='torch'"
        )
    _warn_once(compiled)
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    _LOG.warning(
        "descriptors on the CPU are computed by PyTorch, at about a third of the speed, because there is no working C "
        "compiler: %s; install one, such as gcc (apt install gcc, conda install gcc), or name it in $CC",
        reason,
    )


@functools.lru_cache(maxsize=8)
def _compiled(triples: tuple[tuple[int, int, int], ...], real: str) -> TripleSums | str:
    """The sums, or the reason why there are none."""
    try:
        return TripleSums(load_c(_source(triples, real)))
    except CompilerUnavailable as error:
        return str(error)


def _source(triples: Sequence[tuple[int, int, int]], real: str) -> str:
    functions = 1 + max(row for triple in triples for row in triple)
    loops = "\n".join(_loop(triples, start) for start in range(0, len(triples), _TRIPLES_PER_LOOP))
    return f"#define REAL {real}\n" + _FUNCTION.format(triples=len(triples), functions=functions, loops=loops)


def _loop(triples: Sequence[tuple[int, int, int]], start: int) -> str:
    """C code that sums the triples from `start` on; products of two that several triples share are computed once."""
    selected = list(enumerate(triples))[start : start + _TRIPLES_PER_LOOP]
    pairs = sorted({(i, j) for _, (i, j, _) in selected})
    indent = " " * 16
    return _LOOP.format(
        zeros=", ".join(f"s{index} = 0" for index, _ in selected),
        products="\n".join(f"{indent}const REAL p{i}_{j} = f[{i}][i] * f[{j}][i];" for i, j in pairs),
        additions="\n".join(f"{indent}s{index} += p{i}_{j} * f[{k}][i];" for index, (i, j, k) in selected),
        results=" ".join(f"sum[{index}] += s{index};" for index, _ in selected),
    )
