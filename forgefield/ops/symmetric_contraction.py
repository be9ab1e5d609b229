"""The symmetric contraction of MACE: equivariant polynomials of an atom's own features, channel by channel, each with a weight.

Features of one channel are numbers A_i of several irreps. A polynomial of degree nu couples nu copies of A to one irrep, by a
sequence of Clebsch-Gordan products: ((A x A) x A) ... Many of the sequences give the same polynomial or sums of others; the
plan keeps a set that is linearly independent, so that each degree costs as many terms as it needs.

The sum of all polynomials with their weights is evaluated from the last factor on. With P the products of one degree less,

    out_m = sum_i A_i G_mi,    G_mi = sum_k w_k sum_q C_kmiq P_kq,

where G collects all degrees. Products are taken once for all outputs, couplings are matrices of constants, and a row is one
component of all atoms and channels: what is computed is a few matrix products and products of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forgefield.ops.graph import Segments, gather, join
from forgefield.ops.harmonics import clebsch_gordan

_TOLERANCE = 1e-8
"""Part of a polynomial, relative to its size, up to which it counts as a sum of others."""


class Irrep(NamedTuple):
    """Degree and parity (+1 or -1)."""

    l: int
    p: int

    @property
    def dim(self) -> int:
        return 2 * self.l + 1

    def times(self, other: Irrep) -> list[Irrep]:
        """The irreps of the product, by ascending degree."""
        return [Irrep(l, self.p * other.p) for l in range(abs(self.l - other.l), self.l + other.l + 1)]


class Term(NamedTuple):
    """The product of term number `left` of one degree less with the features of number `factor`, coupled to `irrep`."""

    irrep: Irrep
    left: int
    factor: int


@dataclass(frozen=True, eq=False)
class Stage:
    """How the terms of degree two and above that later degrees need are computed from those of one degree less: rows `left` of
    these times rows `factor` of the features, (n_products,) int64 both, then `coupling` (n_rows, n_products), float64."""

    left: Tensor
    factor: Tensor
    coupling: Tensor


@dataclass(frozen=True, eq=False)
class Output:
    """The polynomials of one output irrep.

    counts: number of polynomials of each degree, from one on. linear: where the features of this irrep begin; None where there
    are none. rows: (n_rows,) rows of all products, degree by degree. weights: (n_rows,) the weight of each. coupling:
    (dim * n_features, n_rows) float64.
    """

    irrep: Irrep
    counts: tuple[int, ...]
    linear: int | None
    rows: Tensor
    weights: Tensor
    coupling: Tensor


@dataclass(frozen=True, eq=False)
class ContractionPlan:
    """Everything that follows from irreps alone. inputs: irreps of the features, each once. stages: degrees two and above."""

    inputs: tuple[Irrep, ...]
    outputs: tuple[Output, ...]
    stages: tuple[Stage, ...]

    @property
    def n_weights(self) -> int:
        return sum(sum(output.counts) for output in self.outputs)


def symmetric_contraction(features: Tensor, weights: Tensor, plan: ContractionPlan) -> list[Tensor]:
    """For each output (dim, n, c). features: (n_components, n, c). weights: (plan.n_weights, n or 1, c), output by output and
    within one by degree. Differentiable any number of times."""
    products = [features]
    for stage in plan.stages:
        left, factor, coupling = _constants(stage, features)
        pairs = _rows(products[-1], left) * _rows(features, factor)
        products.append((coupling @ pairs.flatten(1)).unflatten(1, pairs.shape[1:]))
    every = join(products, 0)
    results, first = [], 0
    for output in plan.outputs:
        n, dim = sum(output.counts), output.irrep.dim
        own = weights[first : first + n]
        first += n
        result = None
        if output.rows.numel():
            rows, numbers, coupling = _constants(output, features)
            weighted = _rows(every, rows) * _rows(own, numbers)
            slopes = (coupling @ weighted.flatten(1)).unflatten(0, (dim, -1))
            result = (slopes.unflatten(2, features.shape[1:]) * features).sum(1)
        if output.linear is not None:
            linear = own[:1] * features[output.linear : output.linear + dim]
            result = linear if result is None else result + linear
        results.append(features.new_zeros(dim, *features.shape[1:]) if result is None else result)
    return results


def _rows(values: Tensor, index: Tensor) -> Tensor:
    return gather(values, Segments(index, values.shape[0]))


@lru_cache(maxsize=512)
def _moved(part: Stage | Output, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    with _disable_current_modes():  # they outlive the trace that may be the first to need them
        first, second = (part.left, part.factor) if isinstance(part, Stage) else (part.rows, part.weights)
        return first.to(device), second.to(device), part.coupling.to(device, dtype)


def _constants(part: Stage | Output, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _moved(part, like.device, like.dtype)


# ---- the plan


@lru_cache(maxsize=64)
def plan_contraction(inputs: tuple[Irrep, ...], outputs: tuple[Irrep, ...], correlation: int) -> ContractionPlan:
    """Plan for features of the irreps `inputs`, polynomials up to degree `correlation`, and results of the irreps `outputs`."""
    terms = _independent_terms(inputs, outputs, correlation)
    used = _used_terms(terms, outputs)
    places: list[dict[int, int]] = [_offsets([(i, irrep) for i, irrep in enumerate(inputs)])]
    stages = []
    for degree in range(2, correlation):
        chosen = [(number, terms[degree][number]) for number in used[degree]]
        stages.append(_stage(inputs, terms[degree - 1], places[-1], chosen, merge=degree == 2))
        places.append(_offsets([(number, term.irrep) for number, term in chosen]))
    return ContractionPlan(inputs, tuple(_output(irrep, inputs, terms, places) for irrep in outputs), tuple(stages))


def coupling(left: Irrep, factor: Irrep, result: Irrep) -> Tensor:
    """(dim of result, of left, of factor) float64, with unit variance of the result for unit variance of the factors."""
    return clebsch_gordan(result.l, left.l, factor.l) * result.dim**0.5


def _offsets(members: Iterable[tuple[int, Irrep]]) -> dict[int, int]:
    """Number of a term -> its first row, terms one after another."""
    result, row = {}, 0
    for number, irrep in members:
        result[number] = row
        row += irrep.dim
    return result


def _independent_terms(
    inputs: tuple[Irrep, ...], outputs: tuple[Irrep, ...], correlation: int
) -> dict[int, list[Term]]:
    """Independent polynomials of each degree, sorted by degree of the irrep."""
    samples = sample_features(inputs)
    terms = {1: [Term(irrep, 0, number) for number, irrep in enumerate(inputs)]}
    values = samples
    for degree in range(2, correlation + 1):
        reach = max(irrep.l for irrep in outputs) + (correlation - degree) * max(irrep.l for irrep in inputs)
        kept: list[tuple[Term, Tensor]] = []
        for irrep, group in _by_irrep(_candidates(terms[degree - 1], inputs)):
            is_output = irrep in outputs
            if irrep.l <= reach and (degree < correlation or is_output):
                found = [(term, evaluate(term, values, terms[degree - 1], samples, inputs)) for term in group]
                kept += [found[number] for number in independent([value for _, value in found])]
        terms[degree], values = [term for term, _ in kept], [value for _, value in kept]
    return terms


def _candidates(left: Sequence[Term], inputs: Sequence[Irrep]) -> Iterator[Term]:
    for number, term in enumerate(left):
        for factor, irrep in enumerate(inputs):
            for result in term.irrep.times(irrep):
                yield Term(result, number, factor)


def _by_irrep(terms: Iterable[Term]) -> list[tuple[Irrep, list[Term]]]:
    groups: dict[Irrep, list[Term]] = {}
    for term in terms:
        groups.setdefault(term.irrep, []).append(term)
    return sorted(groups.items())


def sample_features(inputs: Sequence[Irrep], n_samples: int = 400) -> list[Tensor]:
    """(n_samples, dim) random features of each irrep, float64, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n_samples, irrep.dim, generator=generator, dtype=torch.float64) for irrep in inputs]


