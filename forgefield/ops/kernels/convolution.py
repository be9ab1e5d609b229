"""The convolution by generated kernels: of values, or of values and tangents side by side, with a gradient.

Rows of features, harmonics and weights have a second dimension R: 1 for values alone, 2 for values and their tangents. The
gradient is taken once; forces and the gradients of a training in its tangent form ask for no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.graph import EdgeGraph, sum_rows
from forgefield.ops.kernels.operations import convolution, convolution_backward, name_of
from forgefield.ops.kernels.table import Places, table_gradient


@dataclass(frozen=True)
class Rows:
    """Weights of every edge, or of every pair of atoms where the graph has pairs: (n_rows, R, n_weights)."""

    weights: Tensor


@dataclass(frozen=True)
class Table:
    """Weights by polynomials (n_intervals, 4, n_weights) and where edges lie among them."""

    polynomials: Tensor
    places: Places


def convolve_by_kernels(
    features: Tensor, harmonics: Tensor, radial: Rows | Table, graph: EdgeGraph, plan: ConvolutionPlan
) -> Tensor:
    """Sums over the edges of each atom, (n_atoms, R, plan.out_dim).

    features: (n_atoms, R, plan.in_dim). harmonics: (n_edges, R, (l_max + 1)^2). With tangents, harmonics and places are
    taken for constants.
    """
    if isinstance(radial, Table):
        places = radial.places
        return _Convolution.apply(features, harmonics, radial.polynomials, places.place, places.at, graph, plan)
    row = torch.arange(graph.n_edges, device=features.device) if graph.pair is None else graph.pair
    return _Convolution.apply(features, harmonics, radial.weights, None, row, graph, plan)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, harmonics, weights, place, row, graph, plan):
        ctx.save_for_backward(features, harmonics, weights, place, row)
        ctx.structure = (graph, plan)
        edges = (graph.source, graph.by_destination.pointers, row, place)
        return convolution(
            features.contiguous(), harmonics.contiguous(), weights.contiguous(), *edges, name_of(plan), True
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        features, harmonics, weights, place, row = ctx.saved_tensors
        graph, plan = ctx.structure
        to_features, to_harmonics, to_weights, to_place = ctx.needs_input_grad[:4]
        geometry = to_harmonics or to_place
        if geometry and features.shape[1] == 2:
            raise RuntimeError("with tangents there is no gradient in harmonics and lengths")
        edges = (graph.source, graph.by_destination.pointers, row, place)
        values = (grad.contiguous(), features.contiguous(), harmonics.contiguous(), weights.contiguous())
        of_x, of_w, parts = convolution_backward(*values, *edges, name_of(plan), True, geometry, to_weights)
        of_features = sum_rows(of_x.flatten(1), graph.by_source).view_as(features) if to_features else None
        of_y = parts.sum(0) if geometry else None
        of_harmonics = None if of_y is None else of_y[:, :, : harmonics.shape[2]]
        of_place = None if of_y is None or place is None else of_y[:, :, harmonics.shape[2]]
        of_weights = _of_weights(of_w, weights, place, row, graph) if to_weights else None
        return of_features, of_harmonics, of_weights, of_place, None, None, None


def _of_weights(of_w: Tensor, weights: Tensor, place: Tensor | None, row: Tensor, graph: EdgeGraph) -> Tensor:
    """From the cotangents of every edge's weights to those of the table, or of the rows that two edges may share."""
    if place is not None:
        return table_gradient(of_w, row, place, weights.shape[0])
    if graph.pair_edge is None or graph.reverse is None:
        return of_w
    back = graph.reverse.index_select(0, graph.pair_edge)
    return of_w.index_select(0, graph.pair_edge) + of_w.index_select(0, back)
