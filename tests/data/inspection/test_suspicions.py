"""Labels and settings that are read without error and are hardly right are named, with what to set; good data is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forgefield.cli import main
from forgefield.data.frame import Frame
from forgefield.data.inspection.inspect import inspect_table
from forgefield.data.inspection.suspicions import label_warnings
from forgefield.data.module import read_data
from forgefield.data.options import DataOptions, LabelOptions, UnitOptions
from forgefield.data.reading import read_table
from forgefield.data.store.export import write_frames
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.physics.units import EV_PER_A3_TO_GPA


def crystal(i: int) -> Frame:
    """Copper cubes of 1 to 3 cells, 4 to 108 atoms, -3.5 eV/atom, 2 GPa."""
    rng = np.random.default_rng(i)
    cells = 1 + i % 3
    basis = np.array([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    grid = np.array([[x, y, z] for x in range(cells) for y in range(cells) for z in range(cells)])
    positions = 3.6 * (grid[:, None] + basis).reshape(-1, 3) + rng.normal(scale=0.05, size=(4 * cells**3, 3))
    n = len(positions)
    return Frame(
        positions=positions,
        numbers=np.full(n, 29),
        cell=3.6 * cells * np.eye(3),
        pbc=np.full(3, True),
        energy=n * (-3.5 + 0.1 * rng.normal()),
        forces=rng.normal(size=(n, 3)),
        stress=np.eye(3) * 2 / EV_PER_A3_TO_GPA,
        source="cu.xyz",
        index=i,
    )


CRYSTALS = [crystal(i) for i in range(24)]


def doubts(frames) -> str:
    return "\n".join(label_warnings(FrameTable.from_frames(frames)))


def test_good_data_raises_no_doubt():
    assert doubts(CRYSTALS) == ""
    assert inspect_table(FrameTable.from_frames(CRYSTALS)).remarks == []


def test_energies_per_atom_read_as_total_energies():
    per_atom = [replace(frame, energy=frame.energy / len(frame)) for frame in CRYSTALS]
    assert "energies do not grow with the number of atoms: frames of 4 atoms have -3." in doubts(per_atom)
    assert "set data.units.energy=eV/atom" in doubts(per_atom)
    squared = [replace(frame, energy=frame.energy * len(frame)) for frame in CRYSTALS]
    assert "energies grow with the square of the number of atoms" in doubts(squared)
    assert doubts([frame for frame in per_atom if len(frame) == 32]) == ""  # of one size there is nothing to see
    small = [replace(frame, energy=0.001 * frame.energy / len(frame) * i) for i, frame in enumerate(CRYSTALS)]
    assert doubts(small) == ""


def test_energies_of_molecules_of_many_kinds_are_total_energies(make_frame):
    """Sizes and compositions vary together; energies are those of atoms."""
    rng = np.random.default_rng(1)
    atom = {1: -13.6, 6: -1029.0, 8: -2041.0}
    frames = []
    for _ in range(60):
        numbers = rng.choice([1, 6, 8], size=rng.integers(3, 20))
        frames.append(make_frame(numbers, energy=sum(atom[z] for z in numbers) - 4.0 * len(numbers), forces=None))
    assert doubts(frames) == ""


@pytest.mark.parametrize("unit", ["kbar", "GPa"])
def test_stress_in_another_unit(unit):
    factor = {"kbar": 1602.18, "GPa": 160.218}[unit]
    wrong = [replace(frame, stress=frame.stress * factor) for frame in CRYSTALS]
    assert f"stresses are large: up to {2 * factor:.6g} GPa (cu.xyz, frame 0)" in doubts(wrong)
    one = [*CRYSTALS[:-1], replace(CRYSTALS[-1], stress=np.eye(3) * 1001 / EV_PER_A3_TO_GPA)]
    assert "1001 GPa (cu.xyz, frame 23)" in doubts(one)


def test_energies_beyond_all_electrons_are_in_another_unit(make_frame):
    aspirin = [6] * 9 + [1] * 8 + [8] * 4
    frames = [make_frame(aspirin, energy=-406757.0 - i, forces=None, source="a.npz", index=i) for i in range(12)]
    assert "12 frames with an energy beyond the total energy of all electrons" in doubts(frames)
    assert doubts([replace(frame, energy=frame.energy * 0.0433641) for frame in frames]) == ""


def test_labels_that_never_change(make_frame):
    frames = [replace(frame, energy=1.0, forces=np.zeros((len(frame), 3))) for frame in CRYSTALS]
    assert "all 24 frames have the same energy, 1 eV" in doubts(frames)
    assert "all forces of 24 frames are zero" in doubts(frames)


def test_cells_in_nanometres():
    small = [replace(frame, positions=frame.positions / 10, cell=frame.cell / 10) for frame in CRYSTALS]
    assert "24 frames with a cell of less than 1 A^3 per atom (are lengths in nm?" in doubts(small)


def test_atoms_without_neighbours_are_counted(make_frame):
    positions = np.array([[0, 0, 0], [0, 0, 1.0], [0, 0, 40.0], [0, 0, 80.0]])
    frames = [make_frame([1] * 4, positions=positions + 0.01 * i) for i in range(3)] + [make_frame([1])] * 5
    found = inspect_table(FrameTable.from_frames(frames))
    assert found.survey.lone_share == 0.5
    assert any("50 % of the atoms have no neighbour within 5 A" in remark for remark in found.remarks)
    found = inspect_table(FrameTable.from_frames(frames), cutoff=50.0)
    assert found.survey.lone_share == 0.0


@pytest.fixture
def data(tmp_path):
    write_frames(CRYSTALS, tmp_path / "cu.extxyz")
    return str(tmp_path / "cu.extxyz")


def test_training_warns_of_lonely_atoms_and_refuses_a_cutoff_with_nothing_in_it(data, tmp_path, make_frame):
    module = read_data(DataOptions(train=data, cutoff=4.0), 0)
    assert "warning" not in dict(module.describe())
    with pytest.raises(ForgefieldError, match=r"data\.cutoff=0\.01: no atom has a neighbour within 0\.01 A"):
        read_data(DataOptions(train=data, cutoff=0.01), 0)
    with pytest.raises(ForgefieldError, match=r"data\.cutoff must be a length of at most 100 A, not 1e\+06"):
        read_data(DataOptions(train=data, cutoff=1e6), 0)
    positions = np.array([[0, 0, 0], [0, 0, 1.0], [0, 0, 40.0]])
    sparse = [make_frame([1] * 3, positions=positions * (1 + 0.01 * i), energy=-1.0 * i) for i in range(8)]
    write_frames(sparse, tmp_path / "sparse.extxyz")
    module = read_data(DataOptions(train=str(tmp_path / "sparse.extxyz"), cutoff=4.0), 0)
    assert "33 % of the atoms have no neighbour within 4 A" in dict(module.describe())["warning"]


def test_the_start_of_a_training_reports_suspicious_data(tmp_path):
    wrong = [replace(frame, energy=frame.energy / len(frame), stress=frame.stress * 1602) for frame in CRYSTALS]
    write_frames(wrong, tmp_path / "cu.extxyz")
    module = read_data(DataOptions(train=str(tmp_path / "cu.extxyz"), cutoff=4.0), 0)
    warnings = [text for name, text in module.describe() if name == "warning"]
    assert len(warnings) == 2
    assert "set data.units.energy=eV/atom" in warnings[0]
    assert "stresses are large" in warnings[1]
    right = DataOptions(
        train=str(tmp_path / "cu.extxyz"), cutoff=4.0, units=UnitOptions(energy="eV/atom", stress="kbar")
    )
    module = read_data(right, 0)
    assert module.warnings == []


def test_colabfit_is_suspicious_until_its_units_are_set(shared):
    path, labels = str(shared / "matsciml_lmdb" / "colabfit"), LabelOptions(energy="potential-energy")
    remarks = "\n".join(inspect_table(read_table(path, labels)).remarks)
    assert "set data.units.energy=eV/atom" in remarks
    assert "up to 37903.7 GPa" in remarks
    units = UnitOptions(energy="eV/atom", stress="kbar")
    assert inspect_table(read_table(path, labels, units)).remarks == []


@pytest.mark.parametrize("name", ["3bpa/train_300K.xyz", "mlearn/Li_train.xyz", "mlearn/Cu_train.xyz", "water_dp"])
def test_published_data_is_not_suspicious(shared, name):
    assert label_warnings(read_table(str(shared / name))) == []


def test_isolated_atoms_are_left_out_of_the_energy_spread(tmp_path, make_frame):
    rng = np.random.default_rng(0)
    molecules = [make_frame([1, 1], energy=-31.0 + 0.1 * rng.normal()) for _ in range(20)]
    path = str(tmp_path / "a.extxyz")
    write_frames([*molecules, make_frame([1], energy=-13.6)], tmp_path / "a.extxyz")
    module = read_data(DataOptions(train=path, val=None, cutoff=4.0), 0)
    residuals = np.array([frame.energy / 2 + 13.6 for frame in molecules])
    assert module.statistics.reference_kind == "isolated"
    assert module.statistics.energy_residual_std == pytest.approx(residuals.std(), rel=1e-5)
    assert dict(module.describe())["energy spread"] == f"{1000 * residuals.std():.1f} meV/atom"


def test_data_info_takes_units_per_atom_and_refuses_a_huge_cutoff(tmp_path, capsys):
    per_atom = [replace(frame, energy=frame.energy / len(frame)) for frame in CRYSTALS]
    path = str(tmp_path / "cu.extxyz")
    write_frames(per_atom, tmp_path / "cu.extxyz")
    assert main(["data", "info", path]) == 0
    assert "--energy-unit eV/atom" in capsys.readouterr().out
    assert main(["data", "info", path, "--energy-unit", "eV/atom"]) == 0
    assert "nothing suspicious" in capsys.readouterr().out
    assert main(["data", "info", path, "--cutoff", "1e6"]) == 2
    assert "cutoff must be a length of at most 100 A, not 1e+06" in capsys.readouterr().err


def with_energies(per_atom: np.ndarray) -> list[Frame]:
    """Copper cubes with these energies, eV/atom."""
    frames = [crystal(i) for i in range(len(per_atom))]
    return [replace(frame, energy=len(frame) * float(energy)) for frame, energy in zip(frames, per_atom)]


def test_a_single_energy_far_from_all_others_is_named() -> None:
    energies = -3.5 + 0.03 * np.random.default_rng(1).normal(size=40)
    assert not doubts(with_energies(energies))
    energies[17] += 0.6
    warning = doubts(with_energies(energies))
    deviation = abs(energies[17] - np.median(energies))
    assert f"1 frame with an energy that deviates by up to {deviation:.3g} eV/atom" in warning
    assert "17" in warning.partition("converge?)")[2]


def test_the_tail_of_a_broad_distribution_is_not_an_outlier() -> None:
    assert not doubts(with_energies(-3.5 + np.linspace(0, 1, 40) ** 4))
