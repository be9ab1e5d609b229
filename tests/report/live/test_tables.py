"""Tables of runs: what they show, how they are sorted, and that the command prints what the functions return."""

import json

import pytest
import yaml

import forgefield
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.report.live.folder import found
from tests.support.example_run import write_example_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs; that of `deep/search/c` has another learning rate, and no test."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("a", "b", "deep/search/c")):
        write_example_run(folder / name, epochs=6, frames=4, seed=seed)
    config = folder / "deep/search/c/config.yaml"
    config.write_text(config.read_text().replace("lr: 0.01", "lr: 0.003"))
    (folder / "deep/search/c/test.json").unlink()
    write_example_run(folder / ".hidden", epochs=1, frames=2)
    write_example_run(folder / "a/inside", epochs=1, frames=2)
    return folder


def test_runs_are_found_in_folders_but_not_in_hidden_ones_or_in_runs(runs):
    assert sorted(found(runs)) == ["a", "b", "deep/search/c"]


def test_members_of_an_ensemble_are_runs(tmp_path):
    for name in ("ensemble", "ensemble/members/seed-0", "ensemble/members/seed-1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    assert sorted(found(tmp_path)) == ["ensemble", "ensemble/members/seed-0", "ensemble/members/seed-1"]


def test_errors_are_those_of_the_best_epoch_and_of_the_test(runs):
    table = forgefield.list_runs(runs)
    rows = [json.loads(line) for line in (runs / "a/metrics.jsonl").read_text().splitlines()]
    best = min(rows, key=lambda row: row["val/loss"])
    at = table.column("run").index("a")
    assert table.column("val/forces_mae")[at] == best["val/forces_mae"]
    assert table.column("test/forces_mae")[at] == json.loads((runs / "a/test.json").read_text())["errors"]["forces_mae"]
    assert "val/forces_rmse" in [c.key for c in forgefield.list_runs(runs, errors="rmse").columns]


@pytest.mark.parametrize("descending", [False, True])
def test_rows_are_sorted_by_value_and_those_without_come_last(runs, descending):
    values = forgefield.list_runs(runs, sort="test/forces_mae", descending=descending).column("test/forces_mae")
    assert values[-1] is None
    assert values[:-1] == sorted(values[:-1], reverse=descending)
    names = forgefield.list_runs(runs, sort="run", descending=descending).column("run")
    assert names == sorted(names, reverse=descending)
    assert forgefield.list_runs(runs, sort="forces_mae", first=1).column("val/forces_mae") == [
        min(forgefield.list_runs(runs).column("val/forces_mae"))
    ]


def test_only_settings_that_differ_are_compared(runs):
    comparison = forgefield.compare(runs / "a", runs / "b", runs / "deep/search/c")
    assert comparison.settings.column("setting") == ["training.lr"]
    assert comparison.settings.column("c") == [
        yaml.safe_load((runs / "deep/search/c/config.yaml").read_text())["training"]["lr"]
    ]
    assert comparison.errors.column("error").count("forces_mae") == 2, "validation and test"
    assert "All settings are the same." in repr(forgefield.compare(runs / "a", runs / "b"))


def test_commands_print_the_tables(runs, capsys):
    assert main(["runs", str(runs), "--sort", "forces_mae"]) == 0
    assert capsys.readouterr().out == f"{forgefield.list_runs(runs, sort='forces_mae')}\n"
    paths = [str(runs / "a"), str(runs / "deep/search/c")]
    assert main(["compare", *paths]) == 0
    assert capsys.readouterr().out == f"{forgefield.compare(*paths)}\n"


def test_a_table_fits_into_a_terminal(runs):
    table = forgefield.list_runs(runs)
    narrow, dropped = table.fitting(80, ("run", "state"))
    assert max(map(len, narrow.lines())) <= 80
    assert [column.heading for column in table.columns if column not in narrow.columns] == dropped
    assert table.fitting(1000) == (table, [])
    assert [column.key for column in table.fitting(5, ("run", "state"))[0].columns] == ["run", "state"]


def test_tables_are_displayed_in_notebooks_and_as_dataframes(runs):
    table = forgefield.list_runs(runs)
    assert "<td>deep/search/c</td>" in table._repr_html_()
    pytest.importorskip("pandas")
    assert table.dataframe()["run"].tolist() == table.column("run")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda runs: forgefield.list_runs(runs, sort="force"), "There is no column 'force'"),
        (lambda runs: forgefield.list_runs(runs, errors="max"), "'mae' or 'rmse'"),
        (lambda runs: forgefield.list_runs(runs / "missing"), "There is no"),
        (lambda runs: forgefield.list_runs(runs / "a" / "predictions"), "no runs in"),
        (lambda runs: forgefield.compare(runs / "a"), "at least two"),
        (lambda runs: forgefield.watch(runs / "missing"), "There is no"),
    ],
)
def test_errors_explain_what_to_do(runs, call, message):
    with pytest.raises(ForgefieldError, match=message):
        call(runs)
