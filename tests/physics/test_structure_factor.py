"""The static structure factor: Bragg peaks of a crystal, all wave vectors of a skewed cell, the table of the command."""

from __future__ import annotations

import numpy as np
from ase.build import bulk
from ase.io import write

from forgefield.cli import main
from forgefield.physics.structure_factor import static_structure_factor, wave_vectors


def test_every_wave_vector_of_a_skewed_cell_is_found_once():
    cell, k_max = np.array([[3.0, 0, 0], [2.5, 3.1, 0], [-1.0, 0.7, 2.8]]), 9.0
    n = np.stack(np.meshgrid(*[np.arange(-20, 21)] * 3, indexing="ij"), -1).reshape(-1, 3)
    expected = n @ (2 * np.pi * np.linalg.inv(cell).T)
    lengths = np.linalg.norm(expected, axis=1)
    expected = expected[(lengths <= k_max) & (lengths > 0)]
    half = wave_vectors(cell, k_max)
    both = np.concatenate([half, -half])
    assert len(both) == len(expected)
    assert np.allclose(both[np.lexsort(both.round(6).T)], expected[np.lexsort(expected.round(6).T)])


def test_a_crystal_has_bragg_peaks_only_and_the_table_states_them(tmp_path):
    atoms = bulk("Al", "fcc", a=4.0, cubic=True) * (2, 2, 2)
    displaced = atoms.copy()
    displaced.rotate(30, "z", rotate_cell=True)
    write(tmp_path / "al.xyz", [atoms, displaced], format="extxyz")
    words = ["data", "structure-factor", str(tmp_path / "al.xyz"), "-o", str(tmp_path / "s.csv")]
    assert main([*words, "--k-max", "3.5", "--shells", "350"]) == 0
    k, values, vectors = np.loadtxt(tmp_path / "s.csv", delimiter=",", skiprows=1, unpack=True)
    peaks = values > 1e-6
    assert np.allclose(k[peaks], 2 * np.pi / 4.0 * np.sqrt([3, 4]), atol=1e-6)  # (111) and (200)
    assert vectors[peaks].tolist() == [16, 12]  # 8 and 6 in each of the two frames
    assert np.allclose(values[peaks], len(atoms))


def test_random_points_have_a_structure_factor_of_one():
    rng = np.random.default_rng(0)
    gas = [(rng.random((200, 3)) * 12, np.diag([12.0, 12.0, 12.0])) for _ in range(4)]
    found = static_structure_factor(gas, k_max=4.0, shells=2)
    assert np.abs(found.values - 1).max() < 0.1
