"""Writes Triton code for couplings of two sets of components of every atom and channel to a third, with a weight for each path.

All are derivatives of one form, linear in each of its four factors,

    F = sum over paths n and components of  C[i, j, k] w[n, c] x[i, a, c] y[j, a, c] z[k, a, c]

with Clebsch-Gordan coefficients C as literals. A coupling is the derivative of F by one factor, and so are all its derivatives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.utils._python_dispatch import _disable_current_modes

from forgefield.kernels.core.generation import ArgumentTable
from forgefield.ops.harmonics import clebsch_gordan

WEIGHT, FACTORS = 0, ("w", "x", "y", "z")
"""Factors of the form: weights, and the three sets of components."""
ARGUMENTS = ArgumentTable(
    w="(paths, channels), weights",
    x="(components, n_atoms, channels)",
    y="(components, n_atoms, channels)",
    z="(components, n_atoms, channels)",
    out="the factor that is computed; for weights a partial sum of every program, (programs, paths, channels)",
    n_atoms="number of atoms",
)
"""Arguments of every kernel of this family; that of the computed factor is not read."""


@dataclass(frozen=True)
class CoupledPath:
    """Degrees of the coupled components, and the offsets of the components of each."""

    l1: int
    first_x: int
    l2: int
    first_y: int
    l3: int
    first_z: int

    def terms(self) -> list[tuple[int, int, int, float]]:
        """(i, j, k, value) of the form. Results have the norm that features of unit variance give them."""
        with _disable_current_modes():  # the first call may be during a trace
            values = (clebsch_gordan(self.l1, self.l2, self.l3) * (2 * self.l3 + 1) ** 0.5).tolist()
        return [
            (self.first_x + i, self.first_y + j, self.first_z + k, value)
            for i, plane in enumerate(values)
            for j, line in enumerate(plane)
            for k, value in enumerate(line)
            if abs(value) > 1e-12
        ]


@dataclass(frozen=True)
class Coupling:
    """sizes: numbers of components of the factors x, y and z."""

    paths: tuple[CoupledPath, ...]
    sizes: tuple[int, int, int]

    def size(self, factor: int) -> int:
        return len(self.paths) if factor == WEIGHT else self.sizes[factor - 1]


def key_of_coupling(paths: Sequence[CoupledPath], sizes: Sequence[int], code: str) -> str:
    """A line of JSON from which any process can rebuild the coupling. code: a hash of the code generator."""
    rows = [[p.l1, p.first_x, p.l2, p.first_y, p.l3, p.first_z] for p in paths]
    return json.dumps({"paths": rows, "sizes": list(sizes), "code": code}, separators=(",", ":"))


@lru_cache(maxsize=64)
def coupling_of_key(key: str) -> Coupling:
    content = json.loads(key)
    return Coupling(tuple(CoupledPath(*row) for row in content["paths"]), tuple(content["sizes"]))


def write_coupling(form: Coupling, factor: int, channels: int, block: int) -> str:
    """Source of a module with the kernel `couple(w, x, y, z, out, n_atoms)`, which computes the factor number `factor`.

    For weights it computes a partial sum of every program, (programs, paths, channels), with the grid (programs, chunks of
    channels). For other factors its grid is (n_atoms x channels / block,).
    """
    body = _of_weights(form, channels, block) if factor == WEIGHT else _of_components(form, factor, channels, block)
    lines = ["import triton", "import triton.language as tl", "", ""]
    lines += ["@triton.jit(do_not_specialize=['n_atoms'])", f"def couple({ARGUMENTS.signature}):"]
    return "\n".join([*lines, *_indented(body)]) + "\n"


def _of_components(form: Coupling, factor: int, channels: int, block: int) -> list[str]:
    lines = [
        f"plane = tl.cast(n_atoms, tl.int64) * {channels}",
        f"at = tl.program_id(0).to(tl.int64) * {block} + tl.arange(0, {block})",
        "inside = at < plane",
        f"c = at % {channels}",
    ]
    lines += [f"w{n} = tl.load(w + {n * channels} + c, mask=inside, other=0.0)" for n in range(len(form.paths))]
    lines += _loads(form, [other for other in (1, 2, 3) if other != factor], "at", "inside")
    result = FACTORS[factor]
    lines += [f"o{i} = tl.zeros([{block}], w.dtype.element_ty)" for i in range(form.size(factor))]
    for n, path in enumerate(form.paths):
        by_result: dict[int, list[str]] = {}
        for i, j, k, value in path.terms():
            factors = {"x": f"x{i}", "y": f"y{j}", "z": f"z{k}"}
            number = int(factors.pop(result)[1:])
            by_result.setdefault(number, []).append(f"{value!r} * " + " * ".join(factors.values()))
        lines += [f"o{number} += w{n} * ({_sum(terms)})" for number, terms in by_result.items()]
    return [*lines, *(f"tl.store(out + {i} * plane + at, o{i}, mask=inside)" for i in range(form.size(factor)))]


def _of_weights(form: Coupling, channels: int, block: int) -> list[str]:
    lines = [
        f"plane = tl.cast(n_atoms, tl.int64) * {channels}",
        f"c = tl.program_id(1) * {block} + tl.arange(0, {block})",
        f"inside = c < {channels}",
    ]
    lines += [f"o{n} = tl.zeros([{block}], x.dtype.element_ty)" for n in range(len(form.paths))]
    loop = [f"at = tl.cast(atom, tl.int64) * {channels} + c", *_loads(form, (1, 2, 3), "at", "inside")]
    for n, path in enumerate(form.paths):
        by_x: dict[int, list[str]] = {}
        for i, j, k, value in path.terms():
            by_x.setdefault(i, []).append(f"{value!r} * y{j} * z{k}")
        loop += [f"o{n} += x{i} * ({_sum(terms)})" for i, terms in by_x.items()]
    lines += ["for atom in range(tl.program_id(0), n_atoms, tl.num_programs(0)):", *_indented(loop)]
    row = f"out + tl.program_id(0) * {len(form.paths) * channels}"
    return [*lines, *(f"tl.store({row} + {n * channels} + c, o{n}, mask=inside)" for n in range(len(form.paths)))]


def _loads(form: Coupling, factors: Iterable[int], at: str, inside: str) -> list[str]:
    return [
        f"{FACTORS[factor]}{i} = tl.load({FACTORS[factor]} + {i} * plane + {at}, mask={inside}, other=0.0)"
        for factor in factors
        for i in range(form.size(factor))
    ]


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms).replace("+ -", "- ")


def _indented(lines: Iterable[str]) -> list[str]:
    return ["    " + line for line in lines]
