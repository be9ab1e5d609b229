"""Where a label is not found, messages name the values that may be it and the setting that says so."""

from __future__ import annotations

import numpy as np
import pytest

from forgefield import api
from forgefield.cli import main
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only

HEADER = 'Lattice="9 0 0 0 9 0 0 0 9" Properties=species:S:1:pos:R:3:q:R:1:my_frc:R:3'


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frames = [
        f'3\n{HEADER} temperature=300 my_energy={-3.5 - i} tag=x flag=T my_virial="1 0 0 0 1 0 0 0 1"\n'
        + "".join(f"H 0 {0.1 * i} {atom} 0.5 1 2 3\n" for atom in range(3))
        for i in range(6)
    ]
    (tmp_path / "a.xyz").write_text("".join(frames))
    return str(tmp_path / "a.xyz")


def hints(path, **labels) -> dict[str, str]:
    reader = LabelReader(LabelOptions(**labels), UnitOptions())
    read_frames(path, LabelOptions(**labels), reader=reader)
    return reader.hints()


def test_values_that_fit_are_named_the_likeliest_first(path):
    found = hints(path)
    assert found["energy"] == (
        "the data has my_energy (one number per frame), temperature (one number per frame); to use the first as the energy, "
        "set data.labels.energy=my_energy"
    )
    assert found["forces"] == (
        "the data has my_frc (3 numbers per atom); to use it as the forces, set data.labels.forces=my_frc"
    )
    assert "my_virial (9 numbers per frame)" in found["stress"]


def test_labels_that_are_left_out_on_purpose_need_no_hint(path):
    assert "energy" not in hints(path, energy="none")
    assert "my_energy" not in hints(path, energy="my_energy")["energy"]


def test_arrays_of_many_frames_are_looked_at_too(tmp_path):
    np.savez(
        tmp_path / "a.npz", z=np.full(4, 29), R=np.arange(24.0).reshape(2, 4, 3), total=np.array([-3.0, -4.0]),
        push=np.ones((2, 4, 3)),
    )  # fmt: skip
    found = hints(tmp_path / "a.npz")
    assert "total (one number per frame)" in found["energy"]
    assert "push (3 numbers per atom)" in found["forces"]


def test_training_init_test_and_data_info_report_it(path, tmp_path, capsys):
    config = tiny_config(tmp_path)
    run = train_only(config)
    unlabelled = {**config, "name": "other", "data": {**config["data"], "train": path}}
    for task in (config["task"], None):
        with pytest.raises(ForgefieldError, match=r"set data\.labels\.energy=my_energy"):
            train_only({**unlabelled, "task": task})
    (tmp_path / "b.xyz").write_text("1\nmy_energy=-3.5\nCu 0 0 0\n")
    with pytest.raises(ForgefieldError, match=r"set data\.labels\.energy=my_energy, or use forgefield predict"):
        api.test(run.path, str(tmp_path / "b.xyz"))
    assert main(["init", path]) == 2
    assert "set data.labels.energy=my_energy" in capsys.readouterr().err
    assert main(["init", path, "data.labels.energy=my_energy"]) == 0
    assert "worth a look: no frame has forces; the data has my_frc" in capsys.readouterr().out
    assert main(["data", "info", path]) == 0
    assert "not found; the data has my_energy (one number per frame)" in capsys.readouterr().out
