"""Deviations between LAMMPS and ASE where quantities vanish by symmetry."""

from __future__ import annotations

import numpy as np
import pytest
from ase.build import bulk

from forgefield.inference.lammps.compare import TOLERANCE, Outcome, compare_ranks
from tests.support.lammps_runs import write_run


def test_quantities_that_are_zero_but_for_rounding_agree():
    rounding = Outcome(-14.0, np.full((4, 3), 1e-15), np.full(6, 1e-14))
    exact = Outcome(-14.0, np.zeros((4, 3)), np.zeros(6))
    assert max(rounding.deviations(exact).values()) < TOLERANCE


def test_deviations_of_small_and_large_quantities_are_seen():
    expected = Outcome(-14.0, np.full((4, 3), 2.0), np.full(6, 8.0))
    found = Outcome(-14.0 - 14e-6, np.full((4, 3), 2.0 + 2e-6), np.full(6, 8.0 + 8e-6)).deviations(expected)
    assert list(found.values()) == pytest.approx([1e-6] * 3, rel=1e-6)
    zero = Outcome(-14.0, np.zeros((4, 3)), np.zeros(6))
    found = Outcome(-14.0, np.full((4, 3), 1e-7), np.full(6, 4e-7)).deviations(zero)
    assert list(found.values()) == pytest.approx([0.0, 1e-6, 1e-6])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_perfect_crystal_passes(tmp_path):
    crystal = bulk("Cu", cubic=True, a=3.7) * (2, 2, 2)
    (deviations,) = compare_ranks(write_run(tmp_path), crystal, [1]).values()
    assert max(deviations.values()) < TOLERANCE
