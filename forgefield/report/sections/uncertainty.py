"""The section on uncertainties: how well they agree with the errors of test and validation frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from forgefield.report.canvas import COLOURS, house_style, log_ticks, new_figure, to_svg
from forgefield.report.folder import RunData, split_title
from forgefield.report.markup import Child, Html, card, count, section, significant, table, tag
from forgefield.tasks.calibration import calibration_curve, calibration_metrics, counted, error_by_uncertainty

_TITLES = {"energy": ("Energy", "meV/atom"), "forces": ("Forces", "meV/Å")}
_COLOURS = ("blue", "orange", "green", "purple")


@dataclass(frozen=True)
class Compared:
    """Errors and uncertainties (n,) of one quantity and split, eV per atom or eV/A."""

    split: str
    quantity: str
    error: np.ndarray
    uncertainty: np.ndarray


def compared(run: RunData) -> list[Compared]:
    """All quantities of all splits that have uncertainties: of predictions, else those that calibration used."""
    found = []
    for name in _TITLES:
        for split in run.splits:
            values = _predicted(run, split, name)
            if values is None and split == "val" and name in run.uncertainties:
                error, uncertainty = run.uncertainties[name].T
                values = Compared(split, name, error, uncertainty)
            if values is not None and len(counted(values.error, values.uncertainty)[0]):
                found.append(values)
    return found


def _predicted(run: RunData, split: str, name: str) -> Compared | None:
    predictions = run.predictions.get(split)
    if predictions is None:
        return None
    uncertainty = predictions.energy_uncertainty if name == "energy" else predictions.forces_uncertainty
    predicted, reference = predictions.pair(name)
    if uncertainty is None or predicted is None or reference is None:
        return None
    per_atom = predictions.n_atoms if name == "energy" else 1
    return Compared(split, name, ((predicted - reference) / per_atom).ravel(), (uncertainty / per_atom).ravel())


def uncertainty_section(run: RunData) -> Html:
    source = "of the members of the ensemble" if run.members else "from the last layer of the model"
    lead = (
        f"Uncertainties are standard deviations {source}, scaled so that they agree with the errors of validation frames. "
        "Calibrated ones contain 68 % of the errors."
    )
    values = compared(run)
    cards = []
    for name in _TITLES:
        of_quantity = [one for one in values if one.quantity == name]
        if of_quantity:
            title = _TITLES[name][0]
            figure = to_svg(calibration_figure(of_quantity), f"calibration-{name}", f"{title}: calibration curve")
            cards.append(card(f"{title}: calibration", figure))
            figure = to_svg(spread_figure(of_quantity), f"spread-{name}", f"{title}: error against uncertainty")
            cards.append(card(f"{title}: error against uncertainty", figure))
    return section("uncertainty", "Uncertainty", lead, tag("div", *cards, class_="grid"), _table(values))


def calibration_figure(values: list[Compared]) -> Figure:
    """Observed against expected share of errors inside intervals, one curve for each split."""
    with house_style():
        figure = new_figure(3.7, 3.4)
        axes = figure.subplots()
        axes.plot([0, 100], [0, 100], color=COLOURS["line"], linewidth=1, linestyle=(0, (3, 2)))
        for one, colour in zip(values, _COLOURS):
            expected, observed = calibration_curve(one.error, one.uncertainty)
            axes.plot(100 * expected, 100 * observed, color=COLOURS[colour], label=split_title(one.split))
        axes.set_xlabel("expected share of errors, %")
        axes.set_ylabel("observed share, %")
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.grid()
        axes.legend(loc="upper left")
        return figure


def spread_figure(values: list[Compared]) -> Figure:
    """Root mean square error against uncertainty, in groups of equal size, one line for each split."""
    with house_style():
        figure = new_figure(3.7, 3.4)
        axes = figure.subplots()
        unit, everything = _TITLES[values[0].quantity][1], []
        for one, colour in zip(values, _COLOURS):
            spread, error = (1000 * part for part in error_by_uncertainty(one.error, one.uncertainty))
            axes.plot(spread, error, "o-", color=COLOURS[colour], markersize=3.5, label=split_title(one.split))
            everything += [*spread, *error[error > 0]]
        limits = (0.8 * min(everything), 1.25 * max(everything))
        axes.plot(limits, limits, color=COLOURS["line"], linewidth=1, linestyle=(0, (3, 2)), zorder=0)
        for which, set_limits, set_scale in (
            ("x", axes.set_xlim, axes.set_xscale),
            ("y", axes.set_ylim, axes.set_yscale),
        ):
            set_scale("log")
            set_limits(limits)
            log_ticks(axes, which)
        axes.set_xlabel(f"uncertainty, {unit}")
        axes.set_ylabel(f"root mean square error, {unit}")
        axes.grid()
        axes.legend(loc="upper left")
        return figure


def _table(values: list[Compared]) -> Html:
    rows: list[list[Child]] = []
    for one in values:
        error, uncertainty = counted(one.error, one.uncertainty)
        metrics, (title, unit) = calibration_metrics(error, uncertainty), _TITLES[one.quantity]
        rows.append(
            [
                f"{title}, {unit}",
                split_title(one.split),
                count(len(error)),
                significant(1000 * float(np.sqrt(np.square(error).mean()))),
                significant(1000 * float(np.sqrt(np.square(uncertainty).mean()))),
                significant(metrics["nll"]),
                significant(metrics["miscalibration"]),
                f"{100 * metrics['coverage']:.0f} %",
                f"{100 * float((np.abs(error) <= 2 * uncertainty).mean()):.0f} %",
            ]
        )
    header: list[Child] = [
        "Quantity", "Data", "Values", "RMSE", "RMS uncertainty", "Negative log-likelihood", "Miscalibration area",
        "Within 1 deviation (68 %)", "Within 2 (95 %)",
    ]  # fmt: skip
    return tag("div", card("Errors and uncertainties", table(header, rows, text_columns=2)), class_="grid")
