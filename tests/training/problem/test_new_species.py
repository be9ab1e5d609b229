"""A Deep Potential that takes up species: what it knew stays, and it trains, is resumed and used with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch

from forgefield import Calculator, load
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.variants import require_extensible
from tests.support.helpers import PROPERTIES, emt_frames, tiny_config, write_properties
from tests.support.train_many import train_only

SHORT = {"max_epochs": 1, "enable_progress_bar": False}
DESCRIPTORS: dict[str, dict[str, Any]] = {
    "pairs": {"type": "se_e2_a", "neuron": [3, 6], "axis_neuron": 2},
    "attention": {"type": "se_atten", "neuron": [3, 6], "axis_neuron": 2, "attn": 4, "attn_layer": 1, "sel": 60},
}
DESCRIPTORS["hybrid"] = {
    "type": "hybrid",
    "list": [{**DESCRIPTORS["pairs"], "rcut": 3.4}, {"type": "se_e2_r", "neuron": [3]}],
}


def first_run(folder: Path, kind: str, **descriptor: Any) -> Path:
    config = tiny_config(folder, name="first", out=str(folder / "runs"), trainer=SHORT)
    config["model"] = {
        "name": "deeppot",
        "descriptor": DESCRIPTORS[kind] | descriptor,
        "fitting_net": {"neuron": [6]},
    }
    return train_only(config).path


def extra_outputs(folder: Path, **model: Any) -> dict[str, Any]:
    """Trains the first run on copper and nickel."""
    ase.io.write(folder / "nickel.extxyz", emt_frames(8, seed=1, symbols=("Cu", "Ni")), format="extxyz")
    config = tiny_config(folder, name="further", out=str(folder / "runs"), trainer=SHORT)
    config["model"] = {"from": str(folder / "runs" / "first"), "which": "last", "shifts": "fit", **model}
    config["data"] = {"train": str(folder / "nickel.extxyz"), "val": 2, "batch": {"frames": 2}, "cache": False}
    config["data"]["species"] = ["Ni", "Cu"]
    return config


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_old_species_keep_what_was_learnt_and_new_ones_are_learnt(kind, tmp_path, capsys):
    first_run(tmp_path, kind)
    run = train_only(extra_outputs(tmp_path) | {"training": {"lr": 1e-12, "ema": None}})
    assert "New species that are added to the model of run first: Ni." in capsys.readouterr().out
    before, after = load(tmp_path / "runs" / "first", which="last"), load(run, which="last")
    assert run.species == ("Cu", "Au", "Ni")
    known, model = before.model.out_bias, after.model
    assert torch.isfinite(model.out_bias).all()
    assert not torch.allclose(model.out_bias[:1], known[:1])  # fitted to the new data
    for atoms in emt_frames(3, seed=9):
        counts = torch.tensor([(atoms.symbols == symbol).sum() for symbol in ("Cu", "Au")]).double()
        shift = float((model.out_bias[:2] - known) @ counts)
        energies = []
        for potential in (before, after):
            copied = atoms.copy()
            copied.calc = Calculator(potential)
            energies.append(copied.get_potential_energy())
        assert energies[1] - energies[0] == pytest.approx(shift, abs=1e-5)
    descriptor = run.info["model"]["descriptor"]
    for part in descriptor.get("list", [descriptor]):
        assert np.array(part["dstd"])[2, 0] != np.array(part["dstd"])[0, 0]
        assert (np.array(part["dstd"]) > 0).all()


def test_only_what_is_trainable_from_now_on_is_trained_and_a_run_resumes(tmp_path):
    first_run(tmp_path, "pairs")
    config = extra_outputs(tmp_path, descriptor={"trainable": False})
    run = train_only(config)
    again = train_only(config, "trainer.max_epochs=2")
    assert again.info["model"]["descriptor"]["trainable"] is False
    assert again.info["steps"] > run.info.get("steps", 0) - 1
    before, after = load(tmp_path / "runs" / "first", which="last").state_dict(), load(again, which="last").state_dict()
    name = "model.descriptor.networks.layers.0.w"
    assert torch.equal(after[name][[0, 1, 3, 4]], before[name])  # centre and neighbour of Cu, Au among Cu, Au, Ni
    assert not torch.equal(after["model.fitting.networks.layers.0.w"][:2], before["model.fitting.networks.layers.0.w"])


@pytest.mark.parametrize(
    ("descriptor", "model", "said"),
    [
        ({"sel": [60, 60]}, {}, "has slots for neighbours of its species only"),
        ({}, {"shifts": "keep"}, "shifts have to be fitted: set model.shifts=fit"),
    ],
)
def test_models_that_cannot_add_species_are_an_error(descriptor, model, said, tmp_path):
    first_run(tmp_path, "pairs", **descriptor)
    with pytest.raises(ForgefieldError, match=said):
        train_only(extra_outputs(tmp_path, **model))


def test_heads_are_made_for_the_species_of_their_run_and_new_ones_for_all(tmp_path):
    write_properties(tmp_path / "frames.extxyz", 14)
    first_run(tmp_path, "pairs")
    config = extra_outputs(tmp_path)
    frames = emt_frames(8, seed=1, symbols=("Cu", "Ni"))
    for atoms in frames:
        atoms.info["gap"] = 1.0 + atoms.get_volume() / len(atoms)
    ase.io.write(tmp_path / "nickel.extxyz", frames, format="extxyz")
    config["data"]["labels"] = {"fields": {"gap": PROPERTIES["gap"]}}
    config["task"] = {"energy": {}, "gap": {}}
    run = train_only(config)
    assert run.species == ("Cu", "Au", "Ni")
    assert len(run.heads["gap"]["shift"]) == 3
    with pytest.raises(ForgefieldError, match="it has heads in addition to its energy"):
        require_extensible(run.info["model"], ["Pd"], "run further")
