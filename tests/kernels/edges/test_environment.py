"""Sums of weighted harmonics over the edges of atoms and their adjoint, as operators: derivatives against plain operations and
against differences, and what traces hold of them.

By default the operators compute by plain operations here; with `TRITON_INTERPRET=1` (and on a GPU) by kernels.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from forgefield.kernels.convolution import dispatch
from forgefield.kernels.convolution.dispatch import use_edge_operators
from forgefield.kernels.core.runtime import interpreted
from forgefield.kernels.edges.environment import edge_pass, environment_by_operator, mark, project_by_operator
from forgefield.kernels.edges.environment_source import EdgePass, write_pass
from forgefield.models import Potential, build_model, resolve_model
from forgefield.ops.execution import execution
from forgefield.ops.graph import GradientSwitch, Segments, cut
from forgefield.ops.harmonics import project, sum_weighted
from forgefield.training.engines.tracing import trace
from tests.support.engine_cases import labelled, step_function
from tests.support.kernels import DEVICE, assert_same, draw, needs_kernels
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame

by_plain_operations = pytest.mark.skipif(interpreted() or DEVICE == "cuda", reason="of what runs without kernels")
EDGES_OF_ATOMS = {"unequal": (0, 5, 1, 9, 0), "few": (0, 2, 1), "alone": (1,), "none": (0, 0)}
"""How many edges each atom has."""


def edges_of(name: str) -> Segments:
    counts = torch.tensor(EDGES_OF_ATOMS[name], device=DEVICE)
    return Segments(torch.arange(len(counts), device=DEVICE).repeat_interleave(counts), len(counts), True)


def inputs_of(kind: str, edges: Segments, l_max: int, channels: int, shared: bool, dtype=torch.float64) -> list[Tensor]:
    """Rows for projections, weights, harmonics. The first harmonic is not one, as nobody reads it."""
    n_edges, n_harmonics = edges.index.shape[0], (l_max + 1) ** 2
    shapes = [(n_edges, channels * (1 if shared else l_max + 1)), (n_edges, n_harmonics)]
    shapes = [(n_harmonics, edges.count, channels), *shapes] if kind == "project" else shapes
    return [draw(number, *shape, dtype=dtype).requires_grad_(True) for number, shape in enumerate(shapes)]


def operator_of(kind: str, edges: Segments, shared: bool, switch: GradientSwitch | None = None):
    by_operator = project_by_operator if kind == "project" else environment_by_operator
    return lambda *given: by_operator(*given, edges, shared=shared, switch=switch)


def plain_of(kind: str, edges: Segments, l_max: int, shared: bool):
    """Harmonics of degree zero alone would not be looked at, and had no gradient."""
    sizes = [2 * degree + 1 for degree in range(l_max + 1)]

    def environment(weights: Tensor, harmonics: Tensor) -> Tensor:
        return sum_weighted(weights, cut(harmonics, sizes, 1), edges, shared=shared) + 0 * harmonics.sum()

    def projection(rows: Tensor, weights: Tensor, harmonics: Tensor) -> Tensor:
        weights = torch.cat([weights] * (l_max + 1), 1) if shared else weights
        return project(rows, weights, cut(harmonics, sizes, 1), edges) + 0 * harmonics.sum()

    return projection if kind == "project" else environment


def derivatives(function, inputs: list[Tensor]) -> list[Tensor]:
    """Values, cotangents, and the cotangents of what these are made of, for numbers drawn at random."""
    out = function(*inputs)
    grad = draw(4, *out.shape, dtype=out.dtype).requires_grad_(True)
    first = torch.autograd.grad(out, inputs, grad, create_graph=True)
    along = [draw(5 + number, *found.shape, dtype=out.dtype) for number, found in enumerate(first)]
    second = torch.autograd.grad(first, [grad, *inputs], along, allow_unused=True)
    return [out, *first, *(torch.zeros_like(of) if s is None else s for s, of in zip(second, [grad, *inputs]))]


CASES = [
    *((l_max, 5, shared, "unequal") for l_max in range(5) for shared in (True, False)),
    *((1, channels, False, "unequal") for channels in (32, 70, 130)),
    (5, 3, False, "unequal"),  # more harmonics than a warp has lanes
    (2, 3, False, "alone"),
    (2, 3, True, "none"),
]


@pytest.mark.parametrize(("l_max", "channels", "shared", "name"), CASES)
@pytest.mark.parametrize("kind", ["environment", "project"])
def test_values_and_two_derivatives_are_those_of_reference_operations(kind, l_max, channels, shared, name):
    edges = edges_of(name)
    inputs = inputs_of(kind, edges, l_max, channels, shared)
    ours = derivatives(operator_of(kind, edges, shared), inputs)
    plain = derivatives(plain_of(kind, edges, l_max, shared), inputs)
    for found, expected in zip(ours, plain, strict=True):
        assert_same(found, expected)


@needs_kernels
@pytest.mark.parametrize("kind", ["environment", "project"])
def test_float32_is_as_near_as_it_can_be_and_the_same_on_repetition(kind):
    edges = edges_of("unequal")
    inputs = inputs_of(kind, edges, 2, 70, False, dtype=torch.float32)
    function = operator_of(kind, edges, False)
    exact = derivatives(plain_of(kind, edges, 2, False), [given.detach().double().requires_grad_() for given in inputs])
    for found, again, expected in zip(derivatives(function, inputs), derivatives(function, inputs), exact, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, again)
        assert_same(found.double(), expected, 1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["environment", "project"])
def test_derivatives_are_those_of_differences(kind, shared):
    edges = edges_of("few")
    inputs = inputs_of(kind, edges, 1, 2, shared)
    assert torch.autograd.gradcheck(operator_of(kind, edges, shared), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(operator_of(kind, edges, shared), inputs, fast_mode=True)


@pytest.mark.parametrize("kind", ["environment", "project"])
def test_third_and_fourth_derivatives_are_those_of_reference_operations(kind):
    edges = edges_of("unequal")
    inputs = inputs_of(kind, edges, 1, 2, False)

    def fourth(function) -> Tensor:
        out = function(*inputs)
        for _ in range(4):
            grads = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
            out = torch.cat([grad.flatten() for grad in grads])
        return out

    assert_same(fourth(operator_of(kind, edges, False)), fourth(plain_of(kind, edges, 1, False)), 1e-10)


@pytest.mark.parametrize("kind", ["environment", "project"])
def test_harmonics_get_no_gradient_once_the_switch_is_off(kind, monkeypatch):
    edges, switch = edges_of("unequal"), GradientSwitch()
    inputs = inputs_of(kind, edges, 1, 2, False)
    out = operator_of(kind, edges, False, switch)(*inputs)
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    switch.off = True
    total = sum(part.square().sum() for part in first)
    *others, of_harmonics = torch.autograd.grad(total, inputs, allow_unused=True)
    assert of_harmonics is None
    assert all(other is not None for other in others)


@by_plain_operations
@pytest.mark.parametrize("of_harmonics", [True, False])
def test_operators_are_what_torch_asks_of_operators(of_harmonics):
    edges, ours = edges_of("unequal"), torch.ops.forgefield
    q, w, y = (given.detach() for given in inputs_of("project", edges, 2, 3, False))
    p, more = draw(9, w.shape[0], 3), (edges.index, edges.pointers, False, mark())
    for operator, given in (
        (ours.environment.default, (w, y)),
        (ours.environment_backward.default, (q, w, y, of_harmonics)),
        (ours.environment_double_backward.default, (w, y, q, w, y, of_harmonics)),
        (ours.project.default, (q, w, y)),
        (ours.project_backward.default, (p, q, w, y, of_harmonics)),
        (ours.project_double_backward.default, (q, w, y, p, q, w, y, of_harmonics)),
    ):
        assert set(torch.library.opcheck(operator, (*given, *more)).values()) == {"SUCCESS"}


def test_kernels_hold_no_more_of_an_atom_than_registers_do():
    """Numbers that a lane keeps of its atom: rows, their directions and sums."""
    for l_max, channels, dtype in itertools.product(range(5), (8, 64, 256), (torch.float32, torch.float64)):
        weights, harmonics = torch.empty(1, channels * (l_max + 1), dtype=dtype), torch.empty(1, (l_max + 1) ** 2)
        of = edge_pass(True, 2, True, weights, harmonics, False)
        assert 3 * of.n_harmonics * of.tile // 32 * (dtype.itemsize // 4) <= 150


def test_code_reads_only_what_is_needed():
    """Cotangents of weights of an environment do not depend on the weights; the first harmonic is never read."""
    code = write_pass(EdgePass(False, 1, False, 2, 64, True, 64))
    assert "tl.load(w " not in code
    assert "* 9 + 0" not in code
    assert "tl.load(w " in write_pass(EdgePass(False, 1, True, 2, 64, True, 64))


# ---- Allegro


MODEL = {"name": "allegro", "l_max": 2, "num_layers": 2, "num_scalar_features": 4, "num_tensor_features": 3}
MODEL |= {"scalar_embed_mlp_width": 5, "allegro_mlp_width": 6, "readout_mlp_width": 3}
FORMS = {
    "a weight for each degree": {},
    "one weight for all": {"weight_individual_irreps": False, "num_tensor_features": 7},
    "wide": {"allegro_mlp_width": 40, "scalar_embed_mlp_width": 40},
    "wide, one weight for all": {"weight_individual_irreps": False, "allegro_mlp_width": 20},
}


@pytest.fixture
def everywhere(monkeypatch):
    """Sums are operators, with kernels inside or without."""
    monkeypatch.setattr(dispatch, "use_edge_operators", lambda x: True)


def allegro(precision: str = "float64", **options) -> Potential:
    resolved = resolve_model(MODEL | options, species=SPECIES, cutoff=3.0, statistics=STATISTICS)
    return build_model(resolved, precision=precision, seed=1).to(DEVICE).train()


def batch() -> dict[str, Tensor]:
    made = make_batch(make_frame(3, seed=1, box=4.5), make_frame(1, seed=4, periodic=False))
    return {key: value.to(DEVICE) for key, value in made.items()}


def outputs_and_gradients(potential: Potential) -> list[Tensor]:
    """Energies, forces and the gradient of a loss of both in every weight."""
    out = potential(batch())
    loss = out["forces"].square().sum() + out["energy"].square().sum()
    found = torch.autograd.grad(loss, list(potential.parameters()), allow_unused=True)
    return [out["energy"], out["forces"], *(gradient for gradient in found if gradient is not None)]


@pytest.mark.parametrize("form", FORMS)
def test_allegro_of_operators_is_allegro(form, monkeypatch):
    potential = allegro(**FORMS[form])
    with execution(operators=False):
        plain = outputs_and_gradients(potential)
    monkeypatch.setattr(dispatch, "use_edge_operators", lambda x: True)
    monkeypatch.setattr(dispatch, "sum_weighted", None)
    monkeypatch.setattr(dispatch, "project", None)
    for found, expected in zip(outputs_and_gradients(potential), plain, strict=True):
        assert_same(found, expected, 1e-10)


def test_a_traced_training_step_holds_an_operator_for_every_derivative(everywhere):
    """Of two layers each; cotangents are asked for once for forces and once for the loss. For any sizes."""
    potential = allegro()
    function, given = step_function(potential, ("energy", "forces")), labelled(3)
    weights = [*function.trained_weights(), *function.fixed_weights()]
    n, target_weights = len(function.trained), function.task.weights_on(torch.device(DEVICE))

    def gradients(static: list[Tensor], of: dict[str, Tensor]) -> list[Tensor]:
        return [
            g
            for g in function.differentiate(static[:n], static[n:], of, target_weights, None).gradients
            if g is not None
        ]

    given, other = ({key: value.to(DEVICE) for key, value in made.items()} for made in (given, labelled(2, 2)))
    traced = trace(gradients, weights, given)
    targets = [str(node.target).split(".")[1] for node in traced.graph.graph.nodes if "forgefield." in str(node.target)]
    for kind in ("environment", "project"):
        expected = {"": 2, "_backward": 4, "_double_backward": 2}
        assert {word: targets.count(kind + word) for word in expected} == expected
    for found, expected in zip(traced.graph(*weights, *(other[key] for key in traced.keys)), gradients(weights, other)):
        assert_same(found, expected, 1e-10)


@needs_kernels
def test_sums_are_operators_on_a_gpu_by_default():
    x = torch.zeros(1, device=DEVICE)
    assert use_edge_operators(x) == (DEVICE == "cuda")  # an interpreter has to be asked for
    with execution(operators=True):
        assert use_edge_operators(x)
        assert not use_edge_operators(x.half())
        with torch.autograd.forward_ad.dual_level():
            assert not use_edge_operators(x)
    with execution(operators=False):
        assert not use_edge_operators(x)
