"""Plans, graphs and inputs of convolutions, and the reference they are compared with."""

import torch

from forgefield.ops.convolution import convolve
from forgefield.ops.convolution_plan import Block, plan_convolution
from forgefield.ops.graph import EdgeGraph, pair_graph, reverse_edges

PLANS = {
    "vectors": (((4, 0, 1), (4, 1, -1)), 1, {(0, 1), (1, -1)}),
    "unequal widths": (((5, 0, 1), (3, 1, -1), (2, 2, 1)), 2, {(0, 1), (1, -1), (2, 1)}),
    "both parities": (((2, 0, 1), (2, 0, -1), (2, 1, 1), (2, 1, -1)), 2, {(0, 1), (0, -1), (1, 1), (1, -1), (2, 1)}),
    "scalars in": (((33, 0, 1),), 3, {(0, 1), (1, -1), (2, 1), (3, -1)}),
    "scalars out": (((3, 0, 1), (2, 1, -1), (2, 2, 1), (2, 3, -1)), 3, {(0, 1)}),
    "a block without a path": (((3, 0, -1), (2, 1, -1)), 1, {(0, 1), (1, -1)}),
}


def make_plan(name):
    blocks, l_max, out = PLANS[name]
    return plan_convolution(tuple(Block(*block) for block in blocks), l_max, frozenset(out))


def make_graph(*, in_pairs, n_atoms=6):
    gen = torch.Generator().manual_seed(1)
    if not in_pairs:
        destination = torch.randint(n_atoms, (17,), generator=gen).sort().values
        return EdgeGraph(torch.randint(n_atoms, (17,), generator=gen), destination, n_atoms)
    edges = [(i, j) for i in range(n_atoms) for j in range(n_atoms) if i != j and (i + j) % 3]
    source, destination = (torch.tensor(column) for column in zip(*sorted(edges, key=lambda edge: edge[1])))
    shift = torch.zeros(len(edges), 3, dtype=torch.float64)
    reverse = reverse_edges(torch.stack([source, destination]), shift)
    assert reverse is not None
    return pair_graph(source, destination, n_atoms, reverse)


def make_inputs(plan, graph, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    rows = graph.n_edges if graph.pair_edge is None else graph.pair_edge.shape[0]
    shapes = ((graph.n_atoms, plan.in_dim), (graph.n_edges, (plan.l_max + 1) ** 2), (rows, plan.n_weights))
    x, y, w = (torch.randn(shape, generator=gen, dtype=dtype) for shape in shapes)
    y[:, 0] = 1.0
    return x, y, w


def by_reference(x, y, w, graph, plan):
    constant = torch.cat([torch.ones_like(y[:, :1]), y[:, 1:]], 1)  # the first harmonic has no derivative
    return convolve(x, constant @ plan.coupling_matrix().to(y), w, graph, plan)
