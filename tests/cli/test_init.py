"""`forgefield init`: a config for the user's data that loads and says what was found."""

import math
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.data.starter import DataFacts, describe, propose_cutoff, propose_split, starter_config

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labelled(atoms: Atoms, seed: int, *, scale: float = 1.0, **more) -> Atoms:
    random = np.random.default_rng(seed)
    forces = scale * random.standard_normal((len(atoms), 3))
    atoms.calc = SinglePointCalculator(atoms, energy=-3.0 * len(atoms), forces=forces, **more)
    return atoms


@pytest.fixture
def alloys(folder):
    """30 frames: 20 of 4 atoms (Cu3Au) and 10 of 8 atoms (Cu)."""
    frames = []
    for seed in range(30):
        atoms = bulk("Cu", cubic=True) * ((1, 1, 1) if seed < 20 else (2, 1, 1))
        if seed < 20:
            atoms.symbols[0] = "Au"
        frames.append(labelled(atoms, seed))
    write("alloys.extxyz", frames, format="extxyz")
    return folder / "alloys.extxyz"


def test_the_config_describes_the_data_and_loads(alloys, capsys):
    assert main(["init", "alloys.extxyz"]) == 0
    text = Path("alloys.yaml").read_text()
    assert "# 30 frames of 4-8 atoms; Cu 140, Au 20; labels: energy in all, forces in all." in text
    assert "train with: forgefield train alloys.yaml" in capsys.readouterr().out
    config = load_config("alloys.yaml")
    assert config.name == "alloys"
    assert config.data.train == str(alloys)
    assert config.data.species == ["Cu", "Au"]
    assert config.data.val == 0.1
    assert config.task.forces is not None
    assert config.task.stress is None
    # About 5000 steps with the 27 frames that are left to train on, but no more than 1000 epochs.
    steps = math.ceil(27 / config.data.batch.frames)
    assert config.trainer["max_epochs"] == min(1000, math.ceil(5000 / steps))
    assert f"# {steps} batches make an epoch; {config.trainer['max_epochs'] * steps} optimiser steps in all." in text


def test_the_length_of_an_epoch_accounts_for_settings_of_the_user(alloys):
    write("test.extxyz", labelled(bulk("Cu", cubic=True), 0), format="extxyz")
    assert main(["init", "alloys.extxyz", "data.val=6", "data.test=test.extxyz", "data.batch.frames=3"]) == 0
    text = Path("alloys.yaml").read_text()
    assert "  test: test.extxyz\n" in text  # as it was given, not an absolute path
    assert "# 8 batches make an epoch;" in text


def test_neighbours_are_counted_as_a_slow_oracle_counts_them(alloys):
    from ase.io import read
    from ase.neighborlist import neighbor_list

    from forgefield.data.readers import read_frames
    from forgefield.data.starter import survey

    facts = survey(read_frames("alloys.extxyz"), ["alloys.extxyz"])
    images = read("alloys.extxyz", ":")
    for cutoff, mean in facts.mean_neighbours.items():
        edges = sum(len(neighbor_list("i", atoms, cutoff)) for atoms in images)
        assert mean == pytest.approx(edges / sum(map(len, images)), rel=1e-12)


def test_an_existing_config_is_kept_unless_forced(alloys, capsys):
    Path("alloys.yaml").write_text("mine")
    assert main(["init", "alloys.extxyz"]) == 2
    assert "alloys.yaml exists already; --force overwrites it" in capsys.readouterr().err
    assert Path("alloys.yaml").read_text() == "mine"
    assert main(["init", "alloys.extxyz", "--force"]) == 0
    assert load_config("alloys.yaml").name == "alloys"


