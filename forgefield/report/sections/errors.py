"""The section on errors: parity, by species, by force magnitude, distribution, worst frames; test and validation."""

from __future__ import annotations

import numpy as np

from forgefield.report.analysis import (
    QUANTITIES,
    GroupError,
    Pairs,
    Predictions,
    errors_by_magnitude,
    errors_by_species,
    pairs,
    quantities,
    worst_frames,
)
from forgefield.report.canvas import to_svg
from forgefield.report.figures import distribution_figure, magnitude_figure, parity_figure, species_figure
from forgefield.report.folder import SPLITS, RunData, as_number, split_title
from forgefield.report.markup import (
    NOTHING,
    TABS,
    Child,
    Html,
    card,
    count,
    empty_card,
    join,
    section,
    shorten,
    significant,
    stacks,
    tabbed,
    table,
    tag,
    with_unit,
)
from forgefield.report.sections.headline import errors_by_split

_QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)


def errors_section(run: RunData) -> Html:
    lead = "Predictions against the reference; every labelled value is counted once."
    available = [split for split in run.splits if split in run.predictions]
    if not available:
        titles = {split: f"Errors on {split_title(split)} data" for split in SPLITS}
        missing = [empty_card(run, f"predictions/{split}.npz", title) for split, title in titles.items()]
        return section("errors", "Errors", lead, tag("div", *missing, class_="grid"))
    if len(available) > TABS:  # validation keeps its panel
        available = [*available[: TABS - 1], available[-1]]
    panels = []
    for split in available:
        frames = count(len(run.predictions[split].n_atoms))
        panels.append((f"{split_title(split, first=True)} · {frames} frames", _panel(run, split)))
    return section("errors", "Errors", lead, tests_table(run), tabbed(panels))


def tests_table(run: RunData) -> Html | None:
    """Errors on validation and all test data, with the source of each; None for a run without tests."""
    if not run.tests:
        return None
    by_split, shown = errors_by_split(run), quantities(run.heads)
    names = [name for name in shown if any(f"{name}_mae" in errors for errors in by_split.values())]
    kinds = {"mae": "MAE", "rmse": "RMSE"}
    if any(f"{name}_max" in errors for errors in by_split.values() for name in names):
        kinds["max"] = "largest"
    header: list[Child] = ["Data", "From", run.kind.name.capitalize(), "Weights"]
    for name in names:
        unit = shown[name].error_unit
        header += [with_unit(f"{shown[name].title} {title}", unit) for title in kinds.values()]
    rows: list[list[Child]] = []
    for split in [split for split in run.splits if split in by_split]:
        stored = run.tests.get(split, {})
        number = as_number(stored.get(run.kind.name))
        if number is None and split in run.predictions:
            number = len(run.predictions[split].n_atoms)
        source = stored.get("source", "data.val" if split == "val" else NOTHING)
        source = shorten(", ".join(map(str, source)) if isinstance(source, list) else source, 120)
        errors = [significant(by_split[split].get(f"{name}_{kind}")) for name in names for kind in kinds]
        rows.append([split_title(split), source, count(number), shorten(stored.get("weights", "best"), 20), *errors])
    return tag("div", card("All data", table(header, rows, text_columns=2)), class_="grid")


def _panel(run: RunData, split: str) -> Html:
    predictions, units = run.predictions[split], run.heads
    names = [name for name in (*QUANTITIES, *predictions.extra_outputs) if name in QUANTITIES or name in units]
    compared = [values for name in names if (values := pairs(predictions, name, units.get(name, ""))) is not None]
    if not compared:
        return tag("div", tag("p", "These predictions have no reference values."), class_="card empty")
    parity = [card(values.quantity.title, _parity_svg(values, split)) for values in compared]
    rows = [tag("div", *parity, class_="grid")]
    species, magnitude = errors_by_species(predictions), errors_by_magnitude(predictions)
    forces = next((values for values in compared if values.quantity.name == "forces"), None)
    details: list[Html] = []
    if species:
        figure = to_svg(species_figure(species), f"species-{split}", "Force errors by species")
        details.append(card("Force error by species", figure))
    if magnitude:
        figure = to_svg(
            magnitude_figure(magnitude), f"magnitude-{split}", "Force errors by magnitude of the reference force"
        )
        details.append(card("Force error by force magnitude", figure))
    shown = forces or compared[0]
    figure = to_svg(distribution_figure(shown), f"distribution-{split}", "Distribution of absolute errors")
    details.append(card(f"Distribution of errors, {shown.quantity.title.lower()}", figure))
    rows.append(tag("div", *details, class_="grid"))
    rows.append(stacks([_species_table(species), _quantile_table(compared)], [_magnitude_table(magnitude)]))
    rows.append(tag("div", _worst_table(predictions), class_="grid"))
    return join(rows)


def _parity_svg(values: Pairs, split: str) -> Html:
    quantity = values.quantity
    description = (
        f"{quantity.title}, predicted against reference: MAE {significant(values.mae)} {quantity.error_unit}".rstrip()
    )
    return to_svg(parity_figure(values), f"parity-{quantity.name}-{split}", description)


def _species_table(groups: list[GroupError]) -> Html | None:
    if not groups:
        return None
    return card("Force errors by species", _group_table("Species", groups))


def _magnitude_table(groups: list[GroupError]) -> Html | None:
    if not groups:
        return None
    return card("Force errors by magnitude", _group_table("|F|, eV/Å", groups))


def _group_table(first: str, groups: list[GroupError]) -> Html:
    rows: list[list[Child]] = [
        [
            shorten(group.label, 40),
            count(group.n_atoms),
            significant(group.mae),
            significant(group.rmse),
            f"{significant(100 * group.relative, 2)} %",
        ]
        for group in groups[:120]
    ]
    return table([first, "Atoms", "MAE, meV/Å", "RMSE, meV/Å", "Relative"], rows)


def _quantile_table(compared: list[Pairs]) -> Html:
    header = ["Absolute error", *[f"{100 * q:g} % below" if q < 1 else "largest" for q in _QUANTILES]]
    rows: list[list[Child]] = []
    for values in compared:
        quantiles = np.quantile(np.abs(values.error), _QUANTILES)
        rows.append(
            [with_unit(values.quantity.title, values.quantity.error_unit), *[significant(float(v)) for v in quantiles]]
        )
    return card("Quantiles of errors", table(header, rows))


def _worst_table(predictions: Predictions) -> Html | None:
    frames = worst_frames(predictions)
    if not frames:
        return None
    has_origin = predictions.frame_index is not None
    rows: list[list[Child]] = []
    for frame in frames:
        file, index = predictions.origin(frame.index)
        origin: list[Child] = [shorten(file or "in memory", 120)] if has_origin else []
        errors = (significant(frame.energy), significant(frame.forces))
        rows.append([*origin, count(index), count(frame.n_atoms), *errors])
    header: list[Child] = [
        *(["File"] if has_origin else []),
        "Frame",
        "Atoms",
        "Energy error, meV/atom",
        "Force RMSE, meV/Å",
    ]
    content = table(header, rows, text_columns=1)
    where = "within each file" if has_origin else "within the split"
    note = f"Frames are numbered from 0 {where}. Outliers are often reference calculations that did not converge."
    hint = tag("p", note, class_="note")
    return card("Frames with the largest errors", join([content, hint]))
