"""`log.txt` of a run: a line for every row of metrics, and nothing that Lightning or torch say about themselves."""

from __future__ import annotations

import json
import re
import warnings

import torch

from forgefield import api
from forgefield.training.run.journal import is_from_libraries
from tests.support.helpers import tiny_config


def test_epochs_are_in_the_log_with_kind_and_unit_of_errors(tmp_path):
    run = api.train(tiny_config(tmp_path, trainer={"max_epochs": 2}))
    log = (run.path / "log.txt").read_text()
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in log.splitlines() if re.search(r" epoch \d+  step \d+  lr ", line)]
    assert len(lines) == len(rows) == 2
    for number, (line, row) in enumerate(zip(lines, rows)):
        assert f"epoch {number + 1}  step {row['step']}  lr 0.01" in line
        for name, unit in (("energy", "meV/atom"), ("forces", "meV/A")):
            found = re.search(rf"validation: .*{name} MAE ([\d.e+-]+) {unit}, {name} RMSE ([\d.e+-]+) {unit}", line)
            assert found, line
            assert abs(float(found[1]) / row[f"val/{name}_mae"] - 1) < 0.01
    assert "EMA 0.9; validation and test use the averaged weights" in log


def test_warnings_of_lightning_and_torch_are_kept_elsewhere(tmp_path):
    run = api.train(tiny_config(tmp_path, trainer={"max_epochs": 1, "log_every_n_steps": 50}))
    log = (run.path / "log.txt").read_text()
    assert "lightning.pytorch" not in log
    assert "site-packages" not in log
    assert "py.warnings" not in log


def test_a_notebook_shows_everything_once_and_the_log_has_it(tmp_path, monkeypatch):
    """In a notebook rich displays what is printed, whatever file a console has; the progress is one output that is replaced."""
    shown, progress = [], NotebookOutputs()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    monkeypatch.setattr("IPython.display.display", progress.display)
    run = api.train(tiny_config(tmp_path, trainer={"max_epochs": 1, "enable_progress_bar": True}))
    everything = "".join(shown)
    assert everything.count("Result") == 1
    assert everything.count("╭") == 2  # the panels of the start and of the end
    assert len(progress.outputs) == 1
    assert progress.outputs[0].count("epoch 1/1") == 1
    assert "epoch 1/1" not in everything
    assert (run.path / "log.txt").read_text().count("Result") == 1


class NotebookOutputs:
    """What a notebook would show: one text per output, replaced when its handle is updated."""

    def __init__(self):
        self.outputs = []

    def display(self, data, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(data["text/plain"])
        return self

    def update(self, data, *, raw):
        assert raw
        self.outputs[-1] = data["text/plain"]


def test_which_warnings_are_of_the_libraries():
    path = torch.__file__.replace("__init__.py", "optim/lr_scheduler.py")
    assert is_from_libraries("py.warnings", warnings.formatwarning("step order", UserWarning, path, 3))
    assert is_from_libraries("lightning.pytorch.utilities.rank_zero", "GPU available: False")
    assert not is_from_libraries("py.warnings", warnings.formatwarning("my data", UserWarning, "/home/me/model.py", 3))


def test_date_and_hardware_are_in_the_record_and_the_report(tmp_path):
    run = api.train(tiny_config(tmp_path, trainer={"max_epochs": 1}))
    info = run.info
    assert info["started"] <= info["finished"]
    assert info["hardware"]["processes"] == 1
    page = (run.path / "report.html").read_text()
    for words in ("Date and hardware", info["started"][:10], info["hardware"]["cpu"], torch.__version__.split("+")[0]):
        assert words in page
    assert "validation curves their exponential moving average (EMA)." in page
