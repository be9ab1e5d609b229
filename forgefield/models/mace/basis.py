"""Sets of polynomials in files of mace-torch, in terms of the independent ones of `forgefield.ops.symmetric_contraction`.

mace-torch has one weight for each sequence of couplings of a polynomial (the full basis, which is redundant), or those of a
reduced basis of cuequivariance, whose tensors are in the file. It uses the Clebsch-Gordan coefficients of e3nn 0.4.4; those of
later versions differ in the sign of some triples of degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ops.symmetric_contraction import (
    Irrep,
    coupling,
    plan_contraction,
    sample_features,
    symmetric_contraction,
)

FLIPPED = frozenset(
    {(1, l, l) for l in range(2, 9)}
    | {(3, l, l + 2) for l in range(4, 7)}
    | {(4, l, l + 1) for l in range(4, 8)}
    | {(5, l, l) for l in range(5, 9)}
)
"""Degrees, ascending, whose coefficients have the other sign in e3nn 0.4.4, in any order; up to degree 8."""
_EXACT = 1e-9


def old_sign(l1: int, l2: int, l3: int) -> float:
    """Factor between the Clebsch-Gordan coefficients of e3nn 0.4.4 and those of the installed version."""
    first, second, third = sorted((l1, l2, l3))
    return -1.0 if (first, second, third) in FLIPPED else 1.0


@cache
def full_basis_map(
    inputs: tuple[Irrep, ...], outputs: tuple[Irrep, ...], correlation: int, irrep: Irrep, degree: int
) -> Tensor:
    """(n_independent, n_full) float64: independent weights are this matrix times weights of the full basis.

    inputs, outputs, correlation: of the contraction. irrep, degree: which of its polynomials.
    """
    values = _full_values(inputs, degree, natural=degree == 4)
    return _in_terms_of_independent(
        torch.stack([value for kind, value in values if kind == irrep], 2), inputs, outputs, correlation, irrep, degree
    )


def map_of_tensor(
    tensor: Tensor, inputs: tuple[Irrep, ...], outputs: tuple[Irrep, ...], correlation: int, irrep: Irrep, degree: int
) -> Tensor:
    """As `full_basis_map` for the basis of a coupling tensor (dim, n_features, ..., n_features, n_weights), without the first
    axis where dim is one; raises ForgefieldError for one that is not a basis of equivariant polynomials."""
    n_features = sum(factor.dim for factor in inputs)
    shape = (irrep.dim, *[n_features] * degree)
    if tensor.shape[:-1] != (shape if irrep.dim > 1 else shape[1:]):
        raise ForgefieldError(
            f"a coupling tensor has the shape {tuple(tensor.shape)} instead of {shape} and the number of weights"
        )
    features = torch.cat(sample_features(inputs), 1)
    values = tensor.double().reshape(*shape, -1).movedim(0, -2)  # features, dim, weights
    values = torch.einsum("si,i...->s...", features, values)
    for _ in range(degree - 1):
        values = torch.einsum("si,si...->s...", features, values)
    return _in_terms_of_independent(values, inputs, outputs, correlation, irrep, degree)


def full_tensor(inputs: Sequence[Irrep], irrep: Irrep, degree: int) -> Tensor:
    """The coupling tensor of the full basis as mace-torch stores it; zero with one weight where there is no polynomial."""
    n_features = sum(factor.dim for factor in inputs)
    found = [value for kind, value in _full_tensors(tuple(inputs), degree, degree == 4) if kind == irrep]
    tensor = torch.stack(found, -1) if found else torch.zeros(irrep.dim, *[n_features] * degree, 1, dtype=torch.float64)
    return tensor if irrep.dim > 1 else tensor[0]


def _sequences(inputs: Sequence[Irrep], before: Sequence[Irrep], natural: bool) -> list[tuple[Irrep, int, int]]:
    """Result, number of the sequence before and number of the factor of each coupling, in mace-torch's order."""
    made = [
        (result, number, factor)
        for number, left in enumerate(before)
        for factor, irrep in enumerate(inputs)
        for result in left.times(irrep)
        if not natural or result.p == (-1) ** result.l
    ]
    return sorted(made, key=lambda entry: entry[0])


