"""Real spherical harmonics of edge vectors in e3nn's convention, the Clebsch-Gordan coefficients that couple them, and sums
over edges of harmonics times weights.

Components of degree l are normalised to sum_m Y_lm^2 = 2l + 1 on the unit sphere ("component"); degree 1 is
sqrt(3) (x, y, z). Higher degrees come from the lower by one small matrix product each. Weighted sums and their adjoint are the
reference operations, differentiable any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from e3nn import o3
from torch import Tensor, nn

from forgefield.ops.graph import Segments, cut, gather, join, segment_sum


@cache
def clebsch_gordan(l1: int, l2: int, l3: int) -> Tensor:
    """(2 l1 + 1, 2 l2 + 1, 2 l3 + 1) float64, e3nn's real Wigner 3j symbol: the squares sum to one."""
    return o3.wigner_3j(l1, l2, l3, dtype=torch.float64, device=torch.device("cpu"))


@cache
def _raising_matrix(degree: int) -> Tensor:
    """(3 (2 degree + 1), 2 degree + 3) float64: Y_{degree + 1} = (Y_degree x unit vector) @ matrix."""
    coupling = clebsch_gordan(degree, 1, degree + 1).reshape(-1, 2 * degree + 3)
    direction = torch.tensor([[0.36, 0.48, 0.8]], dtype=torch.float64)
    lower, upper = (
        o3.spherical_harmonics(degree + i, direction, normalize=False, normalization="component") for i in (0, 1)
    )
    raised = (lower.unsqueeze(2) * direction.unsqueeze(1)).flatten(1) @ coupling
    return coupling * ((raised * upper).sum() / (raised * raised).sum())


@cache
def raising_terms(degree: int) -> dict[int, list[tuple[int, int, float]]]:
    """For component k of degree + 1 the (i, j, value) of Y_k = sum of value * Y_i * unit vector_j, Y_i of `degree`."""
    matrix = _raising_matrix(degree).reshape(2 * degree + 1, 3, 2 * degree + 3)
    return {
        k: [
            (i, j, float(matrix[i, j, k]))
            for i in range(2 * degree + 1)
            for j in range(3)
            if abs(matrix[i, j, k]) > 1e-12
        ]
        for k in range(2 * degree + 3)
    }


@cache
def lowering_terms(degree: int) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """For component k of `degree` and direction j the (i, value) of dY_k / d(unit vector_j) = sum of value * Y_i, Y_i of the
    degree below. It is the slope of a polynomial that is Y_k on the sphere; along the sphere all such slopes are the same."""
    coupling = clebsch_gordan(degree, 1, degree - 1)
    direction = torch.tensor([[0.36, 0.48, 0.8]], dtype=torch.float64)
    lower, upper = (
        o3.spherical_harmonics(degree + i, direction, normalize=False, normalization="component")[0] for i in (-1, 0)
    )
    along = torch.einsum("kji,j,i->k", coupling, direction[0], lower)
    values = coupling * (degree * (along * upper).sum() / (along * along).sum())
    return {
        (k, j): [(i, float(values[k, j, i])) for i in range(2 * degree - 1) if abs(values[k, j, i]) > 1e-12]
        for k in range(2 * degree + 1)
        for j in range(3)
    }


class SphericalHarmonics(nn.Module):
    """Harmonics of degrees 0..l_max of unit vectors: (n, 3) -> (n, (l_max + 1)^2), in the precision of the input."""

    def __init__(self, l_max: int) -> None:
        super().__init__()
        self.l_max = l_max
        for degree in range(1, l_max):
            self.register_buffer(f"raise_{degree}", _raising_matrix(degree).clone(), persistent=False)

    def _apply(self, fn, recurse: bool = True):
        """Moves between devices but stays float64, as all geometry does."""
        super()._apply(fn, recurse)
        for degree in range(1, self.l_max):
            name = f"raise_{degree}"
            setattr(self, name, _raising_matrix(degree).to(self.get_buffer(name).device))
        return self

    def forward(self, unit_vectors: Tensor) -> Tensor:
        harmonics = [unit_vectors.new_ones(unit_vectors.shape[0], 1)]
        if self.l_max > 0:
            harmonics.append(unit_vectors * 3**0.5)
        for degree in range(1, self.l_max):
            product = harmonics[-1].unsqueeze(2) * unit_vectors.unsqueeze(1)
            harmonics.append(product.flatten(1) @ self.get_buffer(f"raise_{degree}"))
        return join(harmonics, 1)


def sum_weighted(weights: Tensor, directions: Sequence[Tensor], edges: Segments, *, shared: bool) -> Tensor:
    """(components, n_atoms, channels). weights: (n_edges, degrees x channels) or, shared by all degrees, (n_edges, channels).

    directions: (n_edges, 2l + 1) of each degree, the first of which is one and not read. edges: those of each atom.
    """
    parts = [weights] * len(directions) if shared else _by_degree(weights, len(directions))
    sums = [segment_sum(parts[0], edges).unsqueeze(0)]
    for direction, part in zip(directions[1:], parts[1:]):
        sums.append(segment_sum(direction.unsqueeze(2) * part.unsqueeze(1), edges).transpose(0, 1))
    return join(sums, 0)


def project(rows: Tensor, weights: Tensor, directions: Sequence[Tensor], edges: Segments) -> Tensor:
    """(n_edges, channels): rows (components, n_atoms, channels) of an edge's atom dotted with its weighted harmonics."""
    parts = _by_degree(weights, len(directions))
    of_degrees = cut(rows, [direction.shape[1] for direction in directions], 0)
    result = gather(of_degrees[0].squeeze(0), edges) * parts[0]
    for direction, part, of_degree in zip(directions[1:], parts[1:], of_degrees[1:]):
        at_edges = gather(of_degree.transpose(0, 1).contiguous(), edges)
        result = result + (at_edges * direction.unsqueeze(2)).sum(1) * part
    return result


def _by_degree(weights: Tensor, n_degrees: int) -> Sequence[Tensor]:
    return cut(weights, [weights.shape[1] // n_degrees] * n_degrees, 1)
