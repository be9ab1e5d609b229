"""Which convolution is computed: the operator with kernels inside, or the plain operations that are its oracle.

Evaluations by the tools of `deploy/` take operators where they can; everything else, traces among it, has to ask for them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.ops.convolution import convolve
from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.graph import EdgeGraph, GradientSwitch, barrier
from forgefield.ops.kernels.setting import has_triton, interpreted


class _Current(threading.local):
    """Of a thread: calculators may run in several at once. wanted: None where nobody has said anything."""

    wanted: bool | None = None


_current = _Current()


@contextmanager
def operators(wanted: bool) -> Iterator[None]:
    """Inside, convolutions by plain operations are operators where these can run, or never are."""
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
    """Whether a convolution of x is to be an operator: they have no forward mode."""
    if not _current.wanted or forward_ad._current_level >= 0:
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
            from forgefield.ops.kernels.library import convolve_by_operator  # registering operators looks at Triton

            return convolve_by_operator(features, barrier(self.harmonics, self.switch), weights, self.graph, form_key)
        if id(plan) not in self._couplings:
            self._couplings[id(plan)] = barrier(self.harmonics @ coupling_matrix, self.switch)
        return convolve(features, self._couplings[id(plan)], weights, self.graph, plan, self.switch)