def _old_coupling(left: Irrep, factor: Irrep, result: Irrep) -> Tensor:
    return coupling(left, factor, result) * old_sign(result.l, left.l, factor.l)


@cache
def _full_values(inputs: tuple[Irrep, ...], degree: int, natural: bool) -> list[tuple[Irrep, Tensor]]:
    """Values (n_samples, dim) of all sequences of couplings at the sampled features."""
    samples = sample_features(inputs)
    if degree == 1:
        return list(zip(inputs, samples))
    before = _full_values(inputs, degree - 1, natural)
    result = []
    for irrep, number, factor in _sequences(inputs, [kind for kind, _ in before], natural):
        constants = _old_coupling(before[number][0], inputs[factor], irrep)
        result.append((irrep, torch.einsum("kij,si,sj->sk", constants, before[number][1], samples[factor])))
    return result


@cache
def _full_tensors(inputs: tuple[Irrep, ...], degree: int, natural: bool) -> list[tuple[Irrep, Tensor]]:
    """Coupling tensors (dim, n_features, ..., n_features) of all sequences."""
    n_features = sum(irrep.dim for irrep in inputs)
    if degree == 1:
        identity = torch.eye(n_features, dtype=torch.float64)
        return list(zip(inputs, torch.split(identity, [irrep.dim for irrep in inputs])))
    before = _full_tensors(inputs, degree - 1, natural)
    starts = [sum(irrep.dim for irrep in inputs[:number]) for number in range(len(inputs))]
    result = []
    for irrep, number, factor in _sequences(inputs, [kind for kind, _ in before], natural):
        kind, tensor = before[number]
        made = tensor.new_zeros(irrep.dim, *tensor.shape[1:], n_features)
        part = torch.einsum("kij,i...->k...j", _old_coupling(kind, inputs[factor], irrep), tensor)
        made[..., starts[factor] : starts[factor] + inputs[factor].dim] = part
        result.append((irrep, made))
    return result


def _in_terms_of_independent(
    values: Tensor, inputs: tuple[Irrep, ...], outputs: tuple[Irrep, ...], correlation: int, irrep: Irrep, degree: int
) -> Tensor:
    """values: (n_samples, dim, n) at the sampled features."""
    own = _independent_values(inputs, outputs, correlation)[irrep, degree].flatten(0, 1)
    solution: Tensor = torch.linalg.lstsq(own, values.flatten(0, 1)).solution
    rest = (own @ solution - values.flatten(0, 1)).abs().max() if values.numel() else torch.zeros(())
    if rest > _EXACT * max(1.0, float(values.abs().max())):
        raise ForgefieldError(f"the polynomials of degree {degree} for l={irrep.l} are not equivariant")
    return torch.where(solution.abs() < 1e-13, torch.zeros_like(solution), solution)


@cache
def _independent_values(
    inputs: tuple[Irrep, ...], outputs: tuple[Irrep, ...], correlation: int
) -> dict[tuple[Irrep, int], Tensor]:
    """Values (n_samples, dim, n) of the independent polynomials, by irrep and degree, at the sampled features."""
    plan = plan_contraction(inputs, outputs, correlation)
    features = torch.cat(sample_features(inputs), 1).T.unsqueeze(2)
    weights = torch.eye(plan.n_weights, dtype=torch.float64).unsqueeze(1)  # each polynomial alone in one channel
    values = symmetric_contraction(features.repeat(1, 1, plan.n_weights), weights, plan)
    result, start = {}, 0
    for output, value in zip(plan.outputs, values):
        for degree, count in enumerate(output.counts, 1):
            result[output.irrep, degree] = value[:, :, start : start + count].transpose(0, 1)
            start += count
    return result
