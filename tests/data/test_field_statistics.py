"""Mean and spread of fields, against plain numpy on all values at once, whatever the size of the blocks."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms

from forgefield.data import references, statistics
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics import atom_moments, extensive_moments, intensive_moments, largest_magnitude
from forgefield.data.store.table import FrameTable

SPECIES = SpeciesTable(("Cu", "Au", "Ag"))
NUMBERS = {"Cu": 29, "Au": 79}


def frame(rng: np.random.Generator, number: int) -> Frame:
    n = int(rng.integers(1, 6))
    numbers = rng.choice(list(NUMBERS.values()), n).astype(np.int64)
    fields = {
        "gap": rng.standard_normal() + 3.0,
        "moduli": rng.standard_normal((2, 2)) * 5.0,
        "total": np.where(numbers == 29, 2.0, -1.0).sum() + 0.1 * n * rng.standard_normal(),
        "charge": np.where(numbers == 29, 0.3, -0.5) + 0.1 * rng.standard_normal(n),
        "spins": rng.standard_normal((n, 2)),
    }
    del fields[list(fields)[number % 5]]
    arrays = {name: np.array(value) for name, value in fields.items()}
    atoms = Atoms(numbers, positions=3.0 * rng.random((n, 3)))
    per_atom = frozenset({"charge", "spins"} & set(arrays))
    return Frame(atoms.positions, numbers, np.zeros((3, 3)), np.zeros(3, bool), fields=arrays, per_atom=per_atom)


@pytest.fixture(params=[4, 20_000], ids=["small blocks", "one block"])
def table(request, monkeypatch) -> FrameTable:
    monkeypatch.setattr(references, "BLOCK", request.param)
    monkeypatch.setattr(statistics, "BLOCK", request.param)
    rng = np.random.default_rng(3)
    return FrameTable.from_frames([frame(rng, number) for number in range(23)])


def carried(table: FrameTable, name: str) -> list[Frame]:
    return [frame for frame in table if name in frame.fields]


@pytest.mark.parametrize("name", ["gap", "moduli"])
def test_intensive_values_have_one_mean_and_the_deviation_from_it(name, table):
    values = np.stack([frame.fields[name] for frame in carried(table, name)])
    mean, deviation = intensive_moments(table, name, SPECIES)
    assert mean.shape == (3, *values.shape[1:])
    for row in mean:
        np.testing.assert_allclose(row, values.mean(0), rtol=1e-13)
    assert deviation == pytest.approx(np.sqrt(((values - values.mean(0)) ** 2).mean()), rel=1e-13)


def test_extensive_values_are_fitted_by_composition_per_atom(table):
    frames = carried(table, "total")
    counts = np.array([[(frame.numbers == z).sum() for z in (29, 79)] for frame in frames], dtype=float)
    per_atom = np.array([frame.fields["total"] for frame in frames]) / counts.sum(1)
    shares = counts / counts.sum(1, keepdims=True)
    expected, *_ = np.linalg.lstsq(shares, per_atom, rcond=None)
    fitted, deviation = extensive_moments(table, "total", SPECIES)
    np.testing.assert_allclose(fitted, [*expected, 0.0], atol=1e-12)
    assert fitted[0] == pytest.approx(2.0, abs=0.2)
    assert deviation == pytest.approx(np.sqrt(((per_atom - shares @ expected) ** 2).mean()), rel=1e-10)


@pytest.mark.parametrize("name", ["charge", "spins"])
def test_values_of_atoms_have_a_mean_for_each_species_that_has_any(name, table):
    frames = carried(table, name)
    values, numbers = (np.concatenate(parts) for parts in zip(*((f.fields[name], f.numbers) for f in frames)))
    means, deviation = atom_moments(table, name, SPECIES)
    for row, z in enumerate((29, 79)):
        np.testing.assert_allclose(means[row], values[numbers == z].mean(0), rtol=1e-12)
    np.testing.assert_allclose(means[2], values.mean(0), rtol=1e-12)
    of_atoms = np.where((numbers == 29).reshape(-1, *[1] * (values.ndim - 1)), means[0], means[1])
    assert deviation == pytest.approx(np.sqrt(((values - of_atoms) ** 2).mean()), rel=1e-12)


def test_the_largest_value_counts_by_size(table):
    assert largest_magnitude(table, "charge") == max(
        np.abs(frame.fields["charge"]).max() for frame in carried(table, "charge")
    )
