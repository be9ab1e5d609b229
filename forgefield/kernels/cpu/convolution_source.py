"""C code of the equivariant convolution, generated from its plan.

For an edge, a path of a block with components x_i, weight w and couplings m_ik (harmonics times Clebsch-Gordan coefficients,
zeros left out) adds `w * sum_i m_ik x_i` to component k of its output. Channels are contiguous and form the inner loops, which
the compiler vectorises. Four passes:

    values:    out from x, m, w                                        over the edges that end at an atom
    tangents:  the derivative of `values` along (dx, dm, dw)           over the edges that end at an atom
    gradients: of sum(g * values) in x, w and the harmonics            over the edges that start at an atom
    second:    of sum(g * tangents) in x, w and the harmonics          over the edges that start at an atom

Every atom belongs to one thread, so that results do not depend on the number of threads. Gradients of weights are written for
every edge; `pair_sums` adds those of the two edges that share a row of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from forgefield.ops.convolution_plan import ConvolutionPlan

_ZERO = 1e-12
Terms = tuple[tuple[float, int], ...]
"""Coefficients and harmonics whose products add up to a coupling."""


@dataclass(frozen=True)
class Coupling:
    """index: of the coupling in a row of all couplings. terms: what it consists of."""

    index: int
    terms: Terms


@dataclass(frozen=True)
class CPath:
    """A path. weight, output: its first column in a row of weights and of outputs. couplings: by (i, k), without zeros."""

    weight: int
    output: int
    n_out: int
    couplings: dict[tuple[int, int], Coupling]

    def inputs(self, k: int) -> list[int]:
        """Components of the features that component `k` of the output depends on."""
        return sorted(i for i, other in self.couplings if other == k)

    def outputs(self, i: int) -> list[int]:
        """Components of the output that depend on component `i` of the features."""
        return sorted(k for other, k in self.couplings if other == i)


@dataclass(frozen=True)
class CBlock:
    """A block of features with its paths. start: its first column in a row of features."""

    start: int
    channels: int
    n_in: int
    paths: tuple[CPath, ...]

    @property
    def harmonics(self) -> list[int]:
        """Harmonics that its paths use, except the first, which is constant."""
        couplings = [coupling for path in self.paths for coupling in path.couplings.values()]
        return sorted({j for coupling in couplings for _, j in coupling.terms if j > 0})


def blocks_of(plan: ConvolutionPlan) -> list[CBlock]:
    """The plan as blocks, with the positions of all couplings in the rows of `plan.coupling_matrix()`."""
    features = _starts([block.dim for block in plan.in_blocks])
    weights = _starts([block.mul for block in plan.out_blocks])
    outputs = _starts([block.dim for block in plan.out_blocks])
    paths: dict[int, list[CPath]] = {}
    for group in plan.groups:
        members = [
            number for number, start in enumerate(features[:-1]) if group.features.start <= start < group.features.stop
        ]
        matrix = group.coupling.view(-1, group.n_out, group.n_in)
        row = 0
        for number, path in enumerate(plan.paths):
            if path.source not in members:
                continue
            n_in, n_out = 2 * plan.in_blocks[path.source].l + 1, 2 * path.l3 + 1
            column = sum(2 * plan.in_blocks[member].l + 1 for member in members if member < path.source)
            couplings = {}
            for i in range(n_in):
                for k in range(n_out):
                    values = matrix[:, row + k, column + i].tolist()
                    terms = tuple((value, j) for j, value in enumerate(values) if abs(value) > _ZERO)
                    if terms:
                        index = group.couplings.start + (row + k) * group.n_in + column + i
                        couplings[i, k] = Coupling(index, terms)
            paths.setdefault(path.source, []).append(CPath(weights[number], outputs[number], n_out, couplings))
            row += n_out
    return [
        CBlock(features[number], plan.in_blocks[number].mul, 2 * plan.in_blocks[number].l + 1, tuple(of_block))
        for number, of_block in sorted(paths.items())
    ]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes) + 1)]


def count_couplings(plan: ConvolutionPlan) -> int:
    """Number of couplings that are not zero: the size of the generated code."""
    return sum(len(path.couplings) for block in blocks_of(plan) for path in block.paths)


@lru_cache(maxsize=256)
def convolution_source(plan: ConvolutionPlan, real: str) -> str:
    """C code of all passes. real: `float` or `double`."""
    writer = _Writer(plan, real)
    for dual in (False, True):
        writer.write_forward(dual)
        for harmonics in (False, True):
            writer.write_backward(dual, harmonics)
    writer.write_pair_sums()
    return "\n".join(writer.lines) + "\n"


_LOOP = "#pragma omp parallel for num_threads(threads) schedule(dynamic, 16)"


class _Writer:
    """Collects lines of C. `dual`: a pass reads tangents (dx, dm, dw) as well."""

    def __init__(self, plan: ConvolutionPlan, real: str) -> None:
        self.plan, self.blocks = plan, blocks_of(plan)
        self.suffix = "f" if real == "float" else ""
        self.n_harmonics = (plan.l_max + 1) ** 2
        self.lines = ["#include <stdint.h>", "#include <string.h>", f"typedef {real} real;"]

    def __call__(self, *lines: str) -> None:
        self.lines += lines

    def write_forward(self, dual: bool) -> None:
        """`values`, or `tangents` if `dual`."""
        plan = self.plan
        self(
            f"void {'tangents' if dual else 'values'}({_inputs(dual)}, const int64_t *restrict source,"
            " const int64_t *restrict pointers, const int64_t *restrict rows, int64_t n_atoms, real *restrict out,"
            " int threads) {",
            _LOOP,
            "for (int64_t atom = 0; atom < n_atoms; atom++) {",
            f"real o[{plan.out_dim}];",
            "memset(o, 0, sizeof(o));",
            "for (int64_t edge = pointers[atom]; edge < pointers[atom + 1]; edge++) {",
            "const int64_t row = rows ? rows[edge] : edge;",
        )
        for prefix in _prefixes(dual):
            self(
                f"const real *restrict {prefix}x = all_{prefix}x + source[edge] * {plan.in_dim};",
                f"const real *restrict {prefix}m = all_{prefix}m + edge * {plan.n_couplings};",
                f"const real *restrict {prefix}w = all_{prefix}w + row * {plan.n_weights};",
            )
        for block in self.blocks:
            self("#pragma omp simd", f"for (int c = 0; c < {block.channels}; c++) {{")
            self._load_features(block, dual)
            for path in block.paths:
                self("{")
                self._load_weight(path, dual)
                for k in range(path.n_out):
                    self._add_output(block, path, k, dual)
                self("}")
            self("}")
        self("}", f"memcpy(out + atom * {plan.out_dim}, o, sizeof(o));", "}", "}")

    def _add_output(self, block: CBlock, path: CPath, k: int, dual: bool) -> None:
        products = [(path.couplings[i, k].index, i) for i in path.inputs(k)]
        values = _sum(f"m[{index}] * x{i}" for index, i in products)
        line = f"o[{path.output + k * block.channels} + c] +="
        if dual:
            moved = _sum(f"m[{index}] * dx{i} + dm[{index}] * x{i}" for index, i in products)
            self(f"{line} weight * ({moved}) + dweight * ({values});")
        else:
            self(f"{line} weight * ({values});")

    def write_backward(self, dual: bool, harmonics: bool) -> None:
        """`gradients`, or `second` if `dual`; with `_harmonics` after the name, gradients of harmonics are computed, too."""
        plan = self.plan
        name = ("second" if dual else "gradients") + ("_harmonics" if harmonics else "")
        self(
            f"void {name}(const real *restrict all_g, {_inputs(dual)}, const int64_t *restrict destination,"
            " const int64_t *restrict order, const int64_t *restrict pointers, const int64_t *restrict rows, int64_t n_atoms,"
            " real *restrict to_x, real *restrict to_w, real *restrict to_y, int threads) {",
            _LOOP,
            "for (int64_t atom = 0; atom < n_atoms; atom++) {",
            f"real t[{plan.in_dim}];",
            "memset(t, 0, sizeof(t));",
        )
        for prefix in _prefixes(dual):
            self(f"const real *restrict {prefix}x = all_{prefix}x + atom * {plan.in_dim};")
        self(
            "for (int64_t n = pointers[atom]; n < pointers[atom + 1]; n++) {",
            "const int64_t edge = order ? order[n] : n;",
            "const int64_t row = rows ? rows[edge] : edge;",
            f"const real *restrict g = all_g + destination[edge] * {plan.out_dim};",
            f"real *restrict tw = to_w + edge * {plan.n_weights};",
        )
        for prefix in _prefixes(dual):
            self(
                f"const real *restrict {prefix}m = all_{prefix}m + edge * {plan.n_couplings};",
                f"const real *restrict {prefix}w = all_{prefix}w + row * {plan.n_weights};",
            )
        if harmonics:
            self(*(f"real y{j} = 0;" for j in range(1, self.n_harmonics)))
        for block in self.blocks:
            self._write_backward_block(block, dual, harmonics)
        if harmonics:
            self(f"real *restrict ty = to_y + edge * {self.n_harmonics};", "ty[0] = 0;")
            self(*(f"ty[{j}] = y{j};" for j in range(1, self.n_harmonics)))
        self("}", f"memcpy(to_x + atom * {plan.in_dim}, t, sizeof(t));", "}", "}")

    def _write_backward_block(self, block: CBlock, dual: bool, harmonics: bool) -> None:
        sums = ", ".join(f"y{j}" for j in block.harmonics) if harmonics else ""
        self("#pragma omp simd" + (f" reduction(+: {sums})" if sums else ""))
        self(f"for (int c = 0; c < {block.channels}; c++) {{")
        self._load_features(block, dual)
        self(*(f"real t{i} = t[{block.start + i * block.channels} + c];" for i in range(block.n_in)))
        for path in block.paths:
            self("{")
            self._load_weight(path, dual)
            self(*(f"const real g{k} = g[{path.output + k * block.channels} + c];" for k in range(path.n_out)))
            to_weight = []
            for i in range(block.n_in):
                products = [(path.couplings[i, k].index, k) for k in path.outputs(i)]
                if not products:
                    continue
                self(f"const real s{i} = {_sum(f'm[{index}] * g{k}' for index, k in products)};")
                if dual:
                    self(f"const real r{i} = {_sum(f'dm[{index}] * g{k}' for index, k in products)};")
                self(f"t{i} += {f'dweight * s{i} + weight * r{i}' if dual else f'weight * s{i}'};")
                to_weight.append(f"dx{i} * s{i} + x{i} * r{i}" if dual else f"x{i} * s{i}")
            self(f"tw[{path.weight} + c] = {_sum(to_weight)};")
            if harmonics:
                self._add_to_harmonics(path, dual)
            self("}")
        self(*(f"t[{block.start + i * block.channels} + c] = t{i};" for i in range(block.n_in)))
        self("}")

    def _add_to_harmonics(self, path: CPath, dual: bool) -> None:
        sums = list(_products_by_terms(path))
        if not sums:
            return
        for i in sorted({i for i, _ in path.couplings}):
            self(f"const real a{i} = {f'dweight * x{i} + weight * dx{i}' if dual else f'weight * x{i}'};")
        for number, (products, terms) in enumerate(sums):
            self(f"const real z{number} = {_sum(products)};")
            self(*(f"y{j} += {value!r}{self.suffix} * z{number};" for value, j in terms))

    def _load_features(self, block: CBlock, dual: bool) -> None:
        for prefix in _prefixes(dual):
            for i in range(block.n_in):
                self(f"const real {prefix}x{i} = {prefix}x[{block.start + i * block.channels} + c];")

    def _load_weight(self, path: CPath, dual: bool) -> None:
        self(*(f"const real {prefix}weight = {prefix}w[{path.weight} + c];" for prefix in _prefixes(dual)))

    def write_pair_sums(self) -> None:
        """`pair_sums`: rows of the two edges of each pair, added."""
        n = self.plan.n_weights
        self(
            "void pair_sums(const real *restrict of_edges, const int64_t *restrict pair_edge, const int64_t *restrict reverse,"
            " int64_t n_pairs, real *restrict out, int threads) {",
            "#pragma omp parallel for num_threads(threads) schedule(static)",
            "for (int64_t pair = 0; pair < n_pairs; pair++) {",
            f"const real *restrict a = of_edges + pair_edge[pair] * {n};",
            f"const real *restrict b = of_edges + reverse[pair_edge[pair]] * {n};",
            f"real *restrict o = out + pair * {n};",
            f"for (int c = 0; c < {n}; c++) o[c] = a[c] + b[c];",
            "}",
            "}",
        )


def _products_by_terms(path: CPath) -> Iterator[tuple[list[str], Terms]]:
    """Products a_i g_k whose sum is the gradient of a coupling, and the terms of that coupling without the constant harmonic.
    Couplings that are equal up to their sign share a sum."""
    sums: dict[Terms, tuple[list[str], Terms]] = {}
    for (i, k), coupling in path.couplings.items():
        terms = tuple((value, j) for value, j in coupling.terms if j > 0)
        if not terms:
            continue
        key = tuple((round(value, 9), j) for value, j in terms)
        opposite = tuple((-value, j) for value, j in key)
        if opposite in sums:
            sums[opposite][0].append(f"-a{i} * g{k}")
        else:
            sums.setdefault(key, ([], terms))[0].append(f"a{i} * g{k}")
    yield from sums.values()


def _prefixes(dual: bool) -> tuple[str, ...]:
    return ("", "d") if dual else ("",)


def _inputs(dual: bool) -> str:
    return ", ".join(f"const real *restrict all_{prefix}{name}" for name in "xmw" for prefix in _prefixes(dual))


def _sum(products: Sequence[str] | Iterator[str]) -> str:
    return " + ".join(products) or "0"
