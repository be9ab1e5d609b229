"""The section on diagnosis: findings, figures and numbers of the diagnosis callbacks that a run used."""

from __future__ import annotations

from typing import Any

from forgefield.diagnosis.records import FIGURES, Finding, findings_of, numbers
from forgefield.report.canvas import house_style, to_svg
from forgefield.report.folder import RunData, as_number
from forgefield.report.markup import NOTHING, Child, Html, card, count, key_values, section, shorten, significant, tag

SHOWN = 40
"""Largest number of findings on the page."""
NAMES = {
    "gradient_check": "Gradient check",
    "forward_nan": "Forward pass",
    "training_helper": "Training helper",
    "autocorrelation": "Autocorrelation",
    "loss_spike": "Loss spikes",
    "throughput": "Throughput",
    "energy": "Energy",
}


def diagnosis_section(run: RunData) -> Html:
    """Findings in order of steps, then the figures of each callback."""
    names = ", ".join(NAMES.get(name, shorten(name, 40)) for name in run.diagnosis)
    lead = f"Findings of the diagnosis callbacks of this run ({names})."
    cards = [_findings_card(run)]
    for name, (title, figure_of) in FIGURES.items():
        if name not in run.diagnosis:
            continue
        with house_style():
            figure = figure_of(run.diagnosis[name])
        if figure is not None:
            cards.append(card(title, to_svg(figure, f"diagnosis-{name}", f"{title} over training")))
    rows = _number_rows(run.diagnosis)
    if rows:
        cards.append(card("Summary", key_values(rows)))
    return section("diagnosis", "Diagnosis", lead, tag("div", *cards, class_="grid"))


def _findings_card(run: RunData) -> Html:
    findings = [(name, finding) for name, record in run.diagnosis.items() for finding in findings_of(record)]
    findings.sort(key=lambda entry: entry[1].step)
    if not findings:
        return card("Findings", tag("p", "No problems were found."))
    items = [_finding(name, finding) for name, finding in findings[:SHOWN]]
    more = (
        tag("p", f"{count(len(findings) - SHOWN)} more are in the folder diagnosis.") if len(findings) > SHOWN else None
    )
    return tag("div", tag("h3", "Findings"), tag("ul", *items), more, class_="card whole-row")


def _finding(name: str, finding: Finding) -> Html:
    what = shorten(finding.what, 600)
    what = what[:1].upper() + what[1:]
    who = f"{NAMES.get(name, shorten(name, 40))}, step {count(finding.step)}. "
    return tag("li", tag("strong", who), what, " ", tag("em", shorten(finding.advice, 400)))


def _number_rows(records: dict[str, dict[str, Any]]) -> list[tuple[str, Child]]:
    rows: list[tuple[str, Child]] = []
    check = records.get("gradient_check", {})
    if "checked" in check:
        rows.append(("Gradients checked", count(as_number(check["checked"]))))
        rows.append(("Gradients that are not finite", count(as_number(check.get("bad")))))
    spikes = records.get("loss_spike", {}).get("spikes")
    if isinstance(spikes, list):
        back = sum(1 for spike in spikes if isinstance(spike, dict) and spike.get("action") == "rolled back")
        rows.append(("Loss spikes", count(len(spikes)) + (f", {count(back)} undone" if back else "")))
    rows += _throughput_rows(records.get("throughput", {}))
    energy = records.get("energy", {})
    if (kwh := as_number(energy.get("kwh"))) is not None:
        rows.append(("Energy", f"{significant(kwh)} kWh ({shorten(energy.get('source', ''), 60)})"))
        if (co2 := as_number(energy.get("kg_co2"))) is not None:
            rows.append(("Emissions", f"{significant(co2)} kg CO₂"))
    elif "note" in energy:
        rows.append(("Energy", shorten(energy["note"], 160)))
    return rows


def _throughput_rows(record: dict[str, Any]) -> list[tuple[str, Child]]:
    rows: list[tuple[str, Child]] = []
    for key, title, unit, factor in (
        ("frames_per_second", "Frames per second", "", 1.0),
        ("median_ms", "Median step", " ms", 1.0),
        ("data_share", "Waiting for data", " %", 100.0),
        ("memory_mb", "Peak memory", " MiB", 1.0),
    ):
        values = sorted(value for value in numbers(record, "rows", key) if value == value)
        if values:
            value = values[-1] if key == "memory_mb" else values[len(values) // 2]
            rows.append((title, f"{significant(factor * value)}{unit}" if value is not None else NOTHING))
    return rows
