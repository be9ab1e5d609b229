"""The errors of a run on grid points: observables of each snapshot, its density of states and its density, as figures.

Read from `predictions/SPLIT-points.npz`, which may be absent or damaged; that is then said in the place of the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from forgefield.errors import ForgefieldError
from forgefield.report.analysis import Pairs, Quantity
from forgefield.report.canvas import COLOURS, house_style, linear_ticks, new_figure, to_svg
from forgefield.report.figures import parity_figure
from forgefield.report.folder import SPLITS, RunData, split_title
from forgefield.report.markup import Child, Html, join, table, tag
from forgefield.report.numbers import shorten, significant
from forgefield.report.sections import card, section, tabbed
from forgefield.report.sections_errors import tests_table
from forgefield.untrusted.archives import npz_arrays

SHOWN = 4
"""Snapshots of a split that get figures."""
DENSITY = Quantity("density", "Density", "n", "1/Å³", "1/Å³", 1.0)


@dataclass(frozen=True)
class PointPredictions:
    """What was predicted for some snapshots; arrays as `predictions/SPLIT-points.npz` names them."""

    arrays: dict[str, np.ndarray]

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.arrays["names"]]

    @property
    def metrics(self) -> list[str]:
        return [key.removeprefix("error_") for key in self.arrays if key.startswith("error_")]


def read_points(path: Path) -> PointPredictions | None:
    """The predictions of a split; None where there are none that can be read."""
    try:
        arrays = npz_arrays(path)
        n, levels = len(arrays["names"]), len(arrays["energies"])
        fit = all(arrays[f"dos_{kind}"].shape == (n, levels) for kind in ("pred", "ref"))
        fit = fit and all(arrays[key].shape == (n,) for key in arrays if key.startswith("error_"))
        return PointPredictions(arrays) if fit and n else None
    except (OSError, ForgefieldError, KeyError, TypeError):
        return None


def points_section(run: RunData) -> Html:
    lead = "Observables of the predicted LDOS of whole snapshots against those of the LDOS they should have."
    splits = run.splits if run.tests else SPLITS
    found = {split: read_points(run.path / "predictions" / f"{split}-points.npz") for split in splits}
    available = {split: predictions for split, predictions in found.items() if predictions is not None}
    if not available:
        words = (
            "There are no predictions of whole snapshots yet; forgefield test RUN --data SNAPSHOTS makes them. Observables "
            "need the temperature, the number of electrons and the cell of a snapshot."
        )
        return section("errors", "Errors", lead, tag("div", tag("p", words), class_="card empty"))
    panels = []
    for split, predictions in available.items():
        count = len(predictions.names)
        title = f"{split_title(split, first=True)} · {count} snapshot{'' if count == 1 else 's'}"
        panels.append((title, _panel(run, split, predictions)))
    return section("errors", "Errors", lead, tests_table(run), tabbed(panels))


def _panel(run: RunData, split: str, predictions: PointPredictions) -> Html:
    figures: list[Html] = []
    for number, name in enumerate(predictions.names[:SHOWN]):
        title = shorten(name, 40)
        drawing = to_svg(dos_figure(predictions, number), f"dos-{split}-{number}", f"Density of states of {title}")
        figures.append(card(f"Density of states, {title}", drawing))
        pairs = density_pairs(predictions, number)
        if pairs is not None:
            drawing = to_svg(parity_figure(pairs), f"density-{split}-{number}", f"Density of {title}")
            figures.append(card(f"Density, {title}", drawing))
    return join([tag("div", _table(run, predictions), class_="grid"), tag("div", *figures, class_="grid")])


def dos_figure(predictions: PointPredictions, number: int) -> Figure:
    """Predicted and reference density of states over energy, and the error below; the Fermi energy as a line."""
    arrays = predictions.arrays
    energies, predicted, reference = arrays["energies"], arrays["dos_pred"][number], arrays["dos_ref"][number]
    with house_style():
        figure = new_figure(3.7, 4.1)
        main, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.0, 1))
        main.plot(energies, reference, color=COLOURS["orange"], label="reference")
        main.plot(energies, predicted, color=COLOURS["blue"], linestyle=(0, (4, 2)), label="predicted")
        if "fermi_ref" in arrays:
            fermi = float(arrays["fermi_ref"][number])
            main.axvline(fermi, color=COLOURS["line"], linewidth=0.9, linestyle=(0, (2, 2)), label="Fermi energy")
        below.axhline(0, color=COLOURS["line"], linewidth=0.8)
        below.plot(energies, predicted - reference, color=COLOURS["blue"])
        main.set_ylabel("DOS, 1/eV")
        below.set_ylabel("error")
        below.set_xlabel("energy, eV")
        main.legend(loc="best")
        for axes in (main, below):
            axes.grid(axis="y")
            linear_ticks(axes, "x", 6)
            linear_ticks(axes, "y", 5 if axes is main else 3)
        return figure


def density_pairs(predictions: PointPredictions, number: int) -> Pairs | None:
    """The sampled points of a snapshot."""
    stored = predictions.arrays.get(f"density_{number}")
    if stored is None or stored.ndim != 2 or len(stored) != 2 or stored.shape[1] == 0:
        return None
    return Pairs(DENSITY, stored[0], stored[1])


def _table(run: RunData, predictions: PointPredictions) -> Html:
    """Errors of every observable of every snapshot, and energies as the calculation printed them."""
    arrays, units = predictions.arrays, run.heads
    header: list[Child] = [
        "Snapshot",
        *(f"{name.replace('_', ' ')}, {units.get(name, '')}" for name in predictions.metrics),
    ]
    against_dft = {"band": "band_energy", "total": "total"}
    extra = {
        name: key
        for name, key in against_dft.items()
        if f"{key}_pred" in arrays and np.isfinite(arrays.get(f"{name}_dft", np.nan)).all()
    }
    header += [f"{name} energy against DFT, meV/atom" for name in extra]
    rows: list[list[Child]] = []
    for number, snapshot in enumerate(predictions.names[:200]):
        row: list[Child] = [shorten(snapshot, 40)]
        row += [significant(float(arrays[f"error_{name}"][number])) for name in predictions.metrics]
        for name, key in extra.items():
            difference = arrays[f"{key}_pred"][number] - arrays[f"{name}_dft"][number]
            row.append(significant(float(1000 * difference / arrays["n_atoms"][number])))
        rows.append(row)
    note = "Energies are prediction minus reference; against DFT, also by what the targets themselves miss of it."
    content = [table(header, rows), tag("p", note, class_="note") if extra else None]
    return tag("div", tag("h3", "Observables of each snapshot"), *content, class_="card whole-row")
