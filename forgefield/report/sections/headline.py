"""The top of the report: the name of the run, and its errors, time, speed and size as cards."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from forgefield.report.analysis import Quantity, errors, quantities
from forgefield.report.folder import Row, RunData, as_number, split_title
from forgefield.report.markup import NOTHING, Child, Html, count, duration, join, short_count, shorten, significant, tag

OTHER_SPLITS = 3
"""Number of other splits whose errors a card lists."""


def title_block(run: RunData) -> Html:
    model = run.info.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    cutoff = as_number(run.info.get("cutoff"))
    parts = [
        f"ensemble of {len(run.members)}" if run.members else None,
        f"model {shorten(name, 60)}" if name else None,
        ", ".join(shorten(symbol, 12) for symbol in species_of(run)[:30]) or None,
        f"cutoff {significant(cutoff)} Å" if cutoff is not None else None,
        shorten(run.info["precision"], 30) if run.info.get("precision") else None,
    ]
    status = run.info.get("status")
    state = str(status).lower() if status else ""
    good = state in {"finished", "complete", "completed", "done", "imported"}
    pill = tag("span", shorten(status, 40), class_=f"pill {'good' if good else 'warn'}") if state else None
    return tag(
        "header",
        tag("div", "Forgefield report", class_="eyebrow"),
        tag("div", tag("h1", shorten(run.name)), pill, class_="title-row"),
        tag("p", " · ".join(part for part in parts if part), class_="subtitle"),
        tag("p", str(ended), class_="subtitle") if (ended := run.info.get("stopped_early")) else None,
        class_="top wrap",
    )


def headline(run: RunData) -> Html:
    """A row of cards: errors, training time, speed and number of parameters."""
    by_split = errors_by_split(run)
    cards = [card for shown in quantities(run.heads).values() if (card := _error_card(shown, by_split)) is not None]
    cards += _class_cards(by_split)
    if not cards:
        cards = [_stat("Errors", NOTHING, None, "not tested or validated yet", main=True)]
    return tag("div", *cards, *_run_cards(run), class_="headline")


def errors_by_split(run: RunData) -> dict[str, dict[str, float]]:
    """Errors of each split, by name: those stored by `forgefield test`, else of the predictions, else of the best row."""
    by_split = {split: errors(predictions) for split, predictions in run.predictions.items()}
    for name in run.tests:
        if stored := run.test_errors(name):
            by_split[name] = {**by_split.get(name, {}), **stored}
    by_split = {split: by_split[split] for split in run.splits if split in by_split}
    best = best_row(run)
    if best is not None:
        row = {key.removeprefix("val/"): value for key, value in best.items() if key.startswith("val/")}
        of_classes = {key: value for key, value in row.items() if key.endswith(("_accuracy", "_f1"))}
        by_split["val"] = {**by_split["val"], **of_classes} if "val" in by_split else row
    return by_split


def best_row(run: RunData) -> dict[str, float] | None:
    """The row of the metrics with the lowest monitored value."""
    monitor = run.monitor
    rows = [row for row in run.metrics if monitor in row]
    return min(rows, key=lambda row: row[monitor]) if rows else None


def species_of(run: RunData) -> list[str]:
    """Chemical symbols of the model, or of its predictions."""
    listed = run.info.get("species")
    if isinstance(listed, list):
        return [str(symbol) for symbol in listed]
    return list(next((p.symbols for p in run.predictions.values()), ()))


def parameter_count(run: RunData) -> float | None:
    """Number of parameters, from `run.json` or the header of the weights file; None where neither has it."""
    for record in (run.info, run.info.get("model")):
        stored = record.get("parameters", record.get("n_parameters")) if isinstance(record, dict) else None
        if isinstance(stored, dict):
            stored = stored.get("total")
        if as_number(stored) is not None:
            return as_number(stored)
    return _count_in_weights(run.path / "checkpoints" / "best.safetensors")


def _count_in_weights(file: Path) -> float | None:
    """Number of values in a safetensors file, from the table of tensors at its start; None for a damaged file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            table = json.loads(stream.read(min(length, 50_000_000)))
        total = 0
        for name, entry in table.items():
            if name != "__metadata__":
                size = 1
                for extent in entry["shape"]:
                    size *= int(extent)
                total += size
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return float(total)


