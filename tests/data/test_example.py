"""The built-in example data: real physics, reproducible to the byte, test frames apart from training frames."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.calculators.emt import EMT

from forgefield.data import example
from forgefield.data.example import Recipe, make_example
from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("example")
    return folder, make_example(folder, seed=0)


@pytest.fixture
def small(monkeypatch) -> None:
    """Fewer frames, so that making the data twice is quick."""
    monkeypatch.setattr(example, "TRAIN", Recipe(trajectories=2, samples=2, shaken=7))
    monkeypatch.setattr(example, "TEST", Recipe(trajectories=1, samples=2, shaken=2))


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "train.extxyz").read_bytes() + (folder / "test.extxyz").read_bytes()).hexdigest()


def test_size_is_that_of_the_summary(made):
    folder, summary = made
    for name, low, high in (("train", 200, 400), ("test", 60, 100)):
        frames = read_frames(folder / f"{name}.extxyz")
        assert summary[name] == {
            "file": str(folder / f"{name}.extxyz"),
            "frames": len(frames),
            "atoms": sum(map(len, frames)),
        }
        assert low <= len(frames) <= high
        assert max(map(len, frames)) <= 32


def test_every_label_is_that_of_emt_for_the_stored_frame(made):
    folder, _ = made
    frames = read_frames(folder / "train.extxyz")
    images = ase.io.read(folder / "train.extxyz", ":")
    for frame, atoms in list(zip(frames, images))[::29]:
        atoms.calc = EMT()
        assert np.isclose(frame.energy, atoms.get_potential_energy(), rtol=0, atol=1e-7)
        assert np.allclose(frame.forces, atoms.get_forces(), rtol=0, atol=1e-6)
        if frame.volume > 0:
            assert np.allclose(frame.stress, atoms.get_stress(voigt=False), rtol=0, atol=1e-7)
        else:
            assert frame.stress is None


def test_free_atoms_of_both_species_come_first(made):
    frames = read_frames(made[0] / "train.extxyz")
    assert [frame.numbers.tolist() for frame in frames[:2]] == [[29], [79]]
    assert np.allclose([frame.energy for frame in frames[:2]], [3.51, 3.80])  # cohesive energies of EMT
    assert min(map(len, frames[2:])) >= 8


def test_frames_cover_the_alloy(made):
    frames = read_frames(made[0] / "train.extxyz")[2:]
    images = ase.io.read(made[0] / "train.extxyz", "2:")
    gold = np.array([np.mean(frame.numbers == 79) for frame in frames])
    assert gold.min() == 0.0
    assert gold.max() == 1.0
    assert any(frame.pbc.tolist() == [True, True, False] for frame in frames)  # surfaces
    assert any(len(frame) == 15 for frame in frames)  # vacancies
    kinds = {atoms.info["config_type"] for atoms in images}
    assert kinds == {"shaken", "md-300K", "md-600K", "md-900K", "md-1200K"}
    hot, cold = (
        np.concatenate([a.get_forces() for a in images if a.info["config_type"] == kind]).std()
        for kind in ("md-1200K", "md-300K")
    )
    assert hot > 1.3 * cold


def test_forces_are_moderate_and_no_frame_comes_twice(made):
    train, test = (read_frames(made[0] / f"{name}.extxyz") for name in ("train", "test"))
    assert max(np.abs(frame.forces).max() for frame in train + test) < 12.0
    assert len({frame.positions.tobytes() for frame in train[2:] + test}) == len(train[2:] + test)


def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(small, tmp_path):
    np.random.seed(1)
    make_example(tmp_path / "a", seed=7)
    np.random.seed(2)
    make_example(tmp_path / "b", seed=7)
    make_example(tmp_path / "c", seed=8)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_full_example_is_reproducible(made, tmp_path, small):
    """A second small recipe on the same seed starts with the same trajectory as the full one."""
    make_example(tmp_path, seed=0)
    full, short = (read_frames(folder / "test.extxyz") for folder in (made[0], tmp_path))
    assert np.array_equal(full[0].positions, short[0].positions)


def test_unwritable_folder_is_one_clear_error(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgefieldError, match="The example data could not be written"):
        make_example(tmp_path / "file" / "data", seed=0)
