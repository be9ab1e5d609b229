"""The section on diagnosis: findings as text, figures from records, and no trust in what the files hold."""

from __future__ import annotations

import json

from forgefield.diagnosis.records import FIGURES, FOLDER, Finding, as_rows, read_records, write_record
from forgefield.report.folder import read_run
from forgefield.report.page import report_html

STEPS = [1, 2, 3, 4]
RECORDS = {
    "gradient_check": {
        "findings": as_rows([Finding("gradient", 7, "the gradient holds NaN in <b>layer</b>.", "Look at it.")]),
        "checked": 4,
        "bad": 1,
        "events": [{"step": 3, "layers": ["a"], "frames": ["frame 5"]}],
        "norms": {"step": STEPS, "norm": [1.0, 0.5, float("nan"), 0.1]},
    },
    "training_helper": {"findings": [], "history": {"step": STEPS, "update": [0.1, 0.01, 0.01, 0.001], "loss": STEPS}},
    "autocorrelation": {
        "findings": [],
        "lags": [0, 1, 2],
        "threshold": 0.6,
        "gradients": {"mean": [1, 0.2, 0.0], "low": [1, 0.1, -0.1], "high": [1, 0.3, 0.1]},
        "history": {"step": STEPS, "gradients": [0.1] * 4, "parameters": [0.9] * 4},
    },
    "loss_spike": {
        "findings": [],
        "spikes": [{"step": 3, "loss": 9.0, "usual": 1.0, "action": "rolled back"}],
        "losses": {"step": STEPS, "loss": [1.0, 0.9, 9.0, 0.8]},
    },
    "throughput": {
        "findings": [],
        "rows": {"step": STEPS, "median_ms": [3.0] * 4, "slow_ms": [5.0] * 4, "memory_mb": [100, 120, 120, 120]},
    },
    "energy": {"findings": [], "kwh": 0.125, "source": "intel-rapl:0", "kg_co2": 0.05},
}


KEYS = ("findings", "norms", "history", "lags", "gradients", "losses", "rows", "events", "spikes")


def test_findings_and_figures_are_on_the_page(tmp_path):
    assert "Diagnosis" not in report_html(read_run(tmp_path))
    for name, record in RECORDS.items():
        write_record(tmp_path / FOLDER, name, record)
    page = report_html(read_run(tmp_path))
    assert "The gradient holds NaN in &lt;b&gt;layer&lt;/b&gt;." in page
    assert "<b>layer" not in page
    for title, _ in FIGURES.values():
        assert f"<h3>{title}</h3><svg" in page.replace("\n", "")
    assert "0.125 kWh (intel-rapl:0)" in page
    assert "1, 1 undone" in page
    assert 'href="#diagnosis"' in page
    assert page == report_html(read_run(tmp_path))


def test_records_that_make_no_sense_stop_nothing(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir()
    nonsense = [None, 3, "x", [], {"step": "a"}, [1, 2], {"norm": [1], "step": [1, 2]}]
    for name in FIGURES:
        for value in nonsense:
            record = dict.fromkeys(KEYS, value)
            (folder / f"{name}.json").write_text(json.dumps(record))
            report_html(read_run(tmp_path))
    (folder / "gradient_check.json").write_text("{ cut off")
    (folder / "energy.json").write_text("[1, 2]")
    assert "gradient_check" not in read_records(tmp_path)
    assert "<script>alert" not in report_html(read_run(tmp_path))
