"""The sections on learning (loss, learning rate and errors over training, errors of the best weights) and timing."""

from __future__ import annotations

from datetime import datetime

from forgefield.report.analysis import Quantity, quantities
from forgefield.report.canvas import to_svg
from forgefield.report.figures import learning_figure, timing_figure
from forgefield.report.folder import Row, RunData, as_number
from forgefield.report.markup import (
    Child,
    Html,
    card,
    count,
    duration,
    empty_card,
    key_values,
    section,
    short_count,
    shorten,
    significant,
    table,
    tag,
    with_unit,
)
from forgefield.report.sections.headline import best_row, median_of


def learning_section(run: RunData) -> Html:
    lead = (
        "Errors are in physical units and do not depend on the loss weights. The dotted line marks the best weights, which are "
        "used by default."
    )
    if uses_average(run):
        lead += " Training curves show the current weights, validation curves their exponential moving average (EMA)."
    x_key = x_axis(run.metrics)
    best = best_row(run)
    at = best.get(x_key) if best else None
    cards: list[Html] = []
    loss = _curves(run.metrics, x_key, "loss")
    if loss:
        rate = curve(run.metrics, x_key, "lr")
        figure = learning_figure(loss, x_label=x_key, y_label="loss", learning_rate=rate, best=at)
        drawing = to_svg(figure, "curve-loss", "Loss and learning rate over training")
        cards.append(card("Loss and learning rate", drawing))
    shown = quantities(run.heads)
    for quantity in shown.values():
        curves = _curves(run.metrics, x_key, f"{quantity.name}_mae")
        if curves:
            figure = learning_figure(curves, x_label=x_key, y_label=with_unit("MAE", quantity.error_unit), best=at)
            drawing = to_svg(figure, f"curve-{quantity.name}", f"{quantity.title} MAE over training")
            cards.append(card(f"{quantity.title} MAE", drawing))
    if cards and best is not None:
        cards.append(_best_card(run, best, x_key, len(cards), shown))
    if not cards:
        name = "metrics.jsonl" if run.note("metrics.jsonl") else "metrics.csv"
        cards = [empty_card(run, name, "Learning curves")]
    return section("learning", "Learning", lead, tag("div", *cards, class_="grid"))


def uses_average(run: RunData) -> bool:
    """Whether validation uses an exponential moving average of the weights."""
    training = run.config.get("training")
    return isinstance(training, dict) and bool(training.get("ema"))


def _best_card(run: RunData, best: Row, x_key: str, n_before: int, shown: dict[str, Quantity]) -> Html:
    """Training and validation errors of the best weights; as wide as the row of figures leaves room for."""
    rows: list[list[Child]] = []
    for quantity in shown.values():
        for kind in ("mae", "rmse"):
            train, val = (best.get(f"{split}/{quantity.name}_{kind}") for split in ("train", "val"))
            if train is not None or val is not None:
                name = with_unit(f"{quantity.title} {kind.upper()}", quantity.error_unit)
                rows.append([name, significant(train), significant(val)])
    rows.append(["Loss", significant(best.get("train/loss")), significant(best.get("val/loss"))])
    when = f"{x_key} {count(best.get(x_key))}" if x_key in best else "the best row"
    width = {0: "whole-row", 1: "two-cells"}.get(n_before % 3, "")
    note = "Training errors are averages over the epoch, during which the weights change."
    if uses_average(run):
        note += " Validation uses the exponential moving average (EMA) of the weights."
    content = (table(["", "Train", "Validation"], rows), tag("p", note, class_="note"))
    return tag("div", tag("h3", f"Best weights, {when}"), *content, class_=f"card {width}")


def x_axis(rows: list[Row]) -> str:
    """`epoch`, or `step` where several rows have the same epoch."""
    epochs = [row["epoch"] for row in rows if "epoch" in row]
    return "epoch" if epochs and (len(set(epochs)) == len(epochs) or not any("step" in row for row in rows)) else "step"


def _curves(rows: list[Row], x_key: str, name: str) -> dict[str, tuple[list[float], list[float]]]:
    curves = {"train": curve(rows, x_key, f"train/{name}"), "validation": curve(rows, x_key, f"val/{name}")}
    return {key: curve for key, curve in curves.items() if curve is not None}


def curve(rows: list[Row], x_key: str, y_key: str, *, positive: bool = True) -> tuple[list[float], list[float]] | None:
    """x and y values of the rows that have both. positive: leave out values that a logarithmic axis cannot show."""
    both = [(row[x_key], row[y_key]) for row in rows if x_key in row and y_key in row]
    shown = [(x, y) for x, y in both if y > 0 or not positive]
    return ([x for x, _ in shown], [y for _, y in shown]) if shown else None


# ---- timing


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
