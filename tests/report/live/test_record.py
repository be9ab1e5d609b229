"""A run that is read again and again while it changes is shown as one that is read once."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgefield.processes import this_process
from forgefield.report.folder import read_run
from forgefield.report.live.record import AppendedLines, Cached, LiveRun
from forgefield.report.sections.headline import errors_by_split
from forgefield.training.run.owner import OWNER
from tests.support.example_run import write_example_run


@pytest.fixture
def folder(tmp_path):
    return write_example_run(tmp_path / "example", epochs=12, frames=4)


def live(folder):
    run = LiveRun(folder)
    run.update()
    return run


def change_info(folder, **changes):
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


lines = st.lists(st.text(alphabet="abc", max_size=5), max_size=6).map(lambda words: [f"{word}\n" for word in words])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.sampled_from(["append", "part", "rewrite", "replace", "remove"]), lines), max_size=6)
)
def test_lines_are_those_of_the_file_after_any_change(steps, tmp_path):
    path = tmp_path / "rows"
    path.unlink(missing_ok=True)
    reader, seen = AppendedLines(path), []
    for number, (how, new) in enumerate(steps):
        text = "".join(new)
        if how in ("append", "part"):
            with open(path, "a") as file:
                file.write(text + ("unfinished" if how == "part" else ""))
        elif how == "rewrite":
            path.write_text(text)
        elif how == "replace":
            (tmp_path / "new").write_text(text)
            os.replace(tmp_path / "new", path)
        else:
            path.unlink(missing_ok=True)
        if path.exists():
            os.utime(path, ns=(number, number + 1))  # each change has its time, as with a clock that is fine enough
        added, is_new = reader.read()
        seen = added if is_new else seen + added
        text = path.read_text() if path.exists() else ""
        assert seen == text[: text.rfind("\n") + 1].splitlines()


def test_a_file_is_read_again_only_when_it_changes(tmp_path):
    path, calls = tmp_path / "value", []
    cached = Cached(path, lambda file: calls.append(1) or int(file.read_text()), lambda: -1)
    assert cached.value() == -1
    path.write_text("5")
    assert [cached.value() for _ in range(3)] == [5, 5, 5]
    assert len(calls) == 1
    path.write_text("damaged")
    assert cached.value() == -1
    path.unlink()
    assert cached.value() == -1


def test_a_run_that_grows_has_the_errors_of_the_report(folder):
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(rows[0])
    run = live(folder)
    assert run.epoch == 1
    for row in rows[1:]:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(row)
        run.update()
    report = read_run(folder)
    assert run.data.metrics == report.metrics
    assert run.data.timing == report.timing
    assert run.errors()["test"] == report.test_errors("test")
    assert run.errors() == live(folder).errors()
    assert errors_by_split(report)["test"]["forces_mae"] == run.errors()["test"]["forces_mae"]
    assert run.epoch == 12
    assert run.seconds == pytest.approx(sum(row["seconds"] for row in report.timing))


def test_states(folder):
    change_info(folder, status="running")
    run = live(folder)
    assert run.state == "interrupted", "no process trains it"
    owner = {**this_process(), "hears_signals": True}
    for status, record, state in (
        ("running", owner, "running"),
        ("new", owner, "starting"),
        ("finished", owner, "starting"),
        ("running", {**owner, "born": "1"}, "interrupted"),
        ("finished", None, "finished"),
        ("stopped", None, "stopped"),
        ("new", None, "not started"),
    ):
        change_info(folder, status=status)
        (folder / OWNER).unlink(missing_ok=True)
        if record is not None:
            (folder / OWNER).write_text(json.dumps(record))
        run.update()
        assert run.state == state


def test_the_time_left_follows_from_the_share_that_is_done(folder):
    change_info(folder, status="running", max_epochs=48, max_steps=-1)
    assert live(folder).seconds_left is None
    (folder / OWNER).write_text(json.dumps({**this_process(), "hears_signals": True}))
    run = live(folder)
    assert run.seconds_left == pytest.approx(3 * run.seconds)


def test_results_of_earlier_weights_are_left_out(folder):
    import torch

    from forgefield.weights import read_weights, write_weights

    best = folder / "checkpoints" / "best.safetensors"
    best.parent.mkdir()
    write_weights(best, {"w": torch.ones(2)}, {})
    test = json.loads((folder / "test.json").read_text())
    (folder / "test.json").write_text(json.dumps({**test, "weights_sha256": read_weights(best).sha256}))
    run = live(folder)
    assert "test" in run.errors()
    write_weights(best, {"w": torch.zeros(2)}, {})
    run.update()
    assert "test" not in run.errors()


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl", "timing.csv", "test.json"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00{", b"[1, 2]\n", b"{" * 5000])
def test_missing_and_damaged_files_leave_the_rest(folder, name, content):
    path = folder / name
    path.unlink() if content is None else path.write_bytes(content)
    run = live(folder)
    run.errors(), run.state, run.settings(), run.findings, run.log(), run.seconds_left, run.speed
    assert len(run.data.metrics) == (0 if name == "metrics.jsonl" else 12)
