"""Sums over nodes of products of three functions, in one pass through the cache: a loop in C, compiled when it is first used.

Written in torch the same costs two thirds of a bispectrum on a CPU, since every product travels through memory. It takes
any C compiler and about a second once per process; nothing is kept on disk. Where there is no compiler, torch does it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError

_LOG = logging.getLogger(__name__)
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-shared",
    "-fPIC",
)
"""Sums may be reordered. Not -ffast-math: a library linked with it makes the whole process round tiny numbers to zero."""
_PARALLEL = "-fopenmp"
"""Left out where the compiler has no OpenMP: the loop then runs on one thread."""
_PATIENCE = 120
"""Seconds that a compiler may take."""
_TOGETHER = 10
"""Triples summed in one loop over the nodes: as many as there are registers for."""
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
    """The compiled sums for `triples`; where there is no working C compiler an error if `required`, else None and a note."""
    made = _compiled(triples, "double" if dtype == torch.float64 else "float")
    if isinstance(made, TripleSums):
        return made
    if required:
        raise ForgefieldError(
            f"kernel='compiled' needs a working C compiler: {made}; or leave it to torch, kernel='torch'"
        )
    _warn_once(made)
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    _LOG.warning(
        "descriptors on the CPU are computed by torch alone, at about a third of the speed, since there is no working C "
        "compiler: %s; install one, such as gcc (apt install gcc, conda install gcc), or name it in $CC",
        reason,
    )


@functools.lru_cache(maxsize=8)
def _compiled(triples: tuple[tuple[int, int, int], ...], real: str) -> TripleSums | str:
    """The sums, or the reason why there are none."""
    named = (name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    compiler = next((found for found in map(shutil.which, named) if found), None)
    if compiler is None:
        return "there is none of the name $CC, cc, gcc or clang"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "triples.c", Path(folder) / "triples.so"
        source.write_text(_source(triples, real))
        reason = _make(compiler, source, binary, (*_FLAGS, _PARALLEL))
        if reason is not None:
            reason = _make(compiler, source, binary, _FLAGS)
        if reason is not None:
            return reason
        try:
            return TripleSums(ctypes.CDLL(str(binary)))
        except OSError as error:
            return f"what {compiler} made cannot be loaded: {error}"


def _make(compiler: str, source: Path, binary: Path, flags: Sequence[str]) -> str | None:
    """Compile `source`; the reason where that fails."""
    command = [compiler, *flags, str(source), "-o", str(binary)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"{compiler} was not done after {_PATIENCE} s"
    except OSError as error:
        return f"{compiler} cannot be started: {error}"
    return f"{compiler} says {made.stderr.strip()}" if made.returncode else None


def _source(triples: Sequence[tuple[int, int, int]], real: str) -> str:
    functions = 1 + max(row for triple in triples for row in triple)
    loops = "\n".join(_loop(triples, start) for start in range(0, len(triples), _TOGETHER))
    return f"#define REAL {real}\n" + _FUNCTION.format(triples=len(triples), functions=functions, loops=loops)


def _loop(triples: Sequence[tuple[int, int, int]], start: int) -> str:
    """C code that adds up the triples from `start` on: products of two are computed once and used for all that share them."""
    mine = list(enumerate(triples))[start : start + _TOGETHER]
    pairs = sorted({(i, j) for _, (i, j, _) in mine})
    indent = " " * 16
    return _LOOP.format(
        zeros=", ".join(f"s{place} = 0" for place, _ in mine),
        products="\n".join(f"{indent}const REAL p{i}_{j} = f[{i}][i] * f[{j}][i];" for i, j in pairs),
        additions="\n".join(f"{indent}s{place} += p{i}_{j} * f[{k}][i];" for place, (i, j, k) in mine),
        results=" ".join(f"sum[{place}] += s{place};" for place, _ in mine),
    )