def evaluate(
    term: Term, values: Sequence[Tensor], left: Sequence[Term], samples: Sequence[Tensor], inputs: Sequence[Irrep]
) -> Tensor:
    """(n_samples, dim) of a term. values: of the terms `left` of one degree less."""
    constants = coupling(left[term.left].irrep, inputs[term.factor], term.irrep)
    return torch.einsum("kij,si,sj->sk", constants, values[term.left], samples[term.factor])


def independent(values: Sequence[Tensor]) -> list[int]:
    """Numbers of those that are not sums of multiples of the ones before."""
    kept: list[int] = []
    basis: list[Tensor] = []
    for number, value in enumerate(values):
        rest = value.flatten()
        size = rest.norm()
        if size < _TOLERANCE * value.numel() ** 0.5:
            continue
        rest = rest / size
        for _ in range(2):  # the second pass removes what rounding left
            for vector in basis:
                rest = rest - (rest @ vector) * vector
        if rest.norm() > _TOLERANCE:
            basis.append(rest / rest.norm())
            kept.append(number)
    return kept


def _used_terms(terms: dict[int, list[Term]], outputs: tuple[Irrep, ...]) -> dict[int, list[int]]:
    """Numbers of the terms of each degree that terms of the next one are made of."""
    used: dict[int, list[int]] = {}
    wanted: set[int] = set()
    for degree in sorted(terms, reverse=True):
        used[degree] = sorted(wanted)
        needed = [term for n, term in enumerate(terms[degree]) if n in wanted or term.irrep in outputs]
        wanted = {term.left for term in needed}
    return used


