"""Snapshots named by their .info.json: trained on and tested as if their descriptors had been written to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgefield import api
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.files import write_descriptors
from forgefield.ldos.electronic.fermi import band_energy, dos_of_ldos
from tests.support.snapshots import ENERGIES, GRID, TEMPERATURE, write_snapshot
from tests.support.train_many import train_only

SETTINGS = {"type": "bispectrum", "twojmax": 2, "cutoff": 2.5}


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """The same calculations with written descriptors, and without any."""
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
    written, bare = tmp_path / "written", tmp_path / "bare"
    for folder in (written, bare):
        folder.mkdir()
        for number in range(3):
            positions = [[0, 0, 0], [1, 1, 1.5 + 0.1 * number]]
            atoms = {"numbers": [4, 4], "positions": positions, "cell": np.diag([2.0, 2.0, 3.0]).tolist()}
            inputs = write_snapshot(folder, f"s{number}", seed=number + 1, atoms=atoms)
            inputs.unlink()
            if folder == written:
                write_descriptors(folder / f"s{number}.info.json", inputs, DescriptorOptions(**SETTINGS))
    return written, bare


def test_trainings_are_the_same_with_computed_and_with_written_descriptors(folders):
    written, bare = folders
    runs = []
    for folder, ending in ((written, ".in.npy"), (bare, ".info.json")):
        files = [str(folder / f"s{number}{ending}") for number in range(3)]
        points = {"energies": ENERGIES, "descriptors": SETTINGS}
        data = {"train": files[:2], "val": files[2], "batch": {"points": 14}, "points": points}
        config = base_config(folder) | {"data": data}
        runs.append(train_only(config))
    assert (runs[0].path / "metrics.csv").read_bytes() == (runs[1].path / "metrics.csv").read_bytes()
    made = sorted((cache_folder() / "descriptors").glob("*.npy"))
    assert len(made) == 3
    np.testing.assert_array_equal(
        sorted(np.load(file).sum() for file in made),
        sorted(np.load(written / f"s{number}.in.npy").sum() for number in range(3)),
    )
    rows = runs[0].metrics()
    assert {"train/band_energy_mae", "val/band_energy_mae", "train/density_mae"} <= set(rows[0])
    measure_again(runs[0], written)


def base_config(folder: Path) -> dict[str, Any]:
    return {
        "name": "points",
        "out": str(folder / "runs"),
        "seed": 5,
        "model": {"name": "ldos", "hidden": [8], "activation": "silu"},
        "task": {"ldos": {}, "observables": {"metrics": ["band_energy", "density"], "training": True}},
        "training": {"lr": 0.01, "ema": None, "tensorboard": 0, "block": 4},
        "trainer": {"max_epochs": 2, "enable_progress_bar": False, "accelerator": "cpu"},
    }


def measure_again(run, folder: Path) -> None:
    """`train/band_energy_mae` of the last row is the mean over the training snapshots, with the last weights."""
    found = [
        api.test(run, str(folder / f"s{number}.in.npy"), which="last", device="cpu")["band_energy_mae"]
        for number in range(2)
    ]
    assert run.metrics()[-1]["train/band_energy_mae"] == pytest.approx(np.mean(found), rel=1e-5)


def test_testing_on_them_lists_every_snapshot(folders, capsys):
    written, bare = folders
    files = [str(written / f"s{number}.in.npy") for number in range(3)]
    points = {"energies": ENERGIES, "descriptors": SETTINGS}
    data = {"train": files[:2], "val": files[2], "batch": {"points": 14}, "points": points}
    run = train_only(base_config(written) | {"data": data})
    spec = [str(bare / "s0.info.json"), str(bare / "s1.info.json")]
    assert main(["test", str(run.path), "--data", *spec, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "s0: band energy " in out
    assert "s1: band energy " in out
    (file,) = run.path.glob("test*.json")
    content = json.loads(file.read_text())
    assert [each["name"] for each in content["snapshots"]] == ["s0", "s1"]
    for name, error in content["errors"].items():
        if name.startswith(("band", "dos", "fermi", "density")):
            quantity = name.removesuffix("_mae")
            assert error == pytest.approx(np.mean([abs(each["errors"][quantity]) for each in content["snapshots"]]))
    _check_first_snapshot(run, bare, written, content["snapshots"][0])


def _check_first_snapshot(run, bare: Path, written: Path, stored: dict[str, Any]) -> None:
    """Energies once more from plain arrays; with the Fermi energy of the reference for `band_energy_actual_fe`."""
    model, volume = api.load(run), 12.0 / 60
    with torch.no_grad():
        ldos = model(torch.from_numpy(np.load(written / "s0.in.npy")).reshape(60, -1)).double()
    target = torch.from_numpy(np.load(bare / "s0.out.npy")).double().reshape(60, -1)
    level, difference = stored["reference"]["fermi_energy"], stored["predicted"]["band_energy"]
    energies = [float(band_energy(dos_of_ldos(values, volume), GRID, TEMPERATURE, level)) for values in (ldos, target)]
    assert stored["reference"]["band_energy"] == pytest.approx(energies[1], rel=1e-6)
    assert stored["errors"]["band_energy_actual_fe"] == pytest.approx(500 * (energies[0] - energies[1]), rel=1e-3)
    assert stored["errors"]["band_energy"] == pytest.approx(500 * (difference - energies[1]), rel=1e-6)
    assert stored["dft"]["band_energy"] == 3.0


def test_without_settings_of_descriptors_the_way_out_is_named(folders):
    _, bare = folders
    data = {"train": str(bare), "val": 0.2, "batch": {"points": 14}, "points": {"energies": ENERGIES}}
    config = base_config(bare) | {"data": data, "task": {"ldos": {}}}
    with pytest.raises(
        ForgefieldError, match=r"s0.info.json: this snapshot has no file of descriptors; set data.points.desc"
    ):
        api.train(config)


def test_observables_of_training_snapshots_need_complete_ones(folders):
    _, bare = folders
    points = {"energies": ENERGIES, "descriptors": SETTINGS}
    observables = {"metrics": ["band_energy"], "training": True, "snapshots": str(bare / "s2.info.json")}
    data = {"train": str(bare / "s0.info.json"), "val": 0.2, "batch": {"points": 14}, "points": points}
    with pytest.raises(ForgefieldError, match="task.observables.training needs complete training snapshots"):
        api.train(base_config(bare) | {"data": data, "task": {"ldos": {}, "observables": observables}})


def test_data_info_reads_them(folders, capsys):
    _, bare = folders
    assert main(["data", "info", str(bare / "s1.info.json")]) == 0
    out = capsys.readouterr().out
    assert "Be2" in out
    assert "7 columns, ldos" in out
    (bare / "s1.out.npy").unlink()
    assert main(["data", "info", str(bare / "s1.info.json")]) == 0
    assert "4 x 3 x 5" in capsys.readouterr().out
    assert main(["data", "info", str(bare / "s9.info.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err
