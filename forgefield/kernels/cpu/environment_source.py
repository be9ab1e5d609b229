"""C code of sums of weighted harmonics over the edges of atoms, of their adjoint, and of the derivatives of both.

The formulas are those of `kernels/edges/environment_reference.py`. Edges are sorted by atom. Channels are contiguous and form
the inner loop. Every atom belongs to one thread, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

INPUTS = ("aq", "aw", "ay", "p", "q", "w", "y")
OUTPUTS = ("to_p", "out", "to_w", "to_y")


@dataclass(frozen=True)
class Pass:
    """projection: of rows of atoms onto edges, else sums over edges. order: 0 for values, 1 and 2 for derivatives.
    of_harmonics: whether cotangents of harmonics are computed."""

    projection: bool
    order: int
    of_harmonics: bool

    @property
    def name(self) -> str:
        return (
            f"{'project' if self.projection else 'environment'}_{self.order}{'_harmonics' if self.of_harmonics else ''}"
        )


PASSES = tuple(
    Pass(projection, order, of_harmonics)
    for projection in (False, True)
    for order in range(3)
    for of_harmonics in ((False, True) if order else (False,))
)


@lru_cache(maxsize=64)
def environment_source(l_max: int, shared: bool, real: str) -> str:
    """C code of all passes. shared: all degrees have one weight. real: `float` or `double`."""
    head = ["#include <stdint.h>", "#include <string.h>", f"typedef {real} real;"]
    return "\n".join([*head, *(line for of in PASSES for line in _Writer(of, l_max, shared).lines())]) + "\n"


class _Writer:
    def __init__(self, of: Pass, l_max: int, shared: bool) -> None:
        self.of, self.n = of, (l_max + 1) ** 2
        self.weight_of = [0 if shared else degree for degree in range(l_max + 1) for _ in range(2 * degree + 1)]
        self.n_weights = max(self.weight_of) + 1

    @property
    def has_rows(self) -> bool:
        return self.of.projection or self.of.order > 0

    @property
    def sums_over_edges(self) -> bool:
        return self.of.order > 0 if self.of.projection else self.of.order != 1

    def lines(self) -> list[str]:
        of, n = self.of, self.n
        arguments = [f"const real *restrict all_{name}" for name in INPUTS]
        arguments += [f"real *restrict {name}" for name in OUTPUTS]
        second = of.order == 2
        loads = {"w": self.n_weights, "aw": self.n_weights if second else 0}
        result = [
            f"void {of.name}({', '.join(arguments)}, const int64_t *restrict pointers, int64_t n_atoms, int64_t channels,"
            " int threads) {",
            "#pragma omp parallel for num_threads(threads) schedule(dynamic, 16)",
            "for (int64_t atom = 0; atom < n_atoms; atom++) {",
        ]
        if self.sums_over_edges:
            result += [f"real o[{n} * channels];", "memset(o, 0, sizeof(o));"]
        rows = [name for name, used in (("q", self.has_rows), ("aq", second and of.projection)) if used]
        result += [
            f"const real *restrict {row}{k} = all_{row} + ({k} * n_atoms + atom) * channels;"
            for row in rows
            for k in range(n)
        ]
        result += ["for (int64_t edge = pointers[atom]; edge < pointers[atom + 1]; edge++) {"]
        result += [f"const real y{k} = all_y[edge * {n} + {k}];" for k in range(1, n)]
        if second:
            result += [f"const real ay{k} = all_ay[edge * {n} + {k}];" for k in range(1, n)]
        for name, count in loads.items():
            result += [
                f"const real *restrict {name}_{j} = all_{name} + (edge * {self.n_weights} + {j}) * channels;"
                for j in range(count)
            ]
        if of.projection and of.order:
            result += ["const real *restrict p = all_p + edge * channels;"]
        if of.projection and of.order != 1:
            result += ["real *restrict tp = to_p + edge * channels;"]
        if of.order:
            result += [f"real *restrict tw = to_w + edge * {self.n_weights} * channels;"]
        sums = [f"z{k}" for k in range(1, n)] if of.of_harmonics else []
        result += [f"real {name} = 0;" for name in sums]
        result += ["#pragma omp simd" + (f" reduction(+: {', '.join(sums)})" if sums else "")]
        result += ["for (int64_t c = 0; c < channels; c++) {", *self._body(), "}"]
        if of.of_harmonics:
            result += [f"to_y[edge * {n}] = 0;", *(f"to_y[edge * {n} + {k}] = z{k};" for k in range(1, n))]
        result += ["}"]
        if self.sums_over_edges:
            result += [
                f"for (int k = 0; k < {n}; k++) memcpy(out + (k * n_atoms + atom) * channels, o + k * channels,"
                " channels * sizeof(real));"
            ]
        return [*result, "}", "}"]

    def _body(self) -> list[str]:
        """For one channel of an edge."""
        of, second, n = self.of, self.of.order == 2, self.n
        lines: list[str] = []
        to_p: list[str] = []
        to_w: list[list[str]] = [[] for _ in range(self.n_weights)]
        y = ["1", *(f"y{k}" for k in range(1, n))]
        factor = "p[c] * " if of.projection else ""
        for k, j in enumerate(self.weight_of):
            w, aw, q, aq = f"w_{j}[c]", f"aw_{j}[c]", f"q{k}[c]", f"aq{k}[c]"
            moved_w = f"{aw} * {y[k]}" + (f" + {w} * ay{k}" if k else "")
            if self.sums_over_edges:
                lines.append(f"o[{k} * channels + c] += {factor}({moved_w if second else f'{w} * {y[k]}'});")
            if of.projection:
                moved_q = f"({aq} * {y[k]}" + (f" + {q} * ay{k})" if k else ")")
                to_p.append(f"{moved_q} * {w} + {q} * {y[k]} * {aw}" if second else f"{q} * {y[k]} * {w}")
                to_w[j].append(moved_q if second else f"{q} * {y[k]}")
                cotangent = f"{aq} * {w} + {q} * {aw}" if second else f"{q} * {w}"
            else:
                if not second or k:
                    to_w[j].append(f"{q} * ay{k}" if second else f"{q} * {y[k]}")
                cotangent = f"{q} * {aw if second else w}"
            if of.of_harmonics and k:
                lines.append(f"z{k} += {factor}({cotangent});")
        if of.projection and of.order != 1:
            lines.append(f"tp[c] = {' + '.join(to_p)};")
        if of.order:
            lines += [f"tw[{j} * channels + c] = {factor}({' + '.join(terms) or '0'});" for j, terms in enumerate(to_w)]
        return lines
