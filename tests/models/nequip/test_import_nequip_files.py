"""Checkpoints that NequIP and Allegro wrote (`tests/support/nequip_files.py`) predict here what they predict there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forgefield.cli import main
from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.models import build_model
from forgefield.models.allegro.importer import read_allegro
from forgefield.models.importing import ImportedModel
from forgefield.models.nequip.importer import read_nequip
from tests.support.structures import make_batch

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.stem for path in FILES.glob("*.ckpt"))
SWAPPED = FILES / "nequip_scales_to_shifts.ckpt"


def read(path: Path) -> ImportedModel:
    return read_allegro(path) if path.name.startswith("allegro") else read_nequip(path)


@pytest.mark.parametrize("name", NAMES)
def test_energies_and_forces_are_those_of_the_program_that_wrote_the_file(name):
    imported = read(FILES / f"{name}.ckpt")
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    expected = np.load(FILES / f"{name}.npz")
    labels = {"energy": None, "forces": None, "stress": None}
    frame = Frame(expected["positions"], expected["numbers"], 4.0 * np.eye(3), np.ones(3, bool), **labels)
    found = potential.eval()(make_batch(frame))
    tolerance = 1e-11 if imported.precision == "float64" else 1e-5
    assert float(found["energy"].detach()) == pytest.approx(float(expected["energy"]), abs=tolerance)
    np.testing.assert_allclose(found["forces"].detach().numpy(), expected["forces"], rtol=0, atol=tolerance)


def changed(tmp_path: Path, change) -> Path:
    """A copy of a checkpoint of NequIP after `change(checkpoint)`."""
    content = torch.load(SWAPPED, weights_only=True)
    change(content)
    torch.save(content, tmp_path / "nequip.ckpt")
    return tmp_path / "nequip.ckpt"


def set_modifier(content, **arguments):
    (modifier,) = content["hyper_parameters"]["model"]["modifiers"]
    modifier.update(arguments)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: set_modifier(c, modifier="enable_Surprise"), "modifier enable_Surprise"),
        (lambda c: set_modifier(c, surprise=1), "argument surprise"),
        (lambda c: set_modifier(c, shifts_trainable=False), "has 12 averaged weights, and by its options 11 tensors"),
        (lambda c: c["state_dict"].update({"ema.ema_weight_11": torch.ones(3, 1)}), r"scale_shift\.shifts has shape"),
        (
            lambda c: c["hyper_parameters"]["model"]["model"].update(r_max=3.5),
            "cutoff of 3 A, but r_max is 3.5",
        ),
        (
            # The wrong one of two tensors of one shape is taken for the trained one.
            lambda c: set_modifier(c, shifts_trainable=False, scales_trainable=True, shifts={"H": -13.0}),
            r"shifts is -13\.6, -75, but constant in the options, -13, -75",
        ),
        (
            lambda c: c["state_dict"]["model.sole_model.model.func.bessel_encode.bessel_weights"].mul_(1.1),
            "bessel_trainable: true",
        ),
    ],
)
def test_options_and_weights_that_contradict_each_other_are_refused(tmp_path, change, sentence):
    with pytest.raises(ForgefieldError, match=sentence):
        read_nequip(changed(tmp_path, change))


def test_modifiers_that_change_no_weight_are_accepted(tmp_path):
    def accelerate(content):
        content["hyper_parameters"]["model"]["modifiers"].append({"modifier": "enable_OpenEquivariance"})

    expected, found = read_nequip(SWAPPED).state, read_nequip(changed(tmp_path, accelerate)).state
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_command_reports_what_was_checked(tmp_path, capsys):
    assert main(["import", "nequip", str(SWAPPED), "--name", "water", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "no weight is missing" in shown
    assert "the cutoff, Bessel frequencies, energy scales agree with the options" in shown
    assert "no predictions to compare with" in shown
