"""What `inspect_table` finds in data: numbers equal to those of a slow look at every frame, faults named by frame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forgefield.data.inspection import inspect as inspecting
from forgefield.data.inspection import survey as surveying
from forgefield.data.inspection.inspect import inspect_table
from forgefield.data.inspection.survey import row_blocks
from forgefield.data.neighbours.graph import GraphOptions, edge_vectors, neighbour_list
from forgefield.data.reading import read_table
from forgefield.data.store.convert import convert, store_frames
from forgefield.data.store.export import write_frames
from forgefield.data.store.store import open_store
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.physics.units import EV_PER_A3_TO_GPA
from tests.support.helpers import write_emt


@pytest.fixture
def water(make_frame):
    """Frames of H2O with energies about -500 eV and forces of about 1 eV/A; every third without forces."""
    rng = np.random.default_rng(0)
    return [
        make_frame(
            [8, 1, 1],
            energy=-500 + rng.normal(),
            forces=None if i % 3 == 2 else rng.normal(size=(3, 3)),
            source=f"w{i % 2}.xyz",
            index=i,
        )
        for i in range(24)
    ]


def remarks_of(frames) -> str:
    return "\n".join(inspect_table(FrameTable.from_frames(frames)).remarks)


def test_numbers_are_those_of_a_look_at_every_frame(tmp_path):
    table = read_table(str(write_emt(tmp_path / "cu.extxyz", 25)))
    frames, found = list(table), inspect_table(table, 4.0)
    sizes = [len(frame) for frame in frames]
    assert (found.n_frames, found.n_files) == (25, 1)
    assert found.atoms == (min(sizes), max(sizes), sum(sizes))
    for symbol, number in (("Cu", 29), ("Au", 79)):
        counts = [int((frame.numbers == number).sum()) for frame in frames]
        assert found.species[symbol] == (sum(counts), sum(count > 0 for count in counts))
    assert found.periodicity == {"xyz": 25}
    ranges = {label.name: (label.low, label.high, label.frames, label.unit) for label in found.labels}
    energies = [frame.energy / len(frame) for frame in frames]
    forces = np.concatenate([frame.forces for frame in frames])
    stress = np.stack([frame.stress for frame in frames]) * EV_PER_A3_TO_GPA
    assert ranges["energy"] == (min(energies), max(energies), 25, "eV/atom")
    assert ranges["forces"] == (forces.min(), forces.max(), 25, "eV/A")
    assert ranges["stress"] == (pytest.approx(stress.min()), pytest.approx(stress.max()), 25, "GPa")
    degrees, lengths, most = [], [], {"Cu": 0, "Au": 0}
    for frame in frames:
        source, destination, shifts = neighbour_list(frame.positions, frame.cell, frame.pbc, 4.0)
        length = np.linalg.norm(edge_vectors(frame.positions, frame.cell, source, destination, shifts), axis=1)
        degrees.append(np.bincount(destination, minlength=len(frame)))
        for symbol, number in (("Cu", 29), ("Au", 79)):
            around = np.bincount(destination[frame.numbers[source] == number], minlength=1)
            most[symbol] = max(most[symbol], int(around.max()))
        lengths.append([length[destination == atom].min() for atom in range(len(frame))])
    degrees, lengths = np.concatenate(degrees), np.concatenate(lengths)
    assert found.survey.neighbours == (degrees.min(), pytest.approx(degrees.mean()), degrees.max())
    assert found.survey.most_by_element == most
    np.testing.assert_allclose(found.survey.nearest, lengths, rtol=1e-12)
    assert found.survey.closest[0] == pytest.approx(lengths.min())
    assert found.limits == []


def test_a_store_is_seen_like_the_files_it_was_made_from(tmp_path):
    source = write_emt(tmp_path / "cu.extxyz", 20)
    convert(str(source), tmp_path / "store", graph=GraphOptions(4.0))
    files, store = inspect_table(read_table(str(source))), inspect_table(open_store(tmp_path / "store").table())
    for name in ("n_frames", "n_files", "atoms", "species", "periodicity", "labels", "systems", "remarks", "limits"):
        assert getattr(files, name) == getattr(store, name)
    np.testing.assert_array_equal(files.survey.nearest, store.survey.nearest)


def test_mixed_periodicity_and_sources_are_counted(make_frame):
    cell = np.eye(3) * 9
    frames = [
        make_frame([1, 1], cell=cell, pbc=pbc, source=source)
        for pbc, source in (((True, True, False), "slab"), ((False,) * 3, "gas"), ((True, True, False), "slab"))
    ]
    found = inspect_table(FrameTable.from_frames(frames))
    assert found.periodicity == {"xy": 2, "none": 1}
    assert found.systems == [("slab", 2), ("gas", 1)]


def test_repeated_frames_are_found_whatever_their_weight_and_name(water):
    again = replace(water[4], weight=3.0, source="other.xyz", index=9)
    assert "1 frame identical to an earlier one: other.xyz, frame 9" in remarks_of([*water, again])
    assert "repeat" not in remarks_of(water)


def test_the_same_structure_with_other_labels_is_not_a_repetition(water):
    twin = replace(water[4], energy=water[4].energy + 0.1, source="twin.xyz", index=0)
    remarks = remarks_of([*water, twin])
    assert "1 frame with the structure of an earlier one but different labels: twin.xyz, frame 0" in remarks
    assert "repeat" not in remarks


def test_missing_labels_are_counted(water):
    assert "8 frames without forces: w0.xyz, frame 2; w1.xyz, frame 5" in remarks_of(water)
    assert "without energy" not in remarks_of(water)


def test_atoms_at_the_same_place_are_a_remark_and_not_an_error(water, make_frame):
    double = make_frame([8, 1, 1], positions=[[0, 0, 0], [0, 0, 0], [0, 0.9, 0]], source="bad.xyz", index=1)
    found = inspect_table(FrameTable.from_frames([*water, double]))
    assert found.survey.closest[0] == 0.0
    assert any("closer than half" in remark and "bad.xyz, frame 1" in remark for remark in found.remarks)


def test_strange_units_are_doubted(water):
    factor = 23.06
    assert "?" not in remarks_of(water)
    large = [frame if frame.forces is None else replace(frame, forces=frame.forces * factor) for frame in water]
    assert "are they in kcal/mol/A?" in remarks_of(large)
    assert "are lengths in Bohr?" in remarks_of([replace(f, positions=f.positions * 1.8897) for f in water])
    assert "are lengths in nm?" in remarks_of([replace(f, positions=f.positions / 10) for f in water])
    scattered = [replace(frame, energy=-500.0 + 60 * i) for i, frame in enumerate(water)]
    assert "are they total energies in eV" in remarks_of(scattered)


def test_an_energy_in_another_unit_names_the_factor(water):
    water[7] = replace(water[7], energy=water[7].energy / 27.2114)
    assert "w1.xyz, frame 7; the ratio 27.2" in remarks_of(water)


def test_large_tables_are_looked_at_in_part_and_that_is_reported(water, monkeypatch):
    monkeypatch.setattr(surveying, "FRAMES", 10)
    monkeypatch.setattr(inspecting, "COMPARED", 20)
    found = inspect_table(FrameTable.from_frames([*water, water[0]]))
    assert len(found.survey.rows) == 10
    assert found.survey.rows[0] == 0
    assert found.survey.rows[-1] == 24
    assert found.limits == [
        "distances and neighbours were examined in 10 of 25 frames, evenly spaced",
        "duplicate frames were not searched, because there are more than 20 frames",
    ]
    assert not any("repeat" in remark for remark in found.remarks)


def test_a_store_with_neighbour_lists_shows_its_closest_pair_wherever_it_is(tmp_path, water, make_frame, monkeypatch):
    monkeypatch.setattr(surveying, "FRAMES", 3)
    monkeypatch.setattr(surveying, "CLOSEST", 2)
    water[13] = make_frame([8, 1, 1], positions=[[0, 0, 0], [0, 0, 0.2], [0, 1, 0]], source="w.xyz", index=13)
    store_frames(water, tmp_path / "store", GraphOptions(3.0))
    found = inspect_table(open_store(tmp_path / "store").table())
    assert found.survey.closest == (pytest.approx(0.2), "H-O, w.xyz, frame 13")
    assert list(found.survey.too_close) == [13]


def test_blocks_hold_every_frame_once_and_about_as_many_atoms_as_allowed():
    n_atoms = np.random.default_rng(1).integers(1, 50, size=200)
    blocks = list(row_blocks(n_atoms, 100))
    assert np.array_equal(np.concatenate(blocks), np.arange(200))
    assert max(n_atoms[block].sum() for block in blocks) <= 100 + n_atoms.max()
    assert [list(block) for block in row_blocks(np.array([500, 1, 1]), 100)] == [[0], [1, 2]]


def test_progress_ends_at_the_end(water):
    seen = []
    inspect_table(FrameTable.from_frames(water), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1000, 1000)
    assert seen == sorted(seen)


def test_nothing_to_look_at_is_an_error():
    with pytest.raises(ForgefieldError, match="no frame"):
        inspect_table(FrameTable([]))


@pytest.mark.parametrize("suffix", [".extxyz", ".xyz", ".traj", ".db"])
def test_written_frames_are_read_back_to_the_last_bit(tmp_path, suffix):
    rng = np.random.default_rng(3)
    frames = list(read_table(str(write_emt(tmp_path / "cu.extxyz", 8))))
    frames = [replace(f, positions=f.positions + rng.normal(scale=1e-9, size=f.positions.shape)) for f in frames]
    frames[1] = replace(frames[1], weight=1 / 3, stress=rng.normal(size=(3, 3)))
    frames[2] = replace(frames[2], forces=None)
    frames[3] = replace(frames[3], energy=None, stress=None)
    frames[4] = replace(frames[4], pbc=np.array([True, False, True]))
    frames[5] = replace(frames[5], pbc=np.zeros(3, bool), cell=np.zeros((3, 3)), stress=None)
    path = tmp_path / f"again{suffix}"
    assert write_frames(frames, path) == (8, sum(map(len, frames)))
    for before, after in zip(frames, read_table(str(path)), strict=True):
        for name in ("positions", "numbers", "cell", "pbc", "energy", "forces", "stress", "weight"):
            old, new = getattr(before, name), getattr(after, name)
            assert (old is None) == (new is None), name
            assert old is None or np.array_equal(old, new), name


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path, water):
    def frames():
        yield from water
        raise ForgefieldError("the source ends here")

    with pytest.raises(ForgefieldError, match="ends here"):
        write_frames(frames(), tmp_path / "w.extxyz")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ForgefieldError, match="no frame to write"):
        write_frames([], tmp_path / "w.extxyz")
    with pytest.raises(ForgefieldError, match="end in .extxyz"):
        write_frames(water, tmp_path / "w.cif")
    assert list(tmp_path.iterdir()) == []
