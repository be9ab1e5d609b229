"""A layer of DPA-3: features of atoms, edges and angles, each updated from the others.

Every affine map of concatenated features is a sum of maps of each of them, so that what depends on atoms is computed once per
atom, and what depends on edges once per edge, before it is broadcast to edges and angles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from forgefield.models.deeppot.attention import Slots
from forgefield.models.deeppot.repflow_angles import Angles
from forgefield.models.deeppot.repflow_options import Dpa3Options
from forgefield.models.deeppot.silut import fast_activation
from forgefield.models.edges import EdgeContext
from forgefield.ops import products
from forgefield.ops.graph import EdgeGraph, gather, segment_sum

AXES = 3.0
"""Products of moments are divided by the number of axes."""


class Affine(nn.Module):
    """x W + b. w: (n_in, n_out); b: (n_out,), or None without `bias`."""

    b: Tensor | None

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        bias: bool = True,
        trainable: bool,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        drawn = torch.randn(n_in, n_out, generator=generator, dtype=torch.float64) / math.sqrt(n_in + n_out)
        self.w = nn.Parameter(drawn.to(dtype), requires_grad=trainable)
        self.b = None
        if bias:
            drawn = torch.randn(n_out, generator=generator, dtype=torch.float64)
            self.b = nn.Parameter(drawn.to(dtype), requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        y = products.product(x, self.w)
        return y if self.b is None else y + self.b

    def parts(self, *sizes: int) -> tuple[Tensor, ...]:
        """The matrices of parts of the input with these widths."""
        return tuple(torch.split(self.w, list(sizes)))


@dataclass(frozen=True)
class Around:
    """What all layers read and none changes, in the precision of the weights.

    steps: (n_edges, 3) direction to the neighbour, times a function of the distance, the switch and the root of the norm of
    sums. fades: (n_edges, 1) switch over the norm of sums over neighbours. near: (n_edges, 1), 1 for edges with angles.
    near_fades: (m, n, 1) of each block of angles, switch of the angles. slots: places of the edges of every atom, if known.
    """

    edges: EdgeContext
    steps: Tensor
    fades: Tensor
    near: Tensor
    near_fades: Sequence[Tensor]
    angles: Angles
    slots: Slots | None

    @property
    def graph(self) -> EdgeGraph:
        return self.edges.graph


@dataclass(frozen=True)
class Features:
    """nodes: (n_atoms, n_dim). edges: (n_edges, e_dim). angles: (m, n, n, a_dim) of each block."""

    nodes: Tensor
    edges: Tensor
    angles: Sequence[Tensor]


class RepFlowLayer(nn.Module):
    """One update of all features. DeePMD-kit's names: node_self_mlp is `node_self`, node_sym_linear `node_sym`, ..."""

    def __init__(self, options: Dpa3Options, *, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.options = options
        n, e, a = options.n_dim, options.e_dim, options.a_dim
        self.activate = fast_activation(options.activation_function)
        self.residual = options.update_style == "res_residual"
        self.n_angle, self.e_angle = options.angle_widths()

        def affine(n_in: int, n_out: int, *, bias: bool = True) -> Affine:
            return Affine(n_in, n_out, bias=bias, trainable=options.trainable, dtype=dtype, generator=generator)

        self.node_self = affine(n, n)
        self.node_sym = affine(options.axis_neuron * (n + e), n)
        self.node_edge = affine(2 * n + e, options.n_multi_edge_message * n)
        self.edge_self = affine(2 * n + e, e)
        if options.update_angle:
            if options.compresses_by_maps:
                self.compress_node = affine(n, self.n_angle, bias=False)
                self.compress_edge = affine(e, self.e_angle, bias=False)
            width = a + self.n_angle + 2 * self.e_angle
            self.edge_angle = affine(width, e)
            self.edge_angle_out = affine(e, e)
            self.angle_self = affine(width, a)
        counts = {"node": (2 + options.n_multi_edge_message, n), "edge": (1 + options.update_angle, e)}
        counts["angle"] = (int(options.update_angle), a)
        for name, (count, width) in counts.items():
            steps = [self._step(width, dtype, generator) for _ in range(count if self.residual else 0)]
            self.add_module(f"{name}_steps", nn.ParameterList(steps))

    def _step(self, width: int, dtype: torch.dtype, generator: torch.Generator) -> nn.Parameter:
        """Factors of one term of an update."""
        options, size = self.options, self.options.update_residual
        values = torch.full((width,), size, dtype=torch.float64)
        if options.update_residual_init == "norm":
            values = size * torch.randn(width, generator=generator, dtype=torch.float64)
        return nn.Parameter(values.to(dtype), requires_grad=options.trainable)

    def steps_of(self, name: str) -> list[nn.Parameter]:
        """Factors of the terms of the update of nodes, edges or angles; empty without residual steps."""
        return list(cast(nn.ParameterList, getattr(self, f"{name}_steps")))

    def forward(self, old: Features, around: Around, *, edges: bool, angles: bool) -> Features:
        """Updated features. edges, angles: whether those of edges and of angles are needed."""
        if self.options.sequential_update:
            return self._sequential(old, around)
        nodes = self._updated_nodes(old.nodes, old.edges, around)
        if not edges:
            return Features(nodes, old.edges, old.angles)
        of_edges, of_angles = [self._message(self.edge_self, old.nodes, old.edges, around)], old.angles
        if self.options.update_angle:
            rows = self._angle_rows(old.nodes, old.edges, around)
            of_edges.append(self._edges_from_angles(old.angles, rows, old.edges, around))
            if angles:
                of_angles = self._updated_angles(old.angles, rows, around)
        return Features(nodes, self._update("edge", old.edges, of_edges), of_angles)

    def _sequential(self, old: Features, around: Around) -> Features:
        """Each part of the update reads what the one before has updated: edges, angles, edges, nodes."""
        first, second = self.steps_of("edge")
        of_edges = old.edges + first * self._message(self.edge_self, old.nodes, old.edges, around)
        rows = self._angle_rows(old.nodes, of_edges, around)
        of_angles = self._updated_angles(old.angles, rows, around)
        of_edges = of_edges + second * self._edges_from_angles(of_angles, rows, of_edges, around)
        return Features(self._updated_nodes(old.nodes, of_edges, around), of_edges, of_angles)

    # ---- nodes and edges

    def _message(self, layer: Affine, nodes: Tensor, of_edges: Tensor, around: Around) -> Tensor:
        """activate(W [centre, neighbour, edge] + b), (n_edges, ...)."""
        of_centre, of_neighbour, of_edge = layer.parts(self.options.n_dim, self.options.n_dim, self.options.e_dim)
        assert layer.b is not None
        centre = gather(products.product(nodes, of_centre) + layer.b, around.graph.by_destination)
        neighbour = gather(products.product(nodes, of_neighbour), around.graph.by_source)
        return self.activate(centre + neighbour + products.product(of_edges, of_edge))

    def _updated_nodes(self, nodes: Tensor, of_edges: Tensor, around: Around) -> Tensor:
        graph, widths = around.graph, [self.options.e_dim, self.options.n_dim]
        moments = neighbour_moments(
            around.steps, torch.cat([of_edges, gather(nodes, graph.by_source)], 1), graph, around.slots
        )
        invariants = [self._invariants(part) for part in moments.split(widths, 2)]
        terms = [self.activate(self.node_self(nodes)), self.activate(self.node_sym(torch.cat(invariants, 1)))]
        messages = self._message(self.node_edge, nodes, of_edges, around) * around.fades
        terms += segment_sum(messages, graph.by_destination).split(self.options.n_dim, 1)
        return self._update("node", nodes, terms)

    def _invariants(self, moments: Tensor) -> Tensor:
        """(n_atoms, axis_neuron * c) of moments (n_atoms, 3, c)."""
        first = moments[:, :, : self.options.axis_neuron]
        return torch.bmm(first.transpose(1, 2), moments).flatten(1) / AXES

    def _update(self, name: str, old: Tensor, terms: Sequence[Tensor]) -> Tensor:
        style = self.options.update_style
        if style == "res_residual":
            for step, term in zip(self.steps_of(name), terms, strict=True):
                old = old + step * term
            return old
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        if style == "res_avg":
            return (old + total) / math.sqrt(1 + len(terms))
        return old + total / math.sqrt(len(terms))

    # ---- angles

    def _angle_rows(self, nodes: Tensor, of_edges: Tensor, around: Around) -> tuple[Tensor, Tensor]:
        """Features of the centre and of the edge at the places of near neighbours, as angles read them."""
        angles = around.angles
        if self.options.compresses_by_maps:
            return angles.of_centres(self.compress_node(nodes)), self.compress_edge(angles.rows(of_edges))
        return angles.of_centres(nodes[:, : self.n_angle]), angles.rows(of_edges[:, : self.e_angle])

    def _on_angles(
        self, layer: Affine, angles: Sequence[Tensor], rows: tuple[Tensor, Tensor], around: Around
    ) -> list[Tensor]:
        """activate(W [angle, node, edge ik, edge ij] + b), (m, n, n, ...) of each block."""
        of_angle, of_node, of_other, of_edge = layer.parts(self.options.a_dim, self.n_angle, self.e_angle, self.e_angle)
        nodes, edges = rows
        assert layer.b is not None
        first = products.product(torch.cat([nodes, edges], 1), torch.cat([of_node, of_edge])) + layer.b
        second = products.product(edges, of_other)
        blocks = zip(angles, around.angles.blocks(first), around.angles.blocks(second), strict=True)
        return [
            self.activate(products.product(angle, of_angle) + ij.unsqueeze(2) + ik.unsqueeze(1))
            for angle, ij, ik in blocks
        ]

    def _edges_from_angles(
        self, angles: Sequence[Tensor], rows: tuple[Tensor, Tensor], of_edges: Tensor, around: Around
    ) -> Tensor:
        sums = []
        for message, fades in zip(self._on_angles(self.edge_angle, angles, rows, around), around.near_fades):
            sums.append(fades * torch.matmul(fades.transpose(1, 2).unsqueeze(1), message).squeeze(2))
        summed = around.angles.to_edges(sums, of_edges.shape[0], of_edges)
        if not self.options.smooth_edge_update:
            summed = summed + (1 - around.near) * of_edges
        return self.activate(self.edge_angle_out(summed))

    def _updated_angles(self, angles: Sequence[Tensor], rows: tuple[Tensor, Tensor], around: Around) -> list[Tensor]:
        terms = self._on_angles(self.angle_self, angles, rows, around)
        return [self._update("angle", angle, [term]) for angle, term in zip(angles, terms, strict=True)]


def neighbour_moments(steps: Tensor, values: Tensor, graph: EdgeGraph, slots: Slots | None) -> Tensor:
    """(n_atoms, 3, c): sum over each atom's edges of steps (n_edges, 3) (x) values (n_edges, c). slots: places of the edges of
    every atom, if their number is known."""
    if slots is not None:
        return torch.bmm(slots.spread(steps).transpose(1, 2), slots.spread(values))
    return segment_sum(steps.unsqueeze(2) * values.unsqueeze(1), graph.by_destination)
