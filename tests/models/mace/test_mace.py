"""What MACE promises beyond the numbers of mace-torch: limits, smoothness, symmetry, branches, new species, bad options."""

import numpy as np
import pytest
import torch
from e3nn import o3

from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.models import build_model, resolve_model
from forgefield.models.mace.model import MACE
from forgefield.training.engines.engine import Engine
from tests.support.engine_cases import labelled, step_function
from tests.support.structures import STATISTICS, make_batch, make_frame

TINY = {"name": "mace", "hidden_irreps": "4x0e + 4x1o", "max_ell": 2, "radial_mlp": [8], "mlp_irreps": "4x0e"}
VARIANTS = {
    "residual": {},
    "plain, scalars": {"interaction_first": "plain", "hidden_irreps": "4x0e", "correlation": 2},
    "density, all degrees": {
        "interaction_first": "density",
        "interaction": "density_residual",
        "hidden_irreps": "4x0e + 4x1o + 4x2e",
        "distance_transform": "Agnesi",
        "pair_repulsion": True,
    },
    "nonlinear": {
        "interaction_first": "nonlinear",
        "interaction": "nonlinear",
        "apply_cutoff": False,
        "distance_transform": "Soft",
        "readout_bias": True,
    },
    "both parities": {"hidden_irreps": "3x0e + 3x0o + 3x1o + 3x1e", "num_interactions": 3, "use_reduced_cg": False},
    "four factors": {"max_ell": 1, "correlation": 4, "radial_type": "chebyshev", "distance_transform": "Agnesi"},
}


def make(precision="float64", seed=0, species=("H", "O"), **options):
    statistics = STATISTICS | {"reference_energies": dict.fromkeys(species, -1.0)}
    resolved = resolve_model({**TINY, **options}, species=species, cutoff=3.0, statistics=statistics)
    return build_model(resolved, precision=precision, seed=seed)


@pytest.fixture(params=VARIANTS)
def potential(request):
    return make(**VARIANTS[request.param])


