"""Sums of weighted harmonics and projections by compiled C code equal reference operations, with all derivatives."""

import pytest
import torch

from forgefield.kernels.convolution.dispatch import WeightedHarmonics
from forgefield.ops.execution import C_CONVOLUTIONS, execution
from forgefield.ops.graph import EdgeGraph, GradientSwitch

CHANNELS = 11
UNUSED = {"allow_unused": True, "materialize_grads": True}
"""Without directions, harmonics have no gradient."""


def graph_of(n_atoms=7, n_edges=60):
    generator = torch.Generator().manual_seed(0)
    source, destination = torch.randint(n_atoms - 1, (2, n_edges), generator=generator)  # one atom has no edges
    return EdgeGraph(source, destination.sort().values, n_atoms)


def inputs_of(graph, l_max, shared, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    degrees, components = l_max + 1, (l_max + 1) ** 2
    sizes = [
        (graph.n_edges, components),
        (graph.n_edges, CHANNELS * (1 if shared else degrees)),
        (graph.n_edges, CHANNELS * degrees),
        (components, graph.n_atoms, CHANNELS),
    ]
    y, *others = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    y[:, 0] = 1.0
    return [value.to(dtype) for value in (y, *others)]


def results(graph, inputs, shared, level):
    """Values, first derivatives, and derivatives of a function of these, as in a loss of forces."""
    with execution(c_code=level):
        y, *others = (value.clone().requires_grad_() for value in inputs)
        harmonics = WeightedHarmonics(torch.cat([torch.ones_like(y[:, :1]), y[:, 1:]], 1), graph, None)
        assert harmonics.in_c == (level > C_CONVOLUTIONS)
        summed = harmonics.summed(others[0], shared=shared)
        projected = harmonics.project(others[2], others[1])
        leaves = [y, *others]
        first = torch.autograd.grad(summed.sin().sum() + projected.cos().sum(), leaves, create_graph=True, **UNUSED)
        loss = sum(value.square().sum() for value in first) + summed.square().sum() + projected.sum()
        return [summed, projected, *first, *torch.autograd.grad(loss, leaves, **UNUSED)]


@pytest.mark.parametrize("l_max", [0, 1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_values_first_and_second_derivatives_equal_reference_operations(l_max, shared):
    graph = graph_of()
    inputs = inputs_of(graph, l_max, shared)
    expected, found = (results(graph, inputs, shared, level) for level in (C_CONVOLUTIONS, C_CONVOLUTIONS + 1))
    for value, reference in zip(found, expected):
        torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-11)
    single = results(graph, [value.float() for value in inputs], shared, C_CONVOLUTIONS + 1)
    for value, reference in zip(single, expected):
        assert (value - reference).norm() <= 1e-5 * (1 + reference.norm())


def test_results_do_not_depend_on_the_number_of_threads():
    graph, before, found = graph_of(40, 400), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(results(graph, inputs_of(graph, 2, False), False, C_CONVOLUTIONS + 1))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*found):
        assert torch.equal(one, three)


def test_edges_that_belong_to_no_atom_get_zero():
    graph, (y, w, _, rows) = graph_of(), inputs_of(graph_of(), 1, False)
    pointers = graph.by_destination.pointers.clamp(max=40)
    shorter = EdgeGraph(graph.source, graph.destination, graph.n_atoms, pointers=pointers)
    w.requires_grad_()
    harmonics = WeightedHarmonics(y, shorter, None)
    projected = harmonics.project(rows, w)
    (to_w,) = torch.autograd.grad(projected.square().sum() + harmonics.summed(w, shared=False).sum(), w)
    assert bool((projected[40:] == 0).all() and (to_w[40:] == 0).all())
    assert bool((projected[:40] != 0).all() and (to_w[:40] != 0).all())


def test_harmonics_get_no_gradient_once_the_switch_is_off():
    graph = graph_of()
    y, w, *_ = (value.requires_grad_() for value in inputs_of(graph, 1, False))
    switch = GradientSwitch()
    out = WeightedHarmonics(y, graph, switch).summed(w, shared=False)
    switch.off = True
    to_y, to_w = torch.autograd.grad(out.sum(), (y, w), allow_unused=True)
    assert to_y is None
    assert float(to_w.abs().sum()) > 0