def _stage(
    inputs: tuple[Irrep, ...],
    before: list[Term],
    places: dict[int, int],
    chosen: list[tuple[int, Term]],
    *,
    merge: bool,
) -> Stage:
    """merge: the rows of `before` are those of the features, so that a product does not depend on the order of its factors."""
    first_of = _offsets(list(enumerate(inputs)))
    columns: dict[tuple[int, int], int] = {}
    entries: list[tuple[int, int, float]] = []
    row = 0
    for _, term in chosen:
        constants = coupling(before[term.left].irrep, inputs[term.factor], term.irrep)
        for k, i, j in torch.nonzero(constants.abs() > 1e-12).tolist():
            pair = (places[term.left] + i, first_of[term.factor] + j)
            pair = (min(pair), max(pair)) if merge else pair
            entries.append((row + k, columns.setdefault(pair, len(columns)), float(constants[k, i, j])))
        row += term.irrep.dim
    matrix = torch.zeros(row, len(columns), dtype=torch.float64)
    for k, column, value in entries:
        matrix[k, column] += value
    pairs = torch.tensor(list(columns), dtype=torch.int64).reshape(-1, 2)
    return Stage(pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), matrix)


def _output(
    irrep: Irrep, inputs: tuple[Irrep, ...], terms: dict[int, list[Term]], places: list[dict[int, int]]
) -> Output:
    first_of = _offsets(list(enumerate(inputs)))
    n_features = sum(factor.dim for factor in inputs)
    linear = first_of[inputs.index(irrep)] if irrep in inputs else None
    counts, rows, weights, columns = [int(linear is not None)], [], [], []
    start = 0
    for degree in range(2, len(terms) + 1):
        own = [term for term in terms[degree] if term.irrep == irrep]
        for term in own:
            left = terms[degree - 1][term.left].irrep
            constants = coupling(left, inputs[term.factor], irrep)
            for q in range(left.dim):
                column = torch.zeros(irrep.dim, n_features, dtype=torch.float64)
                begin = first_of[term.factor]
                column[:, begin : begin + inputs[term.factor].dim] = constants[:, q]
                columns.append(column.flatten())
                rows.append(start + places[degree - 2][term.left] + q)
                weights.append(sum(counts) + own.index(term))
        counts.append(len(own))
        start += sum(terms[degree - 1][number].irrep.dim for number in places[degree - 2])
    matrix = torch.stack(columns, 1) if columns else torch.zeros(irrep.dim * n_features, 0, dtype=torch.float64)
    numbers = torch.tensor(rows, dtype=torch.int64), torch.tensor(weights, dtype=torch.int64)
    return Output(irrep, tuple(counts), linear, numbers[0], numbers[1], matrix)