@pytest.mark.parametrize("inverted", [False, True])
def test_energies_are_invariant_and_forces_and_stress_rotate(potential, inverted):
    frame = make_frame(6, seed=2)
    angles = torch.tensor([0.3, 1.1, 2.5], dtype=torch.float64)
    rotation = o3.angles_to_matrix(*angles).numpy() * (-1 if inverted else 1)
    turned = Frame(frame.positions @ rotation.T, frame.numbers, frame.cell @ rotation.T, frame.pbc, None, None, None)
    one, other = potential(make_batch(frame), stress=True), potential(make_batch(turned), stress=True)
    torch.testing.assert_close(one["energy"], other["energy"], rtol=1e-12, atol=1e-12)
    matrix = torch.from_numpy(np.ascontiguousarray(rotation))
    torch.testing.assert_close(one["forces"] @ matrix.T, other["forces"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(matrix @ one["stress"][0] @ matrix.T, other["stress"][0], rtol=1e-9, atol=1e-11)


def test_forces_are_the_derivative_of_the_energy(potential):
    batch = make_batch(make_frame(5, seed=1))
    forces = potential(batch)["forces"]
    direction = torch.randn(forces.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = [batch | {"positions": batch["positions"] + step * direction} for step in (1e-4, -1e-4)]
    energies = [potential(each, forces=False)["energy"].sum().item() for each in moved]
    assert -(forces * direction).sum().item() == pytest.approx((energies[0] - energies[1]) / 2e-4, rel=1e-6, abs=1e-7)


def test_predictions_do_not_depend_on_batch_mates_or_order(potential):
    frames = [make_frame(5, seed=3), make_frame(1, periodic=False), make_frame(7, seed=4, periodic=False)]
    together = potential(make_batch(*frames))
    alone = [potential(make_batch(frame)) for frame in frames]
    torch.testing.assert_close(
        together["energy"], torch.cat([each["energy"] for each in alone]), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(together["forces"], torch.cat([each["forces"] for each in alone]), rtol=1e-9, atol=1e-11)


def dimer(distance: float, numbers=(8, 8)) -> Frame:
    positions = np.zeros((2, 3))
    positions[1, 2] = distance
    return Frame(positions, np.array(numbers), np.zeros((3, 3)), np.zeros(3, bool), None, None, None)


def test_everything_is_smooth_at_the_cutoff(potential):
    apart = potential(make_batch(dimer(3.5), cutoff=3.0))["energy"].item()
    differences = []
    for gap in (1e-2, 1e-3, 1e-4):
        outputs = potential(make_batch(dimer(3.0 - gap)))
        differences.append((abs(outputs["energy"].item() - apart), outputs["forces"].abs().max().item()))
    assert differences[1][0] < differences[0][0] / 300 + 1e-12
    assert differences[2][1] < differences[1][1] / 30 + 1e-12


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("first", ["plain", "density"])
def test_an_atom_alone_has_exactly_its_shift(first, precision):
    shifts = {"H": -13.605693122994, "O": -75.0123456789}
    potential = make(precision, energy_shifts=shifts, interaction_first=first)
    assert potential.interface.isolated_limit
    lone = [make_frame(1, seed=seed, periodic=False, numbers=(z,)) for seed, z in enumerate((1, 8))]
    assert potential(make_batch(*lone))["energy"].tolist() == [shifts["H"], shifts["O"]]


@pytest.mark.parametrize(
    "options", [{}, {"interaction_first": "nonlinear"}, {"interaction_first": "plain", "readout_bias": True}]
)
def test_the_isolated_limit_is_declared_only_where_it_holds(options):
    potential = make(**options)
    assert not potential.interface.isolated_limit
    with torch.no_grad():  # they start at zero
        for name, parameter in potential.named_parameters():
            parameter.add_(0.5 if name.endswith("bias") else 0.0)
    lone = make_batch(make_frame(1, periodic=False, numbers=(8,)))
    assert potential(lone)["energy"].item() != potential.model.energy_shifts[1].item()
    assert (
        MACE.isolated_energies(
            resolve_model({**TINY, **options}, species=("H", "O"), cutoff=3.0, statistics=STATISTICS)
        )
        is None
    )


def test_no_edges_at_all_still_trains(potential):
    batch = make_batch(make_frame(1, periodic=False), make_frame(1, seed=1, periodic=False))
    outputs = potential.train()(batch, stress=True)
    (outputs["energy"].sum() + outputs["forces"].sum()).backward()
    assert torch.equal(outputs["forces"], torch.zeros(2, 3, dtype=torch.float64))


def test_gradients_by_tangents_equal_double_backward(potential):
    batch = make_batch(make_frame(5, seed=1), make_frame(4, seed=2, periodic=False))
    potential.train()
    outputs = potential(batch)
    loss = outputs["forces"].square().sum() + outputs["energy"].square().sum()
    parameters = list(potential.parameters())
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    adjoints = {key: 2 * outputs[key].detach() for key in ("forces", "energy")}
    got = torch.autograd.grad(*_terms(potential, batch, adjoints, parameters), allow_unused=True)
    for one, other in zip(expected, got):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def _terms(potential, batch, adjoints, parameters):
    values, cotangents = potential.response(batch, adjoints)
    return values, parameters, cotangents


def test_float32_agrees_with_float64_to_its_rounding(potential):
    batch = make_batch(make_frame(6, seed=1))
    single = potential.interface.in_float64()
    assert single.weight_dtype() == torch.float64
    rounded = make(
        "float32",
        **{k: v for k, v in vars(potential.model.options).items() if k not in ("energy_scales", "energy_shifts")},
    )
    torch.testing.assert_close(rounded(batch)["energy"], potential(batch)["energy"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("preset", "channels", "degrees"), [("small", 128, 1), ("medium", 128, 2), ("large", 128, 3)])
def test_presets_have_the_features_of_the_published_models(preset, channels, degrees):
    resolved = resolve_model({"name": "mace", "preset": preset}, species=("H", "O"), cutoff=6.0, statistics=STATISTICS)
    irreps = o3.Irreps(resolved["hidden_irreps"])
    assert [mul for mul, _ in irreps] == [channels] * degrees
    assert (resolved["max_ell"], resolved["correlation"], resolved["num_bessel"]) == (3, 3, 10)


def two_branches(**options):
    shifts = {"dft": {"H": -1.0, "O": -2.0}, "cc": {"H": -3.0, "O": -4.0}}
    branches = {"branches": ["dft", "cc"], "energy_shifts": shifts, "energy_scales": {"dft": 1.0, "cc": 2.0}}
    resolved = resolve_model({**TINY, **branches, **options}, species=("H", "O"), cutoff=3.0, statistics=STATISTICS)
    return resolved, build_model(resolved, precision="float64", seed=3)


@pytest.mark.parametrize("options", [{}, {"readout_bias": True}, {"num_interactions": 1, "interaction": "plain"}])
def test_a_branch_alone_is_the_model_with_that_branch(options):
    resolved, both = two_branches(**options)
    assert both.interface.branches == ("dft", "cc")
    batch = make_batch(make_frame(5), make_frame(6, seed=1))
    together = both(batch | {"branch": torch.tensor([1, 0])})["energy"]
    for number, name in ((0, "cc"), (1, "dft")):
        own, state = MACE.branch(resolved, both.state_dict(), name)
        one = build_model(own, precision="float64", seed=0)
        one.load_state_dict(state)
        assert one(batch)["energy"][number].item() == pytest.approx(together[number].item(), rel=1e-13)
    with pytest.raises(ForgefieldError, match="choose one by its name"):
        both(batch)


@pytest.mark.parametrize(
    "options", [{}, VARIANTS["nonlinear"], VARIANTS["plain, scalars"], {"use_agnostic_product": True}]
)
def test_new_species_leave_predictions_for_old_ones_unchanged(options):
    small = make(seed=4, **options)
    resolved = resolve_model({**TINY, **options}, species=("H", "O"), cutoff=3.0, statistics=STATISTICS)
    larger = MACE.add_species(resolved, ["C", "N"], {})
    big = build_model(larger, precision="float64", seed=9)
    big.load_state_dict(MACE.add_species_to_state(big.state_dict(), small.state_dict(), 2, 2))
    frame = make_frame(6, seed=5)
    expected = small(make_batch(frame))
    got = big(make_batch(frame, species=("H", "O", "C", "N")))
    torch.testing.assert_close(got["energy"], expected["energy"], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got["forces"], expected["forces"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_irreps": "4x1o"}, "begin with 0e"),
        ({"hidden_irreps": "4x0e + 3x1o"}, "same number of channels"),
        ({"hidden_irreps": "lots"}, "sum of irreps"),
        ({"edge_irreps": "4x2e"}, "edge_irreps"),
        ({"correlation": [3]}, "one for each of the 2 layers"),
        ({"correlation": 0}, "correlation"),
        ({"mlp_irreps": "4x1o"}, "mlp_irreps"),
        ({"interaction": "RealAgnosticInteractionBlock"}, "choose one of plain"),
        ({"branches": ["a", "a"]}, "each once"),
        ({"hiden_irreps": "4x0e"}, "Did you mean 'hidden_irreps'"),
        ({"hidden_irreps": "4x0e + 4x0o", "interaction": "nonlinear"}, "0o"),
        ({"num_interactions": 1, "readout_bias": True}, "readout_bias"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ForgefieldError, match=words):
        resolve_model({**TINY, **options}, species=("H", "O"), cutoff=3.0, statistics=STATISTICS)


def test_elements_are_needed_where_radii_are():
    with pytest.raises(ForgefieldError, match="distance_transform needs chemical elements; X1 is not one"):
        make(species=("H", "X1"), distance_transform="Agnesi")


def test_a_training_step_has_the_gradient_of_every_weight(potential):
    """Finite differences of the loss, weight by weight; a step computes with other tensors than the parameters."""
    batch, generator = labelled(4, 3), torch.Generator().manual_seed(2)
    engine = Engine(step_function(potential))
    result = engine.differentiate(batch)
    for name, weight, gradient in zip(engine.function.trained, engine.function.trained_weights(), result.gradients):
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        losses = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                weight += step * direction
                losses.append(float(engine.differentiate(batch).loss))
                weight -= step * direction
        slope = 0.0 if gradient is None else float((gradient * direction).sum())
        assert slope == pytest.approx((losses[0] - losses[1]) / 2e-4, rel=1e-4, abs=1e-7 * abs(losses[0])), name
