"""Packages and fine-tuned checkpoints of NequIP and Allegro (`tests/support/nequip_packages.py`) predict here what they predict
there, and nothing in them is executed."""

from __future__ import annotations

import lzma
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from forgefield.cli import main
from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.models import build_model
from forgefield.models.allegro.importer import ALLEGRO, read_allegro
from forgefield.models.allegro.modules import allegro_settings_of_modules
from forgefield.models.importing import ImportedModel
from forgefield.models.module_records import children_of
from forgefield.models.nequip.importer import NEQUIP, read_nequip
from forgefield.models.nequip.modules import module_settings, nequip_settings_of_modules
from forgefield.models.nequip.saved import read_saved
from forgefield.models.nequip.types_and_units import ModelUnits
from forgefield.physics.units import energy_factor, length_factor
from forgefield.untrusted.torch_files import open_torch_package
from tests.support.structures import make_batch

FILES = Path(__file__).parent / "packages"
STORED = sorted(path.name.removesuffix(".xz") for path in FILES.glob("*.xz"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All files as the programs wrote them, side by side."""
    unpacked = tmp_path_factory.mktemp("packages")
    for name in STORED:
        (unpacked / name).write_bytes(lzma.decompress((FILES / f"{name}.xz").read_bytes()))
    return unpacked


def read(path: Path, **options) -> ImportedModel:
    return read_allegro(path, **options) if path.name.startswith("allegro") else read_nequip(path, **options)


def predictions(
    imported: ImportedModel, expected: dict[str, np.ndarray], length: float = 1.0
) -> dict[str, torch.Tensor]:
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    labels = {"energy": None, "forces": None, "stress": None}
    cell = length * 4.0 * np.eye(3)
    frame = Frame(length * expected["positions"], expected["numbers"], cell, np.ones(3, bool), **labels)
    return {name: value.detach() for name, value in potential.eval()(make_batch(frame)).items()}


def require_equal(imported: ImportedModel, expected: dict[str, np.ndarray], energy: float = 1.0, length: float = 1.0):
    found = predictions(imported, expected, length)
    assert float(found["energy"]) == pytest.approx(energy * float(expected["energy"]), abs=1e-9)
    np.testing.assert_allclose(found["forces"], energy / length * expected["forces"], rtol=0, atol=1e-9)


def numbers_of(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FILES / f"{name.partition('.')[0]}.npz"))


@pytest.mark.parametrize("name", [name for name in STORED if not name.startswith("zbl")])
def test_energies_and_forces_are_those_of_the_program_that_wrote_the_file(name, folder):
    imported = read(folder / name)
    assert imported.resolved["species"] == ["H", "O"]
    assert "hyd is H, oxy is O" in imported.checked
    require_equal(imported, numbers_of(name))


@pytest.mark.parametrize(
    ("name", "kind", "describe"),
    [("nequip", NEQUIP, nequip_settings_of_modules), ("allegro", ALLEGRO, allegro_settings_of_modules)],
)
def test_options_read_off_modules_are_those_in_the_config(name, kind, describe, folder):
    path = folder / f"{name}.nequip.zip"
    with open_torch_package(path) as package:
        model = children_of(package.records("model/eager_model.pkl"))["sole_model"]
        found = module_settings(path, model, describe)
    written = read_saved(kind, path, "ema").settings
    for key in ("avg_num_neighbors", "per_type_energy_scales", "per_type_energy_shifts", "r_max", "type_names"):
        assert found[key] == pytest.approx(written[key])
    built = {
        "nequip": {
            "feature_irreps_hidden": ["3x0e+3x0o+2x1e+2x1o", "3x0e"],
            "radial_mlp_width": [4, 4],
            "num_bessels": 4,
        },
        "allegro": {"l_max": 2, "parity": False, "num_tensor_features": 2, "forward_normalize": False},
    }[name]
    assert {key: found[key] for key in built} == built
    assert found["per_type_energy_shifts_trainable"] == (name == "nequip")


def test_a_model_in_other_units_predicts_in_ev_and_angstrom(folder):
    expected = numbers_of("zbl")  # its ZBL repulsion is in kcal/mol, so the model is
    imported = read_nequip(folder / "zbl.nequip.zip")
    assert "were in kcal/mol and A" in imported.checked
    found = predictions(imported, expected)
    kcal = energy_factor("kcal/mol")
    # LAMMPS' constants of the two systems of units differ in the seventh digit.
    assert float(found["energy"]) == pytest.approx(kcal * float(expected["energy"]), rel=1e-6)
    np.testing.assert_allclose(found["forces"], kcal * expected["forces"], rtol=1e-6, atol=1e-6)
    for name in ("nequip", "allegro"):
        imported = read(folder / f"{name}.nequip.zip", units=ModelUnits("Ha", "Bohr"))
        require_equal(imported, numbers_of(name), energy_factor("Ha"), length_factor("Bohr"))
    with pytest.raises(
        ForgefieldError, match=r"ZBL repulsion of the model is in kcal/mol and A \(real\), not in eV and A"
    ):
        read_nequip(folder / "zbl.nequip.zip", units=ModelUnits("eV"))


def test_the_file_that_a_model_was_trained_from_is_found_or_asked_for(folder, tmp_path):
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes((folder / "nequip_finetuned.ckpt").read_bytes())
    with pytest.raises(ForgefieldError, match=r"trained from nequip.nequip.zip, which is not there .* --options FILE"):
        read_nequip(moved)
    require_equal(read_nequip(moved, folder / "nequip.nequip.zip"), numbers_of("nequip_finetuned"))
    with pytest.raises(ForgefieldError, match="leave --options out"):
        read_nequip(folder / "nequip.nequip.zip", folder / "nequip.nequip.zip")


def test_weights_before_averaging_are_imported_on_request(folder):
    average, last = (read_nequip(folder / "nequip_free.ckpt", weights=which) for which in ("ema", "raw"))
    name = "model.readout.weights.0"
    assert not torch.equal(average.state[name], last.state[name])


def test_the_command_names_types_and_errors(folder, tmp_path, capsys):
    package = str(folder / "nequip.nequip.zip")
    arguments = ["--name", "water", "--out", str(tmp_path)]
    assert main(["import", "nequip", package, *arguments, "--species", "O"]) != 0
    assert "--species names 1 elements, but" in capsys.readouterr().err
    assert main(["import", "nequip", package, *arguments, "--energy-unit", "kcal"]) != 0
    assert "did you mean 'kcal/mol'" in capsys.readouterr().err
    assert main(["import", "mace", package, *arguments, "--energy-unit", "eV"]) != 0
    assert "--energy_unit does not apply to mace" in capsys.readouterr().err.replace("-unit", "_unit")
    assert main(["import", "allegro", package, *arguments]) != 0
    assert "does not contain a model of Allegro" in capsys.readouterr().err
    assert main(["import", "nequip", package, *arguments, "--species", "D", "O"]) != 0
    assert "D does not tell its element" in capsys.readouterr().err
    assert main(["import", "nequip", package, *arguments]) == 0
    assert "NequIP 0.19.1, package, species H O" in capsys.readouterr().out


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def test_code_in_a_package_never_runs(folder, tmp_path, capsys):
    source, changed = folder / "nequip.nequip.zip", tmp_path / "harmful.nequip.zip"
    with zipfile.ZipFile(source) as whole, zipfile.ZipFile(changed, "w") as copy:
        root = whole.namelist()[0].split("/")[0]
        for item in whole.infolist():
            harmful = item.filename.endswith("eager_model.pkl")
            copy.writestr(item.filename, pickle.dumps(Harmful()) if harmful else whole.read(item))
        copy.writestr(f"{root}/nequip/__init__.py", "print('executed')")
    with pytest.raises(ForgefieldError, match="a package with one model is expected"):
        read_nequip(changed)
    assert "executed" not in capsys.readouterr().out
    for content in (b"PK", source.read_bytes()[:5000]):
        changed.write_bytes(content)
        with pytest.raises(ForgefieldError, match="damaged or truncated"):
            read_nequip(changed)
