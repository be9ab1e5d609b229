"""TensorNet against TorchMD-NET's and M3GNet against MatGL's, with their weights, in float64 (fixtures/encoders)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgefield.data.frame import Frame
from forgefield.models import build_model, resolve_model
from forgefield.models.edges import EdgeContext
from tests.support.structures import SPECIES, make_batch

FIXTURES = Path(__file__).parents[2] / "fixtures" / "encoders"
SHIFTS, SCALE = {"H": -1.0, "O": 2.0}, 1.5


def tensornet_names(layers: int) -> dict[str, str]:
    names = {"layers.0.species.weights.0": "tensor_embedding.emb2.weight"}
    names["layers.0.species.biases.0"] = "tensor_embedding.emb2.bias"
    for i, n in enumerate((0, 1)):
        names[f"layers.0.gates.weights.{i}"] = f"tensor_embedding.linears_scalar.{n}.weight"
        names[f"layers.0.gates.biases.{i}"] = f"tensor_embedding.linears_scalar.{n}.bias"
    names |= {f"layers.0.norm.{kind}": f"tensor_embedding.init_norm.{kind}" for kind in ("weight", "bias")}
    names |= {f"layers.0.mix.weights.{i}": f"tensor_embedding.linears_tensor.{i}.weight" for i in range(3)}
    for layer in range(layers):
        ours, theirs = f"layers.{layer + 1}", f"layers.{layer}"
        for i in range(3):
            names[f"{ours}.radial.weights.{i}"] = f"{theirs}.linears_scalar.{i}.weight"
            names[f"{ours}.radial.biases.{i}"] = f"{theirs}.linears_scalar.{i}.bias"
            names[f"{ours}.enter.weights.{i}"] = f"{theirs}.linears_tensor.{i}.weight"
            names[f"{ours}.leave.weights.{i}"] = f"{theirs}.linears_tensor.{i + 3}.weight"
    last = f"layers.{layers + 1}"
    names |= {f"{last}.norm.{kind}": f"out_norm.{kind}" for kind in ("weight", "bias")}
    return names | {f"{last}.dense.weights.0": "linear.weight", f"{last}.dense.biases.0": "linear.bias"}


def m3gnet_names(layers: int) -> dict[str, str]:
    names = {"embedding": "embedding.layer_node_embedding.weight"}
    edge = "embedding.layer_edge_embedding.layers.0"
    names |= {"layers.0.weights.0": f"{edge}.weight", "layers.0.biases.0": f"{edge}.bias"}
    for layer in range(layers):
        ours, three, conv = f"layers.{layer + 1}", f"three_body_interactions.{layer}", f"graph_layers.{layer}.conv"
        atom = f"{three}.update_network_atom.layers.0"
        names |= {f"{ours}.of_atoms.weights.0": f"{atom}.weight", f"{ours}.of_atoms.biases.0": f"{atom}.bias"}
        for one, other in (("values", "layers"), ("gates", "gates")):
            names[f"{ours}.of_triples.{one}.weights.0"] = f"{three}.update_network_bond.{other}.0.weight"
            for what, peer in (("edge", "edge"), ("atom", "node")):
                for i in range(3):
                    theirs = f"{conv}.{peer}_update_func.{other}.{2 * i}"
                    names[f"{ours}.{what}_update.{one}.weights.{i}"] = f"{theirs}.weight"
                    names[f"{ours}.{what}_update.{one}.biases.{i}"] = f"{theirs}.bias"
        names |= {f"{ours}.edge_radial": f"{conv}.edge_weight_func.weight"}
        names |= {f"{ours}.atom_radial": f"{conv}.node_weight_func.weight"}
    return names


def peer_state(file: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """State of the model from the peer's; matrices of linear layers are (out, in) there."""
    names = tensornet_names(2) if name == "tensornet" else m3gnet_names(2)
    state = {ours: file[f"weights.{theirs}"] for ours, theirs in names.items()}
    state = {ours: value.T if value.ndim == 2 and ours != "embedding" else value for ours, value in state.items()}
    if name == "tensornet":
        embedding = "weights.tensor_embedding."
        state["embedding"] = file[f"{embedding}emb.weight"][[1, 8]]
        for kind, ours in (("weight", "weights"), ("bias", "biases")):
            parts = [file[f"{embedding}distance_proj{i}.{kind}"] for i in (1, 2, 3)]
            state[f"layers.0.radial.{ours}.0"] = np.concatenate(parts).T
    for i in range(2):
        state[f"readout.weights.{i}"] = file[f"readout.{2 * i}.weight"].T
    state["readout.biases.0"] = file["readout.0.bias"]  # the last one cancels with that of the isolated atom
    return state


@pytest.mark.parametrize(
    ("file_name", "options"),
    [
        ("tensornet", {"name": "tensornet", "num_rbf": 5, "envelope": "cosine"}),
        ("tensornet_without_loops", {"name": "tensornet", "num_rbf": 5, "envelope": "cosine", "self_loops": False}),
        ("m3gnet_bessel", {"name": "m3gnet", "max_n": 2, "three_body_cutoff": 2.5}),
        ("m3gnet_smooth", {"name": "m3gnet", "max_n": 2, "three_body_cutoff": 2.5, "three_body_basis": "smooth"}),
    ],
)
def test_with_the_weights_of_the_peer_everything_is_equal(file_name: str, options: dict[str, Any]) -> None:
    with np.load(FIXTURES / f"{file_name}.npz") as archive:
        file = dict(archive)
    given = {"num_layers": 2, "num_features": 4, "avg_num_neighbours": 1.0, "energy_scales": SCALE, **options}
    resolved = resolve_model(given | {"energy_shifts": SHIFTS}, species=SPECIES, cutoff=3.0)
    potential = build_model(resolved, precision="float64", seed=1)
    model = potential.model
    state = {key: torch.from_numpy(value.copy()) for key, value in peer_state(file, options["name"]).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (set(missing), unexpected) == ({"energy_scales", "energy_shifts"}, [])
    for number in range(2):
        frame = frame_of(file, number)
        batch = make_batch(frame)
        out = potential(batch, stress=True)
        energy = SCALE * float(file[f"{number}.energy"]) + sum(
            SHIFTS[SPECIES[(1, 8).index(int(z))]] for z in frame.numbers
        )
        close = {"rtol": 1e-9, "atol": 1e-10}
        features, _ = model.encode(batch, EdgeContext.of(batch), energies=False)
        np.testing.assert_allclose(features.detach(), file[f"{number}.features"], **close)
        np.testing.assert_allclose(out["energy"].detach(), [energy], **close)
        np.testing.assert_allclose(out["forces"].detach(), SCALE * file[f"{number}.forces"], **close)
        if frame.pbc.any():
            np.testing.assert_allclose(out["stress"].detach()[0], SCALE * file[f"{number}.stress"], **close)
        assert np.abs(file[f"{number}.forces"]).max() > 1e-2


def frame_of(file: dict[str, np.ndarray], number: int) -> Frame:
    cell = file[f"{number}.cell"]
    labels: dict[str, Any] = {"energy": None, "forces": None, "stress": None}
    numbers = file[f"{number}.numbers"].astype(np.int64)
    return Frame(file[f"{number}.positions"], numbers, cell, np.full(3, bool(cell.any())), **labels)
