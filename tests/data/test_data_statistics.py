"""Statistics against slow, obvious sums; references by every route; absurd labels are found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.data import references
from forgefield.data import statistics as statistics_module
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.options import DataOptions
from forgefield.data.references import fit_by_composition, robust_fit
from forgefield.data.species import SpeciesTable
from forgefield.data.statistics import Statistics, compute_statistics
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError

ENERGY = {1: -13.6, 6: -1029.49, 8: -2041.98}
SYMBOL = {1: "H", 6: "C", 8: "O"}
MOLECULES = [[8, 1, 1], [6, 8], [6, 8, 8], [6, 1, 1, 1, 1], [1, 1]]


@pytest.fixture
def molecules(make_frame):
    rng = np.random.default_rng(2)
    return [
        make_frame(z, energy=sum(ENERGY[n] for n in z), forces=rng.normal(size=(len(z), 3)), source="m.xyz", index=i)
        for i, z in enumerate(MOLECULES)
    ]


def graphs(frames, symbols=None, cutoff=3.0):
    return GraphDataset(frames, SpeciesTable(symbols) if symbols else SpeciesTable.from_frames(frames), cutoff)


def isolated(make_frame, *numbers, **rest):
    return [make_frame([z], energy=ENERGY[z] + 1.0, forces=None, source="iso.xyz", index=z, **rest) for z in numbers]


def test_numbers_equal_sums_over_all_atoms(molecules):
    molecules[1] = replace(molecules[1], forces=None, stress=None)
    dataset = graphs(molecules)
    found = compute_statistics(dataset, DataOptions())
    assert found.species_counts == {"H": 8, "C": 3, "O": 4}
    assert found.labels == {"energy": 5, "forces": 4, "stress": 0}
    pairs = [
        (a.numbers[i], np.linalg.norm(a.positions[i] - a.positions[j]))
        for a in molecules
        for i in range(len(a))
        for j in range(len(a))
        if i != j and np.linalg.norm(a.positions[i] - a.positions[j]) <= 3.0
    ]
    assert found.mean_neighbours == pytest.approx(len(pairs) / 15)
    assert found.mean_neighbours_by_species["O"] == pytest.approx(sum(z == 8 for z, _ in pairs) / 4)
    assert found.min_distance == pytest.approx(min(d for _, d in pairs), rel=1e-14)
    forces = np.concatenate([m.forces for m in molecules if m.forces is not None])
    numbers = np.concatenate([m.numbers for m in molecules if m.forces is not None])
    assert found.forces_rms == pytest.approx(np.sqrt((forces**2).mean()), rel=1e-14)
    assert found.forces_rms_by_species["H"] == pytest.approx(np.sqrt((forces[numbers == 1] ** 2).mean()), rel=1e-14)
    assert found.max_force == np.abs(forces).max()


def test_the_fit_recovers_the_energies_of_the_species(molecules):
    found = compute_statistics(graphs(molecules), DataOptions())
    assert found.reference_kind == "fit"
    assert found.reference_note == ""
    for z, energy in ENERGY.items():
        assert found.reference_energies[SYMBOL[z]] == pytest.approx(energy, abs=1e-9)
    assert found.energy_residual_mean == pytest.approx(0, abs=1e-9)
    assert found.energy_residual_std == pytest.approx(0, abs=1e-9)


@given(seed=st.integers(0, 2**32 - 1), species=st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_least_squares_is_exact_in_one_go_and_in_blocks(seed, species):
    rng = np.random.default_rng(seed)
    counts = np.concatenate([np.eye(species, dtype=int), rng.integers(0, 9, (20, species))])
    counts = counts[counts.sum(axis=1) > 0]
    energies = rng.uniform(-3000, 10, species)
    frames = [
        Frame(
            rng.normal(size=(n.sum(), 3)),
            np.repeat([1, 6, 8, 29][:species], n),
            np.zeros((3, 3)),
            np.zeros(3, bool),
            float(n @ energies),
        )
        for n in counts
    ]
    table, known = FrameTable.from_frames(frames), SpeciesTable(["H", "C", "O", "Cu"][:species])
    for block in (references.BLOCK, 7):
        with patch.object(references, "BLOCK", block):
            fit, rank = fit_by_composition(table, known)
        assert rank == species
        np.testing.assert_allclose(fit, energies, rtol=0, atol=1e-8)


def test_one_composition_gives_the_smallest_norm_with_a_message(make_frame):
    frames = [make_frame([8, 1, 1], energy=-30.0 + 0.01 * i) for i in range(3)]
    found = compute_statistics(graphs(frames), DataOptions(reference_energies="fit"))
    energies = found.reference_energies
    assert "only 1 of 2 species" in found.reference_note
    assert energies["H"] == pytest.approx(2 * energies["O"])
    assert 2 * energies["H"] + energies["O"] == pytest.approx(-29.99)


def test_isolated_atoms_are_the_reference_where_every_species_has_one(make_frame, molecules):
    frames = molecules + isolated(make_frame, 1, 6, 8)
    found = compute_statistics(graphs(frames), DataOptions())
    assert found.reference_kind == "isolated"
    assert found.reference_energies == {"H": -12.6, "C": pytest.approx(-1028.49), "O": pytest.approx(-2040.98)}
    assert found.n_frames == 8
    some = molecules + isolated(make_frame, 1, 6)
    assert compute_statistics(graphs(some), DataOptions()).reference_kind == "fit"
    with pytest.raises(ForgefieldError, match=r"reference_energies=isolated.*for O;"):
        compute_statistics(graphs(some), DataOptions(reference_energies="isolated"))


def test_a_lone_atom_that_sees_its_images_is_not_isolated(make_frame):
    box = {"pbc": True}
    far = isolated(make_frame, 1, cell=9 * np.eye(3), **box)
    near = isolated(make_frame, 1, cell=2.5 * np.eye(3), **box)
    assert compute_statistics(graphs(far), DataOptions()).reference_kind == "isolated"
    assert compute_statistics(graphs(near), DataOptions()).reference_kind == "fit"


def test_isolated_atoms_that_disagree_are_refused(make_frame):
    one, two = isolated(make_frame, 1) + isolated(make_frame, 1)
    with pytest.raises(ForgefieldError, match=r"isolated H atom has the energy -11\.6.*is -12\.6.*iso\.xyz, frame 1"):
        compute_statistics(graphs([one, replace(two, energy=-11.6)]), DataOptions())


def test_energies_in_the_config_are_used_as_they_are_and_must_be_complete(molecules):
    given_energies = {"H": -13.0, "C": -1030.0, "O": -2042.0}
    options = DataOptions(reference_energies=given_energies)
    found = compute_statistics(graphs(molecules), options)
    assert found.reference_energies == given_energies
    assert found.reference_kind == "given"
    with pytest.raises(ForgefieldError, match="has no energy for C, O"):
        compute_statistics(graphs(molecules), DataOptions(reference_energies={"H": -13.0}))
    with pytest.raises(ForgefieldError, match="has N, which the model does not have"):
        compute_statistics(graphs(molecules), DataOptions(reference_energies={**given_energies, "N": 1.0}))
    with pytest.raises(ForgefieldError, match="must be auto, isolated, fit, mean, none"):
        compute_statistics(graphs(molecules), DataOptions(reference_energies="fitted"))


def test_energies_in_the_config_in_another_unit_are_noticed(molecules):
    in_hartree = {SYMBOL[z]: energy / 27.211386 for z, energy in ENERGY.items()}
    with pytest.raises(ForgefieldError, match=r"given reference energies do not match.*27\.21: are eV and Ha mixed"):
        compute_statistics(graphs(molecules), DataOptions(reference_energies=in_hartree))


def test_no_references_and_no_energies(molecules):
    assert set(
        compute_statistics(graphs(molecules), DataOptions(reference_energies="none")).reference_energies.values()
    ) == {0.0}
    bare = [replace(m, energy=None, forces=None) for m in molecules]
    found = compute_statistics(graphs(bare), DataOptions())
    assert found.reference_kind == "none"
    assert (found.energy_residual_mean, found.forces_rms, found.max_force) == (None, None, None)
    with pytest.raises(ForgefieldError, match="no training frame has an energy"):
        compute_statistics(graphs(bare), DataOptions(reference_energies="fit"))


def test_an_absurd_force_is_found_also_in_the_validation_data(molecules):
    forces = molecules[3].forces.copy()
    forces[2, 1] = -301.0
    bad = replace(molecules[3], forces=forces)
    message = r"m\.xyz, frame 3: force component y of atom 2 is -301 eV/A.*data\.max_force=300"
    with pytest.raises(ForgefieldError, match=message):
        compute_statistics(graphs([*molecules[:3], bad]), DataOptions())
    with pytest.raises(ForgefieldError, match=message):
        compute_statistics(graphs(molecules), DataOptions(), [graphs([bad])])
    compute_statistics(graphs([*molecules[:3], bad]), DataOptions(max_force=302))


@pytest.mark.parametrize(("factor", "pair"), [(27.211386, "eV and Ha"), (1 / 23.0605, "eV and kcal/mol")])
def test_energies_in_mixed_units_are_found_and_the_ratio_is_named(molecules, factor, pair):
    bad = replace(molecules[0], energy=molecules[0].energy / factor, index=9)
    with pytest.raises(ForgefieldError, match=rf"m\.xyz, frame 9: the energy.*{pair} mixed"):
        compute_statistics(graphs(molecules * 3 + [bad]), DataOptions())


def test_a_few_wrong_frames_do_not_move_the_robust_fit():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, (60, 3)).astype(float)
    energies = counts @ [-10.0, -500.0, -2000.0] + 0.01 * rng.normal(size=60)
    energies[::6] *= 27.2
    np.testing.assert_allclose(robust_fit(counts, energies), [-10, -500, -2000], atol=0.1)


def test_json_round_trip_is_exact(molecules):
    found = compute_statistics(graphs(molecules), DataOptions())
    assert Statistics.from_json(found.to_json()) == found


def cache_files():
    return sorted(Path(os.environ["FORGEFIELD_CACHE"]).rglob("*"))


def test_kept_by_a_hash_of_all_it_depends_on(molecules, monkeypatch):
    first = compute_statistics(graphs(molecules), DataOptions())
    assert [p.suffix for p in cache_files()] == ["", ".json"]

    def unexpected(*_):
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(statistics_module, "_compute", unexpected)
        assert compute_statistics(graphs(molecules), DataOptions()) == first
        moved = replace(molecules[0], positions=molecules[0].positions + 1e-12)
        heavier = replace(molecules[0], weight=2.0)
        for dataset, options in (
            (graphs([moved, *molecules[1:]]), DataOptions()),
            (graphs([heavier, *molecules[1:]]), DataOptions()),
            (graphs(molecules, cutoff=3.1), DataOptions()),
            (graphs(molecules), DataOptions(reference_energies="none")),
            (graphs(molecules), DataOptions(cache=False)),
            (graphs(molecules, ["H", "C", "O", "N"]), DataOptions()),
        ):
            with pytest.raises(AssertionError, match="measured again"):
                compute_statistics(dataset, options)


def test_a_damaged_or_unwritable_cache_costs_nothing_but_time(molecules, monkeypatch, tmp_path):
    first = compute_statistics(graphs(molecules), DataOptions())
    cache_files()[-1].write_text("{half a fi")
    assert compute_statistics(graphs(molecules), DataOptions()) == first
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "file"))
    assert compute_statistics(graphs(molecules), DataOptions()) == first


def test_isolated_atoms_in_boxes_are_found_with_every_neighbour_list(make_frame):
    box = {"cell": 20 * np.eye(3), "pbc": True, "forces": None}
    frames = [
        make_frame([1], energy=-13.6, **box),
        make_frame([8], energy=-2041.98, **box),
        make_frame([8, 1], energy=-2060.0),
    ]
    for on_device in (False, True):
        dataset = GraphDataset(frames, SpeciesTable(["H", "O"]), 5.0, on_device=on_device)
        found = compute_statistics(dataset, DataOptions(cache=False))
        assert (found.reference_kind, found.reference_energies) == ("isolated", {"H": -13.6, "O": -2041.98})
