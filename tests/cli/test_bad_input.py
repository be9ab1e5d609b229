"""Bad input, as a user meets it on the command line: one clear sentence, an exit code that is not 0, nothing lost."""

from __future__ import annotations

from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.cli import main
from tests.support.helpers import emt_frames, tiny_config


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(work: Path, **changes) -> str:
    (work / "my.yaml").write_text(yaml.safe_dump(tiny_config(work, **changes)))
    return str(work / "my.yaml")


def relabel(atoms: Atoms, **results) -> Atoms:
    old = dict(atoms.calc.results)
    atoms.calc = SinglePointCalculator(atoms, **{**old, **results})
    return atoms


def fails(capsys, *words: str) -> str:
    """The one line that the command ends with."""
    capsys.readouterr()
    assert main(list(words)) not in (0, None)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[0]


def save(work: Path, frames: list[Atoms]) -> None:
    ase.io.write(work / "frames.extxyz", frames, format="extxyz")


def test_empty_file(work, capsys):
    (work / "frames.extxyz").write_text("")
    message = fails(capsys, "train", write_config(work))
    assert "frames.extxyz" in message
    assert "empty" in message


def test_truncated_file(work, capsys):
    save(work, emt_frames(6, seed=0))
    text = (work / "frames.extxyz").read_text()
    (work / "frames.extxyz").write_text(text[: int(0.7 * len(text))])
    message = fails(capsys, "train", write_config(work))
    assert "frames.extxyz" in message
    assert "frame" in message


def test_nan_forces(work, capsys):
    frames = emt_frames(6, seed=0)
    forces = frames[3].get_forces()
    forces[1, 2] = np.nan
    save(work, [*frames[:3], relabel(frames[3], forces=forces), *frames[4:]])
    message = fails(capsys, "train", write_config(work))
    assert "frame 3" in message
    assert "forces" in message


def test_absurd_forces(work, capsys):
    frames = emt_frames(8, seed=0)
    forces = frames[2].get_forces()
    forces[0, 0] = 5e6
    relabel(frames[2], forces=forces)
    save(work, frames)
    message = fails(capsys, "train", write_config(work))
    assert "frame 2" in message
    assert "data.max_force" in message


def test_energies_in_mixed_units(work, capsys):
    frames = emt_frames(14, seed=0)
    for atoms in frames:
        relabel(atoms, energy=atoms.get_potential_energy() - 1000.0 * len(atoms))
    for atoms in frames[9:11]:
        relabel(atoms, energy=atoms.get_potential_energy() / 27.211386)
    save(work, frames)
    message = fails(capsys, "train", write_config(work))
    assert "data.max_energy_deviation" in message
    assert "unit" in message


def test_periodic_cell_without_volume(work, capsys):
    frames = emt_frames(5, seed=0)
    frames[4].cell[2] = frames[4].cell[0] + frames[4].cell[1]
    save(work, frames)
    message = fails(capsys, "train", write_config(work))
    assert "frame 4" in message
    assert "volume" in message


def test_unknown_element_at_test_time(work, capsys):
    assert main(["train", write_config(work)]) == 0
    save_as = work / "silver.extxyz"
    ase.io.write(save_as, emt_frames(2, seed=1, symbols=("Ag",)), format="extxyz")
    for words in (
        ["test", "runs/tiny", "--data", "silver.extxyz"],
        ["predict", "runs/tiny", "silver.extxyz", "-o", "o.xyz"],
    ):
        message = fails(capsys, *words)
        assert "Ag" in message
        assert "Cu" in message
    assert not (work / "o.xyz").exists()


def test_missing_files_and_runs(work, capsys):
    assert "nothing.yaml" in fails(capsys, "train", "nothing.yaml")
    assert "missing.extxyz" in fails(capsys, "train", write_config(work, data={"train": "missing.extxyz"}))
    assert "nowhere" in fails(capsys, "test", "nowhere", "--data", "frames.extxyz")


def test_misspelt_key_names_file_key_and_nearest(work, capsys):
    message = fails(capsys, "train", write_config(work, training={"learning_rat": 1.0}))
    assert "my.yaml" in message
    assert "training.learning_rat" in message
    message = fails(capsys, "train", write_config(work), "training.lrr=3")
    assert "training.lrr" in message
    assert "training.lr" in message


def test_a_run_that_failed_leaves_the_earlier_run_as_it_was(work, capsys):
    config = write_config(work)
    assert main(["train", config]) == 0
    before = {p.relative_to(work): p.read_bytes() for p in (work / "runs/tiny/checkpoints").iterdir()}
    message = fails(capsys, "train", config, "training.lr=0.5")
    assert "other settings" in message
    assert {p.relative_to(work): p.read_bytes() for p in (work / "runs/tiny/checkpoints").iterdir()} == before


def test_a_label_key_that_no_frame_has_is_an_error_also_where_labels_are_not_needed(work, capsys):
    assert main(["train", write_config(work)]) == 0
    for words in (
        ["predict", "runs/tiny", "frames.extxyz", "-o", "out.extxyz", "--force"],
        ["test", "runs/tiny", "--data", "frames.extxyz"],
    ):
        assert main(words) == 0
        message = fails(capsys, *words, "data.labels.energy=my_energy")
        assert "my_energy" in message


def test_options_of_models_are_refused_with_file_and_line(work, capsys):
    save(work, emt_frames(6, seed=0))
    path = work / "my.yaml"
    path.write_text("data: {train: frames.extxyz}\nmodel:\n  name: nequip\n  num_layer: 3\n")
    assert f"{path}, line 4: model.num_layer is not an option of this model. Did you mean 'num_layers'?" in fails(
        capsys, "train", str(path)
    )
    assert "command line ('model.l_max=x'): model.l_max is 'x'" in fails(
        capsys, "train", str(path), "~model.num_layer", "model.l_max=x"
    )
    assert f"{path}, line 4: model.num_layer" in fails(capsys, "train", str(path), "trainer.devices=2")
    path.write_text("data: {train: frames.extxyz}\nmodel:\n  name: nequp\n")
    assert f"{path}, line 3: model.name is 'nequp'" in fails(capsys, "train", str(path))


def test_options_of_other_models_are_not_suggested(work, capsys):
    save(work, emt_frames(6, seed=0))
    path = work / "my.yaml"
    path.write_text("data: {train: frames.extxyz}\nmodel: {name: mace, num_channels: 16}\n")
    assert fails(capsys, "train", str(path)).endswith("model.num_channels is not an option of this model.")
    path.write_text("data: {train: frames.extxyz}\nmodel: {name: nequip, num_channels: 16}\n")
    assert fails(capsys, "train", str(path)).endswith("Did you mean 'model.num_features'?")
