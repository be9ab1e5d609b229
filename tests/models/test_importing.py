"""Importing NequIP and Allegro models: weights land where they belong in every form of the file."""

import json
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch

from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.models.allegro.importer import read_allegro
from forgefield.models.importing import ImportedModel
from forgefield.models.nequip.importer import read_nequip
from forgefield.runs import Run
from tests.support import allegro_checkpoints, nequip_checkpoints
from tests.support.imported_models import outputs_of
from tests.support.structures import make_batch, make_frame


@dataclass(frozen=True)
class Program:
    """How to write and read the checkpoints of a program."""

    name: str
    files: ModuleType
    fixed: tuple[str, ...]
    """Endings of the names of tensors that are not averaged."""
    removed: tuple[str, str]
    """A weight, and what Forgefield calls it."""
    foreign: str
    """The name of a weight that the model does not have."""
    origin: str

    def read(self, path, weights: str = "ema") -> ImportedModel:
        return (read_nequip if self.name == "nequip" else read_allegro)(path, weights=weights)


@pytest.fixture(params=["nequip", "allegro"])
def program(request) -> Program:
    fixed = ("_rmax_recip", "bessel_weights", "scales", "atomic_numbers")
    if request.param == "nequip":
        removed = ("model.func.layer1_convnet.conv.sc.weight", "self_connection")
        foreign, fixed = "layer0_convnet.conv.extra.weight", (*fixed, "bias", "output_mask", "tp.weight")
        return Program("nequip", nequip_checkpoints, fixed, removed, foreign, "0.19.1")
    removed = ("model.func.allegro.tps.1.weights", r"couplings\.1\.weight")
    return Program("allegro", allegro_checkpoints, (*fixed, "w3j"), removed, "allegro.extra.weight", "Allegro 0.8.3")


@pytest.fixture
def batch():
    return make_batch(make_frame(6, seed=1))


def test_a_checkpoint_predicts_as_the_model_it_was_made_from(tmp_path, program, batch):
    potential, tensors = program.files.trained_elsewhere()
    torch.save(program.files.checkpoint(tensors), tmp_path / "best.ckpt")
    imported = program.read(tmp_path / "best.ckpt")
    expected, outputs = potential.eval()(batch), outputs_of(imported)
    assert torch.equal(outputs["energy"], expected["energy"])
    assert torch.equal(outputs["forces"], expected["forces"])
    assert imported.precision == "float64"
    assert program.origin in imported.origin


@pytest.mark.parametrize("average_is_separate", [True, False])
def test_averaged_weights_are_taken_from_where_the_checkpoint_holds_them(tmp_path, program, batch, average_is_separate):
    (average, a), (last, b) = program.files.trained_elsewhere(seed=1), program.files.trained_elsewhere(seed=2)
    inside, separate = (b, a) if average_is_separate else (a, b)
    averaged = [value for key, value in separate.items() if not key.endswith(program.fixed)]
    more = {f"ema.ema_weight_{i}": value for i, value in enumerate(averaged)}
    more["ema._extra_state"] = {"decay": 0.9, "is_holding_ema_weights": average_is_separate}
    torch.save(program.files.checkpoint(inside, **more), tmp_path / "best.ckpt")
    for weights, model in (("ema", average), ("raw", last)):
        outputs = outputs_of(program.read(tmp_path / "best.ckpt", weights=weights))
        assert torch.equal(outputs["energy"], model(batch)["energy"])


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_a_state_dict_with_options_next_to_it(tmp_path, program, batch, suffix):
    potential, tensors = program.files.trained_elsewhere()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(tensors, path)
    else:
        np.savez(path, **{key: value.numpy() for key, value in tensors.items()})
    with pytest.raises(ForgefieldError, match=r"model section.*weights\.json"):
        program.read(path)
    path.with_suffix(".json").write_text(json.dumps({"model": program.files.THEIR_OPTIONS}))
    assert torch.equal(outputs_of(program.read(path))["energy"], potential.eval()(batch)["energy"])


def test_missing_and_foreign_weights_are_named(tmp_path, program):
    _, tensors = program.files.trained_elsewhere()
    more = {**tensors, f"model.func.{program.foreign}": torch.ones(2)}
    torch.save(program.files.checkpoint(more), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match=program.foreign.replace(".", r"\.")):
        program.read(tmp_path / "x.ckpt")
    weight, name = program.removed
    del tensors[weight]
    torch.save(program.files.checkpoint(tensors), tmp_path / "x.ckpt")
    with pytest.raises(ForgefieldError, match=f"does not contain.*{name}"):
        program.read(tmp_path / "x.ckpt")


def test_the_command_makes_a_run_that_predicts_the_same(tmp_path, program, batch, capsys):
    potential, tensors = program.files.trained_elsewhere()
    torch.save(program.files.checkpoint(tensors), tmp_path / "best.ckpt")
    out = str(tmp_path / "runs")
    command = ["import", program.name, str(tmp_path / "best.ckpt"), "--name", "water", "--out", out]
    assert main(command) == 0
    assert "water" in capsys.readouterr().out
    run = Run.open("water", out=out)
    assert torch.equal(run.load_potential()(batch)["energy"], potential.eval()(batch)["energy"])
    assert main(command) == 2, "the run exists"
