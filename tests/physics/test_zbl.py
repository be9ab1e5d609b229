"""The ZBL repulsion equals the formula of LAMMPS' pair_style zbl, written out again here in numpy."""

import numpy as np
import pytest
import torch

from forgefield.ops.functions import polynomial_cutoff
from forgefield.physics.zbl import zbl_pair_energy
from tests.support.structures import make_batch, make_frame, make_potential


def lammps_zbl(r: float, zi: float, zj: float) -> float:
    """pair_zbl.cpp and pair_zbl_const.h, metal units."""
    a = (zi**0.23 + zj**0.23) / 0.46850
    c, d = (0.02817, 0.28022, 0.50986, 0.18175), (0.20162, 0.40290, 0.94229, 3.19980)
    return 14.399645 * zi * zj / r * sum(ck * np.exp(-dk * a * r) for ck, dk in zip(c, d))


@pytest.mark.parametrize(("zi", "zj"), [(1, 1), (8, 1), (29, 79)])
@pytest.mark.parametrize("r", [0.1, 0.9, 2.5])
def test_pair_energy_is_that_of_lammps(r, zi, zj):
    got = zbl_pair_energy(*(torch.tensor(float(v), dtype=torch.float64) for v in (r, zi, zj)))
    assert got.item() == pytest.approx(lammps_zbl(r, zi, zj), rel=1e-13)


def test_numbers_computed_with_nequip():
    """nequip 0.19.1, nequip.nn.pair_potential, float64: O-H at 0.5 A, O-Cu at 1.2 A, Cu-Cu at 3 A."""
    r, zi, zj = torch.tensor([[0.5, 1.2, 3.0], [8.0, 8.0, 29.0], [1.0, 29.0, 29.0]], dtype=torch.float64)
    expected = torch.tensor(NEQUIP_NUMBERS, dtype=torch.float64)
    torch.testing.assert_close(zbl_pair_energy(r, zi, zj), expected, rtol=1e-12, atol=0)


NEQUIP_NUMBERS = [33.17539232936993, 27.00529327537139, 0.43530519912968657]


@pytest.mark.parametrize("p", [6.0, 3.0])
def test_the_model_adds_half_of_each_pair_under_the_envelope(p):
    batch = make_batch(make_frame(5, seed=1))
    plain, repulsive = (make_potential(zbl=zbl) for zbl in (False, {"polynomial_cutoff_p": p}))
    added = repulsive(batch)["atomic_energy"] - plain(batch)["atomic_energy"]
    positions, numbers = batch["positions"].numpy(), np.array([1, 8])[batch["species"].numpy()]
    expected = np.zeros(5)
    for (j, i), shift in zip(batch["edge_index"].T.tolist(), batch["edge_shift"].numpy()):
        r = np.linalg.norm(positions[j] + shift @ batch["cell"][0].numpy() - positions[i])
        envelope = polynomial_cutoff(torch.tensor(r / 3.0, dtype=torch.float64), p).item()
        expected[i] += 0.5 * lammps_zbl(r, numbers[i], numbers[j]) * envelope
    np.testing.assert_allclose(added.detach().numpy(), expected, rtol=1e-9, atol=1e-10)
