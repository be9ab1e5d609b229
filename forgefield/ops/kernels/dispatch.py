"""Which convolution is computed: the operator with kernels inside, or the plain operations that are its oracle."""

from __future__ import annotations

from torch import Tensor

from forgefield.ops.convolution import convolve
from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.graph import EdgeGraph, GradientSwitch, barrier
from forgefield.ops.kernels.setting import use_operators


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
