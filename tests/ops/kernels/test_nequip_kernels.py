"""NequIP through generated kernels against NequIP by plain operations: energies, forces, stress and gradients of a training.

On a machine without a GPU the kernels run in Triton's interpreter, which has to be asked for before Triton is imported:
`TRITON_INTERPRET=1 pytest tests/ops/kernels`.
"""

import pytest
import torch

from forgefield.ops.kernels.build import has_triton
from forgefield.ops.kernels.setting import interpreted, kernels
from forgefield.ops.kernels.table import CHUNK, edges_by_interval, interval_sums_by_kernel, interval_sums_by_rows
from tests.models.structures import make_batch, make_frame, make_potential

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    not has_triton() or not (torch.cuda.is_available() or interpreted()), reason="needs Triton and a GPU"
)
CASES = {
    "plain": {"l_max": 1, "num_layers": 2, "num_features": 4},
    "degrees of unequal width": {"l_max": 2, "num_layers": 3, "num_features": [6, 3, 2], "parity": False},
    "parities, norm, resnet": {
        "l_max": 1,
        "num_layers": 3,
        "num_features": 2,
        "nonlinearity": "norm",
        "convnet_resnet": True,
    },
    "pair cutoffs": {"per_edge_type_cutoff": {"H": {"O": 2.0}}, "l_max": 1, "zbl": True},
    "deep radial network": {
        "radial_mlp_depth": 2,
        "bessel_trainable": True,
        "avg_num_neighbours": {"H": 5.0, "O": 9.0},
    },
}


def batch(dtype=torch.float64):
    made = make_batch(
        make_frame(5, seed=1), make_frame(3, seed=2, periodic=False), make_frame(1, seed=4, periodic=False)
    )
    return {key: value.to(DEVICE) for key, value in made.items()}


def gradients(potential, given) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    adjoints = {
        "energy": torch.randn(3, dtype=torch.float64, generator=generator).to(DEVICE),
        "forces": torch.randn(9, 3, dtype=torch.float64, generator=generator).to(DEVICE),
        "stress": torch.randn(3, 3, 3, dtype=torch.float64, generator=generator).to(DEVICE),
    }
    given = given | {"memory": {}}
    potential(given, stress=True)  # kernels of the response need what the first pass left
    number = potential.response(given, adjoints)
    weights = [p for p in potential.parameters() if p.requires_grad]
    found = torch.autograd.grad(number, weights, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(weights, found)]


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).norm() / reference.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("case", CASES)
def test_kernels_give_what_plain_operations_give(case):
    potential = make_potential(precision="float64", **CASES[case]).to(DEVICE).eval()
    given = batch()
    plain, plain_gradients = potential(given, stress=True), gradients(potential, given)
    with kernels(enabled=True):
        ours, our_gradients = potential(given, stress=True), gradients(potential, given)
    for key in ("energy", "forces"):
        torch.testing.assert_close(ours[key], plain[key], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours["stress"][0], plain["stress"][0], rtol=1e-10, atol=1e-10)
    for ours_, plain_ in zip(our_gradients, plain_gradients):
        torch.testing.assert_close(ours_, plain_, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_tables_are_as_close_to_float64_as_float32_is(case):
    given = batch()
    reference = make_potential(precision="float64", **CASES[case]).to(DEVICE).eval()
    single = make_potential(precision="float32", **CASES[case]).to(DEVICE).eval()
    exact = torch.cat([g.flatten() for g in gradients(reference, given)])
    plain = torch.cat([g.flatten().double() for g in gradients(single, given)])
    with kernels(enabled=True):
        ours = torch.cat([g.flatten().double() for g in gradients(single, given)])
        forces = single(given)["forces"]
    assert relative(ours, exact) < 3 * relative(plain, exact) + 2e-6
    assert relative(forces, reference(given)["forces"]) < 2e-6


@pytest.mark.parametrize("columns", [5, 16])
def test_gradient_of_a_table_is_summed_over_intervals(columns):
    n_edges, n_intervals = 2 * CHUNK + 40, 6
    at = torch.randint(0, n_intervals - 1, (n_edges,), device=DEVICE)  # the last has no edge
    at[: 2 * CHUNK + 3] = 1  # more than one chunk
    at = edges_by_interval(at.to(torch.int16), n_intervals)
    to_w, to_dw = torch.randn(2, n_edges, columns, dtype=torch.float64, device=DEVICE)
    place, d_place = torch.rand(2, n_edges, dtype=torch.float64, device=DEVICE)
    found = interval_sums_by_kernel(to_w, to_dw, at, place, d_place)
    expected = interval_sums_by_rows(to_w, to_dw, at, place, d_place)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
