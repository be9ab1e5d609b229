"""The section on timing: seconds and samples per second over training, dates, hardware and versions."""

from __future__ import annotations

from datetime import datetime

from forgefield.report.canvas import to_svg
from forgefield.report.figures import timing_figure
from forgefield.report.folder import RunData, as_number
from forgefield.report.layout import card, empty_card, section
from forgefield.report.markup import Child, Html, key_values, tag
from forgefield.report.numbers import count, duration, short_count, shorten
from forgefield.report.sections.headline import median_of
from forgefield.report.sections.learning import curve, x_axis


def timing_section(run: RunData) -> Html:
    lead = "Wall-clock time of training between two rows of metrics; validation is not included."
    x_key = x_axis(run.timing)
    cards: list[Html] = []
    for key, title, label in (
        ("seconds", "Seconds per epoch" if x_key == "epoch" else "Seconds per row", "seconds"),
        (f"{run.kind.counted}_per_second", "Speed", f"{run.kind.counted}/s"),
    ):
        values = curve(run.timing, x_key, key, positive=False)
        if values is not None:
            figure = timing_figure(values, y_label=label, x_label=x_key)
            cards.append(card(title, to_svg(figure, f"timing-{key}", f"{title} over training")))
    if not cards:
        rows = _hardware_rows(run)
        about = card("Date and hardware", key_values(rows)) if rows else None
        missing = empty_card(run, "timing.csv", "Timing")
        return section("timing", "Timing", lead, tag("div", missing, about, class_="grid"))
    cards.append(card("Summary", key_values(_timing_rows(run))))
    if rows := _hardware_rows(run):
        cards.append(tag("div", tag("h3", "Date and hardware"), key_values(rows), class_="card whole-row wide-pairs"))
    return section("timing", "Timing", lead, tag("div", *cards, class_="grid"))


def _hardware_rows(run: RunData) -> list[tuple[str, Child]]:
    """Dates, devices and versions that the run recorded."""
    stored, versions = run.info.get("hardware"), run.info.get("versions")
    hardware = stored if isinstance(stored, dict) else {}
    started, finished = (_date(run.info.get(key)) for key in ("started", "finished"))
    rows: list[tuple[str, Child]] = []
    for title, date in (("Started", started), ("Finished", finished)):
        if date is not None:
            rows.append((title, f"{date:%Y-%m-%d %H:%M}"))
    if started is not None and finished is not None and finished >= started:
        rows.append(("Elapsed", duration((finished - started).total_seconds())))
    for key, title in (("cuda", "GPU"), ("xpu", "XPU"), ("mps", "GPU"), ("cpu", "CPU")):
        if hardware.get(key):
            rows.append((title, shorten(hardware[key], 80)))
    processes = as_number(hardware.get("processes", run.info.get("world_size")))
    if processes is not None:
        rows.append(("Processes (ranks)", count(processes)))
    if as_number(hardware.get("threads")) is not None:
        rows.append(("Threads per process", count(as_number(hardware["threads"]))))
    if hardware.get("cuda_version"):
        rows.append(("CUDA", shorten(hardware["cuda_version"], 20)))
    packages = versions if isinstance(versions, dict) else {}
    names = [name for name in ("forgefield", "torch", "lightning", "python") if packages.get(name)]
    return [*rows, *((name, shorten(packages[name], 40)) for name in names)]


def _date(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _timing_rows(run: RunData) -> list[tuple[str, Child]]:
    seconds = sorted(row["seconds"] for row in run.timing if "seconds" in row)
    steps = [row["step"] for row in run.timing if "step" in row]
    rows: list[tuple[str, Child]] = []
    if seconds:
        rows += [
            ("Total", duration(sum(seconds))),
            ("Rows of metrics", count(len(seconds))),
            ("Median row", duration(seconds[len(seconds) // 2])),
            ("Slowest row", duration(seconds[-1])),
        ]
    if steps:
        rows.append(("Optimiser steps", count(max(steps))))
    for unit in ("atoms/s", "frames/s", "points/s"):
        key = f"{unit.removesuffix('/s')}_per_second"
        speed = median_of(run.timing, key)
        if speed is not None:
            rows.append((f"Median {unit}", short_count(speed)))
    return rows