def _error_card(quantity: Quantity, by_split: dict[str, dict[str, float]]) -> Html | None:
    name = quantity.name
    available = [split for split in by_split if f"{name}_mae" in by_split[split]]
    if not available:
        return None
    first = by_split[available[0]]
    rmse = first.get(f"{name}_rmse")
    extra = [] if rmse is None else [f"RMSE {significant(rmse)} {quantity.error_unit}".rstrip()]
    others = available[1:] if len(available) <= OTHER_SPLITS + 1 else [*available[1:OTHER_SPLITS], available[-1]]
    extra += [
        f"{split_title(split)} MAE {significant(by_split[split][f'{name}_mae'])} {quantity.error_unit}".rstrip()
        for split in others
    ]
    title = f"{quantity.title} MAE, {split_title(available[0])}"
    return _stat(title, significant(first[f"{name}_mae"]), quantity.error_unit, "\n".join(extra), main=True)


def _class_cards(by_split: dict[str, dict[str, float]]) -> list[Html]:
    """Accuracy of each target that is a class."""
    cards = []
    names = [key.removesuffix("_accuracy") for e in by_split.values() for key in e if key.endswith("_accuracy")]
    for name in dict.fromkeys(names):
        split = next(split for split in by_split if f"{name}_accuracy" in by_split[split])
        errors_of_split = by_split[split]
        extra = [f"F1 {significant(errors_of_split.get(f'{name}_f1'))}"]
        extra += (
            [f"AUROC {significant(errors_of_split[f'{name}_auroc'])}"] if f"{name}_auroc" in errors_of_split else []
        )
        value = significant(100 * errors_of_split[f"{name}_accuracy"])
        cards.append(
            _stat(f"{shorten(name, 40)} accuracy, {split_title(split)}", value, "%", "\n".join(extra), main=True)
        )
    return cards


def _run_cards(run: RunData) -> list[Html]:
    seconds = [row["seconds"] for row in run.timing if "seconds" in row]
    epochs = {row["epoch"] for row in run.timing if "epoch" in row}
    done = f"{count(len(epochs))} epochs" if epochs else "no timing yet"
    done += f", sum of {len(run.members)} members" if run.members else ""
    frames = median_of(run.timing, "frames_per_second")
    kind = run.kind.counted
    return [
        _stat("Training time", duration(sum(seconds)) if seconds else NOTHING, None, done, words=True),
        _stat(
            "Speed",
            short_count(median_of(run.timing, f"{kind}_per_second")),
            f"{kind}/s",
            f"{short_count(frames)} frames/s" if frames is not None else "median",
        ),
        _stat("Parameters", short_count(parameter_count(run)), None, _frames_line(run)),
    ]


def median_of(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return median(values) if values else None


def mean_atoms(run: RunData) -> float | None:
    """Atoms per training frame."""
    statistics = run.info.get("statistics")
    if not isinstance(statistics, dict):
        return None
    atoms, frames = as_number(statistics.get("n_atoms")), as_number(statistics.get("n_frames"))
    return atoms / frames if atoms and frames else None


def _frames_line(run: RunData) -> str:
    statistics = run.info.get("statistics")
    points = as_number(statistics.get("n_points")) if isinstance(statistics, dict) else None
    if points is not None:
        return f"{count(points)} training points"
    frames = as_number(statistics.get("n_frames")) if isinstance(statistics, dict) else None
    return f"{count(frames)} training frames" if frames is not None else "in the weights file"


def _stat(name: str, value: str, unit: str | None, extra: Child, *, main: bool = False, words: bool = False) -> Html:
    number = join([value, tag("span", unit, class_="unit") if unit else None])
    return tag(
        "div",
        tag("div", name, class_="name"),
        tag("div", number, class_="value words" if words else "value"),
        tag("div", extra, class_="extra"),
        class_="stat main" if main else "stat",
    )
