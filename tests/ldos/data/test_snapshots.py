"""Snapshots: what files hold is served as the network wants it, and never changed."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from forgefield.errors import ForgefieldError
from forgefield.ldos.data import PointTable, Snapshot, find_snapshots, read_info
from forgefield.ldos.data.info import SnapshotInfo
from forgefield.physics.units import BOHR, HARTREE
from tests.support.numbered_snapshots import write_snapshot


def test_coordinates_are_cut_and_units_applied_on_reading_only(folder):
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    (snapshot,) = find_snapshots(str(folder / "snap1.in.npy"), units="1/(Ry*Bohr^3)")
    raw_inputs, raw_targets = (np.load(folder / f"snap1.{part}.npy").reshape(105, -1) for part in ("in", "out"))
    inputs, targets = snapshot.read(10, 90, np.float64)
    assert (snapshot.n_inputs, snapshot.n_targets, snapshot.grid_shape) == (4, 3, (3, 7, 5))
    assert np.array_equal(inputs, raw_inputs[10:90, 3:].astype(np.float64))
    np.testing.assert_allclose(targets, raw_targets[10:90].astype(np.float64) / (HARTREE / 2 * BOHR**3), rtol=1e-14)
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == before


def test_descriptors_without_coordinates_keep_all_columns(tmp_path):
    grid = np.random.default_rng(0).random((3, 4, 5, 6), dtype=np.float32)
    grid[..., :3] = 7.0  # columns that never change are no coordinates
    np.save(tmp_path / "a.in.npy", grid)
    assert Snapshot("a", tmp_path / "a.in.npy", None).n_inputs == 6
    np.save(tmp_path / "b.in.npy", grid.reshape(60, 6))
    with pytest.raises(ForgefieldError, match=r"coordinates: true or coordinates: false"):
        Snapshot("b", tmp_path / "b.in.npy", None)
    assert Snapshot("b", tmp_path / "b.in.npy", None, coordinates=True).n_inputs == 3


def test_a_table_reads_across_snapshots(table):
    inputs, targets = np.empty((200, 4), np.float32), np.empty((200, 3), np.float32)
    table.read_into(100, inputs, targets)
    assert np.array_equal(inputs[:, 0], np.arange(100, 300))
    assert np.array_equal(targets[:, 0], np.arange(100, 300))
    assert table.where(121) == "snap1, grid point (0, 0, 1)"


def test_openpmd_equals_numpy_for_any_stretch(be2):
    names = {"inputs": str(be2 / "Be_snapshot0.in.npy"), "targets": str(be2 / "Be_snapshot0.out.h5")}
    (stored,), (plain,) = find_snapshots([names]), find_snapshots(names["inputs"])
    for start, stop in ((0, 8748), (5, 9), (20, 60), (480, 500), (486, 972), (1000, 5000)):
        assert np.array_equal(stored.read(start, stop)[1], plain.read(start, stop)[1])
    with pytest.raises(ForgefieldError, match=r"states that targets are in 1/\(eV\*A\^3\)"):
        find_snapshots([{**names, "units": "1/(Ry*Bohr^3)"}])


def test_espresso_output_agrees_with_the_json(be2, tmp_path):
    ours = tmp_path / "again.info.json"
    for number in range(3):
        stored, printed = (read_info(be2 / f"Be_snapshot{number}.{end}") for end in ("info.json", "out"))
        ours.write_text(json.dumps(stored.to_json()))
        for other in (printed, read_info(ours)):
            assert other.temperature == pytest.approx(stored.temperature, rel=1e-14)
            assert other.energies == pytest.approx(stored.energies, rel=1e-12)
            assert (other.electrons, other.fermi_energy, other.ecutrho) == (4.0, stored.fermi_energy, 160.0)
            assert (other.pseudopotentials, other.grid_shape) == (stored.pseudopotentials, (18, 18, 27))
            np.testing.assert_allclose(other.cell, stored.cell, atol=2e-8)
            np.testing.assert_allclose(other.positions, stored.positions, atol=2e-8)
            assert np.array_equal(other.numbers, [4, 4])
            assert other.voxel_volume == pytest.approx(abs(np.linalg.det(stored.cell)) / 8748, rel=1e-7)


def _grid_of_targets(folder):
    np.save(folder / "snap0.out.npy", np.zeros((4, 6, 5, 3), np.float32))


def _other_features(folder):
    np.save(folder / "snap2.out.npy", np.zeros((8, 4, 4, 5), np.float32))


def _fortran(folder):
    np.save(folder / "snap0.out.npy", np.asfortranarray(np.zeros((4, 5, 6, 3), np.float32)))


def _cut_off(folder):
    whole = (folder / "snap0.out.npy").read_bytes()
    (folder / "snap0.out.npy").write_bytes(whole[:-10])


def _whole_numbers(folder):
    np.save(folder / "snap0.out.npy", np.zeros((4, 5, 6, 3), np.int64))


def _no_targets(folder):
    (folder / "snap1.out.npy").rename(folder / "snap1.outt.npy")


def _grid_of_info(folder):
    (folder / "snap0.info.json").write_text('{"grid_dimensions": [4, 5, 7]}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_grid_of_targets, r"snap0\.in\.npy has a grid of 4 x 5 x 6 points, but .*snap0\.out\.npy has .* 4 x 6 x 5"),
        (_grid_of_info, r"but .*snap0\.info\.json has a grid of 4 x 5 x 7"),
        (_other_features, r"snap0 has 3 target values per point, snapshot snap2 has 5"),
        (_fortran, r"Fortran order"),
        (_cut_off, r"cut off"),
        (_whole_numbers, r"real numbers"),
        (_no_targets, r"snap1\.out\.npy: there is no such file .* Did you mean 'snap1\.outt\.npy'"),
    ],
)
def test_files_that_do_not_fit_are_named(folder, spoil, message):
    spoil(folder)
    with pytest.raises(ForgefieldError, match=message):
        PointTable(find_snapshots(str(folder)))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("snap9.in.npy", {}, r"Did you mean 'snap\d\.in\.npy'"),
        (["snap0.in.npy", "snap*.in.npy"], {}, r"names .*snap0\.in\.npy twice"),
        ("snap0.in.npy", {"units": "1/(eV*Borh^3)"}, r"Did you mean '1/\(eV\*Bohr\^3\)'"),
        ("snap0.in.npy", {"target": "lodos"}, r"Did you mean 'ldos'"),
        ([{"inputs": "snap0.in.npy", "unit": "1/eV"}], {}, r"Did you mean 'units'"),
        ("nothing*.npy", {}, r"no file of values on a grid matches"),
    ],
)
def test_what_cannot_be_found_is_answered_with_the_nearest(folder, monkeypatch, spec, options, message):
    monkeypatch.chdir(folder)
    with pytest.raises(ForgefieldError, match=message):
        find_snapshots(spec, **options)


def test_missing_temperature_is_named(tmp_path):
    write_snapshot(tmp_path, "a", (2, 2, 2))
    (tmp_path / "a.info.json").write_text('{"number_of_electrons_exact": 4.0}')
    (snapshot,) = find_snapshots(str(tmp_path))
    assert snapshot.info.require("electrons").electrons == 4.0
    with pytest.raises(
        ForgefieldError, match=r"a\.info\.json does not state the temperature, which the band energy needs"
    ):
        snapshot.info.require("electrons", "temperature", why="the band energy")
    assert SnapshotInfo().voxel_volume is None
