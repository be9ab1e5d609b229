"""Checkpoints for NequIP and Allegro: what they wrote, imported and exported, has the same state, which is what they load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models import build_model
from forgefield.models.allegro.exporter import write_allegro
from forgefield.models.allegro.importer import read_allegro
from forgefield.models.nequip.exporter import write_nequip
from forgefield.models.nequip.importer import read_nequip
from forgefield.models.potential import Potential
from tests.support.imported_models import outputs_of
from tests.support.structures import make_batch, make_frame, make_potential

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.stem for path in FILES.glob("*.ckpt"))
ROOT = "model.sole_model.model."
PROGRAMS = {"allegro": (read_allegro, write_allegro), "nequip": (read_nequip, write_nequip)}


def state_of(path: Path) -> dict[str, torch.Tensor]:
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if name.startswith(ROOT)}


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_and_exported_model_has_the_state_that_its_program_wrote(name, tmp_path):
    read, write = PROGRAMS[name.split("_")[0]]
    imported = read(FILES / f"{name}.ckpt", weights="raw")
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    written = state_of(write(potential, tmp_path / "x.ckpt"))
    expected = state_of(FILES / f"{name}.ckpt")
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert written[key].dtype == value.dtype, key
        assert torch.equal(written[key], value), key

    again = read(tmp_path / "x.ckpt")
    assert again.resolved["zbl"] == imported.resolved["zbl"]
    first, second = outputs_of(imported), outputs_of(again)
    assert all(torch.equal(first[key], second[key]) for key in ("energy", "forces"))


def test_trained_shifts_are_exported_instead_of_those_before_the_training(tmp_path):
    potential = make_potential(energy_shifts_trainable=True, energy_shifts={"H": -13.6, "O": -75.0})
    with torch.no_grad():
        potential.model.energy_shifts += 1.5
    write_nequip(potential, tmp_path / "x.ckpt")
    settings = torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]["model"]
    assert settings["per_type_energy_shifts"] == {"H": -12.1, "O": -73.5}
    batch = make_batch(make_frame(6, seed=1))
    assert torch.equal(outputs_of(read_nequip(tmp_path / "x.ckpt"))["energy"], potential.eval()(batch)["energy"])


def test_what_the_programs_do_not_support_is_refused(tmp_path):
    potential = make_potential()
    with pytest.raises(ForgefieldError, match="--sel is an option of --to deepmd"):
        write_nequip(potential, tmp_path / "x.ckpt", sel=[4])
    with pytest.raises(ForgefieldError, match=r"x\.pt: checkpoints of nequip end in \.ckpt"):
        write_nequip(potential, tmp_path / "x.pt")
    with pytest.raises(
        ForgefieldError, match="a NequIP cannot be exported to allegro, only a model with model.name=allegro"
    ):
        write_allegro(potential, tmp_path / "x.ckpt")
    potential.model.adaptive_cutoff = 8.0
    with pytest.raises(ForgefieldError, match="adaptive cutoff"):
        write_nequip(Potential(potential.model), tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())
