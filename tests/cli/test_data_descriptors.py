"""`forgefield data descriptors`: from a calculation or a structure file to the inputs of a snapshot."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.io import write

from forgefield.cli import main
from forgefield.ldos.data import find_snapshots
from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors
from tests.support.snapshots import write_snapshot


def test_a_snapshot_gets_its_inputs(tmp_path, capsys):
    write_snapshot(tmp_path, "s0", seed=1)
    (tmp_path / "s0.in.npy").unlink()
    command = ["data", "descriptors", str(tmp_path / "s0.info.json"), "-o", str(tmp_path / "s0.in.npy")]
    assert main([*command, "--twojmax", "2", "--cutoff", "3", "--device", "cpu"]) == 0
    assert "5 descriptors on 4 x 3 x 5 points" in capsys.readouterr().out
    (snapshot,) = find_snapshots(str(tmp_path / "s0.in.npy"))
    atoms = snapshot.info.atoms()
    expected = make_descriptors(DescriptorOptions(twojmax=2, cutoff=3.0), ["Be"]).on_grid(
        atoms.cell, atoms.positions, atoms.numbers, True, (4, 3, 5)
    )
    np.testing.assert_allclose(snapshot.read()[0], expected.reshape(60, 5), rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--grid NX NY NZ"),
        (["--grid", "2", "2", "2", "--type", "gauss"], "gaussian"),
        (
            ["--grid", "2", "2", "2", "--type", "gaussian", "--twojmax", "4"],
            "with type=gaussian it has no effect: remove it",
        ),
        (["--grid", "2", "2", "2", "--element-weights", "Al"], "Al=1 O=0.5"),
    ],
)
def test_missing_or_inconsistent_data_is_reported(words, message, tmp_path, capsys):
    write(tmp_path / "al.xyz", Atoms("Al", cell=[3, 3, 3], pbc=True), format="extxyz")
    assert main(["data", "descriptors", str(tmp_path / "al.xyz"), "-o", str(tmp_path / "o.npy"), *words]) == 2
    assert message in capsys.readouterr().err
