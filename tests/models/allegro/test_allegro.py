"""What Allegro promises: the function of its paper, the laws of every potential, strict locality, named mistakes."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from e3nn import o3

from forgefield.checks import run_checks
from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models import Potential, build_model, resolve_model
from forgefield.models.allegro import model as allegro
from forgefield.models.allegro import tensors as allegro_tensors
from forgefield.models.allegro.model import Allegro
from forgefield.models.allegro.tensors import harmonic_irreps, layer_irreps
from forgefield.models.edges import edge_vectors
from forgefield.ops.graph import edge_graph
from forgefield.physics.zbl import zbl_pair_energy
from tests.support.allegro_models import TINY, potential_of
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame

VARIANTS = {
    "plain": {},
    "l=2": {"l_max": 2},
    "l=2, three layers, one parity": {"l_max": 2, "num_layers": 3, "parity": False, "num_tensor_features": 2},
    "l=1, four layers, both parities": {"num_layers": 4},
    "splines, linear latents": {"radial_chemical_embed": "spline", "num_splines": 6, "allegro_mlp_depth": 0},
    "trainable everything, deep": {
        "bessel_trainable": True,
        "energy_scales_trainable": True,
        "energy_shifts_trainable": True,
        "scalar_embed_mlp_depth": 0,
        "allegro_mlp_depth": 2,
        "readout_mlp_depth": 2,
        "readout_mlp_nonlinearity": "mish",
        "avg_num_neighbours": {"H": 5.0, "O": 12.0},
        "forward_normalize": False,
    },
    "shared weights, wide latents": {
        "tp_path_channel_coupling": False,
        "weight_individual_irreps": False,
        "allegro_mlp_width": 40,
        "allegro_mlp_nonlinearity": "tanh",
        "readout_mlp_depth": 0,
    },
    "one layer, scalars alone": {"l_max": 0, "num_layers": 1, "radial_chemical_embed_dim": 4},
    "zbl, pair cutoffs": {"zbl": True, "per_edge_type_cutoff": {"H": 2.0, "O": {"H": 2.5}}},
}


@pytest.fixture(params=list(VARIANTS))
def potential(request) -> Potential:
    return potential_of(**VARIANTS[request.param])


def frames_of_all_kinds() -> list[Frame]:
    return [make_frame(5, seed=1), make_frame(2, seed=2, box=2.4), make_frame(4, seed=3, periodic=False)]


def energy(potential: Potential, frame: Frame, cutoff: float = 3.0) -> float:
    return potential(make_batch(frame, cutoff=cutoff), forces=False)["energy"].item()


def moved(frame: Frame, **changes) -> Frame:
    return dataclasses.replace(frame, **changes)


# The function


def perceptron(network, x: torch.Tensor, forward: bool) -> torch.Tensor:
    functions = {"silu": torch.nn.functional.silu, "tanh": torch.tanh, "mish": torch.nn.functional.mish}
    last = len(network.weights) - 1
    for number, weight in enumerate(network.weights):
        n_in, n_out = weight.shape
        inner = number != (0 if forward else last)
        gain = math.sqrt(2) if inner and network.activation is not None else 1.0
        x = x @ weight * (gain / math.sqrt(n_in if forward else n_out))
        if number < last and network.activation is not None:
            x = functions[network.activation](x)
    return x


def weighted_harmonics(weights: torch.Tensor, harmonics: torch.Tensor, l_max: int, channels: int) -> torch.Tensor:
    """(n_edges, channels, components)."""
    degrees = [degree for degree in range(l_max + 1) for _ in range(2 * degree + 1)]
    by_degree = weights.view(len(weights), -1, channels)
    columns = [
        by_degree[:, degree if by_degree.shape[1] > 1 else 0] * harmonics[:, i, None]
        for i, degree in enumerate(degrees)
    ]
    return torch.stack(columns, 2)


def tensor_product(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, irreps) -> torch.Tensor:
    """Every allowed path of edge features x with environments y (n_edges, channels, components), one after another."""
    results, number = [], 0
    for c in irreps[2]:
        total = torch.zeros(*x.shape[:2], c.dim, dtype=x.dtype)
        start = 0
        for a in irreps[0]:
            offset = 0
            for b in irreps[1]:
                if a.p * b.p == c.p and abs(a.l - b.l) <= c.l <= a.l + b.l:
                    left, right = x[..., start : start + a.dim], y[..., offset : offset + b.dim]
                    couple = o3.wigner_3j(a.l, b.l, c.l, dtype=x.dtype) * c.dim**0.5
                    total = total + torch.einsum("eui,euj,ijk->euk", left, right, couple) * weight[number].view(
                        1, -1, 1
                    )
                    number += 1
                offset += b.dim
            start += a.dim
        results.append(total)
    assert number == len(weight)
    return torch.cat(results, 2)


def slow_atomic_energies(model: Allegro, batch) -> torch.Tensor:
    """Allegro as its paper has it: tensor products on edges, features kept and concatenated."""
    options, forward = model.options, model.options.forward_normalize
    vectors, species, (source, centre) = edge_vectors(batch), batch["species"], batch["edge_index"]
    pairs = model.pair_lengths(vectors, species, edge_graph(batch))
    x = pairs.scaled[:, None]
    if options.radial_chemical_embed == "bessel":
        p = options.polynomial_cutoff_p
        ends = 1 - (p + 1) * (p + 2) / 2 * x**p + p * (p + 2) * x ** (p + 1) - p * (p + 1) / 2 * x ** (p + 2)
        basis = torch.sin(math.pi * x * model.bessel_frequencies) / (math.pi * x) * ends * (x < 1)
        kinds = torch.cat([model.centre_embedding[species[centre]], model.neighbour_embedding[species[source]]], 1)
        embedding = kinds * perceptron(model.radial, basis, forward)
    else:
        n, span = options.num_splines, options.spline_span
        first = torch.arange(-span, n - span, dtype=x.dtype) / n
        phase = (x - first) * n / (span + 1)
        basis = torch.where((phase > 0) & (phase < 1), torch.sin(math.pi * phase) ** 4, 0.0)
        weights = model.splines[species[centre] * len(model.species) + species[source]]
        embedding = torch.einsum("en,enc->ec", basis, weights)
    embedding = perceptron(model.scalar_embed, embedding, forward)
    harmonics = o3.spherical_harmonics(list(range(options.l_max + 1)), vectors, True, normalization="component")
    channels, scalars = options.num_tensor_features, options.num_scalar_features
    tensors = perceptron(model.tensor_weights, embedding, forward)
    tensors = weighted_harmonics(tensors, harmonics, options.l_max, channels)
    projected = perceptron(model.first_projection, embedding, True)
    features, env_weights = [projected[:, :scalars]], projected[:, scalars:]
    norm = model.feature_scale[species]
    irreps = layer_irreps(options.l_max, options.parity, options.num_layers)
    for number in range(options.num_layers):
        weighted = weighted_harmonics(env_weights, harmonics, options.l_max, channels)
        summed = torch.zeros(len(species), *weighted.shape[1:], dtype=weighted.dtype).index_add(0, centre, weighted)
        around = (summed * norm[:, None, None])[centre]
        kinds = (irreps[number], harmonic_irreps(options.l_max), irreps[number + 1])
        tensors = tensor_product(tensors, around, model.couplings[number].weight, kinds)
        latent = perceptron(model.latents[number], torch.cat([*features, tensors[:, :, 0]], 1), forward)
        features.append(latent[:, :scalars])
        env_weights = latent[:, scalars:]
    edges = perceptron(model.readout, torch.cat(features, 1), forward).squeeze(1)
    atomic = torch.zeros(len(species), dtype=edges.dtype).index_add(0, centre, edges) * norm / math.sqrt(2)
    return model.energies(atomic, pairs, species, edge_graph(batch))


def test_atomic_energies_are_those_of_tensor_products_on_edges(potential):
    batch = make_batch(*frames_of_all_kinds())
    expected = slow_atomic_energies(potential.model, batch)
    torch.testing.assert_close(potential(batch, forces=False)["atomic_energy"], expected, rtol=1e-11, atol=1e-11)
    assert (expected - potential.model.energy_shifts[batch["species"]]).abs().max() > 1e-4


@pytest.mark.parametrize("changes", [{"DENSE_COMPONENTS": 0}, {"DENSE_COMPONENTS": 100}, {"FEW_KINDS": 0}])
def test_other_ways_to_sum_give_the_same(changes, monkeypatch):
    options = {"l_max": 2, "num_layers": 3, "radial_chemical_embed": "spline"}
    batch = make_batch(*frames_of_all_kinds())
    expected = potential_of(**options)(batch)
    for name, value in changes.items():
        monkeypatch.setattr(allegro if name == "FEW_KINDS" else allegro_tensors, name, value)
    got = potential_of(**options)(batch)
    for key in ("energy", "forces"):
        torch.testing.assert_close(got[key], expected[key], rtol=1e-10, atol=1e-10)


def test_irreps_that_cannot_become_scalars_are_left_out():
    both = layer_irreps(1, True, 3)
    assert both[0] == both[2] == ((0, 1), (1, -1))
    assert both[1] == ((0, 1), (1, 1), (1, -1))
    assert both[3] == ((0, 1),)
    assert layer_irreps(1, False, 3)[1] == ((0, 1), (1, -1))


# The laws


def test_rotated_and_mirrored_structures_have_the_same_energy_and_rotated_forces(potential):
    frame = make_frame(5, seed=5)
    turn = -o3.angles_to_matrix(*torch.tensor([0.3, 1.1, 2.0], dtype=torch.float64)).numpy()
    turned = moved(frame, positions=frame.positions @ turn.T, cell=frame.cell @ turn.T)
    a, b = (potential.eval()(make_batch(f), stress=True) for f in (frame, turned))
    torch.testing.assert_close(a["atomic_energy"], b["atomic_energy"], rtol=1e-10, atol=1e-10)
    rotation = torch.from_numpy(turn)
    torch.testing.assert_close(a["forces"] @ rotation.T, b["forces"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rotation @ a["stress"] @ rotation.T, b["stress"], rtol=1e-9, atol=1e-9)


def test_forces_and_stress_are_derivatives_of_the_energy(potential):
    frame, step = make_frame(5, seed=1), 1e-4
    outputs = potential.eval()(make_batch(frame), stress=True)
    for atom, axis in ((0, 0), (4, 2)):
        ends = []
        for sign in (1, -1):
            positions = frame.positions.copy()
            positions[atom, axis] += sign * step
            ends.append(energy(potential, moved(frame, positions=positions)))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert outputs["forces"][atom, axis].item() == pytest.approx(-slope, rel=1e-5, abs=1e-6)
    ends = []
    for sign in (1, -1):
        strain = np.eye(3)
        strain[0, 1] = strain[1, 0] = sign * step / 2
        ends.append(energy(potential, moved(frame, positions=frame.positions @ strain, cell=frame.cell @ strain)))
    slope = (ends[0] - ends[1]) / (2 * step) / abs(np.linalg.det(frame.cell))
    assert outputs["stress"][0, 0, 1].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_outputs_do_not_depend_on_batch_mates(potential):
    frames = [*frames_of_all_kinds(), make_frame(1, seed=4, periodic=False)]
    together = potential.eval()(make_batch(*frames))
    start = 0
    for number, frame in enumerate(frames):
        alone = potential(make_batch(frame))
        stop = start + len(frame.numbers)
        torch.testing.assert_close(together["energy"][number], alone["energy"][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together["forces"][start:stop], alone["forces"], rtol=1e-9, atol=1e-10)
        start = stop


def test_parameter_gradients_of_a_force_loss_are_exact(potential):
    """Along a random direction of all parameters at once, and of each by itself against one double backward."""
    batch = make_batch(*frames_of_all_kinds())
    generator = torch.Generator().manual_seed(0)
    parameters = list(potential.train().parameters())
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

    def loss() -> torch.Tensor:
        outputs = potential(batch, stress=True)
        return outputs["forces"].square().mean() + outputs["stress"][:2].square().mean() + outputs["energy"].mean()

    gradients = torch.autograd.grad(loss(), parameters)
    for chosen in (range(len(parameters)), range(0, len(parameters), 2)):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                for number in chosen:
                    parameters[number].add_(directions[number], alpha=sign * 1e-5)
                ends.append(loss().item())
                for number in chosen:
                    parameters[number].add_(directions[number], alpha=-sign * 1e-5)
        expected = sum((gradients[number] * directions[number]).sum().item() for number in chosen)
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_the_energy_can_be_differentiated_twice_in_positions():
    potential = potential_of(l_max=2)
    batch = make_batch(make_frame(3, seed=1, periodic=False, box=2.5))

    def total(positions):
        return potential(batch | {"positions": positions}, forces=False)["energy"]

    positions = batch["positions"].clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (positions,), eps=1e-5, atol=1e-6)
    assert torch.autograd.gradgradcheck(total, (positions,), eps=1e-5, atol=1e-5)


def test_two_calls_give_bit_identical_gradients():
    potential, batch = potential_of(l_max=2).train(), make_batch(*frames_of_all_kinds())
    runs = []
    for _ in range(2):
        outputs = potential(batch)
        runs.append(torch.autograd.grad(outputs["forces"].square().sum(), list(potential.parameters())[2:]))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_the_checks_of_physics_pass():
    shifts = {"H": -13.6, "O": -75.0}
    potential = potential_of("float32", energy_shifts=shifts, l_max=2, zbl=True)
    frames = [make_frame(4, seed=1), make_frame(3, seed=2, periodic=False)]
    generator = np.random.default_rng(0)
    results = run_checks(potential, frames, SpeciesTable(SPECIES), 3.0, generator=generator, reference_energies=shifts)
    assert all(result.passed for result in results), [result for result in results if not result.passed]


# Limits


@pytest.mark.parametrize(
    "options", [{}, {"l_max": 2, "num_layers": 3}, {"zbl": True}, VARIANTS["splines, linear latents"]]
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_an_atom_alone_has_exactly_its_shift(options, precision):
    shifts = {"H": -13.605693122994, "O": -75.0123456789}
    potential = potential_of(precision, energy_shifts=shifts, **options).train()
    lone = [make_frame(1, seed=seed, periodic=False, numbers=(z,)) for seed, z in enumerate((1, 8))]
    outputs = potential(make_batch(*lone))
    assert outputs["energy"].tolist() == [shifts["H"], shifts["O"]]
    assert torch.equal(outputs["forces"], torch.zeros(2, 3, dtype=torch.float64))
    (outputs["energy"].sum() + outputs["forces"].sum()).backward()


def molecule(*positions, numbers) -> Frame:
    return Frame(np.array(positions, dtype=np.float64), np.array(numbers), np.zeros((3, 3)), np.full(3, False))


@pytest.mark.parametrize(
    "options",
    [{}, {"zbl": True}, {"per_edge_type_cutoff": {"O": 2.0}}, {"radial_chemical_embed": "spline"}],
)
def test_energy_and_forces_vanish_smoothly_at_the_cutoff(options):
    end = 2.0 if "per_edge_type_cutoff" in options else 3.0
    potential = potential_of(energy_shifts=0.0, **options)
    forces = []
    for gap in (1e-2, 1e-3, 1e-4):
        outputs = potential(make_batch(molecule([0, 0, 0], [0, 0, end - gap], numbers=[8, 8])))
        forces.append(outputs["forces"].abs().max().item())
        assert outputs["energy"].abs().item() < 1e3 * gap**3
    assert forces[1] < forces[0] / 50
    assert forces[2] < forces[1] / 50
    beyond = potential(make_batch(molecule([0, 0, 0], [0, 0, end + 1e-9], numbers=[8, 8]), cutoff=3.5))
    assert beyond["energy"].item() == 0.0
    assert beyond["forces"].abs().max().item() == 0.0


def test_an_atom_depends_on_nothing_beyond_its_own_cutoff():
    """A chain: the second neighbour is within reach of the first, and still without influence, at any depth."""
    potential = potential_of(l_max=2, num_layers=3)
    chain = [[0.0, 0, 0], [1.9, 0.3, 0], [3.6, -0.2, 0.5], [5.1, 0.4, 0.1]]
    moves = [chain, [*chain[:2], [3.9, 0.6, -0.8], [5.8, 0.1, 1.0]], chain[:2]]
    atomic = [potential(make_batch(molecule(*c, numbers=[8, 1, 1, 8][: len(c)])))["atomic_energy"] for c in moves]
    assert atomic[0][0] == atomic[1][0] == atomic[2][0]
    assert atomic[0][1] != atomic[1][1] != atomic[2][1]


def test_pair_cutoffs_are_by_centre_then_neighbour():
    potential = potential_of(per_edge_type_cutoff={"H": {"O": 1.5}}, energy_shifts=0.0)
    atomic = potential(make_batch(molecule([0, 0, 0], [0, 0, 2.0], numbers=[1, 8])))["atomic_energy"]
    assert atomic[0].item() == 0.0
    assert atomic[1].item() != 0.0


def test_zbl_adds_the_repulsion_of_every_pair():
    frame = molecule([0, 0, 0], [0, 0, 0.4], numbers=[1, 8])
    with_it, without = (energy(potential_of(zbl=zbl), frame) for zbl in ({"polynomial_cutoff_p": 4}, False))
    x = 0.4 / 3
    envelope = 1 - 15 * x**4 + 24 * x**5 - 10 * x**6
    pair = zbl_pair_energy(torch.tensor(0.4), torch.tensor(1.0), torch.tensor(8.0)).item() * envelope
    assert with_it - without == pytest.approx(pair, rel=1e-6)


@pytest.mark.parametrize("embed", ["bessel", "spline"])
def test_with_an_adaptive_cutoff_forces_are_derivatives_while_an_atom_becomes_isolated(embed):
    given = {**TINY, "radial_chemical_embed": embed, "energy_shifts": 0.0}
    resolved = resolve_model(given, species=SPECIES, cutoff=2.0, adaptive_cutoff=3.4, statistics=STATISTICS)
    potential = build_model(resolved, precision="float64", seed=0).eval()
    assert potential.adaptive_cutoff == 3.4
    graph = GraphOptions(2.0, adaptive_cutoff=3.4)
    for x in (1.75, 2.3, 3.2):
        frame = molecule([0, 0, 0], [0.76, 0.59, 0], [-0.76, 0.59, 0.1], [x, 0.2, 0.3], numbers=[8, 1, 1, 1])
        outputs = potential(batch_from_frames([frame], SpeciesTable(SPECIES), graph))
        ends = []
        for sign in (1, -1):
            positions = frame.positions.copy()
            positions[3, 0] += sign * 1e-4
            batch = batch_from_frames([moved(frame, positions=positions)], SpeciesTable(SPECIES), graph)
            ends.append(potential(batch, forces=False)["energy"].item())
        assert outputs["forces"][3, 0].item() == pytest.approx(-(ends[0] - ends[1]) / 2e-4, rel=1e-5, abs=1e-7)


# Options


def test_numbers_come_from_the_data_and_a_resolved_section_resolves_to_itself():
    known = {"species": SPECIES, "cutoff": 3.0}
    resolved = resolve_model({"name": "allegro", "preset": "M", "num_layers": 3}, statistics=STATISTICS, **known)
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved["avg_num_neighbours"] == 9.0
    assert resolved["energy_scales"] == 1.3
    assert resolved["energy_shifts"] == {"H": -13.6, "O": -75.0}
    assert (resolved["l_max"], resolved["num_layers"], resolved["num_tensor_features"]) == (2, 3, 64)
    assert (resolved["num_bessels"], resolved["num_splines"]) == (8, None)
    again = {key: value for key, value in resolved.items() if key not in known}
    assert resolve_model(again, statistics=None, **known) == resolved


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_tensor_feature": 3}, ["model.num_tensor_feature ", "'num_tensor_features'"]),
        ({"preset": "XXL"}, ["model.preset", "S, M, L, XL"]),
        ({"l_max": -1}, ["model.l_max", "at least 0"]),
        ({"num_layers": 0}, ["model.num_layers", "at least 1"]),
        ({"parity": "yes"}, ["model.parity", "true or false"]),
        ({"radial_chemical_embed": "fourier"}, ["model.radial_chemical_embed", "bessel, spline"]),
        ({"num_splines": 8}, ["model.num_splines", "radial_chemical_embed=spline", "bessel"]),
        ({"radial_chemical_embed": "spline", "bessel_trainable": True}, ["model.bessel_trainable", "bessel"]),
        (
            {"radial_chemical_embed": "spline", "num_splines": 4, "spline_span": 5},
            ["model.spline_span", "num_splines=4"],
        ),
        ({"num_scalar_features": 7}, ["model.num_scalar_features", "even"]),
        ({"radial_chemical_embed_dim": 5}, ["model.radial_chemical_embed_dim", "even"]),
        ({"polynomial_cutoff_p": 1}, ["model.polynomial_cutoff_p", "at least 2"]),
        ({"allegro_mlp_nonlinearity": "sigmoid"}, ["model.allegro_mlp_nonlinearity", "silu", "null"]),
        ({"energy_shifts": {"H": 1.0}}, ["model.energy_shifts", "H, O"]),
        ({"avg_num_neighbours": 0.0}, ["model.avg_num_neighbours", "positive"]),
        ({"per_edge_type_cutoff": {"H": {"O": 9.0}}}, ["model.per_edge_type_cutoff.H.O", "cutoff=3"]),
        ({"zbl": {"p": 6}}, ["model.zbl.p", "polynomial_cutoff_p"]),
    ],
)
def test_errors_name_what_is_wrong(options, words):
    with pytest.raises(ForgefieldError) as caught:
        resolve_model({"name": "allegro", **options}, species=SPECIES, cutoff=3.0, statistics=STATISTICS)
    for word in words:
        assert word in str(caught.value)


def test_pair_cutoffs_and_an_adaptive_one_are_refused_together():
    facts = {"species": SPECIES, "cutoff": 2.0, "statistics": STATISTICS}
    with pytest.raises(ForgefieldError, match=r"per_edge_type_cutoff and data\.adaptive_cutoff"):
        resolve_model({**TINY, "per_edge_type_cutoff": {"H": 1.5}}, adaptive_cutoff=3.0, **facts)


def test_an_odd_number_of_scalars_is_fine_where_the_embedding_has_its_own_width():
    for options in ({"radial_chemical_embed_dim": 8}, {"radial_chemical_embed": "spline"}):
        potential = potential_of(num_scalar_features=7, **options)
        assert 7 in {size for weight in potential.parameters() for size in weight.shape}


def test_weights_depend_on_the_seed_alone_and_not_on_the_precision():
    a, b, c = potential_of(seed=5), potential_of("float32", seed=5), potential_of(seed=6)
    assert all(torch.equal(p.float(), q) for p, q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.model.couplings[0].weight, c.model.couplings[0].weight)


def test_initial_weights_have_unit_variance_as_in_allegro():
    potential = potential_of(num_scalar_features=64, allegro_mlp_width=64, num_tensor_features=64, l_max=2)
    for name, parameter in potential.named_parameters():
        if parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(1.0, abs=0.08), name
            assert parameter.abs().max() <= 3**0.5, name
