"""Importing NequIP models: weights land where they belong, foreign code never runs, what cannot be kept is refused."""

import collections
import json
import os
import pickle
import zipfile
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch

from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.models import build_model
from forgefield.models.nequip.importer import read_nequip
from forgefield.untrusted.safe_pickle import Foreign, read_torch_file
from tests.support.nequip_checkpoints import THEIR_OPTIONS, checkpoint, trained_elsewhere
from tests.support.structures import make_batch, make_frame


def energies(imported):
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    return potential.eval()(make_batch(make_frame(6, seed=1)))


def test_a_checkpoint_predicts_as_the_model_it_was_made_from(tmp_path):
    potential, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors), tmp_path / "best.ckpt")
    imported = read_nequip(tmp_path / "best.ckpt")
    expected = potential.eval()(make_batch(make_frame(6, seed=1)))
    got = energies(imported)
    assert torch.equal(got["energy"], expected["energy"])
    assert torch.equal(got["forces"], expected["forces"])
    assert imported.precision == "float64"
    assert "0.19.1" in imported.origin


@pytest.mark.parametrize("average_is_apart", [True, False])
def test_averaged_weights_are_taken_from_where_the_checkpoint_holds_them(tmp_path, average_is_apart):
    (average, a), (last, b) = trained_elsewhere(seed=1), trained_elsewhere(seed=2)
    inside, apart = (b, a) if average_is_apart else (a, b)
    fixed = ("_rmax_recip", "bias", "output_mask", "tp.weight", "bessel_weights", "scales", "atomic_numbers")
    learnt = [value for key, value in apart.items() if not key.endswith(fixed)]
    more = {f"ema.ema_weight_{i}": value for i, value in enumerate(learnt)}
    more["ema._extra_state"] = {"decay": 0.9, "is_holding_ema_weights": average_is_apart}
    torch.save(checkpoint(inside, **more), tmp_path / "best.ckpt")
    batch = make_batch(make_frame(6, seed=1))
    for weights, model in (("ema", average), ("raw", last)):
        got = energies(read_nequip(tmp_path / "best.ckpt", weights=weights))
        assert torch.equal(got["energy"], model(batch)["energy"])


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_a_state_dict_with_options_next_to_it(tmp_path, suffix):
    potential, tensors = trained_elsewhere()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(tensors, path)
    else:
        np.savez(path, **{key: value.numpy() for key, value in tensors.items()})
    with pytest.raises(ForgefieldError, match=r"weights\.json"):
        read_nequip(path)
    path.with_suffix(".json").write_text(json.dumps({"model": THEIR_OPTIONS}))
    expected = potential.eval()(make_batch(make_frame(6, seed=1)))["energy"]
    assert torch.equal(energies(read_nequip(path))["energy"], expected)


class Bomb:
    """Pickles as a call that would make a folder when loaded."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.makedirs, (self.target,)


def test_code_in_a_checkpoint_never_runs(tmp_path):
    potential, tensors = trained_elsewhere()
    content = checkpoint(tensors)
    content["callbacks"] = {
        "bomb": Bomb(tmp_path / "exploded"),
        "path": PurePosixPath("a/b"),
        "counter": collections.Counter("abc"),
        "default": collections.defaultdict(list, {1: [2]}),
        "set": {1, 2},
    }
    torch.save(content, tmp_path / "bad.ckpt")
    read = read_torch_file(tmp_path / "bad.ckpt")
    assert not (tmp_path / "exploded").exists()
    assert isinstance(read["callbacks"]["bomb"], Foreign)
    expected = potential.eval()(make_batch(make_frame(6, seed=1)))["energy"]
    assert torch.equal(energies(read_nequip(tmp_path / "bad.ckpt"))["energy"], expected)
    assert not (tmp_path / "exploded").exists()
    torch.load(tmp_path / "bad.ckpt", weights_only=False)
    assert (tmp_path / "exploded").exists(), "the test's own bomb must be a live one"


def test_an_object_of_an_unknown_class_among_the_options_is_refused(tmp_path):
    _, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors, {**THEIR_OPTIONS, "num_layers": Bomb(tmp_path / "x")}), tmp_path / "bad.ckpt")
    with pytest.raises(ForgefieldError, match="num_layers"):
        read_nequip(tmp_path / "bad.ckpt")
    assert not (tmp_path / "x").exists()


def test_tensors_of_every_layout_are_read_as_they_were_saved(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "slice": base[1:3, ::2],
        "transposed": base.T,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    torch.save(saved, tmp_path / "x.pt")
    read = read_torch_file(tmp_path / "x.pt")
    for key, value in saved.items():
        assert read[key].dtype == value.dtype
        assert torch.equal(read[key], value.detach()), key


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"_target_": "allegro.model.AllegroModel"}, "AllegroModel"),
        ({"learnable_shift": True}, "learnable_shift"),
        ({"surprise": 1}, "surprise"),
        ({"type_names": ["H", "Water"]}, "Water"),
        ({"pair_potential": {"_target_": "nequip.nn.pair_potential.LennardJones"}}, "ZBL"),
        ({"num_layers": 3}, "numbers"),
        ({"num_features": 5}, "numbers"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path, change, word):
    _, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors, {**THEIR_OPTIONS, **change}), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match=word):
        read_nequip(tmp_path / "x.ckpt")


def test_missing_weights_are_named(tmp_path):
    _, tensors = trained_elsewhere()
    del tensors["model.func.layer1_convnet.conv.sc.weight"]
    torch.save(checkpoint(tensors), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match=r"does not contain.*self_connection"):
        read_nequip(tmp_path / "x.ckpt")


def test_weights_without_a_counterpart_are_refused(tmp_path):
    _, tensors = trained_elsewhere()
    tensors["model.func.layer0_convnet.conv.extra.weight"] = torch.ones(2)
    torch.save(checkpoint(tensors), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match="extra"):
        read_nequip(tmp_path / "x.ckpt")


@pytest.mark.parametrize("kind", ["missing", "text", "truncated", "plain pickle", "other zip"])
def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path, kind):
    path = tmp_path / "x.ckpt"
    if kind == "text":
        path.write_text("hello")
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    elif kind == "other zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "b")
    elif kind == "truncated":
        torch.save({"a": torch.ones(100)}, path)
        path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ForgefieldError, match=r"x\.ckpt"):
        read_nequip(path)
    assert not (tmp_path / "exploded").exists()


def test_the_command_makes_a_run_that_predicts_the_same(tmp_path, capsys):
    from forgefield.runs import Run

    potential, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors), tmp_path / "best.ckpt")
    out = str(tmp_path / "runs")
    assert main(["import", "nequip", str(tmp_path / "best.ckpt"), "--name", "water", "--out", out]) == 0
    assert "water" in capsys.readouterr().out
    run = Run.open("water", out=out)
    batch = make_batch(make_frame(6, seed=1))
    assert torch.equal(run.load_potential()(batch)["energy"], potential.eval()(batch)["energy"])
    assert main(["import", "nequip", str(tmp_path / "best.ckpt"), "--name", "water", "--out", out]) == 2
