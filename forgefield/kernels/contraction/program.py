"""The symmetric contraction as programs without loops: values, cotangents of the features and weights, and their tangents.

A program is a list of statements, each a sum of products of earlier names. Two of them are written by hand, that of the values
and that of the cotangents. Tangents follow statement by statement from the product rule, and what no output depends on is
left out. The four passes of a training are

    values:    the results b of features a and weights w,
    forces:    cotangents of a, from cotangents g of b,
    tangents:  the derivative of the first along da,
    back:      the derivative of the second along da and dg. With cotangents g of tangents and dg of values, these are the
               cotangents of the features' values, and of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from forgefield.ops.symmetric_contraction import ContractionPlan, Output, Stage

PASSES = ("values", "forces", "tangents", "back")
_ZERO = 1e-12

Term = tuple[float, tuple[str, ...]]
"""A number times the product of the named values."""


class Statement(NamedTuple):
    """name = sum of the terms."""

    name: str
    terms: tuple[Term, ...]


@lru_cache(maxsize=64)
def program(plan: ContractionPlan, kind: str) -> tuple[Statement, ...]:
    """The statements of a pass.

    Names: components a{i} of features, weights w{k} and, numbered over all outputs, components b{m} of results, with cotangents
    ta{i}, tw{k} and g{m}; tangents have the prefix d.
    """
    features, weights = range(_n_features(plan)), range(plan.n_weights)
    results = range(sum(output.irrep.dim for output in plan.outputs))
    if kind == "values":
        return _needed(_values(plan), [f"b{m}" for m in results])
    if kind == "tangents":
        moved = _moved(_values(plan), [f"a{i}" for i in features])
        return _needed(moved, [f"db{m}" for m in results])
    back = _cotangents(plan)
    if kind == "forces":
        return _needed(back, [f"ta{i}" for i in features])
    moved = _moved(back, [*(f"a{i}" for i in features), *(f"g{m}" for m in results)])
    return _needed(moved, [*(f"dta{i}" for i in features), *(f"dtw{k}" for k in weights)])


def n_terms(plan: ContractionPlan) -> int:
    """Terms of the longest program."""
    return sum(len(statement.terms) for statement in program(plan, "back"))


def _n_features(plan: ContractionPlan) -> int:
    return sum(irrep.dim for irrep in plan.inputs)


class _Numbered(NamedTuple):
    """An output with the numbers of its first result and weight."""

    output: Output
    result: int
    weight: int


def _outputs(plan: ContractionPlan) -> list[_Numbered]:
    numbered, result, weight = [], 0, 0
    for output in plan.outputs:
        numbered.append(_Numbered(output, result, weight))
        result, weight = result + output.irrep.dim, weight + sum(output.counts)
    return numbered


def _products(plan: ContractionPlan) -> tuple[list[Statement], list[list[str]]]:
    """Statements of all products of features, and names of those of each degree."""
    statements: list[Statement] = []
    names = [[f"a{i}" for i in range(_n_features(plan))]]
    for degree, stage in enumerate(plan.stages, 2):
        left, factor = stage.left.tolist(), stage.factor.tolist()
        pairs = [f"q{degree}_{k}" for k in range(len(left))]
        for pair, i, j in zip(pairs, left, factor):
            statements.append(Statement(pair, ((1.0, (names[-1][i], names[0][j])),)))
        rows = [f"p{degree}_{r}" for r in range(stage.coupling.shape[0])]
        for row, entries in zip(rows, stage.coupling.tolist()):
            statements.append(Statement(row, tuple((c, (pair,)) for c, pair in zip(entries, pairs) if abs(c) > _ZERO)))
        names.append(rows)
    return statements, names


def _slopes(plan: ContractionPlan, every: Sequence[str]) -> list[Statement]:
    """G of all outputs: `s{m}_{i}`, the factor of feature i in result m, without terms of degree one."""
    statements = []
    for number, (output, result, weight) in enumerate(_outputs(plan)):
        rows, numbers = output.rows.tolist(), output.weights.tolist()
        for column, (row, k) in enumerate(zip(rows, numbers)):
            statements.append(Statement(f"v{number}_{column}", ((1.0, (f"w{weight + k}", every[row])),)))
        for (m, i), entries in _entries(plan, output):
            terms = tuple((c, (f"v{number}_{column}",)) for column, c in entries)
            statements.append(Statement(f"s{result + m}_{i}", terms))
    return statements


def _entries(plan: ContractionPlan, output: Output) -> list[tuple[tuple[int, int], list[tuple[int, float]]]]:
    """Nonzero couplings of an output, by its component and that of the last factor: columns and coefficients."""
    count = _n_features(plan)
    rows = [[(j, c) for j, c in enumerate(row) if abs(c) > _ZERO] for row in output.coupling.tolist()]
    return [(divmod(number, count), row) for number, row in enumerate(rows) if row]


def _values(plan: ContractionPlan) -> list[Statement]:
    products, names = _products(plan)
    statements = [*products, *_slopes(plan, list(chain(*names)))]
    for output, result, weight in _outputs(plan):
        last: dict[int, list[Term]] = {m: [] for m in range(output.irrep.dim)}
        for (m, i), _ in _entries(plan, output):
            last[m].append((1.0, (f"a{i}", f"s{result + m}_{i}")))
        for m, terms in last.items():
            if output.linear is not None:
                terms.append((1.0, (f"w{weight}", f"a{output.linear + m}")))
            statements.append(Statement(f"b{result + m}", tuple(terms)))
    return statements


def _cotangents(plan: ContractionPlan) -> list[Statement]:
    """Cotangents of features, ta, and weights, tw, from those of the results, g."""
    statements, names = _products(plan)
    every = list(chain(*names))
    statements += _slopes(plan, every)
    to: dict[str, list[Term]] = {name: [] for name in every}
    to_weights: list[list[Term]] = [[] for _ in range(plan.n_weights)]
    for number, (output, result, weight) in enumerate(_outputs(plan)):
        by_column: dict[int, list[Term]] = {}
        for (m, i), entries in _entries(plan, output):
            statements.append(Statement(f"k{result + m}_{i}", ((1.0, (f"g{result + m}", f"a{i}")),)))
            to[f"a{i}"].append((1.0, (f"g{result + m}", f"s{result + m}_{i}")))
            for column, c in entries:
                by_column.setdefault(column, []).append((c, (f"k{result + m}_{i}",)))
        rows, numbers = output.rows.tolist(), output.weights.tolist()
        for column, terms in sorted(by_column.items()):
            name, product, k = f"y{number}_{column}", every[rows[column]], weight + numbers[column]
            statements.append(Statement(name, tuple(terms)))
            to[product].append((1.0, (f"w{k}", name)))
            to_weights[k].append((1.0, (product, name)))
        if output.linear is not None:
            for m in range(output.irrep.dim):
                to[f"a{output.linear + m}"].append((1.0, (f"w{weight}", f"g{result + m}")))
                to_weights[weight].append((1.0, (f"a{output.linear + m}", f"g{result + m}")))
    for degree in range(len(names), 1, -1):
        statements += _back_through(plan.stages[degree - 2], degree, names, to)
    statements += [Statement(f"t{name}", tuple(to[name])) for name in names[0]]
    return [*statements, *(Statement(f"tw{k}", tuple(terms)) for k, terms in enumerate(to_weights))]


def _back_through(stage: Stage, degree: int, names: list[list[str]], to: dict[str, list[Term]]) -> list[Statement]:
    """Cotangents of the products of a degree, added to those of their factors."""
    statements = [Statement(f"t{name}", tuple(to[name])) for name in names[degree - 1]]
    columns = stage.coupling.t().tolist()
    for k, (i, j, column) in enumerate(zip(stage.left.tolist(), stage.factor.tolist(), columns)):
        terms = tuple((c, (f"t{row}",)) for c, row in zip(column, names[degree - 1]) if abs(c) > _ZERO)
        statements.append(Statement(f"tq{degree}_{k}", terms))
        left, factor = names[degree - 2][i], names[0][j]
        to[left].append((1.0, (f"tq{degree}_{k}", factor)))
        to[factor].append((1.0, (f"tq{degree}_{k}", left)))
    return statements


def _moved(statements: Iterable[Statement], moving: Iterable[str]) -> list[Statement]:
    """The statements, each followed by that of its tangent. moving: names from outside that have tangents."""
    defined, result = set(moving), []
    for statement in statements:
        result.append(statement)
        terms = [
            (c, (*names[:position], f"d{name}", *names[position + 1 :]))
            for c, names in statement.terms
            for position, name in enumerate(names)
            if name in defined
        ]
        if terms:
            defined.add(statement.name)
        result.append(Statement(f"d{statement.name}", tuple(terms)))
    return result


def _needed(statements: Sequence[Statement], outputs: Iterable[str]) -> tuple[Statement, ...]:
    """Those that the outputs depend on."""
    needed, result = set(outputs), []
    for statement in reversed(statements):
        if statement.name in needed:
            needed.update(name for _, names in statement.terms for name in names)
            result.append(statement)
    return tuple(reversed(result))
