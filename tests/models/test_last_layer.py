"""Energies are linear in the weights of the last layer, for every architecture that declares one."""

import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models import build_model, resolve_model
from forgefield.models.edges import EdgeContext
from forgefield.models.potential import Potential
from tests.support.deeppots import section
from tests.support.structures import SPECIES, STATISTICS, TINY, make_batch, make_frame
from tests.support.toy_models import Morse

ALLEGRO = {"name": "allegro", "l_max": 1, "num_tensor_features": 3, "num_scalar_features": 4, "num_layers": 2}
MACE = {"name": "mace", "hidden_irreps": "4x0e + 4x1o", "max_ell": 2, "radial_mlp": [8], "mlp_irreps": "4x0e"}
MODELS = {
    "mace": MACE,
    "mace with biases and repulsion": {**MACE, "readout_bias": True, "pair_repulsion": True},
    "nequip": {},
    "nequip with a deep readout": {"readout_mlp_depth": 2, "readout_mlp_nonlinearity": "silu"},
    "nequip with scales, repulsion": {"energy_scales": {"H": 0.7, "O": 1.9}, "zbl": True},
    "allegro": ALLEGRO,
    "allegro with a linear readout": {**ALLEGRO, "readout_mlp_depth": 0},
    "deeppot": section(),
    "deeppot for all species": section("se_atten", sel=40),
    "deeppot with isolated atoms": section(fitting={"atom_ener": [-1.0, None]}),
    "deeppot with parameters": section(fitting={"numb_fparam": 1, "fparam_avg": [0.0], "fparam_std": [1.0]}),
    "deeppot without energies of H": {**section(), "atom_exclude_types": [0]},
    "schnet": {"name": "schnet", "num_features": 8},
    "painn": {"name": "painn", "num_features": 8},
    "egnn": {"name": "egnn", "num_features": 8},
    "cgcnn": {"name": "cgcnn", "num_features": 8},
    "tensornet": {"name": "tensornet", "num_features": 8},
    "m3gnet": {"name": "m3gnet", "num_features": 8},
}


def _potential(options: dict) -> Potential:
    section = options if "name" in options else {**TINY, **options}
    resolved = resolve_model(section, species=SPECIES, cutoff=3.0, statistics=STATISTICS)
    potential = build_model(resolved, precision="float64", seed=0)
    generator = torch.Generator().manual_seed(4)
    for parameter in potential.parameters():  # biases are zero at first
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return potential.eval()


def _batch() -> dict[str, torch.Tensor]:
    batch = make_batch(make_frame(6, 1), make_frame(1, 2, periodic=False), make_frame(4, 3))
    return batch | {"fparam": torch.tensor([[0.3], [0.1], [-0.7]], dtype=torch.float64)}


def _short_range(tmp_path) -> dict:
    distances = 0.1 + 0.1 * np.arange(40)
    columns = [scale / distances * np.exp(-distances) for scale in (1, 2, 3)]
    np.savetxt(tmp_path / "table.txt", np.stack([distances, *columns], 1))
    return {**section(), "use_srtab": str(tmp_path / "table.txt"), "sw_rmin": 0.8, "sw_rmax": 1.8, "zbl": True}


@pytest.mark.parametrize("case", [*MODELS, "deeppot with a table of pairs"])
def test_energies_are_features_times_weights_plus_offsets(case, tmp_path) -> None:
    potential, batch = _potential(MODELS[case] if case in MODELS else _short_range(tmp_path)), _batch()
    last = potential.last_layer(batch, EdgeContext.of(batch))
    expected = potential(batch, forces=False)["atomic_energy"]
    assert last.features.shape == (11, len(last.weights))
    assert len(last.weights) > 3
    torch.testing.assert_close(last.energies(), expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("case", MODELS)
def test_forces_are_derivatives_of_features_times_weights(case) -> None:
    potential, batch = _potential(MODELS[case]), _batch()
    direction = torch.randn(11, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, slopes = potential.moved_last_layer(batch, direction)
    step = {sign: batch | {"positions": batch["positions"] + sign * 1e-5 * direction} for sign in (1, -1)}
    ahead, back = (potential.last_layer(moved, EdgeContext.of(moved)).features for moved in (step[1], step[-1]))
    torch.testing.assert_close(slopes, (ahead - back) / 2e-5, rtol=1e-5, atol=1e-6)


def test_weights_are_those_of_the_model() -> None:
    """A change of the last weights changes energies by features times that change."""
    potential, batch = _potential({}), _batch()
    last, change = potential.last_layer(batch, EdgeContext.of(batch)), torch.tensor([0.1, -0.2, 0.3, 0.4])
    potential.model.readout.weights[-1].data += (change / potential.model.readout.scales[-1]).unsqueeze(1)
    moved = potential(batch, forces=False)["atomic_energy"]
    torch.testing.assert_close(moved, last.energies() + last.features @ change.double(), rtol=1e-12, atol=1e-11)


def test_reference_energies_are_offsets() -> None:
    potential, batch = _potential({}), _batch()
    potential.add_reference_energies({"H": 1.0, "O": 20.0})
    last = potential.last_layer(batch, EdgeContext.of(batch))
    torch.testing.assert_close(last.energies(), potential(batch, forces=False)["atomic_energy"], rtol=1e-12, atol=1e-11)


def test_a_model_without_a_last_layer_is_refused() -> None:
    batch = make_batch(make_frame(3, 1, numbers=(29, 79)), cutoff=4.0, species=("Cu", "Au"))
    with pytest.raises(ForgefieldError, match=r"has no method last_layer.*forgefield\.Ensemble"):
        Potential(Morse()).last_layer(batch, EdgeContext.of(batch))
