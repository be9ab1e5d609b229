"""The convolution equals e3nn's tensor product edge by edge, differentiates exactly twice, transforms as it must."""

import pytest
import torch
from e3nn import o3

from forgefield.ops import convolution
from forgefield.ops.convolution import convolve
from forgefield.ops.convolution_plan import Block, plan_convolution
from forgefield.ops.graph import EdgeGraph, GradientSwitch, pair_graph, reverse_edges
from forgefield.ops.harmonics import SphericalHarmonics
from tests.support.e3nn_oracle import e3nn_convolution, to_e3nn, torch_default_dtype

CASES = {
    "vectors": (((4, 0, 1), (4, 1, -1)), 1, {(0, 1), (1, -1)}),
    "unequal widths": (((5, 0, 1), (3, 1, -1), (2, 2, 1)), 2, {(0, 1), (1, -1), (2, 1)}),
    "both parities": (((2, 0, 1), (2, 0, -1), (2, 1, 1), (2, 1, -1)), 2, {(0, 1), (0, -1), (1, 1), (1, -1), (2, 1)}),
    "scalars in": (((3, 0, 1),), 3, {(0, 1), (1, -1), (2, 1), (3, -1)}),
    "scalars out": (((3, 0, 1), (2, 1, -1), (2, 2, 1), (2, 3, -1)), 3, {(0, 1)}),
    "a block without a path": (((3, 0, -1), (2, 1, -1)), 1, {(0, 1), (1, -1)}),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request):
    blocks, l_max, out = CASES[request.param]
    return tuple(Block(*block) for block in blocks), l_max, frozenset(out)