def test_output_name_and_settings_of_the_user(alloys, folder):
    (folder / "configs").mkdir()
    words = ["init", "alloys.extxyz", "-o", "configs/a.yaml", "--name", "gold", "data.cutoff=4.2", "training.lr=1e-3"]
    assert main(words) == 0
    config = load_config("configs/a.yaml")
    assert (config.name, config.data.cutoff, config.training.lr) == ("gold", 4.2, 1e-3)
    assert config.data.train == str(alloys)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gone.extxyz"], "gone.extxyz"),
        (["alloys.extxyz", "-o", "a.txt"], "a.txt: a config ends in .yaml"),
        (["alloys.extxyz", "-o", "nowhere/a.yaml"], "there is no folder nowhere"),
        (["data.cutoff=3"], "name the data to write a config for"),
        (["alloys.extxyz", "data.cutof=3"], "unknown key 'data.cutof'. Did you mean 'data.cutoff'?"),
    ],
)
def test_mistakes_are_reported_and_nothing_is_written(alloys, folder, capsys, words, sentence):
    assert main(["init", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(folder.rglob("*.yaml"))


def test_data_without_labels_is_reported(folder, capsys):
    write("bare.extxyz", [bulk("Cu")], format="extxyz")
    assert main(["init", "bare.extxyz"]) == 2
    assert "no frame has energy, forces or stress" in capsys.readouterr().err


def property_frames(n=30):
    random = np.random.default_rng(0)
    frames = []
    for number in range(n):
        atoms = bulk("Cu", cubic=True)
        atoms.info |= {"band-gap": random.random(), "phase": number % 3, "step": number, "method": 2.0}
        atoms.arrays["charge"] = random.normal(size=4)
        atoms.arrays["moment"] = random.normal(size=(4, 3))
        frames.append(atoms)
    return frames


def test_other_values_become_targets_where_there_are_no_energies(folder, capsys):
    write("gaps.extxyz", property_frames())
    assert main(["init", "gaps.extxyz"]) == 0
    out = capsys.readouterr().out
    assert "method has the same value everywhere" in out
    config = load_config("gaps.yaml")
    assert config.data.labels.fields == {
        "band_gap": {"key": "band-gap"},
        "phase": {},
        "charge": {"per": "atom"},
        "moment": {"per": "atom", "shape": [3]},
    }
    assert config.task.fields["phase"].classes == [0, 1, 2], "three whole numbers"
    assert config.task.fields["band_gap"].classes is None
    assert "step" not in config.data.labels.fields
    assert main(["train", "gaps.yaml", "++trainer.fast_dev_run=true", "++trainer.accelerator=cpu"]) == 0


def test_properties_that_are_named_are_the_targets(folder):
    write("gaps.extxyz", property_frames())
    assert main(["init", "gaps.extxyz", "data.labels.fields={charge: atom}"]) == 0
    assert load_config("gaps.yaml").data.labels.fields == {"charge": "atom"}


def test_large_forces_raise_the_question_of_units(folder, capsys):
    write("big.extxyz", [labelled(bulk("Cu", cubic=True), i, scale=30.0) for i in range(4)], format="extxyz")
    assert main(["init", "big.extxyz"]) == 0
    assert "is the file in kcal/mol?" in capsys.readouterr().out
    assert "is the file in kcal/mol?" in " ".join(Path("big.yaml").read_text().replace("#", "").split())


@pytest.mark.skipif(not (SHARED / "rmd17").is_dir(), reason="shared data not here")
def test_real_data_in_other_units(folder):
    file = SHARED / "rmd17" / "rmd17_ethanol_train_01.npz"
    assert main(["init", str(file), "-o", "e.yaml", "data.units.energy=kcal/mol"]) == 0
    config = load_config("e.yaml")
    assert config.data.units.energy == "kcal/mol"
    assert config.data.species == ["H", "C", "O"]


def facts(**changes) -> DataFacts:
    values = {
        "files": ["a.xyz"],
        "n_frames": 200,
        "smallest": 4,
        "largest": 4,
        "mean_atoms": 4.0,
        "species": {"H": 800},
        "labels": {"energy": 200, "forces": 150, "stress": 0},
        "forces_rms": 1.0,
        "mean_neighbours": {5.0: 40.0, 4.5: 30.0, 4.0: 20.0},
    }
    return DataFacts(**{**values, **changes})


def test_dense_systems_get_a_smaller_cutoff():
    assert propose_cutoff({5.0: 60.0, 4.5: 44.0, 4.0: 31.0}) == 5.0
    assert propose_cutoff({5.0: 70.0, 4.5: 51.0, 4.0: 36.0}) == 4.5
    assert propose_cutoff({5.0: 170.0, 4.5: 120.0, 4.0: 90.0}) == 4.0


@pytest.mark.parametrize(("n", "split"), [(1, (None, None)), (2, (1, None)), (50, (0.1, None)), (1000, (0.1, 0.1))])
def test_few_frames_are_not_split_away(n, split):
    assert propose_split(n) == split


@pytest.mark.parametrize(
    ("atoms", "frames", "batch", "steps", "irreps"),
    [
        (9, 55, 5, 12_000, "128x0e + 128x1o"),
        (64, 300, 2, 57_600, "128x0e + 128x1o + 128x2e"),
        (64, 900, 2, 100_000, "128x0e + 128x1o + 128x2e"),
        (192, 20, 1, 12_000, "128x0e + 128x1o"),
    ],
)
def test_accurate_settings_depend_on_the_number_of_frames(atoms, frames, batch, steps, irreps):
    values, notes = starter_config(facts(n_frames=frames, mean_atoms=float(atoms)), name="x", accurate=True)
    train = frames - round(0.1 * frames) - (round(0.1 * frames) if frames >= 100 else 0)
    per_epoch = -(-train // batch)
    epochs = values["trainer"]["max_epochs"]
    assert values["data"]["batch"] == {"frames": batch}
    assert (epochs - 1) * per_epoch < steps <= epochs * per_epoch
    assert 50 < epochs / values["trainer"]["check_val_every_n_epoch"] < 200
    assert values["model"]["hidden_irreps"] == irreps
    assert list(values["task"]) == ["energy", "forces"]
    assert values["task"]["energy"]["schedule"] == {"kind": "lr", "to": 100}
    assert "GPU" in notes["training"]


def test_accurate_settings_are_a_config_that_trains(folder):
    write("cu.extxyz", [labelled(bulk("Cu", cubic=True), i) for i in range(12)], format="extxyz")
    assert main(["init", "cu.extxyz", "--accurate"]) == 0
    config = load_config("cu.yaml")
    assert config.model["name"] == "mace"
    assert config.task.forces.weight == 10
    small = ["model.hidden_irreps=4x0e", "model.max_ell=1", "model.correlation=2", "++trainer.fast_dev_run=true"]
    assert main(["train", "cu.yaml", *small, "++trainer.accelerator=cpu"]) == 0


def test_accurate_settings_are_for_potentials(folder, capsys):
    write("gaps.extxyz", property_frames())
    assert main(["init", "gaps.extxyz", "--accurate"]) == 2
    assert "has none of them; leave it out" in capsys.readouterr().err


def test_only_labels_that_are_there_are_trained():
    values, _ = starter_config(facts(), name="x")
    assert list(values["task"]) == ["energy", "forces"]
    assert describe(facts()).endswith("labels: energy in all, forces in 150.")


@pytest.mark.parametrize("n", [1, 2, 7, 100, 100_000])
@pytest.mark.parametrize("size", [1, 20, 5000])
def test_any_amount_of_data_gives_sensible_numbers(n, size):
    values, _ = starter_config(facts(n_frames=n, mean_atoms=float(size)), name="x")
    assert 1 <= values["data"]["batch"]["frames"] <= max(1, n)
    assert 10 <= values["trainer"]["max_epochs"] <= 1000
