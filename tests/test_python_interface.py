"""The verbs as Python functions: they take structures in memory, and return objects that print as tables."""

import json

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

import forgefield
from tests.support.warm_commands import warm_commands


def labelled(seed):
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=seed)
    atoms.calc = EMT()
    frame = atoms.copy()
    frame.calc = SinglePointCalculator(frame, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
    return frame


FRAMES = [labelled(seed) for seed in range(10)]


def config(folder, **data):
    return {
        "name": "cu",
        "out": str(folder),
        "data": {"cutoff": 4.0, "val": 2, **data},
        "model": {"name": "nequip", "num_layers": 1, "l_max": 1, "num_features": 4},
        "training": {"tensorboard": 0},
        "trainer": {"max_epochs": 2},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return forgefield.train(config(tmp_path_factory.mktemp("runs")), data=FRAMES)


def test_structures_are_stored_where_the_run_finds_them_again(run, capsys):
    again = forgefield.train(config(run.path.parent, train=FRAMES))
    assert "is complete" in capsys.readouterr().out, "the same structures are the same data"
    assert forgefield.train(run.path, "trainer.max_epochs=3").info["epochs"] == 3
    assert again.path == run.path


def test_other_structures_are_not_the_data_of_the_run(run):
    with pytest.raises(forgefield.ForgefieldError, match=r"data\.train"):
        forgefield.train(config(run.path.parent), data=FRAMES[:-1])


@pytest.mark.parametrize(
    ("given", "data", "message"),
    [
        ({"train": FRAMES}, FRAMES, "given twice"),
        ({}, {"training": FRAMES}, "it takes train, val, test"),
        ({}, [FRAMES[0], "a.xyz"], "separate lists"),
    ],
)
def test_contradictions_are_refused(given, data, message, tmp_path):
    with pytest.raises(forgefield.ForgefieldError, match=message):
        forgefield.train(config(tmp_path, **given), data=data)


def test_files_and_structures_have_the_same_errors_and_predictions(run, tmp_path):
    from forgefield.inference.xyz_files import write_extxyz

    write_extxyz(tmp_path / "some.extxyz", FRAMES[:3])
    errors = forgefield.test(run, FRAMES[:3])
    assert errors == forgefield.test(run, str(tmp_path / "some.extxyz"))
    assert "meV/A" in repr(errors)
    assert "<td>forces_mae</td>" in errors._repr_html_()
    predicted = forgefield.predict(run, FRAMES[:3])
    mean = np.mean([np.abs(a.get_forces() - b.get_forces()) for a, b in zip(predicted, FRAMES)])
    assert 1000 * mean == pytest.approx(errors["forces_mae"])
    assert forgefield.predict(run, FRAMES[:1], tmp_path / "out.extxyz").is_file()


def test_a_potential_takes_a_structure(run):
    potential, atoms = forgefield.load(run), FRAMES[0].copy()
    result = potential(atoms)
    atoms.calc = forgefield.Calculator(run)
    assert result.energy == pytest.approx(atoms.get_potential_energy(), abs=1e-9)
    np.testing.assert_allclose(result.forces, atoms.get_forces(), atol=1e-9)
    np.testing.assert_allclose(result.stress, atoms.get_stress(), atol=1e-9)
    assert "eV" in repr(result)
    assert repr(atoms.calc) == "Calculator(Cu; cutoff 4 A, on cpu)"
    with pytest.raises(forgefield.ForgefieldError, match=r"potential\(atoms\)"):
        potential("structures.xyz")


def test_metrics_are_rows_and_columns(run):
    metrics = run.metrics()
    assert metrics[-1] == json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["val/loss"].tolist() == [row["val/loss"] for row in metrics]
    with pytest.raises(KeyError, match="val/loss"):
        metrics["val/los"]
    pandas = pytest.importorskip("pandas")
    assert isinstance(metrics.dataframe(), pandas.DataFrame)


def test_learning_curves_show_every_row(run):
    axes = run.plot().axes
    assert [panel.get_ylabel().split(",")[0] for panel in axes] == ["loss", "Energy", "Forces"]
    assert all(len(line.get_xdata()) == len(run.metrics()) for panel in axes for line in panel.lines)


def test_predictions_of_a_split_are_arrays(run):
    predictions = run.predictions("val")
    assert predictions["forces_pred"].shape == (8, 3)
    assert "forces_pred" in repr(predictions)
    with pytest.raises(forgefield.ForgefieldError, match="there are: .*val"):
        run.predictions("train")


def test_checks_are_a_table_with_a_verdict(run):
    checks = forgefield.check(run, data=FRAMES[:1], frames=1)
    assert checks.passed
    assert "rotation" in repr(checks)
    assert forgefield.check(config(run.path.parent, train=str(run.config.data.train)), frames=1).passed


def test_a_report_is_a_path_and_a_page(run):
    page = forgefield.report(run)
    assert page == (run.path / "report.html").resolve()
    assert page._repr_html_().startswith("<iframe srcdoc=")
    assert "Forces, MAE" in run._repr_html_()
    assert repr(run).endswith("parameters=1576)")


NOTEBOOK = """
import forgefield
from tests.support.warm_commands import warm_commands
run = forgefield.train(CONFIG)
run
"""


def test_a_notebook_has_one_line_of_progress_and_the_results(run, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(warm_commands()))
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    settings = config(tmp_path, train=str(run.config.data.train))
    settings["trainer"] = {"max_epochs": 20}
    cells = [nbformat.v4.new_code_cell(text) for text in (NOTEBOOK.replace("CONFIG", repr(settings)), "run")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    texts = [output["text"] if "text" in output else output["data"].get("text/plain", "") for output in outputs]
    assert sum("epoch 20/20" in text for text in texts) == 1
    assert not any("epoch 3/20" in text for text in texts), "earlier states are replaced"
    assert sum(" Result " in text for text in texts) == 1
    assert "text/html" not in outputs[-1]["data"], "the errors are in the same cell already"
    assert "Forces, MAE" in notebook.cells[1].outputs[0]["data"]["text/html"]
