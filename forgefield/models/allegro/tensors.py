"""The tensor features of Allegro, carried by atoms instead of edges.

In each layer Allegro couples the tensor features of every edge with the environment of the edge's centre, by
Clebsch-Gordan coefficients and one weight per path and channel; of the result only the scalars are read. All of this
is linear in the features of the edge, and what multiplies them belongs to the centre. So the scalars of layer m are a
dot product of the first, two-body features V of the edge with a row of its centre,

    s_m[e, u] = sum_i q_m[a, i, u] V[e, i, u],     q_m = (scalar row of layer m) M_{m-1} ... M_0,

where M_n[a] is the coupling of layer n with the environment of atom a. Rows are carried through the layers from the last
to the first; no tensor product is computed on an edge. This is Allegro's function, in another order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from forgefield.kernels.convolution.dispatch import CouplingForm
from forgefield.kernels.edges.coupling_source import CoupledPath
from forgefield.ops.graph import cut, join
from forgefield.ops.harmonics import clebsch_gordan
from forgefield.ops.linear import unit_uniform


class Irrep(NamedTuple):
    """Degree and parity (+1 or -1)."""

    l: int
    p: int

    @property
    def dim(self) -> int:
        return 2 * self.l + 1


SCALAR = Irrep(0, 1)


def harmonic_irreps(l_max: int) -> tuple[Irrep, ...]:
    """0e, 1o, 2e, ...: what spherical harmonics transform as."""
    return tuple(Irrep(degree, (-1) ** degree) for degree in range(l_max + 1))


def couples(a: Irrep, b: Irrep, result: Irrep) -> bool:
    """Whether the product of two irreps contains a third."""
    return a.p * b.p == result.p and abs(a.l - b.l) <= result.l <= a.l + b.l


def layer_irreps(l_max: int, parity: bool, num_layers: int) -> list[tuple[Irrep, ...]]:
    """Irreps of the tensor features before the first layer and after each: reachable from the harmonics, and used."""
    harmonics = harmonic_irreps(l_max)
    allowed = tuple(Irrep(degree, p) for degree in range(l_max + 1) for p in (1, -1)) if parity else harmonics
    reached = [harmonics]
    for number in range(num_layers):
        needed = (SCALAR,) if number == num_layers - 1 else allowed
        reached.append(tuple(ir for ir in needed if any(couples(a, b, ir) for a in reached[-1] for b in harmonics)))
    useful = [reached[-1]]
    for before in reversed(reached[:-1]):
        after = useful[0]
        useful.insert(0, tuple(ir for ir in before if any(couples(ir, b, c) for b in harmonics for c in after)))
    return useful


class Path(NamedTuple):
    """Indices of the irreps it couples: of the features, of the environment, of the result."""

    feature: int
    environment: int
    result: int


DENSE_COMPONENTS = 9
"""Up to this number of components of the result, one matrix product computes all; above, one per irrep: fewer zeros."""


class EnvironmentCoupling(nn.Module):
    """Coupling of one layer; it maps rows over the layer's results to rows over its features.

    `weight`: (n_paths, channels), or (n_paths, 1) where channels share it; paths are ordered by result, feature, environment.
    """

    scalar_matrix: Tensor
    weight_of_row: Tensor
    feature_sum: Tensor
    scalar_factors: Tensor

    def __init__(
        self,
        features: Sequence[Irrep],
        environment: Sequence[Irrep],
        results: Sequence[Irrep],
        n_weights: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        """`n_weights`: of each path; channels, or 1."""
        super().__init__()
        self.paths = tuple(
            Path(i, j, k)
            for k, result in enumerate(results)
            for i, feature in enumerate(features)
            for j, other in enumerate(environment)
            if couples(feature, other, result)
        )
        self.weight = nn.Parameter(unit_uniform(len(self.paths), n_weights, generator=generator, dtype=dtype))
        self.groups = _group(results)
        self.group_sizes = [sum(results[k].dim for k in group) for group in self.groups]
        rows = [features[path.feature].dim for path in self.paths]
        starts = [sum(ir.dim for ir in features[: path.feature]) for path in self.paths]
        weight_of_row, feature_sum = torch.zeros(sum(rows), len(rows)), torch.zeros(_dim(features), sum(rows))
        for number, (count, start) in enumerate(zip(rows, starts)):
            first = sum(rows[:number])
            weight_of_row[first : first + count, number] = 1
            feature_sum[start : start + count, first : first + count] = torch.eye(count)
        constants = {"weight_of_row": weight_of_row, "feature_sum": feature_sum}
        constants["scalar_matrix"] = self._matrix((0,), features, environment, results)
        for number, group in enumerate(self.groups):
            constants[f"matrix_{number}"] = self._matrix(group, features, environment, results)
        factors = _diagonal(constants["scalar_matrix"], feature_sum)
        self.scalars_are_products = factors is not None
        if factors is not None:
            constants["scalar_factors"] = factors
        for name, value in constants.items():
            self.register_buffer(name, value.to(dtype), persistent=False)
        self.form = self._form(features, environment, results)

    def _form(self, features: Sequence[Irrep], environment: Sequence[Irrep], results: Sequence[Irrep]) -> CouplingForm:
        """The coupling for kernels: rows over features from environments and rows over results."""
        paths = [
            CoupledPath(a.l, _dim(features[:i]), b.l, _dim(environment[:j]), c.l, _dim(results[:k]))
            for (i, j, k) in self.paths
            for a, b, c in [(features[i], environment[j], results[k])]
        ]
        return CouplingForm(paths, (_dim(features), _dim(environment), _dim(results)))

    def _matrix(
        self, group: Sequence[int], features: Sequence[Irrep], environment: Sequence[Irrep], results: Sequence[Irrep]
    ) -> Tensor:
        """(rows of the paths into `group`, environment components x components of `group`) float64."""
        blocks = []
        for path in (path for path in self.paths if path.result in group):
            a, b, c = features[path.feature], environment[path.environment], results[path.result]
            j, k = _dim(environment[: path.environment]), sum(results[n].dim for n in group if n < path.result)
            block = torch.zeros(a.dim, _dim(environment), sum(results[n].dim for n in group), dtype=torch.float64)
            block[:, j : j + b.dim, k : k + c.dim] = clebsch_gordan(a.l, b.l, c.l) * c.dim**0.5
            blocks.append(block.flatten(1))
        return torch.cat(blocks)

    def scalar_row(self, environment: Tensor) -> Tensor:
        """Row of the scalar result: environment (n_environment, n_atoms, channels) -> (n_features, n_atoms, channels)."""
        if self.scalars_are_products:
            weights = self.weight_of_row[: environment.shape[0]] @ self.weight
            return environment * (weights * self.scalar_factors).unsqueeze(1)
        coupled = self.scalar_matrix @ environment.flatten(1)
        return self._sum_paths(coupled.unflatten(1, environment.shape[1:]), coupled.shape[0])

    def pull(self, environment: Tensor, row: Tensor) -> Tensor:
        """A row over the results (n_results, n_atoms, channels) as a row over the features."""
        if self.form.is_operator(environment):
            return self.form.couple(self.weight.expand(-1, environment.shape[2]), environment, row)
        parts = []
        for number, part in enumerate(cut(row, self.group_sizes, 0)):
            product = (environment.unsqueeze(1) * part.unsqueeze(0)).flatten(2).flatten(0, 1)
            parts.append(self.get_buffer(f"matrix_{number}") @ product)
        coupled = join(parts, 0).unflatten(1, environment.shape[1:])
        return self._sum_paths(coupled, self.weight_of_row.shape[0])

    def _sum_paths(self, coupled: Tensor, n_rows: int) -> Tensor:
        """Weighted rows of the first paths summed for each feature."""
        weights = (self.weight_of_row[:n_rows] @ self.weight).unsqueeze(1)
        summed = self.feature_sum[:, :n_rows] @ (coupled * weights).flatten(1)
        result: Tensor = summed.unflatten(1, coupled.shape[1:])
        return result


def _dim(irreps: Sequence[Irrep]) -> int:
    return sum(ir.dim for ir in irreps)


def _diagonal(matrix: Tensor, feature_sum: Tensor) -> Tensor | None:
    """(n, 1): the diagonal of a diagonal matrix whose rows are the features themselves; None for other matrices."""
    n_rows, n_columns = matrix.shape
    if not n_rows == n_columns == feature_sum.shape[0] or not torch.equal(feature_sum[:, :n_rows], torch.eye(n_rows)):
        return None
    diagonal = matrix.diagonal()
    return diagonal.unsqueeze(1) if (matrix - diagonal.diag()).abs().max() < 1e-12 else None


def _group(results: Sequence[Irrep]) -> list[tuple[int, ...]]:
    """Indices of the results that are coupled in one matrix product."""
    indices = tuple(range(len(results)))
    return [indices] if _dim(results) <= DENSE_COMPONENTS else [(index,) for index in indices]
