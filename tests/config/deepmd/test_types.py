"""Types that are not elements: the element of each, in the config and at the end in DeePMD-kit's files again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from ase import Atoms

from forgefield import Calculator, api
from forgefield.cli import main
from forgefield.config.deepmd.types import element_of_type, elements_of_types
from forgefield.errors import ForgefieldError
from forgefield.inference.lammps.evaluator import species_of_types


@pytest.mark.parametrize(
    ("name", "element"),
    [("O", "O"), ("OW", "O"), ("HW", "H"), ("H1", "H"), ("mCl", "Cl"), ("ZN", "Zn"), ("Na+", "Na"), ("Cu_a", "Cu")]
    + [(name, None) for name in ("CA", "CL", "HO", "oxygen", "7", "M", "D1", "")],
)
def test_the_element_of_a_type(name: str, element: str | None) -> None:
    assert element_of_type(name) == element


@pytest.mark.parametrize(
    ("names", "elements"),
    [
        (["O", "OW"], ["O", "He"]),
        (["OW", "H", "O"], ["He", "H", "O"]),
        (["C1", "C2", "He", "CA"], ["C", "Ne", "He", "Ar"]),
    ],
)
def test_types_without_an_element_of_their_own_have_a_stand_in(names: list[str], elements: list[str]) -> None:
    assert elements_of_types("in.json", "model.type_map", names, None) == elements


def test_elements_that_the_user_gives_are_different() -> None:
    assert elements_of_types("in.json", "model.type_map", ["O", "OW"], ["O", "Xe"]) == ["O", "Xe"]
    with pytest.raises(ForgefieldError, match=r"data.species gives the element O to several types .*\(O, OW\)"):
        elements_of_types("in.json", "model.type_map", ["O", "OW"], ["O", "O"])
    with pytest.raises(ForgefieldError, match="lists 1 elements, but 'model.type_map' in in.json has 2 types"):
        elements_of_types("in.json", "model.type_map", ["O", "OW"], ["O"])


def system(folder: Path, names: str, types: str) -> None:
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text(types)
    (folder / "type_map.raw").write_text(names)
    rng = np.random.default_rng(0)
    values = {"coord": rng.uniform(0, 3, (2, 9)), "energy": rng.normal(size=(2, 1)), "force": rng.normal(size=(2, 9))}
    for name, value in {**values, "box": np.tile(6 * np.eye(3).reshape(1, 9), (2, 1))}.items():
        np.save(folder / "set.000" / f"{name}.npy", value)


@pytest.mark.slow
def test_names_of_types_survive_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two systems with different orders of types, one of which is a second type of oxygen, with a stand-in."""
    monkeypatch.chdir(tmp_path)
    system(tmp_path / "a", "OW HW", "0 1 1")
    system(tmp_path / "b", "HW O OW", "2 0 0")
    content = {
        "model": {
            "type_map": ["OW", "HW", "O"],
            "descriptor": {"type": "se_e2_a", "sel": [4, 4, 4], "rcut": 4.0, "neuron": [2], "axis_neuron": 1},
            "fitting_net": {"neuron": [2]},
        },
        "learning_rate": {"start_lr": 1e-3, "stop_lr": 1e-4},
        "training": {
            "training_data": {"systems": ["a"], "batch_size": 1},
            "validation_data": {"systems": ["b"], "batch_size": 1},
            "numb_steps": 1,
        },
    }
    (tmp_path / "input.json").write_text(json.dumps(content))
    assert main(["train", "input.json"]) == 0
    run = tmp_path / "runs" / "input"
    assert api.load(run).species == ("He", "H", "O")
    # Both systems are the same structure, also for a model that reads names.
    assert dict(api.test(run, "a")) == dict(api.test(run, "b"))
    assert main(["export", str(run), "--to", "deepmd", "-o", "model.yaml"]) == 0
    tree = yaml.safe_load((tmp_path / "model.yaml").read_text())["model"]
    assert tree["type_map"] == tree["descriptor"]["type_map"] == tree["fitting"]["type_map"] == ["OW", "HW", "O"]
    assert main(["import", "deepmd", "model.yaml", "--name", "again"]) == 0
    again, before = api.test(tmp_path / "runs" / "again", "b"), api.test(run, "a")
    assert [again[key] for key in ("energy_rmse", "forces_rmse")] == [
        before[key] for key in ("energy_rmse", "forces_rmse")
    ]
    # ASE and LAMMPS have the names as well.
    positions = np.load("a/set.000/coord.npy")[0].reshape(3, 3)
    atoms = Atoms("OHH", positions, cell=[6] * 3, pbc=True, calculator=Calculator(run))
    atoms.arrays["type_names"] = np.array(["OW", "HW", "HW"])
    stand_in = Atoms("HeHH", positions, cell=[6] * 3, pbc=True, calculator=Calculator(run))
    assert atoms.get_potential_energy() == stand_in.get_potential_energy()
    atoms.arrays["type_names"] = np.array(["O", "HW", "HW"])
    assert atoms.get_potential_energy() != stand_in.get_potential_energy()
    potential = api.load(run)
    assert species_of_types(potential.species, ["HW", "OW", "O"], potential.type_names) == [1, 0, 2]
    with pytest.raises(ForgefieldError, match="atom type 2 is 'OX', but the types of the model are OW, HW, O"):
        species_of_types(potential.species, ["HW", "OX"], potential.type_names)