def make_inputs(plan, n_atoms=5, n_edges=11, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    destination = torch.randint(n_atoms, (n_edges,), generator=gen).sort().values
    graph = EdgeGraph(torch.randint(n_atoms, (n_edges,), generator=gen), destination, n_atoms)
    shapes = ((n_atoms, plan.in_dim), (n_edges, (plan.l_max + 1) ** 2), (n_edges, plan.n_weights))
    return graph, *(torch.randn(shape, generator=gen, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("widest", [1, 16])
def test_equals_e3nn_tensor_product_edge_by_edge(case, widest):
    plan = plan_convolution(*case, widest=widest)
    graph, x, y, w = make_inputs(plan)
    ours = convolve(x, y @ plan.coupling_matrix(), w, graph, plan)
    expected = e3nn_convolution(x, y, w, graph, plan)
    torch.testing.assert_close(to_e3nn(ours, plan.out_blocks), expected, rtol=1e-12, atol=1e-12)


def test_first_and_second_derivatives_are_exact(case):
    plan = plan_convolution(*case)
    graph, x, y, w = make_inputs(plan, n_atoms=3, n_edges=4)
    inputs = [v.requires_grad_() for v in (x, y @ plan.coupling_matrix(), w)]

    def function(*values):
        return convolve(*values, graph, plan)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_cache_slices_do_not_change_the_result(case, monkeypatch):
    plan = plan_convolution(*case)
    graph, x, y, w = make_inputs(plan, n_atoms=9, n_edges=100)
    m = y @ plan.coupling_matrix()
    whole = gradients_of_a_force_like_loss(graph, plan, x, m, w)
    monkeypatch.setattr(convolution, "CACHE_FLOATS", 1)
    for a, b in zip(whole, gradients_of_a_force_like_loss(graph, plan, x, m, w)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def gradients_of_a_force_like_loss(graph, plan, x, m, w, switch=None):
    x, m, w = (value.clone().requires_grad_() for value in (x, m, w))
    energy = convolve(x, m, w, graph, plan, switch).square().sum()
    (force,) = torch.autograd.grad(energy, m, create_graph=True)
    if switch is not None:
        switch.off = True
    return torch.autograd.grad(force.square().sum() + energy, (x, w))


def test_switching_off_the_couplings_gradient_leaves_the_others_unchanged(case):
    plan = plan_convolution(*case)
    graph, x, y, w = make_inputs(plan)
    m = y @ plan.coupling_matrix()
    plain = gradients_of_a_force_like_loss(graph, plan, x, m, w)
    switched = gradients_of_a_force_like_loss(graph, plan, x, m, w, GradientSwitch())
    assert all(torch.equal(a, b) for a, b in zip(plain, switched))


def test_weights_by_pair_equal_weights_by_edge(case):
    plan = plan_convolution(*case)
    i, j = torch.tensor([[0, 0, 1, 1, 2, 0], [1, 2, 2, 3, 3, 0]])
    source, destination = torch.cat([i, j]), torch.cat([j, i])
    shift = torch.zeros(12, 3)
    shift[5], shift[11] = torch.tensor([1.0, 0, 0]), torch.tensor([-1.0, 0, 0])
    order = torch.argsort(destination, stable=True)
    source, destination, shift = source[order], destination[order], shift[order]
    reverse = reverse_edges(torch.stack([source, destination]), shift)
    assert torch.equal(source[reverse], destination)
    assert torch.equal(shift[reverse], -shift)
    paired = pair_graph(source, destination, 4, reverse)
    plain = EdgeGraph(source, destination, 4)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(4, plan.in_dim, generator=gen, dtype=torch.float64)
    m = torch.randn(12, plan.n_couplings, generator=gen, dtype=torch.float64)
    w = torch.randn(6, plan.n_weights, generator=gen, dtype=torch.float64)

    def loss(w, graph, expand):
        return gradients_of_a_force_like_loss(graph, plan, x, m, w[paired.pair] if expand else w)

    (gx, gw), (ex, ew) = loss(w, paired, False), loss(w, plain, True)
    torch.testing.assert_close(gx, ex, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gw, torch.zeros_like(gw).index_add_(0, paired.pair, ew), rtol=1e-12, atol=1e-12)


def test_an_edge_list_without_its_reverses_is_refused():
    with pytest.raises(ValueError, match="both directions"):
        reverse_edges(torch.tensor([[0, 1], [1, 2]]), torch.zeros(2, 3))


def test_rotating_inputs_rotates_outputs(case):
    plan = plan_convolution(*case)
    graph, x, _, w = make_inputs(plan)
    angles = torch.tensor([0.7, 1.3, -0.4], dtype=torch.float64)
    mirror = -o3.angles_to_matrix(*angles)
    vectors = torch.randn(graph.n_edges, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    harmonics = SphericalHarmonics(plan.l_max)

    def turn(rows, blocks):  # turned and inverted, in e3nn's order
        irreps = o3.Irreps([(b.mul, (b.l, b.p)) for b in blocks])
        with torch_default_dtype(torch.float64):
            return to_e3nn(rows, blocks) @ irreps.D_from_angles(*angles, torch.ones(())).T

    def from_e3nn(rows, blocks):
        parts = rows.split([b.dim for b in blocks], dim=1)
        return torch.cat(
            [p.unflatten(1, (b.mul, 2 * b.l + 1)).transpose(1, 2).flatten(1) for p, b in zip(parts, blocks)], 1
        )

    straight = convolve(x, harmonics(unit) @ plan.coupling_matrix(), w, graph, plan)
    turned_x = from_e3nn(turn(x, plan.in_blocks), plan.in_blocks)
    turned = convolve(turned_x, harmonics(unit @ mirror.T) @ plan.coupling_matrix(), w, graph, plan)
    torch.testing.assert_close(to_e3nn(turned, plan.out_blocks), turn(straight, plan.out_blocks), rtol=1e-9, atol=1e-9)


def test_no_edges_give_zero():
    plan = plan_convolution((Block(2, 0, 1),), 1, frozenset({(0, 1), (1, -1)}))
    empty = torch.zeros(0, dtype=torch.int64)
    x = torch.ones(3, 2, requires_grad=True)
    out = convolve(
        x, torch.zeros(0, plan.n_couplings), torch.zeros(0, plan.n_weights), EdgeGraph(empty, empty, 3), plan
    )
    assert torch.equal(out, torch.zeros(3, plan.out_dim))
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 2))
