"""Frozen models of DeePMD-kit (`dp freeze`), read as data: the same predictions, and reasons where they cannot be read."""

from __future__ import annotations

import json
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from forgefield import api
from forgefield.cli import main
from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.readers import read_frames
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models import build_model
from forgefield.models.deeppot.deepmd_files import read_tree
from forgefield.models.deeppot.deepmd_tables import split_table
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.models.deeppot.importer import read_deepmd

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepmd"


def stored(folder: Path, file: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A file of tests/fixtures/deepmd/make_frozen.py, and DeePMD-kit's predictions."""
    path = folder / file
    path.write_bytes(lzma.decompress((FIXTURES / f"{file}.xz").read_bytes()))
    with np.load(FIXTURES / f"{path.stem}.npz") as results:
        return path, dict(results)


@pytest.fixture(params=["se_e2_a.pth", "dpa1.pth"])
def frozen(request, tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    return stored(tmp_path, request.param)


@pytest.mark.parametrize("file", ["se_e2_a.pth", "dpa1.pth", "zbl.pth", "zbl.dp"])
def test_predictions_are_those_of_deepmd(file, tmp_path):
    path, expected = stored(tmp_path, file)
    assert_same(path, expected)
    assert np.abs(expected["force"]).max() > 1e-3


def test_models_with_a_pair_table_are_exported(tmp_path):
    path, expected = stored(tmp_path, "zbl.pth")
    imported = read_deepmd(path)
    potential = build_model(imported.resolved, precision="float64", seed=0)
    potential.load_state_dict(imported.state)
    write_deepmd(potential, tmp_path / "again.dp")
    assert_same(tmp_path / "again.dp", expected)
    theirs, ours = (read_tree(file)["model"] for file in (stored(tmp_path, "zbl.dp")[0], tmp_path / "again.dp"))
    tables = [model["models"][1]["tab"]["@variables"] for model in (theirs, ours)]
    for name in ("vdata", "tab_info", "tab_data"):
        np.testing.assert_allclose(tables[1][name], tables[0][name], rtol=1e-9, atol=1e-9, err_msg=name)
    assert {key: theirs[key] for key in ("type", "sw_rmin", "sw_rmax", "smin_alpha")} == {
        key: ours[key] for key in ("type", "sw_rmin", "sw_rmax", "smin_alpha")
    }


def test_a_table_with_another_bias_than_the_network_is_refused(tmp_path):
    tree = read_tree(stored(tmp_path, "zbl.dp")[0])
    tree["model"]["models"][1]["@variables"]["out_bias"] = np.zeros((1, 2, 1))
    with pytest.raises(ForgefieldError, match=r"add different energies of species \(srtab_add_bias: false\)"):
        split_table(tree["model"])


def assert_same(path: Path, expected: dict[str, np.ndarray]) -> None:
    imported = read_deepmd(path)
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    assert imported.precision == "float64"
    numbers = np.array([8, 1])[expected["atype"][0]]
    cell = expected["box"].reshape(3, 3)
    batch = batch_from_frames(
        [Frame(expected["coord"][0], numbers, cell, np.ones(3, bool))], SpeciesTable(["O", "H"]), 4.0
    )
    found = potential.eval()(batch, stress=True)
    np.testing.assert_allclose(found["energy"].item(), expected["energy"].item(), rtol=1e-11)
    np.testing.assert_allclose(found["atomic_energy"], expected["atom_energy"].reshape(-1), rtol=1e-9)
    np.testing.assert_allclose(found["forces"], expected["force"][0], rtol=1e-9, atol=1e-11)
    virial = -(found["stress"][0] * torch.linalg.det(batch["cell"])[0]).numpy()
    np.testing.assert_allclose(virial, expected["virial"].reshape(3, 3), rtol=1e-9, atol=1e-11)


def test_the_import_verb_makes_a_run(frozen, tmp_path, capsys):
    path, _ = frozen
    assert main(["import", "deepmd", str(path), "--out", str(tmp_path / "runs")]) == 0
    assert "frozen model" in capsys.readouterr().out
    assert api.load(tmp_path / "runs" / path.stem).species == ("O", "H")


def test_systems_without_type_map_have_the_types_of_the_model(frozen, tmp_path):
    path, expected = frozen
    assert main(["import", "deepmd", str(path), "--out", str(tmp_path / "runs")]) == 0
    run, system = tmp_path / "runs" / path.stem, tmp_path / "system"
    (system / "set.000").mkdir(parents=True)
    (system / "type.raw").write_text("\n".join(map(str, expected["atype"][0])))
    for name in ("coord", "box", "energy", "force"):
        np.save(system / "set.000" / f"{name}.npy", expected[name].reshape(1, -1))
    errors = api.test(run, str(system))
    assert errors["energy_mae"] < 1e-10
    assert errors["forces_mae"] < 1e-10
    (predicted,) = api.predict(run, str(system))
    assert predicted.get_chemical_symbols() == ["OH"[t] for t in expected["atype"][0]]
    np.testing.assert_allclose(predicted.get_forces(), expected["force"][0], atol=1e-7)
    with pytest.raises(ForgefieldError, match=r"type_map.raw, so its atom types have no elements"):
        read_frames(str(system))  # without a model, nobody knows them


def rewritten(path: Path, change) -> Path:
    """The archive with another data.pkl."""
    target = path.with_name(f"changed-{path.name}")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return target


def test_what_cannot_be_read_names_the_command_of_deepmd(frozen, tmp_path):
    path, _ = frozen
    with pytest.raises(
        ForgefieldError, match=r"does not contain the options of its model; `dp convert-backend .* writes a"
    ):
        read_deepmd(rewritten(path, lambda content: content.replace(b'{"type_map"', b'["type_map"')))
    with pytest.raises(ForgefieldError, match=r"it is damaged or truncated"):
        read_deepmd(rewritten(path, lambda content: content[:-20]))
    torch.save({"model": 1}, tmp_path / "b.pth")
    with pytest.raises(ForgefieldError, match=r"not a TorchScript model"):
        read_deepmd(tmp_path / "b.pth")
    (tmp_path / "graph.pb").touch()
    with pytest.raises(ForgefieldError, match=r"`dp convert-backend graph.pb graph.dp` converts a frozen model"):
        read_deepmd(tmp_path / "graph.pb")


def test_compressed_models_are_refused(tmp_path):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.compress = True
            self.model_def_script = json.dumps({"type_map": ["O"], "descriptor": {}, "fitting_net": {}})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.compress else x * len(self.model_def_script)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model_def_script = json.dumps({"type_map": ["O"], "descriptor": {}, "fitting_net": {}})
            self.descriptor = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.descriptor(x) * len(self.model_def_script)

    torch.jit.save(torch.jit.script(Model()), str(tmp_path / "c.pth"))
    with pytest.raises(ForgefieldError, match="compressed model; import the model that was given to `dp compress`"):
        read_deepmd(tmp_path / "c.pth")
