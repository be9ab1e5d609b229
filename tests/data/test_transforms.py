"""Functions of the user that change frames: `data.transforms`."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
from ase import Atoms

import forgefield
from forgefield.config.loading import load_config
from forgefield.config.trust import CONFIG
from forgefield.data.splits import resolve_splits
from forgefield.errors import ForgefieldError
from tests.support.helpers import tiny_config, write_emt
from tests.support.train_many import train_only

HERE = "tests.data.test_transforms"


def shifted(atoms: Atoms, energy: float) -> Atoms:
    """The structure with more energy per atom, and a label that follows from its forces."""
    atoms.info["energy"] += energy * len(atoms)
    atoms.info["largest"] = float(np.abs(atoms.arrays["forces"]).max())
    return atoms


def without_large_forces(atoms: Atoms) -> Atoms | None:
    return atoms if atoms.info["largest"] < 1.5 else None


def wrong(atoms: Atoms) -> float:
    return 1.0


def failing(atoms: Atoms) -> Atoms:
    raise KeyError("charge")


def splits(folder, transforms, **data):
    config = load_config(tiny_config(folder, data={"val": 0, "transforms": transforms, **data}))
    return resolve_splits(config.data, 0, trust=CONFIG)


def test_functions_change_and_leave_out_frames_in_their_order_before_labels_are_selected(tmp_path):
    transforms = [{"name": f"{HERE}.shifted", "energy": 2.5}, f"{HERE}.without_large_forces"]
    table = splits(
        tmp_path, transforms, labels={"fields": {"largest": {}}}, val=str(write_emt(tmp_path / "v.extxyz", 4))
    )
    structures = ase.io.read(tmp_path / "frames.extxyz", ":")
    kept = [atoms for atoms in structures if np.abs(atoms.get_forces()).max() < 1.5]
    assert 0 < len(kept) < len(structures)
    expected = [atoms.get_potential_energy() + 2.5 * len(atoms) for atoms in kept]
    assert [frame.energy for frame in table.train] == pytest.approx(expected)
    assert [float(frame.fields["largest"]) for frame in table.train] == pytest.approx(
        [np.abs(atoms.get_forces()).max() for atoms in kept]
    )
    assert len(table.val) <= 4  # the same functions


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([f"{HERE}.wrong"], "wrong returned float; it must return ase.Atoms"),
        ([f"{HERE}.failing"], "frame 0: data.transforms: .*failing raised KeyError"),
        ([f"{HERE}.shfted"], "shfted"),
        ([{"name": f"{HERE}.shifted", "enery": 1}], "Did you mean 'energy'"),
        ([{"energy": 1}], "data.transforms.0"),
    ],
)
def test_what_is_wrong_with_a_function_is_named(tmp_path, transforms, message):
    with pytest.raises(ForgefieldError, match=message):
        splits(tmp_path, transforms)


def test_a_run_names_its_functions_and_they_are_executed_only_with_permission(tmp_path):
    transforms = [{"name": f"{HERE}.shifted", "energy": 100.0}]
    run = train_only(
        tiny_config(tmp_path, data={"transforms": transforms}, trainer={"max_epochs": 1, "accelerator": "cpu"})
    )
    file = str(tmp_path / "frames.extxyz")
    with pytest.raises(ForgefieldError, match="trust-code"):
        forgefield.test(run.path, file)
    errors = forgefield.test(run.path, file, trust_code=True)
    assert errors["energy_mae"] < 10_000  # of energies that are shifted as in the training
    with pytest.raises(ForgefieldError, match="trust-code"):
        load_config(run.path / "config.yaml")
