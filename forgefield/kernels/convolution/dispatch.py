"""Chooses how convolutions and sums over edges are computed: by operators with kernels inside, or by reference operations.

Convolutions are operators where models are evaluated (`forgefield.inference`) and kernels can run; all other callers, traces
included, request them with `execution(operators=True)`. Sums of weighted harmonics are operators wherever kernels can run,
unless they have been excluded with `execution(operators=False)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import isqrt

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.core.runtime import has_triton, interpreted
from forgefield.kernels.cpu.convolution import convolve_by_c, use_c
from forgefield.kernels.cpu.environment import use_environment_in_c
from forgefield.kernels.edges.coupling_source import CoupledPath, key_of_coupling
from forgefield.ops.convolution import convolve
from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.execution import execution, requested_operators
from forgefield.ops.graph import EdgeGraph, GradientSwitch, barrier, cut
from forgefield.ops.harmonics import project, sum_weighted


@contextmanager
def evaluation() -> Iterator[None]:
    """Compute convolutions by operators inside a `with` block, unless operators have been excluded."""
    with execution(operators=requested_operators() is not False):
        yield


def use_operators(x: Tensor) -> bool:
    """Whether a convolution of x is to be computed by an operator."""
    return bool(requested_operators()) and _operators_can_run(x)


def use_edge_operators(x: Tensor) -> bool:
    """Whether sums over edges of x are to be computed by operators: on a GPU, unless they have been excluded."""
    requested = requested_operators()
    return ((requested is None and x.is_cuda) or bool(requested)) and _operators_can_run(x)


def _operators_can_run(x: Tensor) -> bool:
    """Whether the operators' kernels can run on the device of x, and suffice: they do not support forward-mode AD."""
    if forward_ad._current_level >= 0:
        return False
    on_nvidia = x.is_cuda and torch.version.hip is None
    return x.dtype in (torch.float32, torch.float64) and has_triton() and (on_nvidia or interpreted())


class EdgeHarmonics:
    """Harmonics (n_edges, (l_max + 1)^2) of the edges of a graph, with the couplings that the reference operations compute from
    them once for all layers of the same plan. No gradient reaches them once the switch is off."""

    def __init__(self, harmonics: Tensor, graph: EdgeGraph, switch: GradientSwitch | None) -> None:
        self.harmonics, self.graph, self.switch = harmonics, graph, switch
        self._couplings: dict[int, Tensor] = {}

    def convolve(
        self, features: Tensor, weights: Tensor, plan: ConvolutionPlan, coupling_matrix: Tensor, form_key: str
    ) -> Tensor:
        """(n_atoms, plan.out_dim). features: (n_atoms, plan.in_dim); weights: (n_edges or n_pairs, plan.n_weights).

        coupling_matrix: the plan's, in the precision and on the device of the harmonics; form_key: `key_of_plan(plan)`.
        """
        if use_operators(features):
            from forgefield.kernels.convolution.operators import (
                convolve_by_operator,  # registering operators looks at Triton
            )

            return convolve_by_operator(features, barrier(self.harmonics, self.switch), weights, self.graph, form_key)
        if use_c(features, plan):
            with torch.no_grad():
                couplings = self._couplings_by_plan(plan, self.harmonics.detach(), coupling_matrix)
            harmonics = barrier(self.harmonics, self.switch)
            return convolve_by_c(features, harmonics, couplings, weights, self.graph, plan, self.switch)
        couplings = self._couplings_by_plan(plan, self.harmonics, coupling_matrix)
        return convolve(features, couplings, weights, self.graph, plan, self.switch)

    def _couplings_by_plan(self, plan: ConvolutionPlan, harmonics: Tensor, coupling_matrix: Tensor) -> Tensor:
        """(n_edges, plan.n_couplings), computed once for all layers of a plan."""
        if id(plan) not in self._couplings:
            self._couplings[id(plan)] = barrier(harmonics @ coupling_matrix, self.switch)
        return self._couplings[id(plan)]


class WeightedHarmonics:
    """Harmonics (n_edges, (l_max + 1)^2) of the edges of a graph, the first of which is one, and their weighted sums. No
    gradient reaches them once the switch is off."""

    def __init__(self, harmonics: Tensor, graph: EdgeGraph, switch: GradientSwitch | None) -> None:
        self.harmonics, self.graph, self.switch = barrier(harmonics, switch), graph, switch
        self.in_c = use_environment_in_c(harmonics)
        self.by_operators = use_edge_operators(harmonics) or self.in_c
        sizes = [2 * degree + 1 for degree in range(isqrt(harmonics.shape[1]))]
        self._directions = None if self.by_operators else cut(self.harmonics, sizes, 1)

    def summed(self, weights: Tensor, *, shared: bool) -> Tensor:
        """(components, n_atoms, channels): sums over the edges of each atom.

        weights: (n_edges, degrees x channels) or, shared by all degrees, (n_edges, channels).
        """
        edges = self.graph.by_destination
        if self._directions is not None:
            return sum_weighted(weights, self._directions, edges, shared=shared)
        from forgefield.kernels.edges.environment import (
            environment_by_operator,  # registering operators looks at Triton
        )

        return environment_by_operator(
            weights, self.harmonics, edges, shared=shared, switch=self.switch, in_c=self.in_c
        )

    def project(self, rows: Tensor, weights: Tensor) -> Tensor:
        """(n_edges, channels): dot product of the row (components, n_atoms, channels) of an edge's atom with the edge's
        weighted harmonics. weights: (n_edges, degrees x channels)."""
        edges = self.graph.by_destination
        if self._directions is not None:
            return project(rows, weights, self._directions, edges)
        from forgefield.kernels.edges.environment import project_by_operator

        return project_by_operator(
            rows, weights, self.harmonics, edges, shared=False, switch=self.switch, in_c=self.in_c
        )


class CouplingForm:
    """Which components a coupling couples, for kernels. sizes: numbers of components of features, environments and results."""

    def __init__(self, paths: Sequence[CoupledPath], sizes: tuple[int, int, int]) -> None:
        self.paths, self.sizes = tuple(paths), sizes

    def is_operator(self, environment: Tensor) -> bool:
        return use_edge_operators(environment)

    def couple(self, weights: Tensor, environment: Tensor, row: Tensor) -> Tensor:
        """(features, n_atoms, channels). weights: (paths, channels); environment, row: (components, n_atoms, channels)."""
        from forgefield.kernels.edges.coupling import couple  # registering operators looks at Triton

        return couple(weights, environment, row, self._key)

    @cached_property
    def _key(self) -> str:
        from forgefield.kernels.edges.coupling import mark

        return key_of_coupling(self.paths, self.sizes, mark())
