"""Laws of physics that hold for every potential, on NequIP and on a model of a user's own."""

import numpy as np
import pytest
import torch
from e3nn import o3
from torch import nn

from forgefield.data.frame import Frame
from forgefield.models import Potential
from tests.support.structures import make_batch, make_frame, make_potential

VARIANTS = {
    "plain": {},
    "l=2, no parity, unequal widths": {"l_max": 2, "parity": False, "num_features": [4, 3, 2], "num_layers": 3},
    "parity": {"l_max": 2, "num_layers": 3, "num_features": 3},
    "norm": {"nonlinearity": "norm", "parity": False},
    "resnet, no self-connection": {"convnet_resnet": True, "convnet_sc": False, "num_layers": 3, "parity": False},
    "zbl": {"zbl": True},
    "pair cutoffs": {"per_edge_type_cutoff": {"H": 2.0, "O": {"H": 2.5}}},
    "trainable everything": {
        "bessel_trainable": True,
        "energy_scales_trainable": True,
        "energy_shifts_trainable": True,
        "readout_mlp_depth": 1,
        "avg_num_neighbours": {"H": 5.0, "O": 12.0},
    },
    "linear radial functions, one layer": {"radial_mlp_depth": 0, "num_layers": 1},
}


class PairPotential(nn.Module):
    """A user's own model that uses positions and cells directly: no hint that edge vectors are all it needs."""

    def __init__(self, species, cutoff):
        super().__init__()
        self.species, self.cutoff = tuple(species), cutoff
        self.depth = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, batch):
        source, destination = batch["edge_index"]
        shift = (batch["edge_shift"].unsqueeze(1) @ batch["cell"][batch["frame"][destination]]).squeeze(1)
        vectors = batch["positions"][source] + shift - batch["positions"][destination]
        torch.testing.assert_close(vectors, batch["edge_vectors"])
        x = vectors.square().sum(1) / self.cutoff**2
        pair = self.depth * (1 - x).clamp(min=0) ** 3
        return torch.zeros_like(batch["positions"][:, 0]).index_add(0, destination, pair)


def own_model() -> Potential:
    return Potential(PairPotential(("H", "O"), 3.0))


@pytest.fixture(params=[*VARIANTS, "own"])
def potential(request):
    return own_model() if request.param == "own" else make_potential(**VARIANTS[request.param])


def frames_of_all_kinds() -> list[Frame]:
    """Periodic, a cell smaller than the cutoff, a molecule, one atom alone, in unequal sizes."""
    return [
        make_frame(6, seed=1),
        make_frame(2, seed=2, box=2.4),
        make_frame(5, seed=3, periodic=False),
        make_frame(1, seed=4, periodic=False),
    ]


def moved(frame: Frame, **changes) -> Frame:
    kept = {key: getattr(frame, key) for key in ("positions", "numbers", "cell", "pbc", "energy", "forces", "stress")}
    return Frame(**{**kept, **changes})


def energy(potential, frame) -> float:
    return potential(make_batch(frame), forces=False)["energy"].item()


