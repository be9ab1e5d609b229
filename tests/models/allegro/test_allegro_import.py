"""Importing Allegro models: weights land where they belong in every form, what cannot be kept is refused."""

import collections
import json

import numpy as np
import pytest
import torch

from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.models import build_model
from forgefield.models.allegro.importer import read_allegro
from forgefield.models.nequip.importer import read_nequip
from forgefield.runs import Run
from tests.support.allegro_models import potential_of
from tests.support.structures import make_batch, make_frame

THEIR_OPTIONS = {
    "_target_": "allegro.model.AllegroModel",
    "seed": 3,
    "model_dtype": "float64",
    "type_names": ["H", "O"],
    "r_max": 3.0,
    "l_max": 1,
    "num_layers": 2,
    "num_scalar_features": 6,
    "num_tensor_features": 3,
    "radial_chemical_embed": {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 5},
    "scalar_embed_mlp_hidden_layers_depth": 1,
    "scalar_embed_mlp_hidden_layers_width": 8,
    "scalar_embed_mlp_nonlinearity": "silu",
    "allegro_mlp_hidden_layers_depth": 1,
    "allegro_mlp_hidden_layers_width": 5,
    "allegro_mlp_nonlinearity": "silu",
    "readout_mlp_hidden_layers_depth": 1,
    "readout_mlp_hidden_layers_width": 4,
    "readout_mlp_nonlinearity": "silu",
    "tp_path_channel_coupling": True,
    "avg_num_neighbors": {"H": 7.0, "O": 8.0},
    "per_type_energy_scales": 1.3,
    "per_type_energy_shifts": {"H": -13.6, "O": -75.0},
    "per_type_energy_shifts_trainable": True,
    "per_edge_type_cutoff": {"H": 2.5},
    "pair_potential": {"_target_": "nequip.nn.pair_potential.ZBL", "units": "metal", "chemical_species": ["H", "O"]},
}
OUR_OPTIONS = {
    "num_bessels": 5,
    "avg_num_neighbours": {"H": 7.0, "O": 8.0},
    "energy_shifts": {"H": -13.6, "O": -75.0},
    "energy_shifts_trainable": True,
    "per_edge_type_cutoff": {"H": 2.5},
    "zbl": True,
}
SPLINES = {"_target_": "allegro.nn.TwoBodySplineScalarEmbed", "num_splines": 6, "spline_span": 4}


def by_channel(weight: torch.Tensor, first: int, channels: int) -> torch.Tensor:
    """Columns from `first` on by channel, then degree, as Allegro has them."""
    tail = weight[:, first:].reshape(len(weight), -1, channels).transpose(1, 2).reshape(len(weight), -1)
    return torch.cat([weight[:, :first], tail], 1)


def trained_elsewhere(seed: int = 7, spline: bool = False):
    """A model of ours, and its weights under the names and in the order that Allegro 0.8 gives them."""
    options = {key: value for key, value in OUR_OPTIONS.items() if not spline or key != "num_bessels"}
    options |= {"radial_chemical_embed": "spline", "num_splines": 6, "spline_span": 4} if spline else {}
    potential = potential_of(seed=seed, **options)
    model, scalars, channels = potential.model, 6, 3
    theirs = collections.OrderedDict()
    theirs["edge_norm._rmax_recip"] = torch.ones(4)
    embed = "radial_chemical_embed"
    if spline:
        theirs[f"{embed}.spline.lower"] = theirs[f"{embed}.spline.upper"] = torch.zeros(6)
        theirs[f"{embed}.spline.class_embed.weight"] = model.splines.transpose(1, 2).flatten(1)
    else:
        theirs[f"{embed}.bessel_encode.bessel_weights"] = model.bessel_frequencies.view(1, -1)
        theirs[f"{embed}.type_embed.center_embed.weight"] = model.centre_embedding
        theirs[f"{embed}.type_embed.neighbor_embed.weight"] = model.neighbour_embedding
        theirs[f"{embed}.type_embed.basis_linear.mlp.0.weight"] = model.radial.weights[0]
    for depth, weight in enumerate(model.scalar_embed.weights):
        theirs[f"scalar_embed_mlp.mlp_module.mlp.{2 * depth}.weight"] = weight
    theirs["tensor_embed.env_embed_linear.mlp.0.weight"] = by_channel(model.tensor_weights.weights[0], 0, channels)
    projection = by_channel(model.first_projection.weights[0], scalars, channels)
    theirs["allegro.first_layer_env_embed_projection.mlp.0.weight"] = projection
    for number, latent in enumerate(model.latents):
        theirs[f"allegro.latents.{number}.mlp.0.weight"] = latent.weights[0]
        last = by_channel(latent.weights[1], scalars, channels) if number == 0 else latent.weights[1]
        theirs[f"allegro.latents.{number}.mlp.2.weight"] = last
    for number, coupling in enumerate(model.couplings):
        theirs[f"allegro.tps.{number}.weights"] = coupling.weight.T
        theirs[f"allegro.tps.{number}.w3j"] = torch.ones(3)
    for depth, weight in enumerate(model.readout.weights):
        theirs[f"edge_readout.mlp_module.mlp.{2 * depth}.weight"] = weight
    theirs["per_type_energy_scale_shift.shifts"] = model.energy_shifts.view(-1, 1)
    theirs["per_type_energy_scale_shift.scales"] = model.energy_scales[:1].view(1, 1)
    theirs["pair_potential.atomic_numbers"] = torch.tensor([1.0, 8.0])
    return potential, collections.OrderedDict((f"model.func.{key}", value.detach()) for key, value in theirs.items())


