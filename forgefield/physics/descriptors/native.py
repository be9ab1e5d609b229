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

_LOG = logging.getLogger(__name__)
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC")
_TOGETHER = 10
"""Triples summed in one loop over the nodes: as many as there are registers for."""
_FUNCTION = """
void triple_sums(const REAL *values, long points, long nodes, REAL *sums, int threads)
{{
    const long step = points * nodes;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (long point = 0; point < points; point++) {{
        REAL *sum = sums + point * {count};
        {functions}
{loops}
    }}
}}
"""
_LOOP = """        {{
            REAL {zeros};
            for (long i = 0; i < nodes; i++) {{
{products}
{additions}
            }}
            {results}
        }}"""


class TripleSums:
    """Adds, for triples (i, j, k) of functions, the sums over nodes of F_i F_j F_k."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._run = compiled.triple_sums

    def add(self, values: Tensor, sums: Tensor) -> None:
        """values: (n_functions, n_points, n_nodes); sums: (n_points, n_triples), changed in place; both contiguous, on the CPU."""
        self._run(
            ctypes.c_void_p(values.data_ptr()),
            ctypes.c_long(values.shape[1]),
            ctypes.c_long(values.shape[2]),
            ctypes.c_void_p(sums.data_ptr()),
            ctypes.c_int(torch.get_num_threads()),
        )


@functools.lru_cache(maxsize=8)
def triple_sums(triples: tuple[tuple[int, int, int], ...], dtype: torch.dtype) -> TripleSums | None:
    """The compiled sums for `triples`, or None where there is no working C compiler."""
    named = (name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    compiler = next((found for found in map(shutil.which, named) if found), None)
    if compiler is None:
        _LOG.info("no C compiler found: descriptors on the CPU are computed by torch alone, at about half the speed")
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "triples.c", Path(folder) / "triples.so"
        source.write_text(_source(triples, "double" if dtype == torch.float64 else "float"))
        made = subprocess.run([compiler, *_FLAGS, str(source), "-o", str(binary)], capture_output=True, text=True, check=False)
        try:
            if made.returncode == 0:
                return TripleSums(ctypes.CDLL(str(binary)))
            reason = made.stderr
        except OSError as error:
            reason = str(error)
    _LOG.info("%s could not compile the loops of descriptors, torch does them at about half the speed: %s", compiler, reason)
    return None


def _source(triples: Sequence[tuple[int, int, int]], real: str) -> str:
    rows = sorted({row for triple in triples for row in triple})
    loops = [_loop(triples, start) for start in range(0, len(triples), _TOGETHER)]
    functions = " ".join(f"const REAL *f{row} = values + {row} * step + point * nodes;" for row in rows)
    return f"#define REAL {real}\n" + _FUNCTION.format(count=len(triples), functions=functions, loops="\n".join(loops))


def _loop(triples: Sequence[tuple[int, int, int]], start: int) -> str:
    """C code that adds up the triples from `start` on: products of two are computed once and used for all that share them."""
    mine = list(enumerate(triples))[start : start + _TOGETHER]
    pairs = sorted({(i, j) for _, (i, j, _) in mine})
    indent = " " * 16
    return _LOOP.format(
        zeros=", ".join(f"s{place} = 0" for place, _ in mine),
        products="\n".join(f"{indent}const REAL p{i}_{j} = f{i}[i] * f{j}[i];" for i, j in pairs),
        additions="\n".join(f"{indent}s{place} += p{i}_{j} * f{k}[i];" for place, (i, j, k) in mine),
        results=" ".join(f"sum[{place}] += s{place};" for place, _ in mine),
    )
