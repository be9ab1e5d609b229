"""Which convolution and which sums over edges are computed: operators with kernels inside, or the plain operations that are
their oracle.

Convolutions are operators in evaluations by the tools of `deploy/`, where they can be; everything else, traces among it, has to
ask for them. Sums of weighted harmonics are operators wherever they can be, unless somebody has said otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import isqrt

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.core.switches import has_triton, interpreted
from forgefield.kernels.edges.coupling_source import CoupledPath, key_of_coupling
from forgefield.ops.convolution import convolve
from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.graph import EdgeGraph, GradientSwitch, barrier, cut
from forgefield.ops.weighted_harmonics import project, sum_weighted


class _Current(threading.local):
    """Of a thread: calculators may run in several at once. wanted: None where nobody has said anything."""

    wanted: bool | None = None


_current = _Current()


@contextmanager
def operators(wanted: bool) -> Iterator[None]:
    """Inside, convolutions and sums by plain operations are operators where these can run, or never are."""
    before = _current.wanted
    _current.wanted = wanted
    try:
        yield
    finally:
        _current.wanted = before


@contextmanager
def evaluation() -> Iterator[None]:
    """Inside, convolutions are operators unless somebody has said otherwise."""
    with operators(_current.wanted is not False):
        yield


def use_operators(x: Tensor) -> bool:
    """Whether a convolution of x is to be an operator."""
    return bool(_current.wanted) and _have_kernels(x)


def use_edge_operators(x: Tensor) -> bool:
    """Whether sums over edges of x are to be operators: on a GPU, unless somebody has said otherwise."""
    return ((_current.wanted is None and x.is_cuda) or bool(_current.wanted)) and _have_kernels(x)


def _have_kernels(x: Tensor) -> bool:
    """Whether kernels of operators can run where x lies, and suffice: they have no forward mode."""
    if forward_ad._current_level >= 0:
        return False
    on_nvidia = x.is_cuda and torch.version.hip is None
    return x.dtype in (torch.float32, torch.float64) and has_triton() and (on_nvidia or interpreted())


class EdgeHarmonics:
    """Harmonics (n_edges, (l_max + 1)^2) of the edges of a graph, and what plain operations make of them, once for all layers
    that couple them alike. After the switch is off no gradient reaches them."""

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
        if id(plan) not in self._couplings:
            self._couplings[id(plan)] = barrier(self.harmonics @ coupling_matrix, self.switch)
        return convolve(features, self._couplings[id(plan)], weights, self.graph, plan, self.switch)


class WeightedHarmonics:
    """Harmonics (n_edges, (l_max + 1)^2) of the edges of a graph, the first of them one, and what is summed of them times
    weights. After the switch is off no gradient reaches them."""

    def __init__(self, harmonics: Tensor, graph: EdgeGraph, switch: GradientSwitch | None) -> None:
        self.harmonics, self.graph, self.switch = barrier(harmonics, switch), graph, switch
        self.by_operators = use_edge_operators(harmonics)
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

        return environment_by_operator(weights, self.harmonics, edges, shared=shared, switch=self.switch)

    def project(self, rows: Tensor, weights: Tensor) -> Tensor:
        """(n_edges, channels): dot product of the row (components, n_atoms, channels) of an edge's atom with the edge's
        weighted harmonics. weights: (n_edges, degrees x channels)."""
        edges = self.graph.by_destination
        if self._directions is not None:
            return project(rows, weights, self._directions, edges)
        from forgefield.kernels.edges.environment import project_by_operator

        return project_by_operator(rows, weights, self.harmonics, edges, shared=False, switch=self.switch)


class CouplingForm:
    """Which components of atoms a coupling couples, for kernels. sizes: of features, environments and results."""

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
