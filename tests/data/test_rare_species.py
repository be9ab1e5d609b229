"""Random splits keep every species in training, change nothing else, and depend on the seed alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ase.data import chemical_symbols

from forgefield.data.module import read_data
from forgefield.data.options import DataOptions
from forgefield.data.splits import resolve_splits
from forgefield.errors import ForgefieldError
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only


def write(path, formulas):
    """Frame i has energy i and consists of the two atoms named."""
    path.write_text(
        "".join(f"2\nenergy={i}\n{a} 0 0 0\n{b} 0 0 {1.5 + 0.01 * i}\n" for i, (a, b) in enumerate(formulas))
    )
    return str(path)


def energies(table):
    return table.column("energy").astype(int).tolist()


def species(table):
    return set(table.components.number.tolist())


@pytest.fixture
def many_elements(tmp_path):
    """60 frames: all hold carbon, and each of 20 elements is held by one frame only."""
    rare = [chemical_symbols[z] for z in range(21, 41)]
    return write(tmp_path / "a.xyz", [("C", "H")] * 20 + [("C", symbol) for symbol in rare] + [("C", "O")] * 20)


@pytest.mark.parametrize("seed", range(8))
def test_every_species_is_in_training_and_sizes_stay(many_elements, seed):
    options = DataOptions(train=many_elements, val=0.2, test=6, cutoff=3.0)
    splits = resolve_splits(options, seed)
    assert species(splits.train) == {1, 6, 8, *range(21, 41)}
    assert (len(splits.train), len(splits.val), len(splits.test)) == (42, 12, 6)
    rows = [*energies(splits.train), *energies(splits.val), *energies(splits.test)]
    assert sorted(rows) == list(range(60))
    again = resolve_splits(options, seed)
    for name in ("train", "val", "test"):
        assert energies(getattr(splits, name)) == energies(getattr(again, name))
    data = read_data(options, seed)  # a validation frame with a species that training lacks was an error here
    assert "held by few frames" in data.split_description
    with pytest.raises(ForgefieldError, match="not one of the species of the model"):
        read_data(options, seed, keep_species=False)


def test_what_was_drawn_stays_drawn_but_for_frames_that_are_needed(many_elements):
    options = DataOptions(train=many_elements, val=0.2, test=6)
    new, old = resolve_splits(options, 1), resolve_splits(options, 1, keep_species=False)
    for name in ("val", "test"):
        kept = [row for row in energies(getattr(old, name)) if not 20 <= row < 40]
        assert set(kept) <= set(energies(getattr(new, name)))
    common = DataOptions(train=many_elements, indices="0:20", val=0.2)
    new, old = resolve_splits(common, 1), resolve_splits(common, 1, keep_species=False)
    assert energies(new.val) == energies(old.val)
    assert new.description == old.description


def test_isolated_atoms_in_training_count_as_holders(tmp_path):
    path = write(tmp_path / "a.xyz", [("C", "H")] * 9 + [("C", "I")])
    with (tmp_path / "a.xyz").open("a") as file:
        file.write("1\nenergy=10\nI 0 0 0\n")
    for seed in range(5):
        options = DataOptions(train=path, val=5)
        assert energies(resolve_splits(options, seed).val) == energies(
            resolve_splits(options, seed, keep_species=False).val
        )


def test_no_frame_to_spare_is_reported(tmp_path):
    path = write(tmp_path / "a.xyz", [("C", symbol) for symbol in ("H", "N", "O", "F")])
    with pytest.raises(ForgefieldError, match=r"data\.val: no frame can be set aside, because training needs the only"):
        resolve_splits(DataOptions(train=path, val=1), 0)


def test_a_run_of_before_keeps_its_split_and_resumes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.xyz", [("C", "H")] * 8 + [("C", "O"), ("H", "O")] + [("C", "I")])
    old = next(
        seed
        for seed in range(50)
        if 53 not in species(resolve_splits(DataOptions(train=path, val=4), seed, keep_species=False).train)
    )
    config = tiny_config(tmp_path)
    config["data"] |= {"train": path, "val": 4, "test": None, "split_seed": old, "species": ["H", "C", "O", "I"]}
    config["task"] = {"energy": {"weight": 1.0}}
    with monkeypatch.context() as patch:
        patch.setattr(
            "forgefield.training.problem.frames.read_data",
            lambda *args, **kw: read_data(*args, **{**kw, "keep_species": False}),
        )
        run = train_only(config)
    info = json.loads((run.path / "run.json").read_text())
    assert info.pop("keep_species") is False
    info.pop("format_version")
    (run.path / "run.json").write_text(json.dumps(info))  # as it was written before
    longer = {**config, "trainer": {**config["trainer"], "max_epochs": config["trainer"]["max_epochs"] + 1}}
    resumed = train_only(longer)
    assert resumed.info["data_fingerprint"] == info["data_fingerprint"]
    assert resumed.info["keep_species"] is False
    fresh = train_only({**config, "name": "fresh"})
    assert fresh.info["data_fingerprint"] != info["data_fingerprint"]
    assert fresh.info["keep_species"] is True
    assert np.isfinite(fresh.info["statistics"]["reference_energies"]["I"])
