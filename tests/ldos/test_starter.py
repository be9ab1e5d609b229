"""`forgefield init` for snapshots: what it proposes trains, and what no file says is left to the user."""

from __future__ import annotations

import numpy as np
import pytest

from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.files import write_descriptors
from tests.support.snapshots import write_snapshot


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "be").mkdir()
    for number in range(3):
        write_snapshot(tmp_path / "be", f"s{number}", seed=number)
    return tmp_path / "be"


def test_the_proposal_trains_once_the_energies_are_set(folder, capsys):
    assert main(["init", "be"]) == 0
    assert "3 snapshots of 60 points; Be2; 6 descriptors, 7 levels." in capsys.readouterr().out
    with pytest.raises(
        ForgefieldError, match=r"be.yaml, line \d+: 'data.points.energies.first' must be an energy in eV"
    ):
        load_config("be.yaml")
    energies = ["data.points.energies.first=-4", "data.points.energies.spacing=2"]
    assert main(["init", "be", "--force", *energies, "training.lr=0.02"]) == 0
    config = load_config("be.yaml")
    assert config.data.points.energies == {"first": -4, "spacing": 2, "levels": 7}
    assert config.training.lr == 0.02
    assert [len(config.data.train), config.data.val] == [2, str(folder / "s2.in.npy")]
    assert config.data.points.descriptors is None  # those of the files are made up
    assert main(["train", "be.yaml", "trainer.max_epochs=1", "+trainer.accelerator=cpu", "training.tensorboard=0"]) == 0


@pytest.mark.parametrize("written", [True, False])
def test_descriptors_are_proposed_where_they_are_those_of_the_files(folder, written, monkeypatch, tmp_path):
    for number in range(3):
        inputs = folder / f"s{number}.in.npy"
        inputs.unlink()
        if written:
            write_descriptors(folder / f"s{number}.info.json", inputs, DescriptorOptions(twojmax=3))
    assert main(["init", "be", "data.points.energies.first=-4", "data.points.energies.spacing=2"]) == 0
    config = load_config("be.yaml")
    assert config.data.points.descriptors["twojmax"] == (3 if written else 10)
    assert config.data.train[0] == str(folder / ("s0.in.npy" if written else "s0.info.json"))


def test_descriptors_of_other_settings_are_not_claimed(folder):
    for number in range(3):
        inputs = folder / f"s{number}.in.npy"
        inputs.unlink()
        write_descriptors(folder / f"s{number}.info.json", inputs, DescriptorOptions(twojmax=3, cutoff=4.0))
        assert np.load(inputs).shape[-1] == 8
    assert main(["init", "be", "data.points.energies.first=-4", "data.points.energies.spacing=2"]) == 0
    assert load_config("be.yaml").data.points.descriptors is None