def test_forces_are_minus_the_energy_derivative(potential):
    frame, step = make_frame(5, seed=1), 1e-4
    forces = potential.eval()(make_batch(frame))["forces"]
    for atom, axis in ((0, 0), (2, 1), (4, 2)):
        ends = []
        for sign in (1, -1):
            positions = frame.positions.copy()
            positions[atom, axis] += sign * step
            ends.append(energy(potential, moved(frame, positions=positions)))
        assert forces[atom, axis].item() == pytest.approx(-(ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_stress_is_the_strain_derivative_over_the_volume(potential):
    frame, step = make_frame(5, seed=1), 1e-4
    stress = potential.eval()(make_batch(frame), stress=True)["stress"][0]
    assert torch.equal(stress, stress.T)
    volume = abs(np.linalg.det(frame.cell))
    for a, b in ((0, 0), (0, 1), (2, 1)):
        ends = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += sign * step / 2
            strain[b, a] += sign * step / 2
            ends.append(energy(potential, moved(frame, positions=frame.positions @ strain, cell=frame.cell @ strain)))
        derivative = (ends[0] - ends[1]) / (2 * step) / volume
        assert stress[a, b].item() == pytest.approx(derivative, rel=1e-5, abs=1e-7)


def test_rotated_and_mirrored_structures_have_the_same_energy_and_rotated_forces(potential):
    frame = make_frame(6, seed=5)
    turn = -o3.angles_to_matrix(*torch.tensor([0.3, 1.1, 2.0], dtype=torch.float64)).numpy()
    turned = moved(frame, positions=frame.positions @ turn.T, cell=frame.cell @ turn.T)
    a, b = (potential.eval()(make_batch(f), stress=True) for f in (frame, turned))
    torch.testing.assert_close(a["atomic_energy"], b["atomic_energy"], rtol=1e-9, atol=1e-9)
    rotation = torch.from_numpy(turn)
    torch.testing.assert_close(a["forces"] @ rotation.T, b["forces"], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rotation @ a["stress"] @ rotation.T, b["stress"], rtol=1e-8, atol=1e-8)


def test_outputs_do_not_depend_on_batch_mates(potential):
    frames = frames_of_all_kinds()
    together = potential.eval()(make_batch(*frames), stress=True)
    start = 0
    for number, frame in enumerate(frames):
        alone = potential(make_batch(frame), stress=True)
        stop = start + len(frame.numbers)
        torch.testing.assert_close(together["energy"][number], alone["energy"][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together["forces"][start:stop], alone["forces"], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(
            together["stress"][number], alone["stress"][0], rtol=1e-9, atol=1e-10, equal_nan=True
        )
        start = stop


def test_a_frame_without_volume_has_nan_stress_and_clean_gradients(potential):
    outputs = potential.train()(make_batch(*frames_of_all_kinds()), stress=True)
    assert torch.isnan(outputs["stress"][2:]).all()
    assert not torch.isnan(outputs["stress"][:2]).any()
    (outputs["stress"][:2].square().sum() + outputs["forces"].square().sum() + outputs["energy"].sum()).backward()
    for name, parameter in potential.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


def test_parameter_gradients_of_a_force_loss_are_exact(potential):
    batch = make_batch(*frames_of_all_kinds())
    for name, parameter in potential.named_parameters():
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=parameter.dtype)

        def loss() -> torch.Tensor:
            outputs = potential.train()(batch, stress=True)
            return outputs["forces"].square().mean() + outputs["stress"][:2].square().mean() + outputs["energy"].mean()

        (grad,) = torch.autograd.grad(loss(), parameter)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-5)
                ends.append(loss().item())
                parameter.add_(direction, alpha=-sign * 1e-5)
        slope = (ends[0] - ends[1]) / 2e-5
        assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-7), name


def test_works_without_grad_and_gives_the_same(potential):
    batch = make_batch(make_frame(5, seed=1))
    trained = potential.train()(batch, stress=True)
    with torch.no_grad():
        evaluated = potential.eval()(batch, stress=True)
    for key, value in evaluated.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, trained[key].detach(), rtol=1e-12, atol=1e-12)


def test_two_calls_give_bit_identical_gradients(potential):
    batch = make_batch(*frames_of_all_kinds())

    def gradients():
        outputs = potential.train()(batch)
        return torch.autograd.grad(
            outputs["forces"].square().sum() + outputs["energy"].sum(), list(potential.parameters()), allow_unused=True
        )

    for a, b in zip(gradients(), gradients()):
        assert (a is None and b is None) or torch.equal(a, b)


def test_positions_that_want_a_gradient_get_it(potential):
    batch = make_batch(make_frame(4, seed=1))
    batch["positions"].requires_grad_()
    outputs = potential.train()(batch)
    (of_energy,) = torch.autograd.grad(outputs["energy"].sum(), batch["positions"], retain_graph=True)
    torch.testing.assert_close(of_energy, -outputs["forces"].detach())
    (of_forces,) = torch.autograd.grad(outputs["forces"][0, 0], batch["positions"])
    assert of_forces.abs().max() > 0


def test_the_batch_is_left_as_it_was():
    batch = make_batch(make_frame(4))
    before = {key: value.clone() for key, value in batch.items()}
    make_potential().train()(batch, stress=True)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[key], before[key]) or torch.isnan(before[key]).any() for key in before)
    assert not batch["positions"].requires_grad
