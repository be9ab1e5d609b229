"""SchNet against PyTorch Geometric's; PaiNN, EGNN and CGCNN against the formulas of their papers, atom by atom in loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from forgefield.data.frame import Frame
from forgefield.models import Potential, build_model, resolve_model
from tests.support.structures import SPECIES, make_batch, make_frame

CUTOFF, NEIGHBOURS, P = 3.0, 5.0, 6
SHIFTS = {"H": -1.0, "O": 2.0}


def potential_of(name: str, **more: Any) -> Potential:
    given = {"name": name, "num_layers": 2, "num_features": 4, "energy_scales": 1.5, "energy_shifts": SHIFTS, **more}
    given = {"avg_num_neighbours": NEIGHBOURS, **given}
    potential = build_model(resolve_model(given, species=SPECIES, cutoff=CUTOFF), precision="float64", seed=1).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # biases start at zero, where a mistake would not be seen
        for key, parameter in potential.named_parameters():
            if "bias" in key:
                parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return potential


# ---- SchNet


def test_schnet_with_the_weights_of_pytorch_geometric_is_its_schnet_in_the_open():
    geometric = pytest.importorskip("torch_geometric.nn.models")
    width, filters, gaussians = 6, 5, 7
    sizes = {"num_features": width, "num_filters": filters, "num_gaussians": gaussians, "readout_mlp_width": width // 2}
    ours = potential_of("schnet", **sizes, envelope="cosine", avg_num_neighbours=1.0)
    theirs = geometric.SchNet(
        width, filters, 2, gaussians, cutoff=CUTOFF, interaction_graph=lambda pos, batch: all_pairs(pos)
    ).double()
    copy_schnet(theirs, ours.model)
    frame = make_frame(6, periodic=False)
    found = ours(make_batch(frame))
    positions = torch.from_numpy(frame.positions).requires_grad_(True)
    numbers = torch.from_numpy(frame.numbers)
    alone = [theirs(numbers[i : i + 1], positions[i : i + 1].detach()).detach().sum() for i in range(6)]
    network = theirs(numbers, positions).sum() - sum(alone)
    shifts = sum(SHIFTS[SPECIES[(1, 8).index(int(z))]] for z in frame.numbers)
    (slope,) = torch.autograd.grad(network, positions)
    assert float(found["energy"]) == pytest.approx(shifts + 1.5 * float(network.detach()), rel=1e-12)
    torch.testing.assert_close(found["forces"], -1.5 * slope, rtol=1e-9, atol=1e-10)


def all_pairs(positions: Tensor) -> tuple[Tensor, Tensor]:
    n = positions.shape[0]
    distances = (positions[:, None] - positions[None] + torch.eye(n)[..., None]).norm(dim=-1)
    index = ((distances < CUTOFF) & ~torch.eye(n, dtype=torch.bool)).nonzero().T
    return index, (positions[index[0]] - positions[index[1]]).norm(dim=-1)


def copy_schnet(theirs: Any, ours: Any) -> None:
    """Weights of ours into theirs."""
    with torch.no_grad():
        theirs.distance_expansion.offset = torch.linspace(0, CUTOFF, theirs.num_gaussians, dtype=torch.float64)
        theirs.distance_expansion.coeff = -0.5 / (CUTOFF / (theirs.num_gaussians - 1)) ** 2
        theirs.embedding.weight[[1, 8]] = ours.embedding
        for module in theirs.modules():
            if hasattr(module, "shift"):
                module.shift = math.log(2)  # float32 there
        for block, layer in zip(theirs.interactions, ours.layers):
            pairs = [
                (block.mlp[0], layer.filter, 0),
                (block.mlp[2], layer.filter, 1),
                (block.conv.lin1, layer.enter, 0),
            ]
            pairs += [(block.conv.lin2, layer.leave, 0), (block.lin, layer.leave, 1)]
            for linear, dense, number in pairs:
                copy_linear(linear, dense, number)
        copy_linear(theirs.lin1, ours.readout, 0)
        copy_linear(theirs.lin2, ours.readout, 1)


def copy_linear(linear: Any, dense: Any, number: int) -> None:
    linear.weight.copy_(dense.weights[number].T)
    if linear.bias is not None:
        linear.bias.copy_(dense.biases[number])


# ---- the others, from their formulas


def neighbours(frame: Frame) -> list[list[tuple[int, Tensor]]]:
    """For each atom its neighbours, periodic images one by one: their number and the vector to them."""
    reach = range(-3, 4) if frame.pbc.any() else range(1)
    images = [np.array(image) @ frame.cell for image in itertools.product(reach, repeat=3)]
    found: list[list[tuple[int, Tensor]]] = []
    for here in frame.positions:
        vectors = [(j, there + image - here) for j, there in enumerate(frame.positions) for image in images]
        found.append([(j, torch.from_numpy(v)) for j, v in vectors if 0 < np.linalg.norm(v) < CUTOFF])
    return found


def envelope(r: Tensor) -> Tensor:
    x = r / CUTOFF
    return 1 - (P + 1) * (P + 2) / 2 * x**P + P * (P + 2) * x ** (P + 1) - P * (P + 1) / 2 * x ** (P + 2)


def network(dense: Any, x: Tensor, act: Any, ends_active: bool = False) -> Tensor:
    for number, weight in enumerate(dense.weights):
        x = x @ weight + (dense.biases[number] if len(dense.biases) else 0)
        x = act(x) if number < len(dense.weights) - 1 or ends_active else x
    return x


def ssp(x: Tensor) -> Tensor:
    return softplus(x) - math.log(2)


def painn(model: Any, x: list[Tensor], around: list[list[tuple[int, Tensor]]]) -> list[Tensor]:
    n, width = len(x), 4
    v = [torch.zeros(3, width, dtype=torch.float64) for _ in range(n)]

    def read(features: Tensor) -> Tensor:
        return features / (1 + features.square().sum() / width).sqrt() if model.options.normalise else features

    for layer in model.layers:
        phi = [network(layer.message, read(row), silu) for row in x]
        dx, dv = [torch.zeros(width, dtype=torch.float64) for _ in range(n)], [torch.zeros_like(v[0]) for _ in range(n)]
        for i in range(n):
            for j, vector in around[i]:
                r = vector.norm()
                sines = [torch.sin(k * math.pi * r / CUTOFF) / (r / CUTOFF) for k in range(1, 6)]
                parts = (phi[j] * network(layer.filter, torch.stack(sines), silu) * envelope(r)).split(width)
                dx[i] = dx[i] + parts[0]
                dv[i] = dv[i] + torch.outer(vector / r, parts[1]) + (read(v[j]) * parts[2] if len(parts) == 3 else 0)
        x = [a + b / math.sqrt(NEIGHBOURS) for a, b in zip(x, dx)]
        v = [a + b / math.sqrt(NEIGHBOURS) for a, b in zip(v, dv)]
        for i in range(n):
            u, w = read(v[i]) @ layer.mix[:, :width], read(v[i]) @ layer.mix[:, width:]
            length = (w.square().sum(0) + 1e-4).sqrt()
            a_vv, a_sv, a_ss = network(layer.update, torch.cat([read(x[i]), length]), silu).split(width)
            x[i], v[i] = x[i] + a_ss + a_sv * (u * w).sum(0), v[i] + a_vv * u
    return x


def egnn(model: Any, x: list[Tensor], around: list[list[tuple[int, Tensor]]]) -> list[Tensor]:
    place = [torch.zeros(3, dtype=torch.float64) for _ in x]  # how far every atom has moved from where it was
    for layer in model.layers:
        summed, moved = [torch.zeros(4, dtype=torch.float64) for _ in x], [torch.zeros_like(p) for p in place]
        for i in range(len(x)):
            for j, vector in around[i]:
                fade = envelope(vector.norm())
                now = vector / CUTOFF + place[j] - place[i]
                message = network(layer.message, torch.cat([x[i], x[j], now.square().sum()[None]]), silu, True) * fade
                if layer.step is not None:
                    moved[i] = moved[i] + now * network(layer.step, message, silu) * fade / NEIGHBOURS
                summed[i] = summed[i] + message / math.sqrt(NEIGHBOURS)
        place = [a + b for a, b in zip(place, moved)]
        x = [row + network(layer.update, torch.cat([row, m]), silu) for row, m in zip(x, summed)]
    return x


def cgcnn(model: Any, x: list[Tensor], around: list[list[tuple[int, Tensor]]]) -> list[Tensor]:
    for layer in model.layers:
        weight = torch.cat([layer.centre, layer.neighbour, layer.radial.weights[0]])
        new = []
        for i, row in enumerate(x):
            total = row
            for j, vector in around[i]:
                r = vector.norm()
                bells = torch.exp(-0.5 * ((r / CUTOFF - torch.linspace(0, 1, 5, dtype=torch.float64)) * 4) ** 2)
                z = torch.cat([row, x[j], bells]) @ weight + layer.radial.biases[0]
                total = total + torch.sigmoid(z[:4]) * ssp(z[4:]) * envelope(r) / math.sqrt(NEIGHBOURS)
            new.append(ssp(total))
        x = new
    return x


@pytest.mark.parametrize(
    ("oracle", "options", "act"),
    [
        (painn, {"num_bessels": 5}, silu),
        (painn, {"num_bessels": 5, "normalise": False}, silu),
        (egnn, {}, silu),
        (cgcnn, {"num_gaussians": 5}, ssp),
    ],
)
@pytest.mark.parametrize("periodic", [True, False], ids=["periodic", "open"])
def test_atomic_energies_follow_the_formulas(oracle, options, act, periodic):
    potential = potential_of(oracle.__name__, **options)
    model, frame = potential.model, make_frame(4, seed=1, periodic=periodic)
    species = [(1, 8).index(int(z)) for z in frame.numbers]
    with torch.no_grad():
        features = oracle(model, [model.embedding[s] for s in species], neighbours(frame))
        lone = [oracle(model, [row], [[]])[0] for row in model.embedding]
        made = [network(model.readout, row, act) for row in features]
        zero = [network(model.readout, row, act) for row in lone]
        expected = [SHIFTS[SPECIES[s]] + 1.5 * float(m - zero[s]) for s, m in zip(species, made)]
        found = potential(make_batch(frame), forces=False)["atomic_energy"]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)
    assert np.ptp(np.array(expected) - [SHIFTS[SPECIES[s]] for s in species]) > 1e-3
