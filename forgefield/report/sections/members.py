"""The section on the members of an ensemble: their learning curves, and their errors next to those of their mean."""

from __future__ import annotations

from forgefield.report.analysis import QUANTITIES
from forgefield.report.canvas import to_svg
from forgefield.report.figures import learning_figure
from forgefield.report.folder import RunData, split_title
from forgefield.report.markup import Child, Html, card, section, significant, table, tag, with_unit
from forgefield.report.sections.headline import errors_by_split
from forgefield.report.sections.learning import curve, x_axis

SHOWN = ("energy", "forces", "stress")


def members_section(run: RunData) -> Html:
    lead = "Predictions are means of the members. The curves are those of the validation."
    cards = [_curves(run, "loss", "Validation loss", "loss")]
    for name in SHOWN:
        quantity = QUANTITIES[name]
        title = f"{quantity.title} MAE, validation"
        cards.append(_curves(run, f"{name}_mae", title, with_unit("MAE", quantity.error_unit)))
    return section("members", "Members", lead, tag("div", *filter(None, cards), class_="grid"), _table(run))


def _curves(run: RunData, name: str, title: str, label: str) -> Html | None:
    curves = {}
    for member, data in run.members.items():
        values = curve(data.metrics, x_axis(data.metrics), f"val/{name}")
        if values is not None:
            curves[member] = values
    if not curves:
        return None
    x_label = x_axis(next(iter(run.members.values())).metrics)
    figure = learning_figure(curves, x_label=x_label, y_label=label)
    return card(title, to_svg(figure, f"members-{name}", f"{title} of all members"))


def _table(run: RunData) -> Html:
    """Errors of each member and of the ensemble on the splits of the ensemble."""
    ensemble = errors_by_split(run)
    columns = [
        (split, f"{name}_{kind}")
        for split in ensemble
        for name in SHOWN
        for kind in ("mae", "rmse")
        if f"{name}_{kind}" in ensemble[split]
    ]
    header: list[Child] = [""]
    for split, key in columns:
        name, _, kind = key.rpartition("_")
        header.append(
            f"{split_title(split, first=True)} {with_unit(f'{name} {kind.upper()}', QUANTITIES[name].error_unit)}"
        )
    rows: list[list[Child]] = []
    for title, data in [*run.members.items(), ("ensemble", run)]:
        measured = errors_by_split(data)
        rows.append([title, *(significant(measured.get(split, {}).get(key)) for split, key in columns)])
    return tag("div", card("Errors of the members and of the ensemble", table(header, rows)), class_="grid")