def checkpoint(tensors, options=THEIR_OPTIONS, **more):
    state = collections.OrderedDict((f"model.sole_model.{key}", value) for key, value in tensors.items())
    hyper = {"model": options, "info_dict": {"versions": {"nequip": "0.19.1", "allegro": "0.8.3"}}}
    return {"state_dict": state | more, "hyper_parameters": hyper}


def energies(imported):
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    return potential.eval()(make_batch(make_frame(6, seed=1)))


@pytest.mark.parametrize("spline", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_predicts_as_the_model_it_was_made_from(tmp_path, spline, wrapped):
    potential, tensors = trained_elsewhere(spline=spline)
    options = THEIR_OPTIONS | ({"radial_chemical_embed": SPLINES} if spline else {})
    options = {"_target_": "nequip.model.modify", "modifiers": [], "model": options} if wrapped else options
    torch.save(checkpoint(tensors, options), tmp_path / "best.ckpt")
    imported = read_allegro(tmp_path / "best.ckpt")
    expected, got = potential.eval()(make_batch(make_frame(6, seed=1))), energies(imported)
    assert torch.equal(got["energy"], expected["energy"])
    assert torch.equal(got["forces"], expected["forces"])
    assert imported.precision == "float64"
    assert "Allegro 0.8.3" in imported.origin


@pytest.mark.parametrize("average_is_apart", [True, False])
def test_averaged_weights_are_taken_from_where_the_checkpoint_holds_them(tmp_path, average_is_apart):
    (average, a), (last, b) = trained_elsewhere(seed=1), trained_elsewhere(seed=2)
    inside, apart = (b, a) if average_is_apart else (a, b)
    fixed = ("_rmax_recip", "bessel_weights", "w3j", "scales", "atomic_numbers")
    learnt = [value for key, value in apart.items() if not key.endswith(fixed)]
    more = {f"ema.ema_weight_{i}": value for i, value in enumerate(learnt)}
    more["ema._extra_state"] = {"decay": 0.9, "is_holding_ema_weights": average_is_apart}
    torch.save(checkpoint(inside, **more), tmp_path / "best.ckpt")
    batch = make_batch(make_frame(6, seed=1))
    for weights, model in (("ema", average), ("raw", last)):
        got = energies(read_allegro(tmp_path / "best.ckpt", weights=weights))
        assert torch.equal(got["energy"], model(batch)["energy"])


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_a_state_dict_with_options_next_to_it(tmp_path, suffix):
    potential, tensors = trained_elsewhere()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(tensors, path)
    else:
        np.savez(path, **{key: value.numpy() for key, value in tensors.items()})
    with pytest.raises(ForgefieldError, match=r"Allegro's model section.*weights\.json"):
        read_allegro(path)
    path.with_suffix(".json").write_text(json.dumps({"model": THEIR_OPTIONS}))
    expected = potential.eval()(make_batch(make_frame(6, seed=1)))["energy"]
    assert torch.equal(energies(read_allegro(path))["energy"], expected)


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


def test_missing_and_foreign_weights_are_named(tmp_path):
    _, tensors = trained_elsewhere()
    torch.save(checkpoint({**tensors, "model.func.allegro.extra.weight": torch.ones(2)}), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match=r"allegro\.extra\.weight"):
        read_allegro(tmp_path / "x.ckpt")
    del tensors["model.func.allegro.tps.1.weights"]
    torch.save(checkpoint(tensors), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match=r"does not contain.*couplings\.1\.weight"):
        read_allegro(tmp_path / "x.ckpt")


def test_the_other_architecture_is_named(tmp_path):
    _, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match="does not contain a NequIP model"):
        read_nequip(tmp_path / "x.ckpt")


def test_the_command_makes_a_run_that_predicts_the_same(tmp_path, capsys):
    potential, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors), tmp_path / "best.ckpt")
    out = str(tmp_path / "runs")
    assert main(["import", "allegro", str(tmp_path / "best.ckpt"), "--name", "water", "--out", out]) == 0
    assert "water" in capsys.readouterr().out
    batch = make_batch(make_frame(6, seed=1))
    run = Run.open("water", out=out)
    assert torch.equal(run.load_potential()(batch)["energy"], potential.eval()(batch)["energy"])
