"""Importing Allegro models: options, forms of the embedding, refusals. Common tests are in tests/models/test_importing.py."""

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models.allegro.importer import read_allegro
from forgefield.models.nequip.importer import read_nequip
from tests.support.allegro_checkpoints import SPLINES, THEIR_OPTIONS, checkpoint, trained_elsewhere
from tests.support.imported_models import outputs_of
from tests.support.structures import make_batch, make_frame


@pytest.mark.parametrize("spline", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_predicts_as_the_model_it_was_made_from(tmp_path, spline, wrapped):
    potential, tensors = trained_elsewhere(spline=spline)
    options = THEIR_OPTIONS | ({"radial_chemical_embed": SPLINES} if spline else {})
    options = {"_target_": "nequip.model.modify", "modifiers": [], "model": options} if wrapped else options
    torch.save(checkpoint(tensors, options), tmp_path / "best.ckpt")
    imported = read_allegro(tmp_path / "best.ckpt")
    expected, got = potential.eval()(make_batch(make_frame(6, seed=1))), outputs_of(imported)
    assert torch.equal(got["energy"], expected["energy"])
    assert torch.equal(got["forces"], expected["forces"])
    assert imported.precision == "float64"
    assert "Allegro 0.8.3" in imported.origin


def test_scales_and_shifts_that_are_not_there_are_one_and_zero(tmp_path):
    _, tensors = trained_elsewhere()
    for name in ("scales", "shifts"):
        tensors[f"model.func.per_type_energy_scale_shift.{name}"] = torch.empty(0)
    absent = ("per_type_energy_scales", "per_type_energy_shifts", "per_type_energy_shifts_trainable")
    options = {key: value for key, value in THEIR_OPTIONS.items() if key not in absent}
    torch.save(checkpoint(tensors, options), tmp_path / "x.ckpt")
    imported = read_allegro(tmp_path / "x.ckpt")
    assert imported.state["model.energy_scales"].tolist() == [1.0, 1.0]
    assert imported.state["model.energy_shifts"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"_target_": "allegro.model.FullAllegroModel"}, "FullAllegroModel"),
        ({"_target_": "nequip.model.NequIPGNNModel"}, "NequIPGNNModel"),
        ({"radial_chemical_embed": {"_target_": "mine.Embed"}}, "Embed"),
        ({"radial_chemical_embed": {**SPLINES, "_target_": "allegro.nn.TwoBodyBesselScalarEmbed"}}, "num_splines"),
        ({"allegro_mlp_nonlinearity": "sigmoid"}, "allegro_mlp_nonlinearity"),
        ({"surprise": 1}, "surprise"),
        ({"type_names": ["H", "Water"]}, "Water"),
        ({"pair_potential": {"_target_": "nequip.nn.pair_potential.LennardJones"}}, "ZBL"),
        ({"num_layers": 3}, "numbers"),
        ({"num_tensor_features": 5}, "numbers"),
        ({"radial_chemical_embed": SPLINES}, "has no weight"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path, change, word):
    _, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors, {**THEIR_OPTIONS, **change}), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match=word):
        read_allegro(tmp_path / "x.ckpt")


def test_the_other_architecture_is_named(tmp_path):
    _, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match="does not contain a model of NequIP"):
        read_nequip(tmp_path / "x.ckpt")
