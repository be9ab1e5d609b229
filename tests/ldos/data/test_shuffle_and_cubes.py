"""`forgefield data shuffle` and `forgefield data cubes`, as they are typed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ase import Atoms
from ase.io.cube import write_cube

from forgefield.cli import main
from forgefield.ldos.data import PointTable, find_snapshots
from forgefield.ldos.data.cube import read_grid_file
from forgefield.ldos.data.shuffle import shuffle_snapshots
from forgefield.physics.units import BOHR, HARTREE

SHAPE = (3, 4, 5)


@pytest.mark.parametrize("files", [1, 5, 353])
def test_shuffled_files_hold_every_point_once(folder, table, tmp_path, files):
    out = tmp_path / "shuffled"
    assert main(["data", "shuffle", str(folder), "-o", str(out), "--files", str(files), "--seed", "3"]) == 0
    new = PointTable(find_snapshots(str(out)))
    sizes = [snapshot.n_points for snapshot in new.snapshots]
    assert (len(sizes), sum(sizes)) == (files, 353)
    assert max(sizes) - min(sizes) <= 1
    old, found = (
        np.concatenate([np.concatenate(snapshot.read(), axis=1) for snapshot in one.snapshots]) for one in (table, new)
    )
    rows = [np.load(out / f"shuffled{number}.in.npy")[:, 0] for number in range(files)]
    rows = np.concatenate(rows).astype(int)
    assert np.array_equal(np.sort(rows), np.arange(353))
    assert (np.abs(np.diff(rows)) < 5).mean() < 0.1
    assert np.array_equal(found[np.argsort(found[:, 0])], old)
    assert json.loads((out / "shuffled0.info.json").read_text())["shuffled_from"] == ["snap0", "snap1", "snap2"]


def test_the_memory_does_not_change_the_order(table, tmp_path):
    for name, memory in (("much", 1 << 30), ("little", 500)):
        shuffle_snapshots(table, tmp_path / name, files=3, seed=1, memory=memory)
    shuffle_snapshots(table, tmp_path / "other", files=3, seed=2)
    contents = {
        name: [path.read_bytes() for path in sorted((tmp_path / name).glob("*.npy"))]
        for name in ("much", "little", "other")
    }
    assert contents["much"] == contents["little"]
    assert contents["much"] != contents["other"]


def _cubes(folder, names, values):
    atoms = Atoms("Be2", positions=[[0.1, 0.2, 0.3], [1, 1, 1.5]], cell=[[2, 0, 0], [-1, 2, 0], [0, 0, 3]], pbc=True)
    for level, name in enumerate(names):
        with (folder / name).open("w") as file:
            write_cube(file, atoms, data=values[..., level])
    return atoms


@pytest.mark.parametrize("pattern", ["tmp.pp{}.cube", "tmp.pp{:03d}.cube", "be2_tmp_{:02d}.cube"])
def test_cube_files_become_a_snapshot_whatever_their_padding(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(0).random((*SHAPE, 12))
    atoms = _cubes(tmp_path, [pattern.format(level) for level in range(1, 13)], values)
    assert main(["data", "cubes", "*.cube", "-o", "a.out.npy", "--double"]) == 0
    found = np.load(tmp_path / "a.out.npy")
    assert found.shape == (*SHAPE, 12)
    np.testing.assert_allclose(found, values / (HARTREE / 2 * BOHR**3), rtol=1e-5)
    cube = read_grid_file(tmp_path / pattern.format(3))
    np.testing.assert_allclose(cube.cell, atoms.cell, atol=1e-5)
    np.testing.assert_allclose(cube.positions, atoms.positions, atol=1e-5)


def test_what_fortran_prints_without_an_e_is_read(tmp_path):
    header = [" Cubefile created from PWScf calculation", " Contains the selected quantity", "1 0 0 0"]
    header += ["1 4 0 0", "1 0 4 0", "3 0 0 4", "4 4.0 0.0 0.0 0.0"]
    (tmp_path / "a.cube").write_text("\n".join([*header, "  0.12345E-01  0.12345-102 -0.30000E+01", ""]))
    assert read_grid_file(tmp_path / "a.cube").values.tolist() == [[[0.012345, 0.12345e-102, -3.0]]]


def test_an_xsf_grid_is_cut_where_it_repeats_itself(tmp_path):
    values = np.random.default_rng(1).random(SHAPE)
    general = np.pad(values, ((0, 1),) * 3, mode="wrap")
    lines = ["CRYSTAL", "PRIMVEC", "2 0 0", "0 2 0", "0 0 3", "PRIMCOORD", "1 1", "Be 0.0 0.5 0.5"]
    lines += ["BEGIN_BLOCK_DATAGRID_3D", "3D_PWSCF", "DATAGRID_3D_UNKNOWN", " ".join(map(str, general.shape))]
    lines += ["0 0 0", "2 0 0", "0 2 0", "0 0 3", *(f"{value:.8E}" for value in general.transpose(2, 1, 0).reshape(-1))]
    (tmp_path / "a.xsf").write_text("\n".join([*lines, "END_DATAGRID_3D", "END_BLOCK_DATAGRID_3D", ""]))
    found = read_grid_file(tmp_path / "a.xsf")
    np.testing.assert_allclose(found.values, values, rtol=1e-7)
    assert found.numbers.tolist() == [4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "cubes", "tmp*.cube", "-o", "a.out.npy"], "level 3 is missing"),
        (["data", "cubes", "temp*.cube", "-o", "a.out.npy"], "no file matches"),
        (["data", "cubes", "tmp1.cube", "-o", "a.out.npy", "--units", "1/(eV*B^3)"], "is not a unit of ldos"),
        (["data", "cubes", "tmp1.cube", "odd9.cube", "-o", "a.out.npy"], "level 2, 3, 4, 5, 6, 7, 8 is missing"),
        (["data", "cubes", "odd1.cube", "odd2.cube", "-o", "a.out.npy"], "all levels must be from one calculation"),
        (["data", "cubes", "cut.cube", "-o", "a.out.npy"], "truncated"),
        (["data", "cubes", "tmp1.cube", "-o", "a.npz"], "a name with this ending"),
    ],
)
def test_bad_cubes_are_named(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(0).random((*SHAPE, 4))
    _cubes(tmp_path, ["tmp1.cube", "tmp2.cube", "tmp4.cube", "odd1.cube"], values)
    _cubes(tmp_path, ["odd2.cube", "odd9.cube"], np.zeros((2, 2, 2, 2)))
    (tmp_path / "cut.cube").write_text((tmp_path / "tmp1.cube").read_text()[:-300])
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*a.out*"))
