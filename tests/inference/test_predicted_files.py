"""Files that `predict` writes: what the source held is still there, nothing is overwritten, and Forgefield reads them again."""

from __future__ import annotations

import ase.db
import ase.io
import numpy as np
import pytest
from ase.constraints import FixAtoms, FixCartesian

from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError
from forgefield.inference.predict import predict_file
from forgefield.models.potential import Potential
from tests.support.helpers import emt_frames
from tests.support.toy_models import Morse

INFO = {
    "config_type": "bulk 300 K",
    "config_id": 12345678901234567,
    "converged": True,
    "hash": "12e5x",
    "pressure": 1.25e-13,
    "k_points": np.array([2, 2, 4]),
    "my_energy": -3.5,
}


@pytest.fixture
def potential():
    return Potential(Morse())


def images():
    frames = emt_frames(3, seed=1)
    for i, atoms in enumerate(frames):
        n = len(atoms)
        calculator = atoms.calc
        atoms.info.update(INFO, index=i)
        atoms.arrays["charge_spread"] = np.linspace(-1e-11, 1e-3, n)
        atoms.arrays["site"] = np.arange(n) * 7
        atoms.arrays["kind"] = np.array([f"a{k % 3}" for k in range(n)])
        atoms.arrays["shielding"] = np.arange(3.0 * n).reshape(n, 3) / 7
        atoms.set_tags(np.arange(n) % 2)
        atoms.set_momenta(np.ones((n, 3)) / 3)
        atoms.set_constraint(FixAtoms([0, 2]))
        atoms.calc = calculator
    return frames


def same(first, second) -> bool:
    first, second = np.asarray(first), np.asarray(second)
    return first.shape == second.shape and bool((first == second).all())


@pytest.mark.parametrize("source_suffix", [".extxyz", ".traj", ".db"])
@pytest.mark.parametrize("suffix", [".extxyz", ".traj", ".db"])
def test_everything_the_source_holds_is_in_the_output(potential, tmp_path, source_suffix, suffix):
    source, out = tmp_path / f"source{source_suffix}", tmp_path / f"out{suffix}"
    frames = images()
    if source_suffix == ".db":
        with ase.db.connect(source) as database:
            for atoms in frames:
                own = {name: atoms.arrays[name] for name in ("charge_spread", "site", "shielding")}
                own["kind"] = atoms.arrays["kind"].tolist()
                database.write(atoms, data={**atoms.info, **own})
    else:
        ase.io.write(source, frames)
    predict_file(potential, source, out)
    written = ase.io.read(out, ":")
    if suffix == ".db":
        for atoms, row in zip(written, ase.db.connect(out).select(sort="id")):
            atoms.info = dict(row.data)
    for atoms, found in zip(ase.io.read(source, ":") if source_suffix == ".extxyz" else frames, written):
        values = {**found.info, **found.arrays}
        for name in (*INFO, "index"):
            assert same(values[name], atoms.info[name]), name
        kept = [] if source_suffix == ".traj" else ["charge_spread", "site", "kind", "shielding"]
        for name in [*kept, "tags", "momenta"]:
            assert same(values[name], atoms.arrays[name]), name
        assert [constraint.todict() for constraint in found.constraints] == [FixAtoms([0, 2]).todict()]
        assert same(found.positions, atoms.positions)
        assert np.isclose(values["REF_energy"], atoms.get_potential_energy(), rtol=1e-12)
        assert np.allclose(values["REF_forces"], atoms.get_forces(apply_constraint=False), rtol=0, atol=1e-12)


def test_single_cartesian_constraints_survive(potential, tmp_path):
    frames = images()[:1]
    frames[0].set_constraint([FixCartesian(1, [True, False, False])])
    ase.io.write(tmp_path / "source.extxyz", frames)
    out = predict_file(potential, tmp_path / "source.extxyz", tmp_path / "out.extxyz")
    before, after = (ase.io.read(path).constraints for path in (tmp_path / "source.extxyz", out))
    assert len(before) > 0
    assert [constraint.todict() for constraint in after] == [constraint.todict() for constraint in before]


def test_values_whose_name_a_prediction_needs_are_kept_as_input(potential, tmp_path):
    frames = images()[:1]
    frames[0].calc.results["free_energy"] = -7.0
    frames[0].info["REF_energy"] = -8.0
    ase.io.write(tmp_path / "source.extxyz", frames)
    out = predict_file(
        potential, tmp_path / "source.extxyz", tmp_path / "out.extxyz", labels=LabelOptions(energy="my_energy")
    )
    found = ase.io.read(out)
    assert found.info["REF_energy"] == -3.5 == found.info["my_energy"]
    assert found.info["input_free_energy"] == -7.0
    assert found.info["input_REF_energy"] == -8.0
    assert found.info["input_energy"] == frames[0].calc.results["energy"]
    assert "free_energy" not in found.calc.results


@pytest.mark.parametrize("suffix", [".extxyz", ".traj", ".db"])
def test_predictions_are_read_again_with_the_labels_of_the_source(potential, tmp_path, suffix):
    source = tmp_path / "source.extxyz"
    ase.io.write(source, emt_frames(3, seed=1))
    labels, units = LabelOptions(energy="energy", forces="forces"), UnitOptions(energy="kcal/mol")
    out = predict_file(potential, source, tmp_path / f"out{suffix}", labels=labels, units=units)
    for settings in ({}, {"labels": labels, "units": units}):  # defaults, and those of the training
        for before, after in zip(read_frames(source, labels, units), read_frames(out, **settings), strict=True):
            assert np.isclose(before.energy, after.energy, rtol=1e-12)
            assert np.allclose(before.forces, after.forces, rtol=0, atol=1e-12)
            assert np.allclose(before.stress, after.stress, rtol=0, atol=1e-12)


def test_predictions_of_unlabelled_structures_are_not_taken_for_labels(potential, tmp_path):
    bare = emt_frames(2, seed=1)
    for atoms in bare:
        atoms.calc = None
    ase.io.write(tmp_path / "source.extxyz", bare)
    out = predict_file(potential, tmp_path / "source.extxyz", tmp_path / "out.extxyz")
    assert all(frame.energy is None and frame.forces is None and frame.stress is None for frame in read_frames(out))


def test_an_existing_file_is_left_alone_unless_asked_for(potential, tmp_path):
    source, out = tmp_path / "source.extxyz", tmp_path / "out.extxyz"
    ase.io.write(source, images())
    out.write_text("precious")
    with pytest.raises(ForgefieldError, match=r"out\.extxyz exists already; --force"):
        predict_file(potential, source, out)
    assert out.read_text() == "precious"
    predict_file(potential, source, out, overwrite=True)
    assert len(ase.io.read(out, ":")) == 3


@pytest.mark.parametrize("overwrite", [True, False])
def test_the_source_itself_is_never_overwritten(potential, tmp_path, overwrite):
    source, link = tmp_path / "source.extxyz", tmp_path / "link.extxyz"
    ase.io.write(source, images())
    link.symlink_to(source)
    before = source.read_bytes()
    for out in (source, link):
        with pytest.raises(ForgefieldError, match="is one of the files to predict"):
            predict_file(potential, str(source), out, overwrite=overwrite)
    assert source.read_bytes() == before
