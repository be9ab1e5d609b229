"""Importing NequIP models: foreign code never runs, what cannot be kept is refused. Common tests are in
tests/models/test_importing.py."""

import collections
import os
import pickle
import zipfile
from pathlib import PurePosixPath

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models.nequip.importer import read_nequip
from forgefield.untrusted.torch_files import Foreign, read_torch_file
from tests.support.imported_models import outputs_of
from tests.support.nequip_checkpoints import THEIR_OPTIONS, checkpoint, trained_elsewhere
from tests.support.structures import make_batch, make_frame


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
    assert torch.equal(outputs_of(read_nequip(tmp_path / "bad.ckpt"))["energy"], expected)
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
